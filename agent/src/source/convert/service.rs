//! Services.

use std::{collections::HashSet, net::IpAddr};

use ipnet::IpNet;
use k8s_openapi::api::core::v1 as core;
use sheave_ebpf::names::MAX_NAME;

use super::{ConvertOptions, Converted, Problems};
use crate::{
    model::{Algorithm, Family, Service, ServiceName, ServicePort, ServiceType, service::NoFrontend},
    source::{
        address::{parse_ip, parse_net},
        intern::intern,
    },
};

const PROXY_NAME: &str = "service.kubernetes.io/service-proxy-name";
const SKIP: &str = "sheave.io/skip";
const ALGORITHM: &str = "sheave.io/lb-algorithm";

/// The API's default timeout of session affinity, and its limit, in seconds.
const AFFINITY_DEFAULT: u32 = 10_800;
const AFFINITY_MAX: u32 = 86_400;

pub(super) fn convert(api: &core::Service, options: &ConvertOptions) -> Option<Converted<Service>> {
    let meta = &api.metadata;
    let (Some(namespace), Some(name)) = (meta.namespace.as_deref(), meta.name.as_deref()) else { return None };
    if namespace.is_empty() || name.is_empty() {
        return None;
    }
    let name = ServiceName { namespace: intern(namespace), name: name.into() };
    let problems = &mut Problems::of(format!("Service {name}"));
    let default = core::ServiceSpec::default();
    let spec = api.spec.as_ref().unwrap_or(&default);

    let kind = service_type(spec.type_.as_deref());
    let cluster_ips = cluster_ips(spec);
    let ports = ports(spec, problems);
    let no_frontend = exclusion(api, &name, options)
        .or_else(|| unservable(kind, &cluster_ips, &ports, &name))
        .or_else(|| kind.is_err().then(|| invalid("spec.type is unknown")));
    let kind = kind.unwrap_or(ServiceType::ClusterIp);

    let external_ips = addresses("spec.externalIPs", spec.external_ips.as_deref(), problems);
    let mut load_balancer_ips = load_balancer_ips(api, problems);
    let source_ranges = source_ranges(spec, &mut load_balancer_ips, problems);
    // Without an external address there is nothing that the policy could concern.
    let external_local = spec.external_traffic_policy.as_deref() == Some("Local")
        && match kind {
            ServiceType::NodePort | ServiceType::LoadBalancer => true,
            ServiceType::ClusterIp => !external_ips.is_empty(),
            ServiceType::ExternalName => false,
        };
    // The field counts for LoadBalancers with policy Local only.
    let health_check_node_port = match (kind, external_local, spec.health_check_node_port) {
        (ServiceType::LoadBalancer, true, Some(port)) => problems.port("spec.healthCheckNodePort", port),
        _ => 0,
    };
    let value = Service {
        created: meta.creation_timestamp.as_ref().map_or(i64::MAX, |t| t.0.as_second()),
        kind,
        no_frontend,
        cluster_ips: cluster_ips.unwrap_or_default(),
        external_ips,
        load_balancer_ips,
        source_ranges,
        internal_local: spec.internal_traffic_policy.as_deref() == Some("Local"),
        external_local,
        affinity: affinity(spec, problems),
        health_check_node_port,
        ports,
        algorithm: algorithm(api, problems),
        labels: labels(api),
        name,
    };
    Some(Converted { value, problems: std::mem::take(&mut problems.found) })
}

fn invalid(why: &str) -> NoFrontend {
    NoFrontend::Invalid(why.into())
}

/// Services that are someone else's: not ours to judge.
fn exclusion(api: &core::Service, name: &ServiceName, options: &ConvertOptions) -> Option<NoFrontend> {
    let annotated = annotation(api, SKIP).is_some_and(|v| v == "true");
    if annotated || options.skip.contains(name) {
        return Some(NoFrontend::Skipped);
    }
    let label = api.metadata.labels.as_ref().and_then(|labels| labels.get(PROXY_NAME));
    (label != options.proxy_name.as_ref()).then_some(NoFrontend::OtherProxy)
}

