use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::protocol::{Request, Response};

/// Lines of standard error that are kept to say why a worker died.
const KEPT_LINES: usize = 20;
/// How long a killed process may take to be gone.
const REAP: Duration = Duration::from_secs(5);

/// Why a worker gave no answer.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Silence {
    /// The time was up. The worker was killed.
    TimedOut(Duration),
    /// The process ended; with its status and the end of its standard error.
    Ended(String),
}

/// A running worker and the pipes to it.
pub(super) struct Channel {
    child: Child,
    stdin: Option<ChildStdin>,
    lines: Receiver<String>,
    errors: Arc<Mutex<VecDeque<String>>>,
}

impl Channel {
    pub fn start(mut command: Command) -> std::io::Result<Channel> {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        let (sender, lines) = mpsc::channel();
        if let Some(out) = child.stdout.take() {
            std::thread::spawn(move || {
                for line in BufReader::new(out).lines().map_while(Result::ok) {
                    if sender.send(line).is_err() {
                        break;
                    }
                }
            });
        }
        let errors = Arc::new(Mutex::new(VecDeque::new()));
        if let Some(err) = child.stderr.take() {
            let errors = errors.clone();
            std::thread::spawn(move || keep_last_lines(err, &errors));
        }
        let stdin = child.stdin.take();
        Ok(Channel {
            child,
            stdin,
            lines,
            errors,
        })
    }

    /// Sends a request. A worker that is gone shows at the next [`Channel::receive`].
    pub fn send(&mut self, request: &Request) {
        let Ok(mut line) = serde_json::to_string(request) else {
            return;
        };
        line.push('\n');
        if let Some(stdin) = &mut self.stdin {
            let _ = stdin
                .write_all(line.as_bytes())
                .and_then(|()| stdin.flush());
        }
    }

    /// The next answer. After silence the worker is dead, whatever it was.
    pub fn receive(&mut self, timeout: Duration) -> Result<Response, Silence> {
        let deadline = Instant::now() + timeout;
        loop {
            match self
                .lines
                .recv_timeout(deadline.saturating_duration_since(Instant::now()))
            {
                // Anything else on standard output is some library's chatter.
                Ok(line) => match serde_json::from_str(&line) {
                    Ok(response) => return Ok(response),
                    Err(_) => continue,
                },
                Err(RecvTimeoutError::Timeout) => {
                    self.kill();
                    return Err(Silence::TimedOut(timeout));
                }
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Silence::Ended(self.last_words()));
                }
            }
        }
    }

    fn kill(&mut self) {
        self.stdin = None;
        let _ = self.child.kill();
        let _ = self.wait();
    }

    /// A process stuck in the driver cannot even be killed at once: it is left behind rather than waited for.
    fn wait(&mut self) -> Option<std::process::ExitStatus> {
        let deadline = Instant::now() + REAP;
        loop {
            match self.child.try_wait() {
                Ok(Some(status)) => return Some(status),
                Ok(None) if Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(5))
                }
                _ => return None,
            }
        }
    }

    fn last_words(&mut self) -> String {
        let status = self
            .wait()
            .map_or_else(|| "still there".to_string(), |status| status.to_string());
        let errors = self
            .errors
            .lock()
            .expect("no holder of this lock should panic");
        let words: Vec<&str> = errors.iter().map(String::as_str).collect();
        if words.is_empty() {
            format!("worker ended: {status}")
        } else {
            format!("worker ended: {status}; {}", words.join(" | "))
        }
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        self.kill();
    }
}

fn keep_last_lines(err: impl Read, errors: &Mutex<VecDeque<String>>) {
    for line in BufReader::new(err).lines().map_while(Result::ok) {
        let mut kept = errors.lock().expect("no holder of this lock should panic");
        kept.push_back(line);
        if kept.len() > KEPT_LINES {
            kept.pop_front();
        }
    }
}
