//! What this kernel and host can do.
