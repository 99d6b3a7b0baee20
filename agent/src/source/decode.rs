//! One API object in JSON → one object of the model. The one door for both sources, so that a malformed object is the
//! same small thing in both: skipped, with a problem that names it (invariant 7).

use std::{fmt, sync::Arc};

use k8s_openapi::{
    api::{core::v1 as core, discovery::v1 as discovery, networking::v1 as networking},
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
    serde::de::DeserializeOwned,
};
use serde_json::Value;

use super::{
    convert::{self, ConvertOptions, Converted},
    intern::intern,
};
use crate::model::{EndpointSlice, Node, Service, ServiceCidr, ServiceName, SliceName, Update, service::NoFrontend};

/// The kinds of objects that are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// v1 Service.
    Service,
    /// discovery.k8s.io/v1 EndpointSlice.
    Slice,
    /// v1 Node.
    Node,
    /// networking.k8s.io/v1 ServiceCIDR, Kubernetes 1.33.
    ServiceCidr,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Service, Self::Slice, Self::Node, Self::ServiceCidr];

    /// The API's name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Service => "Service",
            Self::Slice => "EndpointSlice",
            Self::Node => "Node",
            Self::ServiceCidr => "ServiceCIDR",
        }
    }

    const fn api_version(self) -> &'static str {
        match self {
            Self::Service | Self::Node => "v1",
            Self::Slice => "discovery.k8s.io/v1",
            Self::ServiceCidr => "networking.k8s.io/v1",
        }
    }

    const fn has_namespace(self) -> bool {
        match self {
            Self::Service | Self::Slice => true,
            Self::Node | Self::ServiceCidr => false,
        }
    }

    /// The kind of an object that says its own.
    pub fn of(object: &Value) -> Option<Self> {
        let text = |field: &str| object.get(field).and_then(Value::as_str);
        Self::ALL
            .into_iter()
            .find(|kind| text("kind") == Some(kind.name()) && text("apiVersion") == Some(kind.api_version()))
    }
}

/// Which object.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Key {
    /// A Service.
    Service(ServiceName),
    /// A slice.
    Slice(SliceName),
    /// A Node.
    Node(Arc<str>),
    /// A ServiceCIDR.
    ServiceCidr(Arc<str>),
}

impl Key {
    /// From the metadata, which is well-formed even where the rest is not; `None` without a name.
    pub fn of(kind: Kind, object: &Value) -> Option<Self> {
        let text = |field: &str| object["metadata"][field].as_str().filter(|t| !t.is_empty());
        let name: Arc<str> = text("name")?.into();
        let namespace = || text("namespace").map(intern);
        Some(match kind {
            Kind::Service => Self::Service(ServiceName { namespace: namespace()?, name }),
            Kind::Slice => Self::Slice(SliceName { namespace: namespace()?, name }),
            Kind::Node => Self::Node(name),
            Kind::ServiceCidr => Self::ServiceCidr(name),
        })
    }

    /// The update that says that there is no such object.
    pub fn gone(self) -> Update {
        match self {
            Self::Service(name) => Update::ServiceGone(name),
            Self::Slice(name) => Update::SliceGone(name),
            Self::Node(name) => Update::NodeGone(name),
            Self::ServiceCidr(name) => Update::ServiceCidrGone(name),
        }
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Service(name) => write!(f, "Service {name}"),
            Self::Slice(SliceName { namespace, name }) => write!(f, "EndpointSlice {namespace}/{name}"),
            Self::Node(name) => write!(f, "Node {name}"),
            Self::ServiceCidr(name) => write!(f, "ServiceCIDR {name}"),
        }
    }
}

/// An object of the model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Object {
    /// A Service.
    Service(Service),
    /// A slice.
    Slice(EndpointSlice),
    /// A Node.
    Node(Node),
    /// A ServiceCIDR.
    ServiceCidr(ServiceCidr),
}

impl Object {
    /// The update that says how the object is.
    pub fn update(self) -> Update {
        match self {
            Self::Service(service) => Update::Service(Box::new(service)),
            Self::Slice(slice) => Update::Slice(Box::new(slice)),
            Self::Node(node) => Update::Node(Box::new(node)),
            Self::ServiceCidr(cidr) => Update::ServiceCidr(cidr),
        }
    }
}

