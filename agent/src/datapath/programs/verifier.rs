//! Why the kernel refused a program, in one sentence.

use aya::programs::ProgramError;

use crate::datapath::{Error, tables::pinned::flatten};

/// The error of a program that could not be loaded. The verifier's log, thousands of lines of register states, is for
/// who asks for it.
pub(in crate::datapath) fn refused(name: &str, error: &ProgramError) -> Error {
    let ProgramError::LoadError { io_error, verifier_log } = error else {
        return Error::Incompatible(format!("the kernel refused the program {name}: {}", flatten(error)));
    };
    let log = verifier_log.to_string();
    tracing::debug!(program = name, "what the verifier says:\n{log}");
    let reason = match reason(&log) {
        Some(line) => format!("{line} ({io_error})"),
        None => io_error.to_string(),
    };
    Error::Incompatible(format!(
        "the kernel refused the program {name}: {reason}; `sheave check` says what this host lacks, `--log-level debug` \
         shows the verifier's log"
    ))
}

/// The line in which the verifier gave up: the last before its statistics.
fn reason(log: &str) -> Option<&str> {
    const STATISTICS: [&str; 4] = ["processed ", "verification time ", "stack depth ", "mark_precise: "];
    let mut lines = log.lines().rev().map(str::trim).filter(|line| !line.is_empty());
    lines.find(|line| !STATISTICS.iter().any(|start| line.starts_with(start)))
}

#[cfg(test)]
mod tests {
    use std::io;

    use aya::programs::ProgramError;

    use super::*;

    #[test]
    fn a_refusal_is_one_sentence() {
        let log = "0: R1=ctx() R10=fp0\n71: (5d) if r7 != r1 goto pc+2\nR7 pointer comparison prohibited\n\
                   verification time 207 usec\nstack depth 152\nprocessed 71 insns (limit 1000000)\n\n";
        for (id, log, expected) in [
            ("with a log", log, Some("R7 pointer comparison prohibited")),
            ("statistics only", "processed 0 insns (limit 1000000)\n", None),
            ("no log", "", None),
        ] {
            assert_eq!(reason(log), expected, "{id}");
        }
        let error = refused("connect4", &ProgramError::IOError(io::Error::from_raw_os_error(libc::EPERM)));
        assert_eq!(error.to_string(), "the kernel refused the program connect4: Operation not permitted (os error 1)");
    }
}
