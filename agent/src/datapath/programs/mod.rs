//! The programs in the kernel: loaded, attached, and looked after.

pub mod attach;
pub mod features;
pub mod keep;
pub mod link;
pub mod load;
pub mod packets;
pub mod probe;
pub mod tc;
pub mod verifier;
pub mod workload_watch;