/// A complete list, of one kind or of all.
#[derive(Default)]
pub struct Lists {
    services: Vec<Service>,
    slices: Vec<EndpointSlice>,
    nodes: Vec<Node>,
    service_cidrs: Vec<ServiceCidr>,
}

impl Lists {
    /// Adds an object.
    pub fn push(&mut self, object: Object) {
        match object {
            Object::Service(service) => self.services.push(service),
            Object::Slice(slice) => self.slices.push(slice),
            Object::Node(node) => self.nodes.push(node),
            Object::ServiceCidr(cidr) => self.service_cidrs.push(cidr),
        }
    }

    /// The update that says that these are all objects of `kind`; takes them out.
    pub fn complete(&mut self, kind: Kind) -> Update {
        match kind {
            Kind::Service => Update::Services(std::mem::take(&mut self.services)),
            Kind::Slice => Update::Slices(std::mem::take(&mut self.slices)),
            Kind::Node => Update::Nodes(std::mem::take(&mut self.nodes)),
            Kind::ServiceCidr => Update::ServiceCidrs(std::mem::take(&mut self.service_cidrs)),
        }
    }
}

/// Who wrote an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// An API server, which fills in defaults.
    Server,
    /// A person, who need not: the namespace is `default`, the name of a port is empty.
    File,
}

/// What came of an API object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decoded {
    /// Which one it is.
    pub key: Key,
    /// `None`: to us it is as if it were not there.
    pub object: Option<Object>,
    /// What of it could not be used, one sentence each.
    pub problems: Vec<String>,
}

/// Decodes and converts.
///
/// # Errors
/// A sentence, when there is not even a name to skip it under.
pub fn decode(kind: Kind, mut object: Value, origin: Origin, options: &ConvertOptions) -> Result<Decoded, String> {
    if let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut) {
        metadata.remove("managedFields"); // often the larger half of an object, and never of use here
        if origin == Origin::File && kind.has_namespace() {
            metadata.entry("namespace").or_insert_with(|| "default".into());
        }
    }
    let key = Key::of(kind, &object).ok_or_else(|| {
        let what = if kind.has_namespace() { "metadata.name and metadata.namespace" } else { "metadata.name" };
        format!("A {} has no {what}, so it is ignored.", kind.name())
    })?;
    let slice = |mut api: discovery::EndpointSlice| {
        if origin == Origin::File {
            convert::default_slice(&mut api);
        }
        convert::slice(&api).ok().map(map(Object::Slice))
    };
    let decoded = |converted: Option<Converted<Object>>| match converted {
        Some(Converted { value, problems }) => Decoded { key: key.clone(), object: Some(value), problems },
        None => Decoded { key: key.clone(), object: None, problems: Vec::new() },
    };
    let attempt = match kind {
        Kind::Service => {
            typed::<core::Service>(object).map(|api| convert::service(&api, options).map(map(Object::Service)))
        }
        Kind::Slice => typed(object).map(slice),
        Kind::Node => typed::<core::Node>(object).map(|api| convert::node(&api).map(map(Object::Node))),
        Kind::ServiceCidr => typed::<networking::ServiceCIDR>(object)
            .map(|api| convert::service_cidr(&api).map(map(Object::ServiceCidr))),
    };
    Ok(attempt.map_or_else(|why| malformed(&key, &why, options), decoded))
}

fn typed<T: DeserializeOwned>(object: Value) -> Result<T, String> {
    serde_json::from_value(object).map_err(|e| e.to_string())
}

fn map<T>(wrap: impl Fn(T) -> Object) -> impl Fn(Converted<T>) -> Converted<Object> {
    move |Converted { value, problems }| Converted { value: wrap(value), problems }
}

