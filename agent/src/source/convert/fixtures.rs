//! Small builders of API objects for tests, and a notation for endpoints: `.3 R za L` is the endpoint whose address
//! ends in .3, with the condition, hints and node that follow.
//!
//! | sign | ready, serving, terminating | | sign | meaning |
//! |---|---|---|---|---|
//! | `R` | yes, yes, no | | `L` | on our own node |
//! | `U` | no, no, no | | `za`, `z{ab}` | hints for zone-a, or for zone-a and zone-b |
//! | `ST` | no, yes, yes | | `n1` | hint for node-1 |
//! | `T` | no, no, yes | | `np` | the Service has a NodePort |
//! | `S` | no, yes, no | | `iTP-L`, `eTP-L` | internal or external traffic policy Local |

use std::collections::BTreeMap;

use k8s_openapi::{
    api::{
        core::v1::{self as core, LoadBalancerIngress, ServiceSpec},
        discovery::v1::{self as discovery, EndpointConditions, EndpointHints, EndpointPort, ForNode, ForZone},
    },
    apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time},
    jiff::Timestamp,
};

use super::{ConvertOptions, node, service, slice};
use crate::model::{EndpointSlice, Node, Service, ServiceName, SliceName, Update, endpoint::PortEndpoint};

/// The node whose endpoints are marked `L`.
pub(crate) const OWN: &str = "own";

fn meta(name: &str) -> ObjectMeta {
    let (namespace, name) = name.split_once('/').expect("namespace/name");
    ObjectMeta { namespace: Some(namespace.to_owned()), name: Some(name.to_owned()), ..ObjectMeta::default() }
}

fn owned(texts: &[&str]) -> Option<Vec<String>> {
    (!texts.is_empty()).then(|| texts.iter().map(|text| (*text).to_owned()).collect())
}

/// `namespace/name` as a Service's name.
pub(crate) fn service_name(name: &str) -> ServiceName {
    let (namespace, name) = name.split_once('/').expect("namespace/name");
    ServiceName::new(namespace, name)
}

/// `namespace/name` as a slice's name.
pub(crate) fn slice_name(name: &str) -> SliceName {
    let ServiceName { namespace, name } = service_name(name);
    SliceName { namespace, name }
}

/// A Service under construction. Family, protocol and addresses are as given: nothing is defaulted.
#[derive(Clone)]
pub(crate) struct Svc(pub(crate) core::Service);

/// A Service `namespace/name` with this ClusterIP; several are separated by commas.
pub(crate) fn svc(name: &str, cluster_ips: &str) -> Svc {
    let ips: Vec<&str> = cluster_ips.split(',').filter(|ip| !ip.is_empty()).collect();
    let spec = ServiceSpec {
        cluster_ip: ips.first().map(|ip| (*ip).to_owned()),
        cluster_ips: owned(&ips),
        ..ServiceSpec::default()
    };
    Svc(core::Service { metadata: meta(name), spec: Some(spec), status: None })
}

impl Svc {
    fn spec(mut self, change: impl FnOnce(&mut ServiceSpec)) -> Self {
        change(self.0.spec.get_or_insert_default());
        self
    }

    /// Port as `name 80/TCP` or `name 80/TCP np 3001`; the name may be missing.
    pub(crate) fn port(self, text: &str) -> Self {
        let (text, node_port) = text.split_once(" np ").map_or((text, None), |(t, np)| (t, np.parse().ok()));
        let (name, number) = text.split_once(' ').map_or((None, text), |(name, rest)| (Some(name.to_owned()), rest));
        let (port, protocol) = number.split_once('/').expect("port/protocol");
        let port = core::ServicePort {
            name,
            port: port.parse().expect("port"),
            protocol: Some(protocol.to_owned()),
            node_port,
            ..core::ServicePort::default()
        };
        self.spec(|spec| spec.ports.get_or_insert_default().push(port))
    }

    pub(crate) fn kind(self, kind: &str) -> Self {
        self.spec(|spec| spec.type_ = Some(kind.to_owned()))
    }

