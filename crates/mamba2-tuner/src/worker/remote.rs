use std::process::Command;
use std::sync::Mutex;
use std::time::Duration;

use mamba2_spec::{DeviceFacts, Kernel};

use super::channel::{Channel, Silence};
use super::protocol::{Hello, Request, Response, Role};
use crate::executor::{
    Check, Compiled, Conditions, Executor, Failure, FailureKind, Rounds, Verified,
};
use crate::{Candidate, Target, TunerError};

/// Making inputs and oracle of a large shape, or opening a device, takes this long at most.
const PREPARE_TIMEOUT: Duration = Duration::from_secs(600);
const START_TIMEOUT: Duration = Duration::from_secs(120);

/// Makes the command line of a worker.
pub type Launch = Box<dyn Fn(&Role) -> Command + Send + Sync>;

/// A GPU driven through worker processes.
pub struct RemoteExecutor {
    launch: Launch,
    gpu_role: Role,
    compile_role: Role,
    timeout: Duration,
    hello: Hello,
    gpu: Mutex<Worker>,
    compiler: Mutex<Worker>,
}

/// One answer for each of several candidates; or why the worker was lost, and nobody knows whose fault it is.
type Together<T> = Result<Vec<Result<T, Failure>>, Failure>;
/// Answers that came before a worker was lost.
type Answers = Vec<Option<Result<Compiled, Failure>>>;

/// A worker that may have to be started (again).
#[derive(Default)]
struct Worker {
    channel: Option<Channel>,
    /// The shape it has inputs for.
    prepared: Option<Target>,
}

impl RemoteExecutor {
    /// Starts the workers of GPU `ordinal`. `launch` gives the command for a role: the same binary with a hidden subcommand, which
    /// calls [`super::worker_main`]. A candidate may take `timeout` for each of compiling, verifying and measuring.
    ///
    /// # Errors
    /// [`TunerError::Device`] with the worker's words if the device cannot be used.
    pub fn start(
        launch: Launch,
        ordinal: usize,
        cubins: Option<std::path::PathBuf>,
        timeout: Duration,
    ) -> Result<RemoteExecutor, TunerError> {
        let gpu_role = Role::Gpu {
            ordinal,
            cubins: cubins.clone(),
        };
        let (channel, hello) = open(&launch, &gpu_role)?;
        let driver = hello
            .conditions
            .first()
            .map_or_else(String::new, |(_, c)| c.driver.clone());
        let compile_role = Role::Compile {
            device: hello.device.clone(),
            driver,
            cubins,
        };
        Ok(RemoteExecutor {
            launch,
            gpu_role,
            compile_role,
            timeout,
            hello,
            gpu: Mutex::new(Worker {
                channel: Some(channel),
                prepared: None,
            }),
            compiler: Mutex::default(),
        })
    }

    fn lock(worker: &Mutex<Worker>) -> std::sync::MutexGuard<'_, Worker> {
        worker.lock().expect("no holder of this lock should panic")
    }

    fn channel<'a>(
        &self,
        worker: &'a mut Worker,
        role: &Role,
    ) -> Result<&'a mut Channel, TunerError> {
        if worker.channel.is_none() {
            worker.prepared = None;
            worker.channel = Some(open(&self.launch, role)?.0);
        }
        Ok(worker.channel.as_mut().expect("a worker was just started"))
    }

    /// One request to the GPU's worker, one answer. Silence ends the worker; the next request starts another.
    fn ask(
        &self,
        worker: &mut Worker,
        request: &Request,
        timeout: Duration,
    ) -> Result<Result<Response, Silence>, TunerError> {
        let channel = self.channel(worker, &self.gpu_role)?;
        channel.send(request);
        let answer = channel.receive(timeout);
        if let Err(silence) = &answer {
            tracing::debug!("worker lost: {silence:?}");
            worker.channel = None;
        }
        Ok(answer)
    }

    fn prepared(&self, worker: &mut Worker, target: &Target) -> Result<(), TunerError> {
        if worker.channel.is_some() && worker.prepared.as_ref() == Some(target) {
            return Ok(());
        }
        let request = Request::Prepare {
            target: target.clone(),
        };
        let unfit = |reason| {
            Err(TunerError::Unfit {
                target: target.to_string(),
                reason,
            })
        };
        match self.ask(worker, &request, PREPARE_TIMEOUT)? {
            Ok(Response::Prepared) => {
                worker.prepared = Some(target.clone());
                Ok(())
            }
            Ok(Response::Unfit(reason)) => unfit(reason),
            Ok(other) => Err(unexpected(&other)),
            // Making inputs runs no candidate: what it dies of is the size of the shape.
            Err(silence) => unfit(failure_of(&silence).to_string()),
        }
    }

    /// Measures candidates together.
    fn measure_together(
        &self,
        worker: &mut Worker,
        target: &Target,
        candidates: &[Candidate],
        rounds: Rounds,
    ) -> Result<Together<Vec<f64>>, TunerError> {
        self.prepared(worker, target)?;
        let request = Request::Measure {
            target: target.clone(),
            candidates: candidates.to_vec(),
            rounds,
        };
        let timeout = self.timeout * u32::try_from(candidates.len()).unwrap_or(u32::MAX).max(1);
        match self.ask(worker, &request, timeout)? {
            Ok(Response::Measured(results)) if results.len() == candidates.len() => Ok(Ok(results)),
            Ok(Response::Error(text)) => {
                worker.channel = None;
                Ok(Err(Failure::new(FailureKind::Crash, text)))
            }
            Ok(other) => Err(unexpected(&other)),
            Err(silence) => Ok(Err(failure_of(&silence))),
        }
    }

    /// Compiles in one worker; what was not answered when it was lost is `None`.
    fn compile_together(
        &self,
        worker: &mut Worker,
        target: &Target,
        candidates: &[Candidate],
    ) -> Result<(Answers, Option<Failure>), TunerError> {
        let channel = self.channel(worker, &self.compile_role)?;
        channel.send(&Request::Compile {
            target: target.clone(),
            candidates: candidates.to_vec(),
        });
        let mut results: Answers = vec![None; candidates.len()];
        while results.iter().any(Option::is_none) {
            match channel.receive(self.timeout) {
                Ok(Response::Compiled { index, result }) if index < results.len() => {
                    results[index] = Some(result)
                }
                Ok(other) => return Err(unexpected(&other)),
                Err(silence) => {
                    worker.channel = None;
                    return Ok((results, Some(failure_of(&silence))));
                }
            }
        }
        Ok((results, None))
    }
}

