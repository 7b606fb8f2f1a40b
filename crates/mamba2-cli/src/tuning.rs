use std::sync::Arc;
use mamba2::{Device, Jit, Problem, Record, StepProblem, TuneHook};
struct Hook;
impl TuneHook for Hook {
    fn tune(&self, _: &Problem, _: &Device, _: &Jit) -> Result<Option<Record>, String> { Ok(None) }
    fn tune_step(&self, _: &StepProblem, _: &Device, _: &Jit) -> Result<Option<Record>, String> { Ok(None) }
}
pub fn hook() -> Arc<dyn TuneHook> { Arc::new(Hook) }
