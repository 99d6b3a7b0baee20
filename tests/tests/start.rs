//! Starting where it cannot work: a sentence that says what is wrong and what to do, and nothing changed.

use std::{
    fs,
    process::{Command, Output, Stdio},
};

use anyhow::{Context, Result};
use sheave_tests::{
    lab::Lab,
    place::program,
    wait::{SOON, eventually},
};

/// Runs to the end, which has to come soon.
fn output(mut command: Command) -> Result<Output> {
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    let ended = eventually("the agent refuses and ends", SOON, || child.try_wait()?.context("it runs"));
    if ended.is_err() {
        child.kill()?;
    }
    let output = child.wait_with_output()?;
    ended.with_context(|| String::from_utf8_lossy(&output.stderr).into_owned())?;
    Ok(output)
}

/// It failed, and said all of that.
#[track_caller]
fn check(name: &str, output: &Output, words: &[&str]) {
    let said = String::from_utf8_lossy(&output.stderr).to_lowercase();
    assert!(!output.status.success(), "{name}: {said}");
    for word in words {
        assert!(said.contains(word), "{name}: no {word:?} in\n{said}");
    }
    assert!(!said.contains("panicked"), "{name}: {said}");
}

#[test]
fn a_second_agent_of_one_node_is_refused_and_the_first_goes_on() -> Result<()> {
    let Some((lab, mut agent)) = Lab::with_agent()? else { return Ok(()) };
    let node = lab.n1();
    let second = output(node.paths().agent(&node.name, &node.host)?)?;
    check("second agent", &second, &["already", "run"]);
    assert!(agent.is_running()?);
    agent.status()?;
    Ok(())
}

#[test]
fn what_is_missing_is_said_in_a_sentence() -> Result<()> {
    let Some(lab) = Lab::new(1)? else { return Ok(()) };
    let node = lab.n1();
    let paths = || node.paths().clone();
    let plain = std::env::temp_dir().join(&lab.name).join("plain");
    fs::create_dir_all(&plain)?;

    // A copy, since a user called nobody may not see where this one was built.
    let copy = plain.join("sheave");
    fs::copy(program("sheave")?, &copy)?;
    let agent = node.paths().agent(&node.name, &node.host)?;
    let mut unprivileged = node.host.command("setpriv")?;
    unprivileged.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).arg(&copy).args(agent.get_args());
    check("no privileges", &output(unprivileged)?, &["root", "cap_bpf"]);

    let mut no_cgroup = paths();
    no_cgroup.cgroup = plain.clone();
    check("no cgroup v2", &output(no_cgroup.agent(&node.name, &node.host)?)?, &["cgroup", "plain"]);

    let mut missing_cgroup = paths();
    missing_cgroup.cgroup = plain.join("missing");
    check("no such cgroup", &output(missing_cgroup.agent(&node.name, &node.host)?)?, &["cgroup", "missing"]);

    let mut no_bpffs = paths();
    no_bpffs.bpffs = plain.clone();
    check("no bpffs", &output(no_bpffs.agent(&node.name, &node.host)?)?, &["bpf", "plain", "mount"]);

    let mut no_manifests = paths();
    no_manifests.manifests = plain.join("missing");
    check("no manifests", &output(no_manifests.agent(&node.name, &node.host)?)?, &["manifests", "missing"]);
    Ok(())
}
