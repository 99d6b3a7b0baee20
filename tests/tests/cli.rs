//! The command line against a live agent, a dead one, and none.

use std::{
    collections::BTreeSet,
    fs::File,
    io::{BufRead as _, BufReader, Write as _},
    process::{Child, Command, Output, Stdio},
};

use anyhow::{Context, Result, ensure};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;
use sheave_tests::{
    foreign,
    lab::Lab,
    node::Node,
    objects::{Slice, Svc},
    place::program,
    wait::{SOON, eventually},
};

/// Where a swapped byte or a sign shows.
const PORTS: [u16; 8] = [1, 80, 443, 8080, 30800, 32768, 40000, 65535];

/// A command of the command line against the agent of a node, ready to run.
fn sheave(node: &Node, args: &[&str]) -> Result<Command> {
    let mut command = node.host.command(program("sheave")?)?;
    command.args(args).arg("--run-dir").arg(&node.paths().run).arg("--bpffs").arg(&node.paths().bpffs);
    Ok(command)
}

/// It ended with this code; what it said on stdout and stderr.
#[track_caller]
fn ended(output: &Output, code: i32) -> (String, String) {
    let [out, err] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text).into_owned());
    assert_eq!(output.status.code(), Some(code), "{out}{err}");
    (out, err)
}

/// Words that are an address, a port and a protocol.
fn addresses(text: &str) -> BTreeSet<String> {
    let protocols = ["/TCP", "/UDP"];
    text.split_whitespace().filter(|w| protocols.iter().any(|p| w.ends_with(p))).map(str::to_owned).collect()
}

/// The numbers behind `port:`, in JSON or YAML.
fn numbers(text: &str) -> Result<BTreeSet<i64>> {
    let text = text.replace('"', "");
    let fields = text.lines().filter_map(|line| line.trim().trim_start_matches("- ").strip_prefix("port:"));
    fields.map(|n| n.trim().trim_end_matches(',').parse().with_context(|| format!("{n:?} is no port"))).collect()
}

#[test]
fn case_36_ports_are_those_of_the_api_in_every_command_and_format() -> Result<()> {
    let Some((lab, agent)) = Lab::with_agent()? else { return Ok(()) };
    let mut expected = BTreeSet::new();
    for (name, ip, shown, pod) in [
        ("four", "10.96.1.2", "10.96.1.2", "10.244.1.10"),
        ("six", "2001:db8:f::1:2", "[2001:db8:f::1:2]", "2001:db8:1::10"),
    ] {
        let mut service = Svc::new(name).ip(ip);
        let mut slice = Slice::new(&format!("{name}-1"), name);
        for (port, target) in PORTS.iter().zip(PORTS.iter().rev()) {
            for protocol in ["TCP", "UDP"] {
                let port_name = format!("{}{port}", protocol.to_lowercase());
                service = service.port(&port_name, *port, protocol);
                slice = slice.port(&port_name, *target, protocol);
                expected.insert(format!("{shown}:{port}/{protocol}"));
            }
        }
        lab.apply(&[&service, &slice.ready(pod, "n1")])?;
    }
    agent.until_programmed("four")?;
    agent.until_programmed("six")?;

    for args in [
        &["svc", "list"] as &[_],
        &["svc", "list", "-o", "wide"],
        &["lb", "list"],
        &["lb", "list", "-o", "wide"],
        &["lb", "list", "--frontends"],
        &["lb", "list", "-o", "name"],
    ] {
        let found: BTreeSet<_> = addresses(&agent.sheave(args)?).into_iter().filter(|a| !a.contains('*')).collect();
        assert_eq!(found, expected, "{args:?}");
    }
    let [four, six] = ["four", "six"].map(|name| agent.sheave(&["svc", "get", name]));
    assert_eq!(addresses(&(four? + &six?)), expected);

    let ports: BTreeSet<i64> = PORTS.iter().copied().map(i64::from).collect();
    for (args, extra) in [(["svc", "list", "-o"], None), (["lb", "list", "-o"], Some(0))] {
        for format in ["json", "yaml"] {
            let text = agent.sheave(&[&args as &[_], &[format]].concat())?;
            // 0 stands for every port that no Service has.
            let expected: BTreeSet<_> = ports.iter().copied().chain(extra).collect();
            assert_eq!(numbers(&text)?, expected, "{args:?} {format}");
        }
    }
    Ok(())
}

/// A command that goes on and on; ended with the value.
struct Watch(Child, BufReader<std::process::ChildStdout>);

impl Watch {
    fn start(mut command: Command) -> Result<Self> {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        let out = child.stdout.take().context("no pipe")?;
        Ok(Self(child, BufReader::new(out)))
    }