/// A malformed Service stays visible in `svc list`; any other object is left out.
fn malformed(key: &Key, why: &str, options: &ConvertOptions) -> Decoded {
    let service = match key {
        Key::Service(name) => {
            let namespace = Some(name.namespace.to_string());
            let metadata = ObjectMeta { name: Some(name.name.to_string()), namespace, ..ObjectMeta::default() };
            convert::service(&core::Service { metadata, ..core::Service::default() }, options).map(|service| {
                Object::Service(Service { no_frontend: Some(NoFrontend::Invalid(why.into())), ..service.value })
            })
        }
        Key::Slice(_) | Key::Node(_) | Key::ServiceCidr(_) => None,
    };
    let problem = format!("{key} is malformed, so it is ignored: {why}.");
    Decoded { key: key.clone(), object: service, problems: vec![problem] }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn check(id: &str, kind: Kind, object: Value, served: bool, problem: Option<&str>) {
        let decoded = decode(kind, object, Origin::Server, &ConvertOptions::default()).expect(id);
        let is_served = match &decoded.object {
            Some(Object::Service(service)) => service.no_frontend.is_none(),
            Some(Object::Slice(_) | Object::Node(_) | Object::ServiceCidr(_)) => true,
            None => false,
        };
        assert_eq!(is_served, served, "{id}: {decoded:?}");
        match problem {
            Some(text) => assert!(decoded.problems.join(" ").contains(text), "{id}: {decoded:?}"),
            None => assert_eq!(decoded.problems, [""; 0], "{id}"),
        }
    }

    #[test]
    fn a_malformed_object_is_skipped_by_name() {
        let meta = json!({"name": "web", "namespace": "t", "managedFields": [{"manager": 7}]});
        let labelled = json!({"name": "web-1", "namespace": "t", "labels": {"kubernetes.io/service-name": "web"}});
        let good = json!({"metadata": meta, "spec": {"clusterIP": "10.96.0.20", "ports": [{"port": 80}]}});
        let port = json!({"metadata": meta, "spec": {"clusterIP": "10.96.0.20", "ports": [{"port": "http"}]}});
        let slice = json!({"metadata": labelled, "addressType": "IPv4", "endpoints": []});
        let endpoints = json!({"metadata": labelled, "addressType": "IPv4", "endpoints": "10.244.1.10"});
        let fqdn =
            json!({"metadata": labelled, "addressType": "FQDN", "endpoints": [{"addresses": ["a.example.org"]}]});
        check("managed fields are not looked at", Kind::Service, good, true, None);
        check(
            "a port that is a name",
            Kind::Service,
            port,
            false,
            Some("Service t/web is malformed, so it is ignored: "),
        );
        check("a slice", Kind::Slice, slice, true, None);
        check("endpoints that are text", Kind::Slice, endpoints, false, Some("EndpointSlice t/web-1 is malformed"));
        check("case 05: a slice of DNS names is none of ours", Kind::Slice, fqdn, false, None);
        check(
            "a Node of numbers",
            Kind::Node,
            json!({"metadata": {"name": "n1"}, "spec": 7}),
            false,
            Some("Node n1 is malformed"),
        );
        let meta = json!({"name": "kubernetes"});
        let cidr = |cidrs: &[&str]| json!({"metadata": meta, "spec": {"cidrs": cidrs}});
        check("service networks", Kind::ServiceCidr, cidr(&["10.96.0.0/16", "2001:db8:f::/112"]), true, None);
        check(
            "no network",
            Kind::ServiceCidr,
            cidr(&["10.96.0.0/99"]),
            true,
            Some("is not a network, so it is ignored"),
        );
        check("every address", Kind::ServiceCidr, cidr(&["0.0.0.0/0"]), true, Some("is every address"));
        let named = json!({"metadata": {"name": 7}});
        for nameless in [named, json!({"metadata": []}), json!({}), json!([]), json!("text"), json!(7), json!(null)] {
            assert_eq!(
                decode(Kind::Service, nameless.clone(), Origin::Server, &ConvertOptions::default()),
                Err("A Service has no metadata.name and metadata.namespace, so it is ignored.".to_owned()),
                "{nameless}"
            );
        }
    }

    #[test]
    fn a_malformed_service_says_why_it_has_no_frontend() {
        let object = json!({"metadata": {"name": "web", "namespace": "t"}, "spec": {"ports": 80}});
        let decoded = decode(Kind::Service, object, Origin::Server, &ConvertOptions::default()).expect("named");
        let Some(Object::Service(service)) = decoded.object else { panic!("{decoded:?}") };
        assert!(matches!(service.no_frontend, Some(NoFrontend::Invalid(_))), "{service:?}");
        assert_eq!(decoded.key, Key::Service(service.name));
    }
}
