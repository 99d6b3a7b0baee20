//! An agent on a host: whether it may start, what it attaches and keeps attached, what it gives up, what was there before.

pub mod check;
pub mod descriptors;
pub mod hooks;
pub mod lock;
pub mod panics;
pub mod preflight;
pub mod privileges;
pub mod takeover;
pub mod traces;
pub mod upkeep;