    /// The next line, whenever it comes.
    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        self.1.read_line(&mut line)?;
        ensure!(!line.is_empty(), "the watch ended");
        Ok(line.trim_end().to_owned())
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_watch_prints_what_changes_and_outlives_the_agent() -> Result<()> {
    let Some((lab, mut agent)) = Lab::with_agent()? else { return Ok(()) };
    let web = Svc::new("web").ip("10.96.0.20").port("http", 80, "TCP");
    let slice = |pods: &[&str]| {
        pods.iter().fold(Slice::new("web-1", "web").port("http", 8080, "TCP"), |slice, pod| slice.ready(pod, "n1"))
    };
    lab.apply(&[&web, &slice(&["10.244.1.10"])])?;
    agent.until_programmed("web")?;
    let mut table = Watch::start(sheave(lab.n1(), &["svc", "list", "--watch"])?)?;
    let mut json = Watch::start(sheave(lab.n1(), &["svc", "list", "-w", "-o", "json"])?)?;
    assert!(table.line()?.starts_with("NAMESPACE "));
    let columns = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
    assert_eq!(columns(&table.line()?), ["t", "web", "ClusterIP", "10.96.0.20:80/TCP", "1/1", "yes"]);
    let ready = |line: &str| -> Result<Value> {
        let list: Value = serde_json::from_str(line)?;
        Ok(list["items"][0]["frontends"][0]["ready"].clone())
    };
    assert_eq!(ready(&json.line()?)?, 1);

    lab.apply(&[&slice(&["10.244.1.10", "10.244.1.11"])])?;
    // Whether a snapshot falls between wanting and having is a matter of luck.
    while !columns(&table.line()?).ends_with(&["2/2".to_owned(), "yes".to_owned()]) {}
    while ready(&json.line()?)? != 2 {}

    agent.kill()?;
    lab.apply(&[&slice(&["10.244.1.10", "10.244.1.11", "10.244.1.12"])])?;
    let mut said = BufReader::new(table.0.stderr.take().context("no pipe")?).lines();
    let away = said.next().context("nothing said")??;
    ensure!(away.starts_with("note: ") && away.ends_with("waiting for the agent to come back"), "{away}");
    agent.restart()?;
    ensure!(said.next().context("nothing said")?? == "note: the agent is back");
    loop {
        let line = columns(&table.line()?);
        ensure!(!line.contains(&"deleted".to_owned()), "the next agent did not know it at first: {line:?}");
        if line.ends_with(&["3/3".to_owned(), "yes".to_owned()]) {
            break;
        }
    }
    while ready(&json.line()?)? != 3 {}
    lab.delete(&[&web])?;
    while !table.line()?.ends_with("deleted") {}
    Ok(())
}

/// A command, where its output goes, and how it ends.
type End = (&'static str, fn() -> Result<Stdio>, i32);

#[test]
fn every_command_ends_as_the_manual_says() -> Result<()> {
    let full = || Ok(Stdio::from(File::options().write(true).open("/dev/full")?));
    let unread = || Ok(Stdio::from(std::io::pipe()?.1));
    let fine = || Ok(Stdio::null());
    let nowhere = " --run-dir /nonexistent/run --bpffs /nonexistent/bpf";
    let printing = [
        "--help",
        "--version",
        "version",
        "completion bash",
        "completion zsh",
        "completion fish",
        "agent --help",
        "agent --print-config",
        "svc list --help",
        "check",
        "check -o json",
        "cleanup --dry-run",
    ];
    let ends = printing.iter().flat_map(|line| [(*line, full as fn() -> _, 1), (*line, unread, 0)]);
    let others: [End; 13] = [
        ("version", fine, 0),
        ("svc list", fine, 1),
        ("svc list --watch", fine, 1),
        ("svc get web", fine, 1),
        ("status", fine, 1),
        ("lb list", fine, 1),
        ("lb list --watch", fine, 1),
        ("monitor", fine, 2),
        ("nonsense", fine, 2),
        ("agent --log-level x=y=z", fine, 2),
        ("agent --healthz-bind-address x", fine, 2),
        ("agent --config /nonexistent", fine, 2),
        ("agent --manifests /nonexistent", fine, 2),
    ];
    for (line, stdout, code) in ends.chain(others) {
        let is_about_a_host = ["cleanup", "svc ", "status", "lb ", "monitor"].iter().any(|c| line.starts_with(c))
            && !line.ends_with("help");
        let whole = format!("{line}{}", if is_about_a_host { nowhere } else { "" });
        let mut command = Command::new(program("sheave")?);
        command.args(whole.split(' ')).stdin(Stdio::null()).stdout(stdout()?).stderr(Stdio::piped());
        let output = command.spawn()?.wait_with_output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.code() == Some(code), "{line} ended with {}, not {code}: {said}", output.status);
        ensure!(said.contains("error: ") == (code != 0) && !said.contains("panicked"), "{line} said {said:?}");
    }
    Ok(())
}

#[test]
fn without_the_agent_the_kernels_side_is_still_told() -> Result<()> {
    let Some((lab, mut agent)) = Lab::with_agent()? else { return Ok(()) };
    let web = Svc::new("web").ip("10.96.0.20").port("http", 80, "TCP");
    lab.apply(&[&web, &Slice::new("web-1", "web").port("http", 8080, "TCP").ready("10.244.1.10", "n1")])?;
    agent.until_programmed("web")?;
    let before = agent.sheave(&["lb", "list"])?;
    agent.kill()?;
    assert_eq!(agent.sheave(&["lb", "list"])?, before);
    for args in [&["svc", "list"] as &[_], &["svc", "get", "web"], &["status"], &["lb", "list", "-l", "app=web"]] {
        let (_, err) = ended(&sheave(lab.n1(), args)?.output()?, 1);
        for words in ["cannot reach the agent", "is `sheave agent` running", "`sheave lb list` works without it"] {
            assert!(err.contains(words), "{args:?}: {err}");
        }
    }
    Ok(())
}

/// All lines begin with `verb`; what they name.
#[track_caller]
fn things(text: &str, verb: &str) -> Vec<String> {
    text.lines().map(|line| line.strip_prefix(verb).unwrap_or_else(|| panic!("{line}")).to_owned()).collect()
}

#[test]
fn cleanup_leaves_the_node_as_if_never_installed() -> Result<()> {
    let Some((lab, mut agent)) = Lab::with_agent()? else { return Ok(()) };
    let node = lab.n1();
    let cleanup = |flags: &[&str]| Ok::<_, anyhow::Error>(sheave(node, &[&["cleanup"], flags].concat())?.output()?);
    let (_, err) = ended(&cleanup(&[])?, 2);
    assert!(err.contains("stop it first"), "{err}");
    assert!(agent.is_running()?);
    agent.status()?;

    agent.terminate()?;
    let (planned, _) = ended(&cleanup(&["--dry-run"])?, 0);
    agent.sheave(&["lb", "list"]).context("a dry run removes nothing")?;
    let (done, _) = ended(&cleanup(&[])?, 0);
    assert_eq!(things(&planned, "would remove "), things(&done, "removed "));
    assert!(!node.paths().bpffs.join("sheave").exists() && !node.paths().run.exists());
    // Links without a pin go with their last reference, which the kernel drops in its own time.
    eventually("nothing is attached", SOON, || {
        let programs = foreign::attached(&node.paths().cgroup)?.unwrap_or_default();
        ensure!(programs.is_empty(), "{programs:?}");
        Ok(())
    })?;
    assert_eq!(ended(&cleanup(&[])?, 0).0, "nothing to clean up\n");

    let mut staying = sheave(node, &["cleanup", "--stay"])?.stdout(Stdio::piped()).spawn()?;
    let mut said = BufReader::new(staying.stdout.take().context("no stdout")?).lines();
    assert_eq!(said.next().transpose()?.as_deref(), Some("nothing to clean up"));
    assert_eq!(said.next().transpose()?.as_deref(), Some("staying until told to stop"));
    kill(Pid::from_raw(staying.id().try_into()?), Signal::SIGTERM)?;
    assert_eq!(staying.wait()?.code(), Some(0), "it hears the signal and ends well");

    agent.restart().context("installed once more")
}

#[test]
fn check_finds_a_host_fit_and_says_what_a_plain_directory_lacks() -> Result<()> {
    let Some(lab) = Lab::new(1)? else { return Ok(()) };
    let node = lab.n1();
    let cgroup = node.paths().cgroup.to_string_lossy().into_owned();
    let (out, _) = ended(&sheave(node, &["check", "-o", "json", "--cgroup-root", &cgroup])?.output()?, 0);
    let list: Value = serde_json::from_str(&out)?;
    let fails = list["items"].as_array().context("no list")?.iter().filter(|f| f["status"] == "fail").count();
    assert_eq!(fails, 0, "{out}");

    let mut command = node.host.command(program("sheave")?)?;
    let (out, err) = ended(&command.args(["check", "--bpffs", "/", "--cgroup-root", &cgroup]).output()?, 1);
    assert!(out.lines().any(|line| line.starts_with("fail   BPF filesystem")), "{out}");
    assert!(err.is_empty(), "the page says it all: {err}");
    Ok(())
}

#[test]
fn bash_accepts_its_completion() -> Result<()> {
    let script = Command::new(program("sheave")?).args(["completion", "bash"]).output()?;
    let mut bash = Command::new("bash").arg("-n").stdin(Stdio::piped()).spawn()?;
    bash.stdin.take().context("no pipe")?.write_all(&script.stdout)?;
    ensure!(!script.stdout.is_empty() && bash.wait()?.success(), "bash refuses the script");
    Ok(())
}
