//! Label selectors, in kubectl's syntax.

use std::{collections::BTreeMap, str::FromStr};

/// All requirements must hold; none at all holds for everything.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Selector(Vec<Requirement>);

#[derive(Clone, Debug, PartialEq, Eq)]
struct Requirement {
    key: String,
    condition: Condition,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Condition {
    In(Vec<String>),
    /// Holds where the label is absent, too.
    NotIn(Vec<String>),
    Exists,
    Absent,
}

impl Selector {
    /// Whether these labels are meant.
    pub fn matches(&self, labels: &BTreeMap<String, String>) -> bool {
        self.0.iter().all(|Requirement { key, condition }| match (condition, labels.get(key)) {
            (Condition::In(values), Some(value)) => values.contains(value),
            (Condition::NotIn(values), Some(value)) => !values.contains(value),
            (Condition::Exists, Some(_)) | (Condition::Absent | Condition::NotIn(_), None) => true,
            (Condition::Absent, Some(_)) | (Condition::In(_) | Condition::Exists, None) => false,
        })
    }
}

impl FromStr for Selector {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text.trim().is_empty() {
            return Ok(Self::default());
        }
        split_outside_parentheses(text).into_iter().map(requirement).collect::<Result<_, _>>().map(Self)
    }
}

/// At commas, except between the parentheses of `in (a,b)`.
fn split_outside_parentheses(text: &str) -> Vec<&str> {
    let mut depth = 0_usize;
    text.split(|c| {
        match c {
            '(' => depth += 1,
            ')' => depth = depth.saturating_sub(1),
            _ => {}
        }
        c == ',' && depth == 0
    })
    .collect()
}

fn requirement(text: &str) -> Result<Requirement, String> {
    let text = text.trim();
    let (key, condition) = if let Some(key) = text.strip_prefix('!') {
        (key, Condition::Absent)
    } else if let Some((key, value)) = text.split_once("!=") {
        (key, Condition::NotIn(vec![one(value)?]))
    } else if let Some((key, value)) = text.split_once("==").or_else(|| text.split_once('=')) {
        (key, Condition::In(vec![one(value)?]))
    } else if let Some((head, values)) = text.strip_suffix(')').and_then(|t| t.split_once('(')) {
        let values = values.split(',').map(one).collect::<Result<_, _>>()?;
        match head.trim_end().rsplit_once(char::is_whitespace) {
            Some((key, "in")) => (key, Condition::In(values)),
            Some((key, "notin")) => (key, Condition::NotIn(values)),
            Some(_) | None => return Err(format!("{text:?}: expected KEY in (…) or KEY notin (…)")),
        }
    } else {
        (text, Condition::Exists)
    };
    let key = key.trim();
    if key.is_empty() || !key.chars().all(|c| c.is_ascii_alphanumeric() || "-_./".contains(c)) {
        return Err(format!("{text:?}: {key:?} is not a label key"));
    }
    Ok(Requirement { key: key.to_owned(), condition })
}

/// A label value; the empty one is legal.
fn one(text: &str) -> Result<String, String> {
    let value = text.trim();
    if value.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c)) {
        return Ok(value.to_owned());
    }
    Err(format!("{value:?} is not a label value"))
}

#[cfg(test)]
mod tests {
    use super::Selector;

    /// A selector, and which of these label sets it means: {} · {app: web} · {app: db, tier: back} · {tier: ""}
    const CASES: &[(&str, [bool; 4])] = &[
        ("", [true, true, true, true]),
        ("app=web", [false, true, false, false]),
        ("app==web", [false, true, false, false]),
        (" app = web ", [false, true, false, false]),
        ("app!=web", [true, false, true, true]),
        ("app in (web, db)", [false, true, true, false]),
        ("app in (web)", [false, true, false, false]),
        ("app notin (web,other)", [true, false, true, true]),
        ("app", [false, true, true, false]),
        ("!app", [true, false, false, true]),
        ("tier=", [false, false, false, true]),
        ("app,tier=back", [false, false, true, false]),
        ("app in (web,db),tier notin (back)", [false, true, false, false]),
        ("app=web,app=db", [false, false, false, false]),
        ("example.org/app notin (x),tier", [false, false, true, true]),
    ];

    #[test]
    fn a_selector_means_what_kubectl_means() {
        let sets: [&[(&str, &str)]; 4] = [&[], &[("app", "web")], &[("app", "db"), ("tier", "back")], &[("tier", "")]];
        let sets = sets.map(|s| s.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect());
        for (text, expected) in CASES {
            let selector: Selector = text.parse().unwrap();
            assert_eq!(sets.each_ref().map(|labels| selector.matches(labels)), *expected, "{text}");
        }
    }

    #[test]
    fn what_is_no_selector_is_refused() {
        for text in ["=web", "!", "app in web", "app in (web", "a b", "app within (web)", "app=a b", "app,,tier", ","] {
            assert!(text.parse::<Selector>().is_err(), "{text:?} was accepted");
        }
    }
}
