//! Live flows of the packet path by Service, as the last look through the flow table found them.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, PoisonError},
};

use prometheus_client::metrics::{family::Family, gauge::Gauge};
use sheave_ebpf::names::{ServiceName, unpad};

use super::{Labels, busiest};
use crate::lb;

/// A gauge for each of the busiest service ports. A clone writes to the same.
#[derive(Clone, Debug, Default)]
pub struct ServiceFlows {
    /// What a scraper sees.
    pub gauges: Family<Labels<4>, Gauge>,
    shown: Arc<Mutex<BTreeSet<Labels<4>>>>,
}

impl ServiceFlows {
    /// Shows the `most` busiest service ports, both families together; equally busy ones in order of their names.
    pub fn set<'a>(&self, found: impl Iterator<Item = (&'a ServiceName, u64)>, most: usize) {
        let mut counts = BTreeMap::<Labels<4>, u64>::new();
        for (name, count) in found {
            *counts.entry(labels(name)).or_default() += count;
        }
        let busiest = busiest(counts, most);
        let mut shown = self.shown.lock().unwrap_or_else(PoisonError::into_inner);
        let now: BTreeSet<_> = busiest.iter().map(|(labels, _)| labels.clone()).collect();
        for gone in shown.difference(&now) {
            self.gauges.remove(gone);
        }
        for (labels, count) in busiest {
            self.gauges.get_or_create(&labels).set(i64::try_from(count).unwrap_or(i64::MAX));
        }
        *shown = now;
    }
}

fn labels(name: &ServiceName) -> Labels<4> {
    [
        ("namespace", unpad(&name.namespace).to_owned()),
        ("service", unpad(&name.name).to_owned()),
        ("port", unpad(&name.port_name).to_owned()),
        ("protocol", lb::protocol(name.proto)),
    ]
}

#[cfg(test)]
mod tests {
    use sheave_ebpf::{names::pad, proto};

    use super::*;

    fn name(service: &str, family: u8) -> ServiceName {
        let text = |text| pad(text).expect("short");
        let (namespace, name, port_name) = (text("ns"), text(service), text("http"));
        ServiceName { namespace, name, port_name, proto: proto::TCP, family, zero: [0; 6] }
    }

    #[test]
    fn the_busiest_services_are_shown_and_the_others_go() {
        let flows = ServiceFlows::default();
        let shown = || -> Vec<(String, i64)> {
            let known = flows.shown.lock().unwrap().clone();
            known.iter().map(|labels| (labels[1].1.clone(), flows.gauges.get_or_create(labels).get())).collect()
        };
        let [a, a6, b, c] = [name("a", 4), name("a", 6), name("b", 4), name("c", 4)];
        flows.set([(&a, 2), (&b, 4), (&a6, 3), (&c, 1)].into_iter(), 2);
        assert_eq!(shown(), [("a".to_owned(), 5), ("b".to_owned(), 4)]);
        flows.set([(&c, 1), (&b, 1), (&a, 1)].into_iter(), 2);
        assert_eq!(shown(), [("a".to_owned(), 1), ("b".to_owned(), 1)], "equally busy: by name");
        flows.set([(&c, 7)].into_iter(), 2);
        assert_eq!(shown(), [("c".to_owned(), 7)]);
    }
}
