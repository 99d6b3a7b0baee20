//! Rules that no compiler checks: which module may use which crate, where `unsafe` may stand, links of the documents.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};

use crate::root;

/// Files longer than this probably have two subjects; a warning, not an error.
const LONG: usize = 500;

/// What the files under a path must not name. Crates stand as `name::`, so that words in prose are free.
struct Layer {
    /// Prefix of paths.
    under: &'static [&'static str],
    /// Prefixes that are exempt.
    except: &'static [&'static str],
    /// Must not appear in code.
    forbidden: &'static [&'static str],
    /// Said when it does.
    reason: &'static str,
}

/// The direction of dependencies: nothing points left in source → model → plan → reconcile → datapath.
const LAYERS: [Layer; 5] = [
    Layer {
        under: &["agent/src/model", "agent/src/plan"],
        except: &[],
        forbidden: &[
            "aya::",
            "kube::",
            "k8s_openapi::",
            "tokio::",
            "tracing::",
            "std::time",
            "std::fs",
            "std::process",
            "std::env",
            "SystemTime",
            "Instant",
            "crate::source",
            "crate::reconcile",
            "crate::datapath",
            "crate::view",
        ],
        reason: "model and plan are pure: no clock, kernel, Kubernetes type, async runtime, log, or later layer",
    },
    Layer {
        under: &["agent/src/model"],
        except: &[],
        forbidden: &["crate::plan"],
        reason: "the model does not know what is planned from it",
    },
    Layer {
        under: &["agent/src"],
        except: &["agent/src/source"],
        forbidden: &["k8s_openapi::"],
        reason: "Kubernetes' types are converted at the door, in agent/src/source",
    },
    Layer {
        under: &["agent/src"],
        except: &["agent/src/datapath", "agent/src/lib.rs"],
        forbidden: &["aya::", "SYS_bpf"],
        reason: "agent/src/datapath is the only user of aya and bpf(2)",
    },
    Layer {
        under: &["agent/src/datapath"],
        except: &[],
        forbidden: &["crate::source", "crate::reconcile", "kube::", "k8s_openapi::"],
        reason: "the datapath knows maps and the kernel, not where the wish came from",
    },
];

/// Where `unsafe` may stand.
const UNSAFE: [&str; 15] = [
    "ebpf/src/pod.rs",
    "ebpf/src/bpf/", // entry modules: helper calls; each block says why
    "agent/build.rs",
    "agent/src/datapath/tables/batch.rs", // BPF_MAP_*_BATCH, which aya lacks
    "agent/src/datapath/tables/clock.rs", // clock_gettime
    "agent/src/datapath/programs/link.rs",
    "agent/src/datapath/host/netns.rs",
    "agent/src/datapath/host/sockets.rs",
    "agent/src/datapath/programs/tc.rs",  // if_nameindex
    "agent/src/datapath/tables/watch.rs", // records of the ring buffer
    "agent/src/datapath/tables/words.rs",
    "tests/src/bin/client.rs", // connect(AF_UNSPEC)
    "tests/src/bin/init.rs",
    "tests/src/foreign.rs",
    "tests/src/tunnel.rs",
];

/// Left-overs of work in progress. In two parts, since this file is checked too.
const UNFINISHED: [[&str; 2]; 4] = [["todo", "!("], ["dbg", "!("], ["unimplemented", "!("], ["FIX", "ME"]];

/// Checks every file; complaints go to the terminal.
pub fn run() -> Result<()> {
    let mut complaints = Vec::new();
    for path in files(root::workspace())? {
        let name = path.strip_prefix(root::workspace())?.to_string_lossy().into_owned();
        let Ok(text) = fs::read_to_string(&path) else { continue };
        match path.extension().and_then(|e| e.to_str()) {
            Some("rs") => complaints.extend(check_code(&name, &text)),
            Some("md") => complaints.extend(check_links(&path, &name, &text)),
            _ => {}
        }
        let lines = text.lines().count();
        if name.ends_with(".rs") && lines > LONG {
            println!("tidy: warning: {name} has {lines} lines; has it two subjects?");
        }
    }
    for complaint in &complaints {
        println!("tidy: {complaint}");
    }
    if !complaints.is_empty() {
        bail!("{} complaints", complaints.len());
    }
    Ok(())
}