    pub(crate) fn external(self, ips: &[&str]) -> Self {
        self.spec(|spec| spec.external_ips = owned(ips))
    }

    pub(crate) fn ranges(self, ranges: &[&str]) -> Self {
        self.spec(|spec| spec.load_balancer_source_ranges = owned(ranges))
    }

    pub(crate) fn internal_local(self) -> Self {
        self.spec(|spec| spec.internal_traffic_policy = Some("Local".to_owned()))
    }

    pub(crate) fn external_local(self) -> Self {
        self.spec(|spec| spec.external_traffic_policy = Some("Local".to_owned()))
    }

    pub(crate) fn health_check(self, port: i32) -> Self {
        self.spec(|spec| spec.health_check_node_port = Some(port))
    }

    /// Affinity by client IP; `None` = without the timeout.
    pub(crate) fn affinity(self, timeout: Option<i32>) -> Self {
        let client_ip = core::ClientIPConfig { timeout_seconds: timeout };
        self.spec(|spec| {
            spec.session_affinity = Some("ClientIP".to_owned());
            spec.session_affinity_config = Some(core::SessionAffinityConfig { client_ip: Some(client_ip) });
        })
    }

    /// An entry of `status.loadBalancer.ingress`; the mode may be absent.
    pub(crate) fn ingress(mut self, ip: &str, mode: Option<&str>) -> Self {
        let entry = LoadBalancerIngress {
            ip: Some(ip.to_owned()),
            ip_mode: mode.map(str::to_owned),
            ..LoadBalancerIngress::default()
        };
        let status = self.0.status.get_or_insert_default();
        status.load_balancer.get_or_insert_default().ingress.get_or_insert_default().push(entry);
        self
    }

    pub(crate) fn label(mut self, key: &str, value: &str) -> Self {
        add(&mut self.0.metadata.labels, key, value);
        self
    }

    pub(crate) fn annotation(mut self, key: &str, value: &str) -> Self {
        add(&mut self.0.metadata.annotations, key, value);
        self
    }

    /// creationTimestamp in Unix seconds.
    pub(crate) fn created(mut self, seconds: i64) -> Self {
        self.0.metadata.creation_timestamp = Some(Time(Timestamp::from_second(seconds).expect("time")));
        self
    }

    /// As the model has it; there must be nothing to complain about.
    pub(crate) fn build(&self) -> Service {
        let converted = service(&self.0, &ConvertOptions::default()).expect("a name");
        assert_eq!(converted.problems, [""; 0]);
        converted.value
    }
}

fn add(map: &mut Option<BTreeMap<String, String>>, key: &str, value: &str) {
    map.get_or_insert_default().insert(key.to_owned(), value.to_owned());
}

/// A slice under construction.
#[derive(Clone)]
pub(crate) struct Slice(pub(crate) discovery::EndpointSlice);

/// A slice `namespace/name` of a Service in that namespace; its family is that of the first endpoint.
pub(crate) fn slice_of(name: &str, service: &str) -> Slice {
    let mut metadata = meta(name);
    add(&mut metadata.labels, "kubernetes.io/service-name", service);
    Slice(discovery::EndpointSlice { metadata, address_type: "IPv4".to_owned(), ..Default::default() })
}

impl Slice {
    /// Ports as `name 80/TCP`, separated by commas; the name may be missing, which is the empty name.
    pub(crate) fn ports(mut self, text: &str) -> Self {
        for entry in text.split(',').map(str::trim).filter(|entry| !entry.is_empty()) {
            let (name, number) = entry.split_once(' ').unwrap_or(("", entry));
            let (port, protocol) = number.split_once('/').expect("port/protocol");
            self.0.ports.get_or_insert_default().push(EndpointPort {
                name: Some(name.to_owned()),
                port: Some(port.parse().expect("port")),
                protocol: Some(protocol.to_owned()),
                app_protocol: None,
            });
        }
        self
    }

