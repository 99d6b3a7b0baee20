//! Every program passes this kernel's verifier. Needs root; runs on every kernel of the matrix.

use anyhow::{Context, Result, bail};
use aya::{EbpfLoader, programs::Program};
use sheave_agent::OBJECT;

#[test]
fn every_program_loads() -> Result<()> {
    if !nix::unistd::geteuid().is_root() {
        sheave_tests::skip("loading programs needs root");
        return Ok(());
    }
    let mut ebpf = EbpfLoader::new().load(OBJECT)?;
    let mut loaded = 0;
    for (name, program) in ebpf.programs_mut() {
        match program {
            Program::CgroupSockAddr(p) => p.load(),
            Program::CgroupSock(p) => p.load(),
            Program::SchedClassifier(p) => p.load(),
            other => bail!("{name} is a {:?}", other.prog_type()),
        }
        .with_context(|| name.to_owned())?;
        loaded += 1;
    }
    assert!(loaded >= 15, "the object holds {loaded} programs");
    Ok(())
}
