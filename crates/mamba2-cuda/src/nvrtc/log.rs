use serde::{Deserialize, Serialize};

/// What ptxas says a kernel needs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resources {
    /// Registers of a thread.
    pub registers: u32,
    /// Local memory of a thread, spills included. Unit: bytes.
    pub stack_bytes: u32,
    /// Registers stored to local memory. Unit: bytes a thread.
    pub spill_store_bytes: u32,
    /// Registers loaded back. Unit: bytes a thread.
    pub spill_load_bytes: u32,
    /// Static shared memory of a block. Unit: bytes.
    pub shared_bytes: u32,
}

impl Resources {
    /// Reads the report of `--ptxas-options=-v`; the largest value of each kind if the log speaks of several functions.
    /// `None` if it has no register count.
    pub fn from_log(log: &str) -> Option<Resources> {
        let mut found = None;
        let mut all = Resources::default();
        for line in log.lines() {
            for (phrase, field) in [
                (" bytes stack frame", &mut all.stack_bytes),
                (" bytes spill stores", &mut all.spill_store_bytes),
                (" bytes spill loads", &mut all.spill_load_bytes),
                (" bytes smem", &mut all.shared_bytes),
                (" registers", &mut all.registers),
            ] {
                if let Some(value) = number_before(line, phrase) {
                    *field = (*field).max(value);
                    if phrase == " registers" {
                        found = Some(());
                    }
                }
            }
        }
        found.map(|()| all)
    }
}

fn number_before(line: &str, phrase: &str) -> Option<u32> {
    let head = &line[..line.find(phrase)?];
    let digits = head.len() - head.bytes().rev().take_while(u8::is_ascii_digit).count();
    head[digits..].parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ptxas_report_is_read_in_full() {
        let log = "ptxas info    : 0 bytes gmem\n\
                   ptxas info    : Compiling entry function 'k' for 'sm_90a'\n\
                   ptxas info    : Function properties for k\n\
                   ptxas         .     968 bytes stack frame, 1456 bytes spill stores, 1920 bytes spill loads\n\
                   ptxas info    : Used 32 registers, used 1 barriers, 968 bytes cumulative stack size, 512 bytes smem\n";
        let want = Resources {
            registers: 32,
            stack_bytes: 968,
            spill_store_bytes: 1456,
            spill_load_bytes: 1920,
            shared_bytes: 512,
        };
        assert_eq!(Resources::from_log(log), Some(want));
    }

    #[test]
    fn a_log_without_a_report_gives_nothing() {
        assert_eq!(Resources::from_log(""), None);
        assert_eq!(
            Resources::from_log("warning: variable was declared but never referenced"),
            None
        );
    }
}
