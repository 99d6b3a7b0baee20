//! Command line, environment, kube-proxy's flags, file, defaults: which of them takes precedence.

use std::{ffi::OsString, fmt::Write as _, fs, path::PathBuf};

use anyhow::Context as _;
use clap::{
    Arg, ArgAction, ArgMatches, Args, Command, CommandFactory as _, FromArgMatches, parser::ValueSource, value_parser,
};

use super::AgentArgs;
use crate::{
    cli::Cli,
    config::{
        Effective, Setting, Settings,
        file::{self, camel_case},
        kube_proxy::{Form, ROWS},
    },
    exit::Refused,
};

/// kube-proxy's flags: accepted, not shown in our help.
#[derive(Clone, Copy, Debug)]
pub struct KubeProxyFlags;

impl Args for KubeProxyFlags {
    fn augment_args(command: Command) -> Command {
        command.args(ROWS.iter().filter_map(|row| row.flag).map(|(name, form)| {
            let arg = Arg::new(name).long(name).hide(true).help("A flag of kube-proxy");
            let arg = if name == "v" { arg.short('v') } else { arg };
            match form {
                Form::Value => arg.action(ArgAction::Set),
                Form::Switch => arg.action(ArgAction::Set).value_parser(value_parser!(bool)),
            }
        }))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for KubeProxyFlags {
    /// They are read where layers are put together.
    fn from_arg_matches(_: &ArgMatches) -> Result<Self, clap::Error> {
        Ok(Self)
    }

    fn update_from_arg_matches(&mut self, _: &ArgMatches) -> Result<(), clap::Error> {
        Ok(())
    }
}

/// All layers put together.
#[derive(Debug)]
pub struct Resolved {
    /// What holds.
    pub args: AgentArgs,
    /// The same for people, by flag.
    pub values: Vec<Effective>,
    /// What was said without effect: a sentence each.
    pub remarks: Vec<String>,
}

/// Puts the layers together: our flags before our environment variables before kube-proxy's flags before the file
/// before defaults. `line` is the whole command line, `sheave agent …`.
///
/// # Errors
/// What is wrong with one of them, and in which.
pub fn resolve(line: &[OsString]) -> anyhow::Result<Resolved> {
    let given = Cli::command().try_get_matches_from(line)?;
    let given = agent(&given)?;
    let mut settings = Settings::default();
    take_flags(&mut settings, given)?;
    let command = Cli::command();
    let command = command.find_subcommand("agent").context("the command line has no agent")?;
    let has_flag = |name: &str| ours(command).any(|arg| arg.get_long() == Some(name));
    if let Some(path) = given.get_one::<PathBuf>("config") {
        let text = fs::read_to_string(path).with_context(|| format!("--config: cannot read {}", path.display()))?;
        file::read(&mut settings, path, &text, &has_flag)?;
    }

    let is_said =
        |id: &str| matches!(given.value_source(id), Some(ValueSource::CommandLine | ValueSource::EnvVariable));
    let find = |flag: &str| ours(command).find(|arg| arg.get_long() == Some(flag));
    let has_manifests = is_said("manifests");
    let needed: Vec<_> = settings
        .iter()
        .filter(|setting| !find(&setting.flag).is_some_and(|arg| is_said(arg.get_id().as_str())))
        .filter(|setting| !(has_manifests && matches!(setting.flag.as_str(), "kubeconfig" | "api-server")))
        .collect();
    let added = needed.iter().filter_map(|setting| as_word(setting, find(&setting.flag)));
    let (before, after) = line.split_at(line.iter().position(|word| word == "agent").map_or(0, |at| at + 1));
    let full: Vec<OsString> = before.iter().cloned().chain(added).chain(after.iter().cloned()).collect();
    let matches = Cli::command().try_get_matches_from(full).map_err(|error| {
        let origins: Vec<_> = needed.iter().map(|s| format!("--{} is {}", s.flag, s.origin)).collect();
        Refused(format!("{}; {}", error.to_string().lines().next().unwrap_or_default(), origins.join(", ")))
    })?;
    let matches = agent(&matches)?;

    let effective = |arg: &Arg| {
        let (id, flag) = (arg.get_id().as_str(), arg.get_long().unwrap_or_default());
        let raw = matches
            .get_raw(id)
            .map(|raw| raw.map(|value| value.to_string_lossy().into_owned()).collect::<Vec<_>>().join(","));
        let setting = needed.iter().find(|setting| setting.flag == flag);
        let origin = match (setting, matches.value_source(id)) {
            (Some(setting), _) => setting.origin.clone(),
            (None, Some(ValueSource::CommandLine)) => format!("--{flag}"),
            (None, Some(ValueSource::EnvVariable)) => arg.get_env().unwrap_or_default().to_string_lossy().into_owned(),
            (None, _) => "default".to_owned(),
        };
        Effective { flag: flag.to_owned(), value: raw, origin }
    };
    Ok(Resolved {
        args: AgentArgs::from_arg_matches(matches)?,
        values: ours(command).map(effective).collect(),
        remarks: settings.remarks.clone(),
    })
}

/// A switch that takes no value is there or not.
fn as_word(setting: &Setting, arg: Option<&Arg>) -> Option<OsString> {
    let Setting { flag, value, origin: _ } = setting;
    let is_bare = arg.is_some_and(|arg| matches!(arg.get_action(), ArgAction::SetTrue));
    match (is_bare, value.as_str()) {
        (true, "false") => None,
        (true, "true") => Some(format!("--{flag}").into()),
        _ => Some(format!("--{flag}={value}").into()),
    }
}

fn agent(matches: &ArgMatches) -> anyhow::Result<&ArgMatches> {
    matches.subcommand_matches("agent").context("the command line has no agent")
}

/// Flags that are a part of the configuration.
fn ours(command: &Command) -> impl Iterator<Item = &Arg> {
    let about_it = ["config", "print-config", "help"];
    command
        .get_arguments()
        .filter(move |arg| !arg.is_hide_set() && arg.get_long().is_some_and(|long| !about_it.contains(&long)))
}

fn take_flags(settings: &mut Settings, given: &ArgMatches) -> Result<(), Refused> {
    for row in ROWS {
        let Some((name, _)) = row.flag.filter(|(name, _)| given.value_source(name) == Some(ValueSource::CommandLine))
        else {
            continue;
        };
        let mut raw = given.get_raw(name).into_iter().flatten();
        let value = raw.next_back().map(|value| value.to_string_lossy().into_owned()).unwrap_or_default();
        row.take(settings, &value, &format!("--{name}"))?;
    }
    Ok(())
}

/// A file for `--config` that says the same, with the origin of each value.
#[must_use]
pub fn print(values: &[Effective]) -> String {
    let (version, kind) = file::OWN;
    let mut text = format!("apiVersion: {version}\nkind: {kind}\n");
    let lines: Vec<(String, &str)> = values
        .iter()
        .map(|Effective { flag, value, origin }| {
            let field = camel_case(flag);
            let line = match value {
                Some(value) => format!("{field}: {}", serde_json::Value::from(value.as_str())),
                None => format!("# {field}: not set"),
            };
            (line, origin.as_str())
        })
        .collect();
    let width = lines.iter().map(|(line, _)| line.chars().count()).max().unwrap_or_default();
    for (line, origin) in lines {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{line:<width$}  # {origin}");
    }
    text
}

#[cfg(test)]
mod tests;
