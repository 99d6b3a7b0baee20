//! Starting where it cannot work: a sentence that says what is wrong and what to do, and nothing changed.

use std::{
    fs,
    process::{Command, Output, Stdio},
    thread,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use sheave_tests::{
    agent::Paths,
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

/// What is wrong with the way it ended: it has to fail, without a panic, and to say all of that.
fn complaint(name: &str, output: &Output, words: &[&str]) -> Option<String> {
    let said = String::from_utf8_lossy(&output.stderr);
    let wrong = match words.iter().find(|word| !said.contains(**word)) {
        _ if output.status.success() => "it succeeded".to_owned(),
        _ if said.contains("panicked") => "it panicked".to_owned(),
        Some(word) => format!("it did not say {word:?}"),
        None => return None,
    };
    Some(format!("{name}: {wrong}:\n{said}"))
}

#[test]
fn a_second_agent_of_one_node_is_refused_and_the_first_goes_on() -> Result<()> {
    let Some((lab, mut agent)) = Lab::with_agent()? else { return Ok(()) };
    let node = lab.n1();
    let second = output(node.paths().agent(&node.name, &node.host)?)?;
    assert_eq!(complaint("second agent", &second, &["another agent", "stop it first"]), None);
    assert!(agent.is_running()?);
    agent.status()?;
    Ok(())
}

#[test]
fn what_is_missing_is_said_in_a_sentence() -> Result<()> {
    let Some(lab) = Lab::new(1)? else { return Ok(()) };
    let node = lab.n1();
    let plain = std::env::temp_dir().join(&lab.name).join("plain");
    fs::create_dir_all(&plain)?;
    let missing = plain.join("missing");
    let with = |change: &dyn Fn(&mut Paths)| -> Result<Output> {
        let mut paths = node.paths().clone();
        change(&mut paths);
        output(paths.agent(&node.name, &node.host)?)
    };
    // A copy, since a user called nobody may not see where this one was built.
    let copy = plain.join("sheave");
    fs::copy(program("sheave")?, &copy)?;
    let agent = node.paths().agent(&node.name, &node.host)?;
    let mut unprivileged = node.host.command("setpriv")?;
    unprivileged.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).arg(&copy).args(agent.get_args());

    let complaints: Vec<_> = [
        complaint("no privileges", &output(unprivileged)?, &["root"]),
        complaint("no cgroup v2", &with(&|p| p.cgroup = plain.clone())?, &["cgroup v2", "plain", "--cgroup-root"]),
        complaint("no such cgroup", &with(&|p| p.cgroup = missing.clone())?, &["missing", "--cgroup-root"]),
        complaint("no bpffs", &with(&|p| p.bpffs = plain.clone())?, &["plain", "mount -t bpf"]),
        complaint("no manifests", &with(&|p| p.manifests = missing.clone())?, &["missing"]),
    ]
    .into_iter()
    .flatten()
    .collect();
    assert!(complaints.is_empty(), "{}", complaints.join("\n"));
    Ok(())
}

#[test]
fn an_idle_agent_sleeps() -> Result<()> {
    let Some((_lab, agent)) = Lab::with_agent()? else { return Ok(()) };
    let wakes = || -> Result<u64> {
        let mut sum = 0;
        for task in fs::read_dir(format!("/proc/{}/task", agent.pid()))? {
            let status = fs::read_to_string(task?.path().join("status"))?;
            let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
            sum += line.context("no count of context switches")?.trim().parse::<u64>()?;
        }
        Ok(sum)
    };
    let second = Duration::from_secs(1);
    eventually("it has settled", SOON, || {
        let before = wakes()?;
        thread::sleep(second); // the time over which is counted
        let times = wakes()? - before;
        ensure!(times <= 5, "it woke up {times} times in a second of nothing to do");
        Ok(())
    })
}
