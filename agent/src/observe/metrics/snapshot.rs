//! What the engine knows at the moment of a scrape.

use std::{collections::BTreeMap, fmt, net::SocketAddr};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric as _},
    metrics::{MetricType, counter::ConstCounter},
};

use super::{busiest, family_name, reading};
use crate::{
    model::Family,
    plan::group::GroupKey,
    view::{MapView, StatusView},
};

/// Everything that is read and not counted.
#[derive(Clone, Debug, Default)]
pub struct Snapshot {
    /// As `sheave status` shows it.
    pub status: StatusView,
    /// Whether the first full pass is in the kernel.
    pub is_ready: bool,
    /// Ports whose Local policy leaves them without an endpoint here, by family.
    pub no_local: BTreeMap<Family, NoLocal>,
    /// Freed entries that may still be in somebody's hands, by kind.
    pub resting: [(&'static str, usize); 3],
    /// Live connections.
    pub connections: Connections,
}

/// Service ports of one family whose Local policy leaves them without an endpoint on this node, by policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NoLocal {
    /// internalTrafficPolicy.
    pub internal: usize,
    /// externalTrafficPolicy.
    pub external: usize,
}

/// Live connections of this node's sockets: the sum of all, and the busiest ones.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Connections {
    /// Of all backends.
    pub total: u64,
    /// The busiest service ports.
    pub services: Vec<(GroupKey, u64)>,
    /// The busiest backends.
    pub backends: Vec<((GroupKey, SocketAddr), u64)>,
}

impl Connections {
    /// Keeps the `most` busiest services and the `most` busiest backends; equally busy ones in order of their names.
    #[must_use]
    pub fn of(found: impl Iterator<Item = (GroupKey, SocketAddr, u64)>, most: usize) -> Self {
        let mut new = Self::default();
        let mut services = BTreeMap::<GroupKey, u64>::new();
        for (group, address, count) in found.filter(|(.., count)| *count > 0) {
            new.total += count;
            *services.entry(group.clone()).or_default() += count;
            new.backends.push(((group, address), count));
        }
        new.services = busiest(services, most);
        new.backends = busiest(new.backends, most);
        new
    }
}

impl Collector for Snapshot {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let Self { status, is_ready, no_local, resting, connections } = self;
        let mut page = Page(encoder);
        let policies = no_local.iter().flat_map(|(family, NoLocal { internal, external })| {
            let label = |policy| [("traffic_policy", policy), ("ip_family", family_name(*family))];
            [(label("internal"), *internal as f64), (label("external"), *external as f64)]
        });
        let help = "Service ports whose Local policy leaves them without an endpoint on this node";
        page.gauges("kubeproxy_sync_proxy_rules_no_local_endpoints_total", help, policies)?;

        page.gauge("sheave_ready", "1 once the first full pass is in the kernel", f64::from(u8::from(*is_ready)))?;
        page.gauge("sheave_services", "Services known, handled or not", status.services as f64)?;
        page.gauge("sheave_frontends", "Addresses and ports that Services should answer on", status.frontends as f64)?;
        let help = "Addresses and ports that the kernel has exactly as wanted";
        page.gauge("sheave_frontends_programmed", help, status.frontends_programmed as f64)?;
        let help = "Addresses and ports that Services ask for and API servers or nodes' agents keep";
        page.gauge("sheave_frontends_kept", help, status.frontends_kept as f64)?;
        page.gauge("sheave_backends", "Backends of all Services", status.backends as f64)?;
        let complaints = status.problems.len() + status.warnings.len();
        page.gauge("sheave_problems", "Problems that `sheave status` reports", complaints as f64)?;
        let in_step = f64::from(u8::from(status.source_problems.is_empty()));
        let help = "1 while the agent is up to date with its source";
        page.gauges("sheave_source_in_step", help, [([("source", status.source.as_str())], in_step)])?;
        let features = status.features.iter().map(|feature| {
            let is_there = f64::from(u8::from(feature.available));
            ([("feature", feature.name.as_str())], is_there)
        });
        page.gauges(
            "sheave_kernel_feature",
            "1 if the kernel has the feature, 0 if the agent does without it",
            features,
        )?;

        let of_maps =
            |value: fn(&MapView) -> f64| status.maps.iter().map(move |map| ([("map", map.name.as_str())], value(map)));
        page.gauges("sheave_map_entries", "Entries in use", of_maps(|map| map.used as f64))?;
        page.gauges("sheave_map_capacity", "Entries that the map can hold", of_maps(|map| map.capacity as f64))?;
        let pressure = of_maps(|map| map.used as f64 / map.capacity.max(1) as f64);
        page.gauges("sheave_map_pressure", "How full the map is, 1 = full", pressure)?;
        let resting = resting.iter().map(|(kind, count)| ([("kind", *kind)], *count as f64));
        page.gauges(
            "sheave_resting_entries",
            "Entries that are freed, but may still be used by a connection",
            resting,
        )?;
        let events = status.counters.iter().map(|(event, count)| ([("event", event.as_str())], *count));
        page.counters(
            "sheave_datapath_events",
            "What the programs did with connections and packets, by outcome",
            events,
        )?;
        let repairs = status.repairs.iter().map(|(part, count)| ([("part", part.as_str())], *count));
        page.counters("sheave_repairs", "Things that somebody else removed and the agent put back", repairs)?;

        page.gauge(
            "sheave_connections",
            "Live connections of this node's sockets, in total",
            connections.total as f64,
        )?;
        let services = connections.services.iter().map(|(group, count)| (labels(group), *count as f64));
        let help = "Live connections of this node's sockets to the busiest Service ports, see --max-metrics-series";
        page.gauges("sheave_service_connections", help, services)?;
        let backends = connections.backends.iter().map(|((group, address), count)| {
            let [namespace, service, port, protocol] = labels(group);
            ([namespace, service, port, protocol, ("backend", address.to_string())], *count as f64)
        });
        page.gauges(
            "sheave_backend_connections",
            "Live connections of this node's sockets to the busiest backends, see --max-metrics-series",
            backends,
        )
    }
}

fn labels(group: &GroupKey) -> [(&'static str, String); 4] {
    let GroupKey { service, port_name, protocol, family: _ } = group;
    [
        ("namespace", service.namespace.to_string()),
        ("service", service.name.to_string()),
        ("port", port_name.to_string()),
        ("protocol", protocol.to_string()),
    ]
}

/// Writes metrics one after the other.
struct Page<'a>(DescriptorEncoder<'a>);

impl Page<'_> {
    fn gauge(&mut self, name: &str, help: &str, value: f64) -> fmt::Result {
        reading(value).encode(self.0.encode_descriptor(name, help, None, MetricType::Gauge)?)
    }

    fn gauges<L: EncodeLabelSet>(
        &mut self,
        name: &str,
        help: &str,
        values: impl IntoIterator<Item = (L, f64)>,
    ) -> fmt::Result {
        let mut metric = self.0.encode_descriptor(name, help, None, MetricType::Gauge)?;
        values.into_iter().try_for_each(|(labels, value)| reading(value).encode(metric.encode_family(&labels)?))
    }

    fn counters<L: EncodeLabelSet>(
        &mut self,
        name: &str,
        help: &str,
        values: impl IntoIterator<Item = (L, u64)>,
    ) -> fmt::Result {
        let mut metric = self.0.encode_descriptor(name, help, None, MetricType::Counter)?;
        values
            .into_iter()
            .try_for_each(|(labels, value)| ConstCounter::new(value).encode(metric.encode_family(&labels)?))
    }
}
