//! A watched directory of manifests, as its source tells it.

use std::{
    fmt::Write as _,
    fs,
    io::Write as _,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use nix::{sys::stat::Mode, unistd::mkfifo};
use sheave_agent::{
    model::Update,
    source::{convert::ConvertOptions, manifests},
};
use sheave_tests::{
    objects::{Object, Slice, Svc, node},
    told::Told,
    wait::{SOON, throughout},
};

/// A directory, removed in the end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Result<Self> {
        let path = std::env::temp_dir().join(format!("sheave-manifests-{}-{name}", std::process::id()));
        fs::create_dir_all(&path)?;
        Ok(Self(path))
    }

    fn write(&self, file: &str, text: impl AsRef<[u8]>) -> Result<()> {
        Ok(fs::write(self.0.join(file), text)?)
    }

    fn watch(&self) -> Result<Told> {
        let (sender, told) = Told::new();
        manifests::start(&self.0, ConvertOptions::default(), sender)?;
        Ok(told)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn service(name: &str, port: u16) -> String {
    Svc::new(name).ip("10.96.0.20").port("http", port, "TCP").text()
}

fn slice(service: &str, digits: u8) -> String {
    let slice = Slice::new(&format!("{service}-1"), service).port("http", 8080, "TCP");
    slice.ready(&format!("10.244.1.{digits}"), "n1").text()
}

#[test]
fn the_first_thing_told_is_every_list() -> Result<()> {
    let folder = Folder::new("lists")?;
    let mut told = folder.watch()?;
    told.until("empty lists", SOON, |told| told.state.service_cidrs().is_some())?;
    let lists = [Update::Services(vec![]), Update::Slices(vec![]), Update::Nodes(vec![]), Update::ServiceCidrs(vec![])];
    ensure!(told.updates == lists);
    ensure!(told.source.source == format!("manifests {}", folder.0.display()), "{:?}", told.source);

    folder.write("a.yaml", format!("{}\n---\n{}", service("web", 80), slice("web", 10)))?;
    folder
        .write("b.json", format!("{{\"kind\": \"List\", \"items\": [{}, {}]}}", service("db", 81), node(1).text()))?;
    folder.write("c.yml", slice("db", 11))?;
    folder.write("d.txt", service("text", 82))?;
    folder.write(".e.yaml", service("hidden", 83))?;
    told.until_lines("as they come", SOON, &["db 81/TCP 10.244.1.11:8080", "web 80/TCP 10.244.1.10:8080"])?;

    let mut again = folder.watch()?;
    again.until("full lists", SOON, |told| told.state.service_cidrs().is_some())?;
    let lines = ["db 81/TCP 10.244.1.11:8080", "web 80/TCP 10.244.1.10:8080"];
    ensure!(again.lines() == lines, "{:?}", again.lines());
    ensure!(again.updates.len() == 4, "four lists and no more: {:?}", again.updates);
    ensure!(again.state.node("n1").is_some());
    Ok(())
}

#[test]
fn watch_rows_are_followed() -> Result<()> {
    let folder = Folder::new("rows")?;
    let mut told = folder.watch()?;
    let two = |digits: [u8; 2]| {
        let slice = Slice::new("s2-1", "s2").port("http", 8080, "TCP");
        slice.ready(&format!("10.244.1.{}", digits[0]), "n1").ready(&format!("10.244.1.{}", digits[1]), "n1").text()
    };
    let rows: [(&str, &str, Option<String>, &[&str]); 8] = [
        ("W-1", "s1.yaml", Some(service("s1", 10)), &["s1 10/TCP"]),
        ("W-2", "s2.yaml", Some(service("s2", 30)), &["s1 10/TCP", "s2 30/TCP"]),
        ("W-3", "s1.yaml", Some(service("s1", 20)), &["s1 20/TCP", "s2 30/TCP"]),
        ("W-4", "s1.yaml", None, &["s2 30/TCP"]),
        ("W-6", "e.yaml", Some(slice("s2", 1)), &["s2 30/TCP 10.244.1.1:8080"]),
        ("W-6", "e.yaml", Some(two([1, 2])), &["s2 30/TCP 10.244.1.1:8080 10.244.1.2:8080"]),
        ("W-6", "e.yaml", None, &["s2 30/TCP"]),
        ("W-5", "s2.yaml", None, &[]),
    ];
    for (id, file, text, expected) in rows {
        match text {
            Some(text) => folder.write(file, text)?,
            None => fs::remove_file(folder.0.join(file))?,
        }
        told.until_lines(id, SOON, expected)?;
    }
    for (id, labelled, expected) in [("W-9", Some(1), 1), ("W-9", Some(2), 2), ("W-9", None, 0)] {
        match labelled {
            Some(number) => folder.write(&node(number).file, node(number).text())?,
            None => [1, 2].iter().try_for_each(|number| fs::remove_file(folder.0.join(node(*number).file)))?,
        }
        told.until(id, SOON, |told| told.state.nodes().count() == expected)?;
    }
    Ok(())
}

#[test]
fn a_broken_file_keeps_what_it_said() -> Result<()> {
    let folder = Folder::new("broken")?;
    folder.write("a.yaml", service("web", 80))?;
    folder.write("b.yaml", service("db", 80))?;
    let mut told = folder.watch()?;
    told.until_lines("both", SOON, &["db 80/TCP", "web 80/TCP"])?;
    folder.write("a.yaml", "kind: Service\nspec: [")?;
    told.until("named", SOON, |told| told.problems.contains_key("manifest a.yaml"))?;
    let problem = &told.problems["manifest a.yaml"];
    let start = "manifest a.yaml cannot be read, so its previous content still counts: line ";
    ensure!(problem.starts_with(start), "{problem}");
    folder.write("a.yaml", "kind: Service\nspec: [")?; // as broken as before: nothing new to say
    folder.write("b.yaml", service("db", 81))?;
    told.until_lines("others go on", SOON, &["db 81/TCP", "web 80/TCP"])?;
    ensure!(told.problems_told == 1, "{:?}", told.problems);
    folder.write("a.yaml", service("web", 82))?;
    told.until_lines("mended", SOON, &["db 81/TCP", "web 82/TCP"])?;
    ensure!(told.problems.is_empty(), "{:?}", told.problems);
    folder.write("a.yaml", b"\xff\xfe")?;
    told.until("no text", SOON, |told| told.problems.contains_key("manifest a.yaml"))?;
    fs::remove_file(folder.0.join("a.yaml"))?;
    told.until_lines("gone", SOON, &["db 81/TCP"])?;
    ensure!(told.problems.is_empty(), "{:?}", told.problems);
    Ok(())
}

#[test]
fn what_is_not_for_a_proxy_is_noted_once() -> Result<()> {
    let folder = Folder::new("kinds")?;
    let pods = "apiVersion: v1\nkind: Pod\nmetadata: {name: a}\n---\napiVersion: v1\nkind: Pod\nmetadata: {name: b}\n";
    folder.write("all.yaml", format!("{pods}---\n{}\n---\n{}", service("web", 80), service("bad", 0)))?;
    let mut told = folder.watch()?;
    told.until_lines("what is", SOON, &["bad invalid: no port of spec.ports can be used", "web 80/TCP"])?;
    ensure!(told.problems["manifest all.yaml"] == "manifest all.yaml is only partly used: v1 Pod in it is ignored.");
    ensure!(told.problems.contains_key("Service t/bad"), "{:?}", told.problems);
    ensure!(told.problems.len() == 2, "{:?}", told.problems);
    Ok(())
}

#[test]
fn an_object_in_two_files_is_the_first_ones() -> Result<()> {
    let folder = Folder::new("twice")?;
    folder.write("b.yaml", service("web", 80))?;
    let mut told = folder.watch()?;
    told.until_lines("one", SOON, &["web 80/TCP"])?;
    folder.write("a.yaml", service("web", 70))?;
    told.until_lines("the first by name", SOON, &["web 70/TCP"])?;
    ensure!(told.problems["Service t/web"] == "Service t/web is also in b.yaml; the one in a.yaml counts.");
    fs::remove_file(folder.0.join("a.yaml"))?;
    told.until_lines("the other again", SOON, &["web 80/TCP"])?;
    ensure!(told.problems.is_empty(), "{:?}", told.problems);
    Ok(())
}

#[test]
fn a_file_counts_when_its_writer_is_done() -> Result<()> {
    let folder = Folder::new("writers")?;
    let mut told = folder.watch()?;
    told.until("synced", SOON, |told| told.state.is_synced())?;

    // Valid YAML after every line: half of it would take endpoints away.
    let text = format!("{}\n---\n{}\n", service("web", 80), service("db", 81));
    folder.write("a.yaml", &text)?;
    told.until_lines("written", SOON, &["db 81/TCP", "web 80/TCP"])?;
    let mut file = fs::File::create(folder.0.join("a.yaml"))?;
    for line in text.lines() {
        writeln!(file, "{line}")?; // not buffered; and no fsync, which takes longer than a writer may pause
        throughout(Duration::from_millis(20), || {
            told.take();
            ensure!(told.lines() == ["db 81/TCP", "web 80/TCP"], "half a file was read: {:?}", told.lines());
            Ok(())
        })?;
    }
    writeln!(file, "---\n{}", service("more", 82))?;
    drop(file);
    told.until_lines("closed", SOON, &["db 81/TCP", "more 82/TCP", "web 80/TCP"])?;

    // Renamed into place, as careful editors do.
    folder.write(".a.yaml.new", service("web", 90))?;
    fs::rename(folder.0.join(".a.yaml.new"), folder.0.join("a.yaml"))?;
    told.until_lines("renamed", SOON, &["web 90/TCP"])?;

    Ok(())
}

/// `kubectl get … > file`: empty for as long as the API server takes, then whole documents with pauses between them.
#[test]
fn a_slow_writer_takes_nothing_away() -> Result<()> {
    let folder = Folder::new("slow")?;
    folder.write("a.yaml", format!("{}\n---\n{}\n", service("web", 80), service("db", 81)))?;
    let mut told = folder.watch()?;
    let before = ["db 81/TCP", "web 80/TCP"];
    told.until_lines("at first", SOON, &before)?;
    let waiting = "manifest a.yaml is open for writing, so its previous content counts until it is closed.";

    let mut file = fs::File::create(folder.0.join("a.yaml"))?;
    for (id, text) in [("emptied", String::new()), ("cut after a document", service("web", 90) + "\n---\n")] {
        write!(file, "{text}")?;
        throughout(Duration::from_millis(600), || {
            told.take();
            ensure!(told.lines() == before, "{id}: {:?}", told.lines());
            Ok(())
        })?;
        told.until(id, SOON, |told| told.problems.get("manifest a.yaml").is_some_and(|problem| problem == waiting))?;
    }
    writeln!(file, "{}", service("db", 91))?;
    drop(file);
    told.until_lines("closed", SOON, &["db 91/TCP", "web 90/TCP"])?;
    ensure!(told.problems.is_empty(), "{:?}", told.problems);

    folder.write("a.yaml", "")?;
    told.until_lines("emptied for good", SOON, &[])?;
    Ok(())
}

/// A file behind a link has no events in this directory.
#[test]
fn a_file_that_changes_without_events_counts_when_it_rests() -> Result<()> {
    let (folder, elsewhere) = (Folder::new("links")?, Folder::new("elsewhere")?);
    elsewhere.write("a.yaml", service("web", 80))?;
    symlink(elsewhere.0.join("a.yaml"), folder.0.join("a.yaml"))?;
    let mut told = folder.watch()?;
    told.until_lines("at first", SOON, &["web 80/TCP"])?;
    elsewhere.write("a.yaml", "")?;
    folder.write("b.yaml", service("db", 81))?;
    told.until_lines("looked at, and left alone for now", SOON, &["db 81/TCP", "web 80/TCP"])?;
    elsewhere.write("a.yaml", service("web", 90))?;
    told.until_lines("written", 2 * SOON, &["db 81/TCP", "web 90/TCP"])?;
    Ok(())
}

#[test]
fn what_is_no_file_is_refused_and_holds_up_nobody() -> Result<()> {
    let folder = Folder::new("odd")?;
    mkfifo(&folder.0.join("fifo.yaml"), Mode::S_IRWXU)?;
    fs::create_dir(folder.0.join("directory.yaml"))?;
    for (name, target) in [("kernel-log", "/proc/kmsg"), ("device", "/dev/zero"), ("nowhere", "/nonexistent")] {
        symlink(target, folder.0.join(format!("{name}.yaml")))?;
    }
    folder.write("web.yaml", service("web", 80))?;
    let mut told = folder.watch()?;
    told.until_lines("the others are read", SOON, &["web 80/TCP"])?;
    told.until("each is named", SOON, |told| told.problems.len() == 4)?;
    for name in ["fifo", "directory", "device"] {
        let problem = &told.problems[&format!("manifest {name}.yaml")];
        ensure!(problem.ends_with("its previous content still counts: it is not a regular file."), "{problem}");
    }
    folder.write("web.yaml", service("web", 81))?;
    told.until_lines("and go on", SOON, &["web 81/TCP"])?;
    ensure!(told.problems_told == 4, "once each: {:?}", told.problems);
    Ok(())
}

#[test]
fn a_config_map_volume_is_followed() -> Result<()> {
    let folder = Folder::new("volume")?;
    let version = |name: &str, text: &str| -> Result<()> {
        fs::create_dir(folder.0.join(name))?;
        folder.write(&format!("{name}/web.yaml"), text)
    };
    version("..1", &service("web", 80))?;
    symlink("..1", folder.0.join("..data"))?;
    symlink("..data/web.yaml", folder.0.join("web.yaml"))?;
    let mut told = folder.watch()?;
    told.until_lines("the first version", SOON, &["web 80/TCP"])?;
    // As the kubelet does it: the link is swapped, the files stay.
    version("..2", &service("web", 90))?;
    symlink("..2", folder.0.join("..data_tmp"))?;
    fs::rename(folder.0.join("..data_tmp"), folder.0.join("..data"))?;
    told.until_lines("the second version", Duration::from_secs(2), &["web 90/TCP"])?;
    Ok(())
}

#[test]
fn a_directory_that_goes_takes_nothing_along() -> Result<()> {
    let folder = Folder::new("goes")?;
    folder.write("a.yaml", service("web", 80))?;
    let mut told = folder.watch()?;
    told.until_lines("at first", SOON, &["web 80/TCP"])?;
    let away = folder.0.with_extension("away");
    fs::rename(&folder.0, &away)?;
    told.until("missed", SOON, |told| !told.source.problems.is_empty())?;
    ensure!(told.lines() == ["web 80/TCP"], "{:?}", told.lines());
    fs::remove_dir_all(&away)?;
    fs::create_dir(&folder.0)?;
    folder.write("a.yaml", service("web", 90))?;
    told.until_lines("another in its place", SOON, &["web 90/TCP"])?;
    ensure!(told.source.problems.is_empty(), "{:?}", told.source);
    folder.write("a.yaml", service("web", 91))?;
    told.until_lines("and that one is watched", Duration::from_secs(2), &["web 91/TCP"])?;
    Ok(())
}

#[test]
fn a_directory_that_is_not_there_is_an_error() {
    let missing = Path::new("/nonexistent/manifests");
    let (sender, _told) = Told::new();
    let error = manifests::start(missing, ConvertOptions::default(), sender).expect_err("not there");
    let text = format!("{error:#}");
    assert!(text.starts_with("cannot read manifests from /nonexistent/manifests: No such file"), "{text}");
}

#[test]
fn a_small_change_in_large_files_is_told_at_once() -> Result<()> {
    let folder = Folder::new("large")?;
    let services = 2_000;
    let mut text = String::new();
    for number in 0..services {
        let mut slice = Slice::new(&format!("s{number}-1"), &format!("s{number}")).port("http", 8080, "TCP");
        for digits in 1..=10 {
            slice = slice.ready(&format!("10.{digits}.{}.{}", number / 250, number % 250), "n1");
        }
        writeln!(text, "{}\n---\n{}\n---", service(&format!("s{number}"), 80), slice.text())?;
    }
    folder.write("large.yaml", &text)?;
    let mut told = folder.watch()?;
    let first = told.until("listed", Duration::from_secs(60), |told| told.state.is_synced())?;
    ensure!(told.state.services().count() == services);

    let known = told.updates.len();
    let begin = Instant::now();
    folder.write("large.yaml", format!("{text}\n{}", service("one", 81)))?;
    told.until("one more", SOON, |told| told.state.services().count() == services + 1)?;
    let change = begin.elapsed();
    ensure!(told.updates.len() == known + 1, "only the difference is told: {:?}", &told.updates[known..]);
    // Text that has not changed is not read again, or this would take as long as the first time.
    ensure!(change * 3 < first, "all took {first:?}, one more {change:?}");
    Ok(())
}
