//! A worker that follows a script instead of driving a GPU. Its argument is the script as JSON.

use mamba2_tuner::fake::{FakeExecutor, Script};

fn main() {
    let script = std::env::args().nth(1).expect("the script should be the argument");
    let script: Script = serde_json::from_str(&script).expect("the script should be JSON");
    if script.device.name == "refuses to start" {
        println!("{{\"error\":\"scripted refusal\"}}");
        return;
    }
    println!("some library's chatter");
    mamba2_tuner::worker::serve(&FakeExecutor::new(script)).expect("standard output should be there");
}
