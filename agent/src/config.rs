//! Configuration that is not on our own command line: kube-proxy's flags and files, and a file of our own.
//!
//! Everything becomes [`Setting`]s of our flags, so that there is one place where a value is checked and one answer to
//! what holds. What has no meaning here is answered with a sentence, never silently dropped.

pub mod file;
pub mod kube_proxy;

use std::collections::BTreeMap;

/// A value for one of our flags.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setting {
    /// Name of the flag, without dashes in front.
    pub flag: String,
    /// As on the command line.
    pub value: String,
    /// Where it came from, for people: `--hostname-override`, `clusterCIDR in /etc/config.conf`.
    pub origin: String,
}

/// The value of a flag of ours.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Effective {
    /// Name, without dashes in front.
    pub flag: String,
    /// As on the command line; `None` = not set, and without a default that could be shown.
    pub value: Option<String>,
    /// Where it comes from.
    pub origin: String,
}

/// All values as JSON, under our names of fields.
#[must_use]
pub fn json(values: &[Effective]) -> serde_json::Value {
    let field = |Effective { flag, value, origin }: &Effective| {
        (file::camel_case(flag), serde_json::json!({"value": value, "origin": origin}))
    };
    serde_json::json!({"sheave": values.iter().map(field).collect::<serde_json::Map<_, _>>()})
}

/// Settings by flag. What comes first holds.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    by_flag: BTreeMap<String, Setting>,
    /// Defaults of kube-proxy that differ from ours and follow from something else that was said.
    implied: BTreeMap<String, Setting>,
    /// What has no effect, or is not known: a sentence each.
    pub remarks: Vec<String>,
}

impl Settings {
    fn add(&mut self, flag: &str, value: &str, origin: &str) {
        let setting = Setting { flag: flag.to_owned(), value: value.to_owned(), origin: origin.to_owned() };
        self.by_flag.entry(flag.to_owned()).or_insert(setting);
    }

    fn imply(&mut self, flag: &str, value: &str, origin: &str) {
        let setting = Setting { flag: flag.to_owned(), value: value.to_owned(), origin: origin.to_owned() };
        self.implied.entry(flag.to_owned()).or_insert(setting);
    }

    fn remark(&mut self, sentence: String) {
        self.remarks.push(sentence);
    }

    /// What holds, one for each flag.
    pub fn iter(&self) -> impl Iterator<Item = &Setting> {
        let implied = self.implied.iter().filter(|(flag, _)| !self.by_flag.contains_key(*flag));
        self.by_flag.values().chain(implied.map(|(_, setting)| setting))
    }
}

#[cfg(test)]
mod tests;
