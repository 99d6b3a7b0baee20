//! EndpointSlices.

use std::net::IpAddr;

use k8s_openapi::{api::discovery::v1 as discovery, apimachinery::pkg::apis::meta::v1::ObjectMeta, jiff::Timestamp};

use super::{Converted, Problems, Skip};
use crate::{
    model::{Endpoint, EndpointSlice, Family, ServiceName, SliceName, SlicePort, endpoint::Hints},
    source::{address::parse_ip, intern::intern},
};

const OWNER: &str = "kubernetes.io/service-name";
const HEADLESS: &str = "service.kubernetes.io/headless";
const TRIGGER_TIME: &str = "endpoints.kubernetes.io/last-change-trigger-time";
const WEIGHT: &str = "sheave.io/weight";

pub(super) fn convert(api: &discovery::EndpointSlice) -> Result<Converted<EndpointSlice>, Skip> {
    let meta = &api.metadata;
    let present = |text: &Option<String>| text.as_deref().filter(|t| !t.is_empty()).map(intern);
    let (Some(namespace), Some(name)) = (present(&meta.namespace), present(&meta.name)) else {
        return Err(Skip { name: None });
    };
    let name = SliceName { namespace, name };
    let label = |key: &str| meta.labels.as_ref().and_then(|labels| labels.get(key)).map(String::as_str);
    let family = match api.address_type.as_str() {
        "IPv4" => Some(Family::V4),
        "IPv6" => Some(Family::V6),
        _ => None, // FQDN, and whatever the future brings
    };
    let (Some(owner), Some(family), None) = (label(OWNER).filter(|o| !o.is_empty()), family, label(HEADLESS)) else {
        return Err(Skip { name: Some(name) });
    };

    let mut problems = Problems::of(format!("EndpointSlice {}/{}", name.namespace, name.name));
    let value = EndpointSlice {
        service: ServiceName { namespace: name.namespace.clone(), name: intern(owner) },
        family,
        ports: ports(api, &mut problems),
        endpoints: endpoints(api, family, &mut problems),
        weight: weight(meta, &mut problems),
        trigger_time: annotation(meta, TRIGGER_TIME)
            .and_then(|text| text.parse::<Timestamp>().ok())
            .map(Timestamp::as_nanosecond),
        name,
    };
    Ok(Converted { value, problems: problems.found })
}

/// Ports with a name and a number; the others say nothing (I08) and are no mistake.
fn ports(api: &discovery::EndpointSlice, problems: &mut Problems) -> Vec<SlicePort> {
    let mut ports = Vec::new();
    for (i, api) in api.ports.iter().flatten().enumerate() {
        let (Some(name), Some(number)) = (&api.name, api.port) else { continue };
        let port = problems.port(format_args!("ports[{i}].port"), number);
        let protocol = problems.protocol(format_args!("ports[{i}].protocol"), api.protocol.as_deref());
        if let (Some(protocol), 1..) = (protocol, port) {
            ports.push(SlicePort { name: intern(name), protocol, port });
        }
    }
    ports
}

fn endpoints(api: &discovery::EndpointSlice, family: Family, problems: &mut Problems) -> Vec<Endpoint> {
    let mut endpoints = Vec::with_capacity(api.endpoints.as_ref().map_or(0, Vec::len));
    for (i, api) in api.endpoints.iter().flatten().enumerate() {
        // The first address is the endpoint; the API has never given more a meaning.
        let Some(text) = api.addresses.first() else { continue };
        match parse_ip(text).filter(|ip| Family::of(*ip) == family && can_be_reached(*ip)) {
            Some(ip) => endpoints.push(endpoint(api, ip)),
            None => problems.add(format_args!(
                "endpoints[{i}].addresses[0] is {text:?}, which cannot be an endpoint of this slice, so it is ignored"
            )),
        }
    }
    endpoints
}

fn can_be_reached(ip: IpAddr) -> bool {
    !ip.is_unspecified() && !ip.is_multicast()
}

fn endpoint(api: &discovery::Endpoint, ip: IpAddr) -> Endpoint {
    let conditions = api.conditions.as_ref();
    let name = |text: &Option<String>| text.as_deref().filter(|t| !t.is_empty()).map(intern);
    Endpoint {
        ip,
        ready: conditions.and_then(|c| c.ready).unwrap_or(true),
        serving: conditions.and_then(|c| c.serving).unwrap_or(true),
        terminating: conditions.and_then(|c| c.terminating).unwrap_or(false),
        node: name(&api.node_name),
        zone: name(&api.zone),
        hints: api.hints.as_ref().and_then(hints),
    }
}

fn hints(api: &discovery::EndpointHints) -> Option<Box<Hints>> {
    let zones: Vec<_> = api.for_zones.iter().flatten().map(|z| intern(&z.name)).collect();
    let nodes: Vec<_> = api.for_nodes.iter().flatten().map(|n| intern(&n.name)).collect();
    (!zones.is_empty() || !nodes.is_empty()).then(|| Box::new(Hints { zones, nodes }))
}

fn weight(meta: &ObjectMeta, problems: &mut Problems) -> Option<u8> {
    let text = annotation(meta, WEIGHT)?;
    let weight = text.trim().parse().ok().filter(|weight| *weight <= 100);
    if weight.is_none() {
        problems.add(format_args!("the annotation {WEIGHT} is {text:?}, not a number from 0 to 100, so it is ignored"));
    }
    weight
}

fn annotation<'a>(meta: &'a ObjectMeta, name: &str) -> Option<&'a str> {
    meta.annotations.as_ref()?.get(name).map(String::as_str)
}