    /// Endpoints in the notation above, separated by `;`: an address, or its end if it begins with a dot and follows
    /// `base`; `R`, `U`, `ST`, `T`, `S` or `R+T`; `L` for this node or `@name` for another; zone hints `za` or
    /// `z{ab}`; node hints `n1`. Without a state the conditions are absent.
    pub(crate) fn endpoints(mut self, base: &str, text: &str) -> Self {
        for entry in text.split(';').map(str::trim).filter(|entry| !entry.is_empty()) {
            let endpoint = endpoint(base, entry);
            if endpoint.addresses[0].contains(':') {
                self.0.address_type = "IPv6".to_owned();
            }
            self.0.endpoints.get_or_insert_default().push(endpoint);
        }
        self
    }

    pub(crate) fn label(mut self, key: &str, value: &str) -> Self {
        add(&mut self.0.metadata.labels, key, value);
        self
    }

    pub(crate) fn annotation(mut self, key: &str, value: &str) -> Self {
        add(&mut self.0.metadata.annotations, key, value);
        self
    }

    /// As the model has it; there must be nothing to complain about.
    pub(crate) fn build(&self) -> EndpointSlice {
        let converted = slice(&self.0).expect("a slice of ours");
        assert_eq!(converted.problems, [""; 0]);
        converted.value
    }

    /// What a source tells of it.
    pub(crate) fn update(&self) -> Update {
        match slice(&self.0) {
            Ok(converted) => Update::Slice(Box::new(converted.value)),
            Err(skip) => Update::SliceGone(skip.name.expect("a name")),
        }
    }

    /// What a source tells when it is deleted.
    pub(crate) fn gone(&self) -> Update {
        Update::SliceGone(slice_name(&format!(
            "{}/{}",
            self.0.metadata.namespace.as_deref().unwrap_or_default(),
            self.0.metadata.name.as_deref().unwrap_or_default()
        )))
    }
}

fn endpoint(base: &str, text: &str) -> discovery::Endpoint {
    let mut endpoint = discovery::Endpoint::default();
    let (mut zones, mut nodes) = (Vec::new(), Vec::new());
    for (i, token) in text.split_whitespace().enumerate() {
        let conditions = |ready, serving, terminating| {
            Some(EndpointConditions { ready: Some(ready), serving: Some(serving), terminating: Some(terminating) })
        };
        match token {
            address if i == 0 && address.starts_with('.') => endpoint.addresses = vec![format!("{base}{address}")],
            address if i == 0 => endpoint.addresses = vec![address.to_owned()],
            "R" => endpoint.conditions = conditions(true, true, false),
            "U" => endpoint.conditions = conditions(false, false, false),
            "ST" => endpoint.conditions = conditions(false, true, true),
            "T" => endpoint.conditions = conditions(false, false, true),
            "S" => endpoint.conditions = conditions(false, true, false),
            "R+T" => endpoint.conditions = conditions(true, true, true),
            "L" => endpoint.node_name = Some(OWN.to_owned()),
            node if node.starts_with('@') => endpoint.node_name = Some(node[1..].to_owned()),
            zone if zone.starts_with('z') => {
                let letters = zone[1..].trim_matches(['{', '}']).chars();
                zones.extend(letters.map(|letter| ForZone { name: format!("zone-{letter}") }));
            }
            node if node.starts_with('n') => nodes.push(ForNode { name: format!("node-{}", &node[1..]) }),
            other => panic!("unknown sign {other:?} in {text:?}"),
        }
    }
    if !zones.is_empty() || !nodes.is_empty() {
        let some = |empty: bool| (!empty).then_some(());
        endpoint.hints = Some(EndpointHints {
            for_zones: some(zones.is_empty()).map(|()| zones),
            for_nodes: some(nodes.is_empty()).map(|()| nodes),
        });
    }
    endpoint
}

