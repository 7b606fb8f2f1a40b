use std::io::{BufRead, Write};
use std::ops::ControlFlow;
use std::sync::Mutex;
use std::sync::mpsc;

use mamba2_cuda::{CubinCache, Jit};
use mamba2_spec::Kernel;

use super::protocol::{Hello, Request, Response, Role};
use crate::gpu::{CompileExecutor, GpuExecutor};
use crate::{Executor, TunerError};

/// The worker process: serves requests from standard input until it ends. `role` is what the parent passed as argument.
///
/// # Errors
/// [`TunerError::Device`] if the role cannot be read or standard output is gone. A device that cannot be opened is told to the
/// parent instead.
pub fn worker_main(role: &str) -> Result<(), TunerError> {
    let role: Role = serde_json::from_str(role)
        .map_err(|e| TunerError::Device(format!("worker role {role:?}: {e}")))?;
    let jit = |cubins: Option<std::path::PathBuf>| {
        Jit::new(cubins.map_or_else(CubinCache::disabled, CubinCache::new))
    };
    match role {
        Role::Gpu { ordinal, cubins } => match GpuExecutor::open(ordinal, jit(cubins)) {
            Ok(executor) => serve(&executor),
            Err(error) => answer(
                &Mutex::new(std::io::stdout()),
                &Response::Error(error.to_string()),
            ),
        },
        Role::Compile {
            device,
            driver,
            cubins,
        } => serve(&CompileExecutor::new(device, jit(cubins), &driver)),
    }
}

/// Serves requests from standard input with any executor until it ends or the device is lost.
///
/// # Errors
/// [`TunerError::Device`] if standard output is gone.
pub fn serve(executor: &dyn Executor) -> Result<(), TunerError> {
    let out = Mutex::new(std::io::stdout());
    let conditions = Kernel::ALL
        .map(|kernel| (kernel, executor.kernel_conditions(kernel)))
        .to_vec();
    let hello = Hello {
        device: executor.device().clone(),
        memory_bytes: executor.memory_bytes(),
        conditions,
    };
    answer(&out, &Response::Hello(hello))?;
    let (sender, requests) = mpsc::channel();
    // A thread of its own reads, so that the end of the parent ends this process even in the middle of a request that hangs.
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines() {
            let Ok(line) = line else { break };
            if sender.send(line).is_err() {
                break;
            }
        }
        std::process::exit(0);
    });
    while let Ok(line) = requests.recv() {
        let response = match serde_json::from_str(&line) {
            Ok(request) => handle(executor, request, &out)?,
            Err(error) => Some(Response::Error(format!("request {line:?}: {error}"))),
        };
        if let Some(response) = response {
            answer(&out, &response)?;
        }
        if executor.is_lost() {
            return Ok(());
        }
    }
    Ok(())
}

fn handle(
    executor: &dyn Executor,
    request: Request,
    out: &Mutex<std::io::Stdout>,
) -> Result<Option<Response>, TunerError> {
    let response = match request {
        Request::Prepare { target } => executor.prepare(&target).map(|()| Response::Prepared),
        Request::Verify {
            target,
            candidate,
            check,
        } => executor
            .verify(&target, &candidate, check)
            .map(Response::Verified),
        Request::Measure {
            target,
            candidates,
            rounds,
        } => executor
            .measure(&target, &candidates, rounds)
            .map(Response::Measured),
        Request::Compile { target, candidates } => {
            // An answer as soon as it is there: silence tells the parent which candidates hang.
            let tell = |step| match answer(out, &Response::Compiling(step)) {
                Ok(()) => ControlFlow::Continue(()),
                Err(_) => ControlFlow::Break(()),
            };
            match executor.compile(&target, &candidates, &tell) {
                Ok(()) => return Ok(None),
                Err(error) => Err(error),
            }
        }
        Request::Load { target, candidates } => executor
            .load(&target, &candidates)
            .map(|()| Response::Loaded),
    };
    Ok(Some(response.unwrap_or_else(|error| match error {
        TunerError::Unfit { reason, .. } => Response::Unfit(reason),
        error => Response::Error(error.to_string()),
    })))
}

fn answer(out: &Mutex<std::io::Stdout>, response: &Response) -> Result<(), TunerError> {
    let mut line =
        serde_json::to_string(response).map_err(|e| TunerError::Device(e.to_string()))?;
    line.push('\n');
    let mut out = out.lock().expect("no holder of this lock should panic");
    out.write_all(line.as_bytes())
        .and_then(|()| out.flush())
        .map_err(|e| TunerError::Device(format!("standard output: {e}")))
}
