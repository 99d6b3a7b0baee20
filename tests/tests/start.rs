//! Starting where it cannot work: a sentence that says what is wrong and what to do, and nothing changed.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    thread,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use sheave_tests::{
    agent::Paths,
    foreign,
    lab::Lab,
    node::Node,
    place::{entered, program},
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

/// What is wrong with the way it ended: it has to refuse in one sentence that has all of these words.
fn complaint(name: &str, output: &Output, words: &[&str]) -> Option<String> {
    let said = String::from_utf8_lossy(&output.stderr);
    let wrong = match words.iter().find(|word| !said.contains(**word)) {
        _ if output.status.code() != Some(2) => format!("it ended with {}", output.status),
        _ if said.contains("panicked") => "it panicked".to_owned(),
        _ if said.lines().filter(|line| line.starts_with("error: ")).count() != 1 => "it is not one error".to_owned(),
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

/// Runs an agent with other paths than the node's.
fn refused(node: &Node, change: &dyn Fn(&mut Paths)) -> Result<Output> {
    let mut paths = node.paths().clone();
    change(&mut paths);
    output(paths.agent(&node.name, &node.host)?)
}

/// A directory on no special filesystem, removed with the lab.
fn plain_directory(lab: &Lab) -> Result<PathBuf> {
    let plain = std::env::temp_dir().join(&lab.name).join("plain");
    fs::create_dir_all(&plain)?;
    Ok(plain)
}

#[test]
fn what_is_missing_is_said_in_a_sentence() -> Result<()> {
    let Some(lab) = Lab::new(1)? else { return Ok(()) };
    let node = lab.n1();
    let plain = plain_directory(&lab)?;
    let missing = plain.join("missing");
    let file = plain.join("file");
    fs::write(&file, "no kubeconfig")?;
    let with = |change: &dyn Fn(&mut Paths)| refused(node, change);
    // A copy, since a user called nobody may not see where this one was built.
    let copy = plain.join("sheave");
    fs::copy(program("sheave")?, &copy)?;
    let agent = node.paths().agent(&node.name, &node.host)?;
    let mut unprivileged = node.host.command("setpriv")?;
    unprivileged.args(["--reuid=65534", "--regid=65534", "--clear-groups"]).arg(&copy).args(entered(&agent).skip(1));
    let new = node.paths().bpffs.join("new");
    let before = Host::now(node)?;

    let complaints: Vec<_> = [
        complaint("no privileges", &output(unprivileged)?, &["root"]),
        complaint("no cgroup v2", &with(&|p| p.cgroup = plain.clone())?, &["cgroup v2", "plain", "--cgroup-root"]),
        complaint("no such cgroup", &with(&|p| p.cgroup = missing.clone())?, &["missing", "--cgroup-root"]),
        complaint("no bpffs", &with(&|p| p.bpffs = plain.clone())?, &["plain", "mount -t bpf"]),
        complaint("no manifests", &with(&|p| p.manifests = missing.clone())?, &["missing"]),
        complaint("no kubeconfig", &with(&|p| p.kubeconfig = Some(missing.clone()))?, &["kubeconfig", "missing"]),
        complaint("odd kubeconfig", &with(&|p| p.kubeconfig = Some(file.clone()))?, &["kubeconfig", "file"]),
        complaint("a run directory in a file", &with(&|p| p.run = file.join("run"))?, &["file/run", "Not a directory"]),
        complaint("and new pins", &with(&|p| (p.run, p.bpffs) = (file.join("run"), new.clone()))?, &["file/run"]),
        complaint(
            "no room for a socket",
            &with(&|p| p.run = plain.join("x".repeat(100)))?,
            &["xx/agent.sock", "--run-dir"],
        ),
    ]
    .into_iter()
    .flatten()
    .collect();
    assert!(complaints.is_empty(), "{}", complaints.join("\n"));
    assert_eq!(Host::now(node)?, before, "whoever is refused changes nothing");
    Ok(())
}

/// What a start may change on a node.
#[derive(Debug, PartialEq)]
struct Host {
    directories: Vec<Vec<String>>,
    devices: String,
    programs: BTreeMap<String, Vec<u64>>,
}

impl Host {
    fn now(node: &Node) -> Result<Self> {
        let entries = |path: &Path| -> Vec<String> {
            let names =
                fs::read_dir(path).into_iter().flatten().flatten().map(|e| e.file_name().to_string_lossy().into());
            let mut names: Vec<String> = names.collect();
            names.sort();
            names
        };
        let plain = node.paths().run.parent().context("the run directory is in none")?.to_owned();
        let lab = plain.parent().context("the node's directory is in none")?.join("plain");
        Ok(Self {
            directories: [&node.paths().bpffs, &node.paths().run, &plain, &lab].map(|path| entries(path)).into(),
            // Their names: carriers come and go by themselves.
            devices: node.host.run("ip", &["-o", "link"])?.lines().filter_map(|line| line.split('<').next()).collect(),
            programs: foreign::attached(&node.paths().cgroup)?.unwrap_or_default(),
        })
    }
}

#[test]
fn a_missing_capability_is_named_before_anything_is_changed() -> Result<()> {
    let Some(lab) = Lab::new(1)? else { return Ok(()) };
    let node = lab.n1();
    let before = Host::now(node)?;
    let limited = |capabilities: &str, command: Command| -> Result<Command> {
        let mut limited = node.host.command("setpriv")?;
        limited.args([format!("--bounding-set={capabilities}"), format!("--inh-caps={capabilities}")]);
        limited.args(entered(&command));
        Ok(limited)
    };
    for (without, word) in
        [("-sys_admin,-perfmon", "CAP_PERFMON"), ("-sys_admin,-bpf", "CAP_BPF"), ("-net_admin", "CAP_NET_ADMIN")]
    {
        let agent = output(limited(without, node.paths().agent(&node.name, &node.host)?)?)?;
        assert_eq!(complaint(without, &agent, &["privileges", word, "BPF, NET_ADMIN, PERFMON and SYS_ADMIN"]), None);
        let mut check = node.host.command(program("sheave")?)?;
        check.args(["check", "--cgroup-root"]).arg(&node.paths().cgroup).arg("--bpffs").arg(&node.paths().bpffs);
        let check = output(limited(without, check)?)?;
        let page = String::from_utf8_lossy(&check.stdout).into_owned();
        assert_eq!(check.status.code(), Some(1), "{page}");
        assert!(page.lines().any(|line| line.starts_with("fail   privileges") && line.contains(word)), "{page}");
    }
    assert_eq!(Host::now(node)?, before);
    Ok(())
}

/// Somebody holds the hook alone that is attached last but one: by then maps, devices and seven links were made.
#[test]
fn a_late_refusal_takes_back_what_was_made() -> Result<()> {
    let Some(lab) = Lab::new(1)? else { return Ok(()) };
    let node = lab.n1();
    foreign::attach_alone(&node.paths().cgroup)?;
    let before = Host::now(node)?;
    let agent = refused(node, &|_| {})?;
    assert_eq!(complaint("late", &agent, &["connect4", "bpftool cgroup tree"]), None);
    // Links without a pin go with their last reference, which the kernel drops in its own time.
    eventually("all of it is gone", SOON, || {
        let now = Host::now(node)?;
        ensure!(now == before, "{now:?} is not {before:?}");
        Ok(())
    })
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