/// Services that have no frontend by design, and what makes one useless.
fn unservable(
    kind: Result<ServiceType, ()>,
    cluster_ips: &Result<Vec<IpAddr>, NoFrontend>,
    ports: &[ServicePort],
    name: &ServiceName,
) -> Option<NoFrontend> {
    if kind == Ok(ServiceType::ExternalName) {
        return Some(NoFrontend::ExternalName);
    }
    if let Err(why) = cluster_ips {
        return Some(why.clone());
    }
    if name.namespace.len() > MAX_NAME || name.name.len() > MAX_NAME {
        return Some(invalid("the name or namespace is longer than 63 bytes"));
    }
    ports.is_empty().then(|| invalid("no port of spec.ports can be used"))
}

fn service_type(text: Option<&str>) -> Result<ServiceType, ()> {
    match text.unwrap_or_default() {
        "" | "ClusterIP" => Ok(ServiceType::ClusterIp),
        "NodePort" => Ok(ServiceType::NodePort),
        "LoadBalancer" => Ok(ServiceType::LoadBalancer),
        "ExternalName" => Ok(ServiceType::ExternalName),
        _ => Err(()),
    }
}

/// The first address of each family; objects older than dual stack have `clusterIP` only.
fn cluster_ips(spec: &core::ServiceSpec) -> Result<Vec<IpAddr>, NoFrontend> {
    let listed = spec.cluster_ips.iter().flatten().map(String::as_str).filter(|t| !t.is_empty());
    let single = spec.cluster_ip.as_deref().filter(|t| !t.is_empty());
    let texts: Vec<&str> = if spec.cluster_ips.iter().flatten().all(String::is_empty) {
        single.into_iter().collect()
    } else {
        listed.collect()
    };
    if single == Some("None") || texts.contains(&"None") {
        return Err(NoFrontend::Headless);
    }
    let mut ips: Vec<IpAddr> = Vec::new();
    for text in &texts {
        let Some(ip) = parse_ip(text).filter(|ip| can_be_dialled(*ip)) else {
            return Err(NoFrontend::Invalid(format!("the cluster IP {text:?} cannot be served").into()));
        };
        if !ips.iter().any(|known| Family::of(*known) == Family::of(ip)) {
            ips.push(ip);
        }
    }
    if ips.is_empty() { Err(NoFrontend::NoClusterIp) } else { Ok(ips) }
}

/// Addresses that no Service may take over: the whole node would lose them.
fn can_be_dialled(ip: IpAddr) -> bool {
    let broadcast = matches!(ip, IpAddr::V4(v4) if v4.is_broadcast());
    !(ip.is_unspecified() || ip.is_loopback() || ip.is_multicast() || broadcast)
}

fn addresses(field: &str, texts: Option<&[String]>, problems: &mut Problems) -> Vec<IpAddr> {
    let mut ips = Vec::new();
    for text in texts.into_iter().flatten().filter(|t| !t.is_empty()) {
        match parse_ip(text).filter(|ip| can_be_dialled(*ip)) {
            Some(ip) if !ips.contains(&ip) => ips.push(ip),
            Some(_) => {}
            None => problems.add(format_args!("{field} has {text:?}, which cannot be served, so it is ignored")),
        }
    }
    ips
}

/// `status.loadBalancer.ingress[].ip` unless the balancer wants the traffic itself.
fn load_balancer_ips(api: &core::Service, problems: &mut Problems) -> Vec<IpAddr> {
    let ingress = api.status.iter().filter_map(|s| s.load_balancer.as_ref()).flat_map(|lb| lb.ingress.iter().flatten());
    let texts: Vec<String> = ingress
        .filter(|entry| matches!(entry.ip_mode.as_deref(), None | Some("VIP")))
        .filter_map(|entry| entry.ip.clone())
        .collect();
    addresses("status.loadBalancer.ingress", Some(&texts), problems)
}

