//! sheave
fn main() {}
