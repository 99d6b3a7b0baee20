//! Scripts: manifests in, the kernel's tables out, as `lb list -o wide` prints them. Each step of a `.txtar` file is a
//! manifest and the table that must follow. The same scripts run on tables in memory, where one write in eight fails,
//! and on real maps. `SHEAVE_UPDATE=1` writes what is seen into the files, to be read before it is committed.

use std::{
    env,
    fmt::Write as _,
    fs,
    net::IpAddr,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, bail, ensure};
use sheave_agent::{
    datapath::{
        Datapath, Limits,
        programs::{
            features::Features,
            load::{self, Switches},
        },
        tables::{
            fake::{Fake, Fault},
            kernel::Kernel,
            pins::Pins,
        },
    },
    engine::{Engine, EngineOptions},
    lb,
    plan::{group::PlanOptions, node_ports::NodePortAddresses},
    reconcile::Reconciler,
    render,
    source::{SourceEvent, convert::ConvertOptions, manifests},
};
use sheave_tests::wait::{SOON, eventually};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

struct Step {
    title: String,
    manifest: String,
    wanted: String,
}

struct Script {
    path: PathBuf,
    comment: String,
    steps: Vec<Step>,
}

impl Script {
    fn read(path: &Path) -> Result<Self> {
        let text = fs::read_to_string(path)?;
        let (mut comment, mut sections) = (String::new(), Vec::<(String, String)>::new());
        for line in text.lines() {
            match line.strip_prefix("-- ").and_then(|l| l.strip_suffix(" --")) {
                Some(title) => sections.push((title.to_owned(), String::new())),
                None => {
                    let body = sections.last_mut().map_or(&mut comment, |(_, body)| body);
                    writeln!(body, "{line}")?;
                }
            }
        }
        let mut steps = Vec::new();
        for pair in sections.chunks(2) {
            let [(title, manifest), (kernel, wanted)] = pair else {
                bail!("{}: a step without a table", path.display())
            };
            ensure!(kernel.ends_with(" kernel"), "{}: {kernel:?} should be \"N kernel\"", path.display());
            steps.push(Step { title: title.clone(), manifest: manifest.clone(), wanted: wanted.clone() });
        }
        Ok(Self { path: path.to_owned(), comment, steps })
    }

    fn write(&self) -> Result<()> {
        let mut text = self.comment.clone();
        for (i, Step { title, manifest, wanted }) in self.steps.iter().enumerate() {
            write!(text, "-- {title} --\n{manifest}-- {} kernel --\n{wanted}", i + 1)?;
        }
        Ok(fs::write(&self.path, text)?)
    }
}

fn scripts() -> Result<Vec<Script>> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata");
    let mut paths: Vec<PathBuf> = fs::read_dir(directory)?.map(|e| Ok(e?.path())).collect::<Result<_>>()?;
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "txtar")); // the chart has files there, too
    paths.sort();
    let scripts: Vec<Script> = paths.iter().map(|path| Script::read(path)).collect::<Result<_>>()?;
    ensure!(!scripts.is_empty(), "there are no scripts");
    Ok(scripts)
}

fn print(tables: &impl Datapath) -> String {
    let views = lb::views(tables);
    let text = render::lb::table(&views, render::lb::Lines::Pairs, true).text();
    text.lines().map(|line| format!("{}\n", line.trim_end())).collect()
}

/// Runs all steps through a real manifest source and the whole engine; returns the tables seen.
fn run<D: Datapath>(script: &Script, tables: D) -> Result<Vec<String>> {
    let directory = env::temp_dir().join(format!("sheave-script-{}-{:p}", std::process::id(), script));
    let _ = fs::remove_dir_all(&directory);
    fs::create_dir(&directory)?;
    let result = run_in(script, tables, &directory);
    fs::remove_dir_all(&directory)?;
    result
}

fn run_in<D: Datapath>(script: &Script, tables: D, directory: &Path) -> Result<Vec<String>> {
    let options = EngineOptions {
        node: "n1".into(),
        plan: PlanOptions::default(),
        node_ports: NodePortAddresses::primary(),
        service_cidrs: vec![],
    };
    let mut engine = Engine::new(options, Reconciler::adopt(tables)?);
    engine.set_interfaces(vec![IpAddr::from([192, 0, 2, 11])]);
    let mut seen = Vec::new();
    let mut told: Option<UnboundedReceiver<SourceEvent>> = None;
    for step in &script.steps {
        // Written beside and moved in: one change.
        let (draft, file) = (directory.join("draft"), directory.join("step.yaml"));
        fs::write(&draft, &step.manifest)?;
        fs::rename(&draft, &file)?;
        let told = match &mut told {
            Some(told) => told,
            None => {
                let (events, receiver) = unbounded_channel();
                manifests::start(directory, ConvertOptions::default(), events)?;
                told.insert(receiver)
            }
        };
        let is_update = env::var_os("SHEAVE_UPDATE").is_some();
        let (mut last, mut quiet) = (String::new(), 0);
        let outcome = eventually(&step.title, SOON, || {
            while let Ok(event) = told.try_recv() {
                if let SourceEvent::Update(update) = event {
                    engine.update(update);
                }
            }
            ensure!(engine.flush(), "not everything is written");
            let text = print(engine.datapath());
            quiet = if text == last { quiet + 1 } else { 0 };
            last.clone_from(&text);
            if is_update {
                let has_changed = seen.last() != Some(&text);
                ensure!(quiet > if has_changed { 50 } else { 300 }, "still changing, or not changed yet");
            } else {
                ensure!(text == step.wanted, "{}: wanted\n{}seen\n{text}", script.path.display(), step.wanted);
            }
            Ok(text)
        });
        seen.push(outcome?);
        engine.reclaim();
    }
    Ok(seen)
}

#[test]
fn scripts_hold_on_tables_in_memory_that_fail() -> Result<()> {
    for (i, mut script) in scripts()?.into_iter().enumerate() {
        let seen = run(&script, Fake::new(Limits::default(), 77 + i as u64, Fault::OneIn(8)))?;
        if env::var_os("SHEAVE_UPDATE").is_some() {
            script.steps.iter_mut().zip(seen).for_each(|(step, text)| step.wanted = text);
            script.write()?;
        }
    }
    Ok(())
}

#[test]
fn scripts_hold_on_real_maps() -> Result<()> {
    // SAFETY: a plain system call.
    if unsafe { libc::geteuid() } != 0 {
        sheave_tests::skip("real maps need root");
        return Ok(());
    }
    for (i, script) in scripts()?.iter().enumerate() {
        let base = PathBuf::from(format!("/sys/fs/bpf/sheave-{}-script{i}", std::process::id()));
        fs::create_dir(&base).with_context(|| format!("is a bpffs mounted at /sys/fs/bpf? ({})", base.display()))?;
        let pins = Pins::below(&base);
        let result = (|| {
            load::load(&pins, &Limits::default(), Switches::default(), Features::default())?;
            run(script, Kernel::open(&pins)?)
        })();
        sheave_agent::datapath::programs::attach::cleanup(&pins, false)?;
        fs::remove_dir(&base)?;
        result?;
    }
    Ok(())
}