/// Ranges of both families; one that admits everyone empties its family.
fn source_ranges(spec: &core::ServiceSpec, vips: &mut Vec<IpAddr>, problems: &mut Problems) -> Vec<IpNet> {
    let texts = spec.load_balancer_source_ranges.as_deref().unwrap_or_default();
    let mut ranges: Vec<IpNet> = Vec::new();
    for text in texts {
        match parse_net(text) {
            Some(range) => ranges.push(range),
            None => problems.add(format_args!("spec.loadBalancerSourceRanges has {text:?}, which is not a network")),
        }
    }
    if ranges.is_empty() && !texts.is_empty() && !vips.is_empty() {
        // No range at all would admit everyone: the opposite of what was asked for.
        problems.add("no source range can be used, so the load-balancer addresses are not served");
        vips.clear();
    }
    for family in Family::ALL {
        let of_family = |range: &IpNet| Family::of(range.addr()) == family;
        if ranges.iter().any(|range| of_family(range) && range.prefix_len() == 0) {
            ranges.retain(|range| !of_family(range));
        }
    }
    ranges.sort_unstable();
    ranges.dedup();
    ranges
}

fn ports(spec: &core::ServiceSpec, problems: &mut Problems) -> Vec<ServicePort> {
    let mut ports: Vec<ServicePort> = Vec::new();
    let mut known = HashSet::new();
    for (i, api) in spec.ports.iter().flatten().enumerate() {
        let name = api.name.as_deref().unwrap_or_default();
        let Some(protocol) = problems.protocol(format_args!("spec.ports[{i}].protocol"), api.protocol.as_deref())
        else {
            continue;
        };
        let port = u16::try_from(api.port).unwrap_or(0);
        if port == 0 {
            problems.add(format_args!(
                "spec.ports[{i}].port is {}, which is not a port number, so it is ignored",
                api.port
            ));
        } else if name.len() > MAX_NAME {
            problems.add(format_args!("spec.ports[{i}].name is longer than 63 bytes, so the port is ignored"));
        } else if !known.insert((name, protocol)) {
            problems.add(format_args!("spec.ports[{i}] has the name and protocol of another port, so it is ignored"));
        } else {
            let node_port = problems.port(format_args!("spec.ports[{i}].nodePort"), api.node_port.unwrap_or_default());
            ports.push(ServicePort { name: intern(name), protocol, port, node_port });
        }
    }
    ports
}

fn affinity(spec: &core::ServiceSpec, problems: &mut Problems) -> Option<u32> {
    if spec.session_affinity.as_deref() != Some("ClientIP") {
        return None;
    }
    let config = spec.session_affinity_config.as_ref().and_then(|c| c.client_ip.as_ref());
    let Some(seconds) = config.and_then(|c| c.timeout_seconds) else { return Some(AFFINITY_DEFAULT) };
    match u32::try_from(seconds) {
        Ok(seconds @ 1..=AFFINITY_MAX) => Some(seconds),
        _ => {
            problems.add(format_args!(
                "the session affinity timeout is {seconds}, not 1 to {AFFINITY_MAX}, so {AFFINITY_DEFAULT} is used"
            ));
            Some(AFFINITY_DEFAULT)
        }
    }
}

fn algorithm(api: &core::Service, problems: &mut Problems) -> Option<Algorithm> {
    let text = annotation(api, ALGORITHM)?;
    let algorithm = Algorithm::parse(text);
    if algorithm.is_none() {
        problems.add(format_args!("the annotation {ALGORITHM} is {text:?}, not {}", Algorithm::NAMES.join(", ")));
    }
    algorithm
}

fn annotation<'a>(api: &'a core::Service, name: &str) -> Option<&'a str> {
    api.metadata.annotations.as_ref()?.get(name).map(String::as_str)
}

fn labels(api: &core::Service) -> std::collections::BTreeMap<Box<str>, Box<str>> {
    let labels = api.metadata.labels.iter().flatten();
    labels.map(|(key, value)| (key.as_str().into(), value.as_str().into())).collect()
}
