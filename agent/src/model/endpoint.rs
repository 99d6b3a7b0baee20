//! EndpointSlices, and the endpoints of one service port in one family.

use std::{
    collections::{BTreeSet, HashMap},
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use super::service::{Family, Protocol, ServiceName};

/// Namespace and name of a slice.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SliceName {
    /// Namespace.
    pub namespace: Arc<str>,
    /// Name.
    pub name: Arc<str>,
}

/// A named port of a slice; ports without name or number do not get this far.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlicePort {
    /// Name, possibly empty.
    pub name: Arc<str>,
    /// Protocol.
    pub protocol: Protocol,
    /// Number, 1–65535.
    pub port: u16,
}

/// Hints of the EndpointSlice controller; empty = absent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hints {
    /// forZones.
    pub zones: Vec<Arc<str>>,
    /// forNodes.
    pub nodes: Vec<Arc<str>>,
}

/// One endpoint: its first address and its conditions with the API's defaults filled in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint {
    /// Address.
    pub ip: IpAddr,
    /// nil counts as true.
    pub ready: bool,
    /// nil counts as true.
    pub serving: bool,
    /// nil counts as false.
    pub terminating: bool,
    /// nodeName; `None` is never local.
    pub node: Option<Arc<str>>,
    /// zone, for display.
    pub zone: Option<Arc<str>>,
    /// Boxed: rare, and 100,000 endpoints must fit in tens of megabytes.
    pub hints: Option<Box<Hints>>,
}

/// An EndpointSlice of a Service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndpointSlice {
    /// Who it is.
    pub name: SliceName,
    /// Owner: label `kubernetes.io/service-name` in the slice's namespace.
    pub service: ServiceName,
    /// addressType.
    pub family: Family,
    /// Its ports.
    pub ports: Vec<SlicePort>,
    /// Its endpoints.
    pub endpoints: Vec<Endpoint>,
    /// From the annotation `sheave.io/weight`, 0–100; `None` counts as 100.
    pub weight: Option<u8>,
    /// Annotation `endpoints.kubernetes.io/last-change-trigger-time`, Unix nanoseconds.
    pub trigger_time: Option<i128>,
}

/// An endpoint of one service port, merged over all slices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortEndpoint<'a> {
    /// Address and target port.
    pub target: SocketAddr,
    /// Conditions, node and hints of its best appearance.
    pub endpoint: &'a Endpoint,
    /// Weight of the slice of that appearance.
    pub weight: Option<u8>,
}

/// How good an appearance of an address is: ready, else serving and terminating, else neither.
fn rank(endpoint: &Endpoint) -> u8 {
    if endpoint.ready { 2 } else { u8::from(endpoint.serving && endpoint.terminating) }
}

/// What the slices of a Service offer, by port: a Service may have thousands of ports.
#[derive(Clone, Debug, Default)]
pub struct Offers<'a>(HashMap<(&'a str, Protocol, Family), Vec<Offer<'a>>>);

/// A slice, and the number that the port has in it.
type Offer<'a> = (&'a EndpointSlice, u16);

impl<'a> Offers<'a> {
    /// Of these slices.
    #[must_use]
    pub fn of(slices: impl IntoIterator<Item = &'a EndpointSlice>) -> Self {
        let mut offers: HashMap<_, Vec<_>> = HashMap::new();
        for slice in slices {
            for port in &slice.ports {
                offers.entry((&*port.name, port.protocol, slice.family)).or_default().push((slice, port.port));
            }
        }
        Self(offers)
    }

    /// The endpoints of (`port_name`, `protocol`) in `family`, sorted by address and port.
    ///
    /// One IP:port may appear several times, within a slice and across slices; it counts once and is as good as its
    /// best appearance, so that the answer depends on the objects only, never on the order of their arrival.
    #[must_use]
    pub fn endpoints(&self, port_name: &str, protocol: Protocol, family: Family) -> Vec<PortEndpoint<'a>> {
        self.0.get(&(port_name, protocol, family)).map_or_else(Vec::new, |offers| merge(offers))
    }
}

fn merge<'a>(offers: &[Offer<'a>]) -> Vec<PortEndpoint<'a>> {
    let mut found: Vec<PortEndpoint<'a>> = Vec::new();
    for (slice, port) in offers {
        found.extend(slice.endpoints.iter().map(|endpoint| PortEndpoint {
            target: SocketAddr::new(endpoint.ip, *port),
            endpoint,
            weight: slice.weight,
        }));
    }
    // Best first within one target; ties are broken by content so that no order of arrival shows.
    found.sort_by(|a, b| {
        let key = |e: &PortEndpoint<'_>| (e.target, 2 - rank(e.endpoint), e.endpoint.terminating);
        let share = |e: &PortEndpoint<'_>| e.weight.unwrap_or(100);
        key(a).cmp(&key(b)).then_with(|| a.endpoint.node.cmp(&b.endpoint.node)).then_with(|| share(b).cmp(&share(a)))
    });
    found.dedup_by_key(|e| e.target);
    found
}

/// Addresses of a Service's endpoints that run on `node` and are ready: what its load balancer asks about (LR, HC).
#[must_use]
pub fn local_ready<'a>(slices: impl IntoIterator<Item = &'a EndpointSlice>, node: &str) -> BTreeSet<IpAddr> {
    let offering = slices.into_iter().filter(|slice| !slice.ports.is_empty());
    let local =
        offering.flat_map(|slice| &slice.endpoints).filter(|e| !node.is_empty() && e.node.as_deref() == Some(node));
    local.filter(|endpoint| endpoint.ready).map(|endpoint| endpoint.ip).collect()
}

#[cfg(test)]
mod tests;