/// A slice with as many endpoints as a case asks for.
#[derive(Clone, Copy)]
pub(crate) struct Gen<'a> {
    /// `namespace/name` of the Service.
    pub(crate) service: &'a str,
    pub(crate) slice: usize,
    pub(crate) offset: usize,
    pub(crate) n: usize,
    pub(crate) unready_every: usize,
    pub(crate) term_every: usize,
    pub(crate) hosts: &'a [&'a str],
    pub(crate) ports: &'a [u16],
}

/// Slice number `slice` of ns1/svc1 with `n` endpoints, all ready, on no node, port 80.
pub(crate) const fn generated(slice: usize, n: usize) -> Gen<'static> {
    Gen { service: "ns1/svc1", slice, offset: slice, n, unready_every: 999, term_every: 999, hosts: &[], ports: &[80] }
}

impl Gen<'_> {
    pub(crate) fn api(&self) -> Slice {
        let Self { service, slice, offset, n, unready_every, term_every, hosts, ports } = *self;
        let (namespace, name) = service.split_once('/').expect("namespace/name");
        let port = |(i, port): (usize, &u16)| format!("port-{i} {port}/TCP");
        let ports: Vec<String> = ports.iter().enumerate().map(port).collect();
        let mut built = slice_of(&format!("{namespace}/{name}-{slice}"), name).ports(&ports.join(","));
        for i in 1..=n {
            let (ready, terminating) = (i % unready_every != 0, i % term_every == 0);
            let state = match (ready, terminating) {
                (true, false) => "R",
                (true, true) => "ST",
                (false, true) => "T",
                (false, false) => "U",
            };
            let node = if hosts.is_empty() { String::new() } else { format!("@{}", hosts[i % hosts.len()]) };
            built = built.endpoints(&format!("10.0.{offset}"), &format!(".{i} {state} {node}"));
        }
        built
    }

    pub(crate) fn update(&self) -> Update {
        self.api().update()
    }
}

/// A Node with these InternalIPs, zone and pod CIDRs.
pub(crate) fn node_with(name: &str, ips: &[&str], zone: &str, pod_cidrs: &[&str]) -> Node {
    let address = |ip: &&str| core::NodeAddress { address: (*ip).to_owned(), type_: "InternalIP".to_owned() };
    let mut metadata = ObjectMeta { name: Some(name.to_owned()), ..ObjectMeta::default() };
    metadata.labels.get_or_insert_default().insert("topology.kubernetes.io/zone".to_owned(), zone.to_owned());
    let api = core::Node {
        metadata,
        spec: Some(core::NodeSpec { pod_cidrs: owned(pod_cidrs), ..core::NodeSpec::default() }),
        status: Some(core::NodeStatus {
            addresses: Some(ips.iter().map(address).collect()),
            ..core::NodeStatus::default()
        }),
    };
    node(&api).expect("a name").value
}

/// Endpoints of a service port in the notation of 0.2, as `10.0.1.1:80 R L; …`; `own` is the node whose are `L`.
pub(crate) fn show(endpoints: &[PortEndpoint<'_>], own: &str) -> String {
    let entry = |e: &PortEndpoint<'_>| {
        let state = match (e.endpoint.ready, e.endpoint.serving, e.endpoint.terminating) {
            (true, _, false) => "R",
            (true, _, true) => "R+T",
            (false, true, true) => "ST",
            (false, false, true) => "T",
            (false, true, false) => "S",
            (false, false, false) => "U",
        };
        let local = if e.endpoint.node.as_deref() == Some(own) { " L" } else { "" };
        format!("{} {state}{local}", e.target)
    };
    endpoints.iter().map(entry).collect::<Vec<_>>().join("; ")
}

/// `.1 R L; .2 R` as [`show`] writes it: every address completed by `base` and `port`.
pub(crate) fn shown(base: &str, port: u16, text: &str) -> String {
    let entries = text.split(';').map(str::trim).filter(|entry| !entry.is_empty());
    let complete = |entry: &str| {
        let (address, rest) = entry.split_once(' ').expect("a state");
        format!("{base}{address}:{port} {rest}")
    };
    entries.map(complete).collect::<Vec<_>>().join("; ")
}
