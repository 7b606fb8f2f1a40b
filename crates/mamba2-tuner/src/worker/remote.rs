use std::ops::ControlFlow;
use std::process::Command;
use std::sync::Mutex;
use std::time::Duration;

use mamba2_spec::{DeviceFacts, Kernel};

use super::channel::{Channel, Silence};
use super::protocol::{Hello, Request, Response, Role};
use crate::executor::{
    Check, Compiling, Conditions, Executor, Failure, FailureKind, Rounds, Tell, Verified,
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
/// How a request to compile several candidates ended.
enum CompileEnd {
    /// Every candidate has its answer, or nobody wants more.
    Done,
    /// The worker was lost while it compiled these, those that are the same code together.
    Lost {
        failure: Failure,
        suspects: Vec<Vec<usize>>,
    },
}

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

    /// Compiles the `open` ones of the candidates in one worker, and strikes from `open` what has its answer.
    fn compile_together(
        &self,
        worker: &mut Worker,
        target: &Target,
        candidates: &[Candidate],
        open: &mut Vec<usize>,
        tell: Tell<'_>,
    ) -> Result<CompileEnd, TunerError> {
        let channel = self.channel(worker, &self.compile_role)?;
        let sent = open.clone();
        channel.send(&Request::Compile {
            target: target.clone(),
            candidates: sent.iter().map(|i| candidates[*i]).collect(),
        });
        let places = |members: Vec<usize>| -> Vec<usize> {
            let place = |i: usize| sent.get(i).copied();
            members.into_iter().filter_map(place).collect()
        };
        let mut started: Vec<Vec<usize>> = Vec::new();
        while !open.is_empty() {
            let step = match channel.receive(self.timeout) {
                Ok(Response::Compiling(Compiling::Started(members))) => {
                    started.push(places(members));
                    continue;
                }
                Ok(Response::Compiling(Compiling::Done(members, result))) => {
                    let members = places(members);
                    started.retain(|s| *s != members);
                    open.retain(|i| !members.contains(i));
                    Compiling::Done(members, result)
                }
                Ok(Response::Error(text)) => return Err(TunerError::Device(text)),
                Ok(other) => return Err(unexpected(&other)),
                Err(silence) => {
                    worker.channel = None;
                    return Ok(CompileEnd::Lost {
                        failure: failure_of(&silence),
                        suspects: started,
                    });
                }
            };
            if tell(step) == ControlFlow::Break(()) {
                // It would go on with what nobody wants.
                worker.channel = None;
                break;
            }
        }
        Ok(CompileEnd::Done)
    }

    /// Compiles one of several candidates that are the same code, and answers for all of them.
    fn compile_alone(
        &self,
        worker: &mut Worker,
        target: &Target,
        candidates: &[Candidate],
        members: Vec<usize>,
        tell: Tell<'_>,
    ) -> Result<ControlFlow<()>, TunerError> {
        let answer = Mutex::new(None);
        let keep = |step| {
            if let Compiling::Done(_, result) = step {
                *answer.lock().expect("no holder of this lock should panic") = Some(result);
            }
            ControlFlow::Continue(())
        };
        let mut alone: Vec<usize> = members.first().copied().into_iter().collect();
        let end = self.compile_together(worker, target, candidates, &mut alone, &keep)?;
        let answer = answer
            .into_inner()
            .expect("no holder of this lock should panic");
        let result = match (answer, end) {
            (Some(result), _) => result,
            (None, CompileEnd::Lost { failure, .. }) => Err(failure),
            (None, CompileEnd::Done) => return Ok(ControlFlow::Continue(())),
        };
        Ok(tell(Compiling::Done(members, result)))
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
        tell: Tell<'_>,
    ) -> Result<(), TunerError> {
        let worker = &mut *Self::lock(&self.compiler);
        let mut open: Vec<usize> = (0..candidates.len()).collect();
        loop {
            let end = self.compile_together(worker, target, candidates, &mut open, tell)?;
            let CompileEnd::Lost {
                failure,
                mut suspects,
            } = end
            else {
                return Ok(());
            };
            // A worker that was lost before it began would be lost for ever.
            if suspects.is_empty() {
                suspects.push(vec![open[0]]);
            }
            if let [only] = &suspects[..]
                && *only == open
            {
                let _ = tell(Compiling::Done(open, Err(failure)));
                return Ok(());
            }
            // One at a time, so that only the one at fault is lost with the worker.
            for members in suspects {
                open.retain(|i| !members.contains(i));
                if self
                    .compile_alone(worker, target, candidates, members, tell)?
                    .is_break()
                {
                    return Ok(());
                }
            }
            if open.is_empty() {
                return Ok(());
            }
        }
    }

    fn load(&self, target: &Target, candidates: &[Candidate]) -> Result<(), TunerError> {
        let worker = &mut *Self::lock(&self.gpu);
        self.prepared(worker, target)?;
        let request = Request::Load {
            target: target.clone(),
            candidates: candidates.to_vec(),
        };
        let timeout = self.timeout * u32::try_from(candidates.len()).unwrap_or(u32::MAX).max(1);
        match self.ask(worker, &request, timeout)? {
            Ok(Response::Loaded) => Ok(()),
            Ok(Response::Error(text)) => {
                tracing::debug!("loading ahead failed: {text}");
                worker.channel = None;
                Ok(())
            }
            Ok(other) => Err(unexpected(&other)),
            // Whose fault it was shows when each is verified by itself.
            Err(_) => Ok(()),
        }
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
