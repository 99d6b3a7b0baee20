//! The command line as a whole.

use clap::{CommandFactory as _, Parser as _};

use super::{Cli, Shell, completion};

#[test]
fn clap_finds_no_contradiction() {
    Cli::command().debug_assert();
}

#[test]
fn every_command_explains_itself() {
    let mut pending = vec![Cli::command()];
    while let Some(command) = pending.pop() {
        let name = command.get_name().to_owned();
        assert!(command.get_about().is_some(), "{name} says nothing of itself");
        for arg in command.get_arguments().filter(|a| !matches!(a.get_id().as_str(), "help" | "version")) {
            assert!(arg.get_help().is_some(), "{name}: {} says nothing of itself", arg.get_id());
        }
        pending.extend(command.get_subcommands().cloned());
    }
}

#[test]
fn help_shows_defaults_environment_and_examples() {
    let mut command = Cli::command();
    command.build();
    for (path, texts) in [
        (
            &["agent"] as &[_],
            &["[default: 16381]", "NODE_NAME", "[default: /run/sheave]", "Examples:", "[default: 65536]"] as &[_],
        ),
        (&["svc", "list"], &["-n, --namespace", "-A, --all-namespaces", "-l, --selector", "-w, --watch", "Examples:"]),
        (&["lb", "list"], &["--frontends", "--backends", "-o, --output", "Examples:"]),
        (&["completion"], &["source <(sheave completion bash)"]),
    ] {
        let mut found = command.clone();
        for name in path {
            found = found.find_subcommand(name).unwrap().clone();
        }
        let help = found.render_long_help().to_string();
        for text in texts {
            assert!(help.contains(text), "{path:?}: {text:?} is not in\n{help}");
        }
    }
}

#[test]
fn completion_scripts_know_every_command() {
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        let script = String::from_utf8(completion(shell)).unwrap();
        for word in ["agent", "svc", "lb", "status", "check", "cleanup", "max-frontends", "no-headers"] {
            assert!(script.contains(word), "{shell:?} does not complete {word}");
        }
    }
}

#[test]
fn kubectl_habits_are_accepted() {
    for line in [
        "sheave svc list",
        "sheave svc ls -A -o wide",
        "sheave service list -n kube-system -l app=web,tier!=db -w --no-headers",
        "sheave svc list --all-namespaces --output=json --watch",
        "sheave svc get -n t web -o yaml",
        "sheave svc get t/web",
        "sheave lb list --backends -ojson",
        "sheave status -o yaml",
        "sheave version",
    ] {
        Cli::try_parse_from(line.split(' ')).unwrap_or_else(|e| panic!("{line}: {e}"));
    }
    for line in ["sheave", "sheave svc", "sheave svc list -o xml", "sheave svc list -l =x", "sheave nonsense"] {
        assert_eq!(Cli::try_parse_from(line.split(' ')).unwrap_err().exit_code(), 2, "{line}");
    }
}
