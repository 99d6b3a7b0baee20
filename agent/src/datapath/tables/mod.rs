//! Maps in the kernel, and the same in memory.

pub mod batch;
pub mod clock;
pub mod fake;
pub mod filling;
pub mod flows;
pub mod guarded;
pub mod kernel;
pub mod migrate;
pub mod pinned;
pub mod pins;
pub mod watch;
pub mod words;