fn open(launch: &Launch, role: &Role) -> Result<(Channel, Hello), TunerError> {
    let mut channel = Channel::start(launch(role))
        .map_err(|e| TunerError::Device(format!("worker cannot be started: {e}")))?;
    match channel.receive(START_TIMEOUT) {
        Ok(Response::Hello(hello)) => Ok((channel, hello)),
        Ok(Response::Error(text)) => Err(TunerError::Device(text)),
        Ok(other) => Err(unexpected(&other)),
        Err(silence) => Err(TunerError::Device(failure_of(&silence).to_string())),
    }
}

fn unexpected(response: &Response) -> TunerError {
    match response {
        Response::Error(text) => TunerError::Device(text.clone()),
        other => TunerError::Device(format!("unexpected answer of a worker: {other:?}")),
    }
}

fn failure_of(silence: &Silence) -> Failure {
    match silence {
        Silence::TimedOut(after) => Failure::new(
            FailureKind::Hang,
            format!("no answer within {} s; killed", after.as_secs_f64()),
        ),
        Silence::Ended(words) => Failure::new(FailureKind::Crash, words.clone()),
    }
}

impl Executor for RemoteExecutor {
    fn device(&self) -> &DeviceFacts {
        &self.hello.device
    }

    fn kernel_conditions(&self, kernel: Kernel) -> Conditions {
        let found = self.hello.conditions.iter().find(|(k, _)| *k == kernel);
        found
            .map(|(_, c)| c.clone())
            .expect("a worker should tell the conditions of every kernel")
    }

    fn memory_bytes(&self) -> Option<u64> {
        self.hello.memory_bytes
    }

    fn prepare(&self, target: &Target) -> Result<(), TunerError> {
        self.prepared(&mut Self::lock(&self.gpu), target)
    }

    fn compile(
        &self,
        target: &Target,
        candidates: &[Candidate],
    ) -> Result<Vec<Result<Compiled, Failure>>, TunerError> {
        let worker = &mut *Self::lock(&self.compiler);
        let (mut results, lost) = self.compile_together(worker, target, candidates)?;
        if lost.is_some() {
            // One at a time, so that only the one at fault is lost with the worker.
            for (result, candidate) in results
                .iter_mut()
                .zip(candidates)
                .filter(|(r, _)| r.is_none())
            {
                let (mut alone, lost) =
                    self.compile_together(worker, target, std::slice::from_ref(candidate))?;
                *result = alone.pop().flatten().or(lost.map(Err));
            }
        }
        Ok(results
            .into_iter()
            .map(|r| r.expect("every candidate should have an answer"))
            .collect())
    }

    fn verify(
        &self,
        target: &Target,
        candidate: &Candidate,
        check: Check,
    ) -> Result<Result<Verified, Failure>, TunerError> {
        let worker = &mut *Self::lock(&self.gpu);
        self.prepared(worker, target)?;
        let request = Request::Verify {
            target: target.clone(),
            candidate: *candidate,
            check,
        };
        match self.ask(worker, &request, self.timeout)? {
            Ok(Response::Verified(result)) => {
                if matches!(&result, Err(failure) if failure.kind == FailureKind::Crash) {
                    // The worker goes away by itself: its context is gone.
                    worker.channel = None;
                }
                Ok(result)
            }
            Ok(other) => Err(unexpected(&other)),
            Err(silence) => Ok(Err(failure_of(&silence))),
        }
    }

    fn measure(
        &self,
        target: &Target,
        candidates: &[Candidate],
        rounds: Rounds,
    ) -> Result<Vec<Result<Vec<f64>, Failure>>, TunerError> {
        let worker = &mut *Self::lock(&self.gpu);
        match self.measure_together(worker, target, candidates, rounds)? {
            Ok(results) => Ok(results),
            Err(failure) if candidates.len() == 1 => Ok(vec![Err(failure)]),
            Err(_) => {
                let alone = |candidate: &Candidate| {
                    let one = self.measure_together(
                        worker,
                        target,
                        std::slice::from_ref(candidate),
                        rounds,
                    )?;
                    Ok(one.map_or_else(Err, |mut results| results.swap_remove(0)))
                };
                candidates.iter().map(alone).collect()
            }
        }
    }
}
