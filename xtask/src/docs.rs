//! Documentation that is made from code.

use anyhow::Result;

use crate::root;

/// The page is made by the unit test that checks it, since only the agent knows its flags and metrics.
pub fn write() -> Result<()> {
    let args = ["test", "--quiet", "--package", "sheave-agent", "--lib", "operations::"];
    root::run(root::command("cargo", &args).env("SHEAVE_WRITE_DOCS", "1").env("AYA_BUILD_SKIP", "1"))
}