/// Every file of ours, without what is built or versioned.
fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        let name = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        match (path.is_symlink(), path.is_dir()) {
            (true, _) => {}
            (false, true) if name == "target" || name == ".git" => {}
            (false, true) => found.extend(files(&path)?),
            (false, false) => found.push(path),
        }
    }
    found.sort();
    Ok(found)
}

/// Layering, unsafe budget, left-overs: of the code, not of its comments.
fn check_code(name: &str, text: &str) -> Vec<String> {
    let mut complaints = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let code = line.split("//").next().unwrap_or_default();
        for layer in LAYERS.iter().filter(|l| is_under(name, l.under) && !is_under(name, l.except)) {
            for word in layer.forbidden.iter().filter(|word| names(code, word)) {
                complaints.push(format!("{name}:{number}: names {word} — {}", layer.reason));
            }
        }
        if names(code, "unsafe ") && !is_under(name, &UNSAFE) && !code.contains('"') && !name.starts_with("tests/tests")
        {
            complaints.push(format!("{name}:{number}: unsafe outside of its budget (xtask/src/tidy.rs)"));
        }
        for word in UNFINISHED.map(|parts| parts.concat()).iter().filter(|word| line.contains(*word)) {
            complaints.push(format!("{name}:{number}: unfinished: {word}"));
        }
    }
    complaints
}

fn is_under(name: &str, prefixes: &[&str]) -> bool {
    prefixes.iter().any(|prefix| !prefix.is_empty() && name.starts_with(prefix))
}

/// Whether the code has that word, not as the end of a longer one (`kube::` is not in `mykube::`).
fn names(code: &str, word: &str) -> bool {
    let longer = |at: usize| code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_');
    code.match_indices(word).any(|(at, _)| !longer(at))
}

/// Every relative link names a file that is there.
fn check_links(path: &Path, name: &str, text: &str) -> Vec<String> {
    let folder = path.parent().unwrap_or(path);
    links(text)
        .filter(|link| !link.contains("://") && !link.starts_with('#') && !link.starts_with("mailto:"))
        .filter(|link| !folder.join(link.split('#').next().unwrap_or_default()).exists())
        .map(|link| format!("{name}: the link to {link} leads nowhere"))
        .collect()
}

/// Targets of `[text](target)`, outside of code blocks.
fn links(text: &str) -> impl Iterator<Item = &str> {
    let prose = text.split("```").step_by(2);
    prose.flat_map(|part| part.split("](").skip(1)).filter_map(|rest| rest.split([')', ' ']).next())
}

#[cfg(test)]
mod tests {
    use super::{check_code, links};

    #[test]
    fn a_line_of_code_is_allowed_or_not_by_where_it_stands() {
        for (name, line, allowed) in [
            ("agent/src/plan/ids.rs", "use std::collections::BTreeMap;", true),
            ("agent/src/plan/ids.rs", "use aya::maps::Array;", false),
            ("agent/src/plan/ids.rs", "// aya::maps is not for here", true),
            ("agent/src/model/node.rs", "use crate::plan::Group;", false),
            ("agent/src/run.rs", "use aya::Ebpf;", false),
            ("agent/src/run.rs", "let x = papaya::x;", true),
            ("agent/src/datapath/programs/load.rs", "use aya::Ebpf;", true),
            ("agent/src/source/convert.rs", "use k8s_openapi::api::core::v1;", true),
            ("agent/src/api.rs", "use k8s_openapi::api::core::v1;", false),
            ("agent/src/run.rs", "unsafe { x() }", false),
            ("agent/src/datapath/programs/link.rs", "unsafe { x() }", true),
        ] {
            assert_eq!(check_code(name, line).is_empty(), allowed, "{name}: {line}");
        }
    }

    #[test]
    fn links_are_found_in_prose_only() {
        let text = "see [a](docs/a.md#top) and [b](b.md \"title\")\n```\n[c](c.md)\n```\n[d](d.md)";
        assert_eq!(links(text).collect::<Vec<_>>(), ["docs/a.md#top", "b.md", "d.md"]);
    }
}
