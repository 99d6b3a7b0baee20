//! Configuration files: kube-proxy's `KubeProxyConfiguration`, and our own, whose fields are our flags.

use std::path::Path;

use serde_json::{Map, Value};

use super::{Settings, kube_proxy::ROWS};
use crate::exit::Refused;

/// kube-proxy's apiVersion and kind.
const KUBE_PROXY: (&str, &str) = ("kubeproxy.config.k8s.io/v1alpha1", "KubeProxyConfiguration");
/// Ours.
pub const OWN: (&str, &str) = ("sheave.io/v1alpha1", "AgentConfiguration");

/// Adds what a file says. `has_flag` knows our flags by name.
///
/// # Errors
/// When it is neither kind of file, or a value cannot be meant.
pub fn read(settings: &mut Settings, path: &Path, text: &str, has_flag: &dyn Fn(&str) -> bool) -> Result<(), Refused> {
    let path = path.display();
    let mut file: Map<String, Value> =
        serde_saphyr::from_str(text).map_err(|e| Refused(format!("{path} is not a YAML mapping: {e}")))?;
    let mut take = |key: &str| file.remove(key).and_then(|v| v.as_str().map(str::to_owned)).unwrap_or_default();
    let (version, kind) = (take("apiVersion"), take("kind"));
    let of_kube_proxy = (version.as_str(), kind.as_str()) == KUBE_PROXY;
    if !of_kube_proxy && (version.as_str(), kind.as_str()) != OWN {
        let [(v1, k1), (v2, k2)] = [KUBE_PROXY, OWN];
        return Err(Refused(format!("{path} is {kind:?} of {version:?}; expected {k1} of {v1}, or {k2} of {v2}")));
    }
    if of_kube_proxy {
        file.entry("mode").or_insert_with(|| Value::from("")); // its default has consequences
    }
    for (field, value) in fields("", &Value::Object(file)) {
        let origin = format!("{field} in {path}");
        if of_kube_proxy {
            let known = |row: &&super::kube_proxy::Row| row.fields.iter().any(|known| is_below(&field, known));
            match ROWS.iter().find(known) {
                Some(row) => row.take(settings, &value, &origin)?,
                None => settings.remark(format!("{origin} is not a field of kube-proxy 1.36, so it is ignored")),
            }
        } else {
            let flag = kebab_case(&field);
            if !has_flag(&flag) {
                return Err(Refused(format!("{origin}: `sheave agent` has no flag --{flag}")));
            }
            settings.add(&flag, &value, &origin);
        }
    }
    Ok(())
}

/// Fields with a value, by path. Lists are joined; null and an empty list say nothing.
fn fields(path: &str, value: &Value) -> Vec<(String, String)> {
    let one = |text: String| vec![(path.to_owned(), text)];
    match value {
        Value::Object(map) => {
            let join = |key: &str| if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") };
            map.iter().flat_map(|(key, value)| fields(&join(key), value)).collect()
        }
        Value::Array(list) if !list.is_empty() => one(list.iter().map(scalar).collect::<Vec<_>>().join(",")),
        Value::Null | Value::Array(_) => Vec::new(),
        Value::String(_) | Value::Bool(_) | Value::Number(_) => one(scalar(value)),
    }
}

fn scalar(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

/// `featureGates.X` is below `featureGates`.
fn is_below(field: &str, known: &str) -> bool {
    field.strip_prefix(known).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// `nodeName` → `node-name`.
fn kebab_case(field: &str) -> String {
    let mut flag = String::new();
    for c in field.chars() {
        if c.is_ascii_uppercase() {
            flag.push('-');
        }
        flag.push(c.to_ascii_lowercase());
    }
    flag
}

/// `node-name` → `nodeName`.
#[must_use]
pub fn camel_case(flag: &str) -> String {
    let mut words = flag.split('-');
    let first = words.next().unwrap_or_default().to_owned();
    words.fold(first, |mut field, word| {
        let mut letters = word.chars();
        field.extend(letters.next().map(|c| c.to_ascii_uppercase()));
        field.push_str(letters.as_str());
        field
    })
}
