//! What follows from changed Services, in the tables and among the health checks.

use std::collections::{BTreeMap, BTreeSet};

use super::{Engine, Fake, Svc, Update, check_no_leak, check_whole, empty_tables, engine, gone, put, svc};
use crate::{
    model::ServiceName,
    plan::group::{GroupKey, GroupPlan},
};

/// The ports of every Service.
type Ports = BTreeMap<ServiceName, Vec<(GroupKey, GroupPlan)>>;

/// An engine, and what it had said when it was looked at last.
struct Followed {
    engine: Engine<Fake>,
    ports: Ports,
    checks: BTreeMap<ServiceName, u16>,
}

impl Followed {
    fn new() -> Self {
        let mut engine = engine(empty_tables());
        let lists = [Update::Services(vec![]), Update::Slices(vec![]), Update::Nodes(vec![])];
        lists.into_iter().for_each(|list| engine.update(list));
        assert!(engine.flush());
        Self { engine, ports: Ports::new(), checks: BTreeMap::new() }
    }

    /// After a step: ports, updated Services, health-check ports.
    fn step(&mut self, updates: Vec<Update>) -> (usize, usize, Vec<String>) {
        let writes = self.engine.datapath().writes;
        updates.into_iter().for_each(|update| self.engine.update(update));
        assert!(self.engine.flush());
        check_whole(self.engine.datapath());
        let mut ports = Ports::new();
        for (key, plan) in self.engine.tables.groups() {
            ports.entry(key.service.clone()).or_default().push(((**key).clone(), plan.clone()));
        }
        let before = std::mem::replace(&mut self.ports, ports);
        let names: BTreeSet<_> = before.keys().chain(self.ports.keys()).collect();
        let updated = names.into_iter().filter(|name| before.get(name) != self.ports.get(name)).count();
        assert_eq!(updated == 0, self.engine.datapath().writes == writes, "writes follow changes");
        if let Some(checks) = self.engine.take_health_checks() {
            self.checks = checks.services.iter().map(|(name, check)| (name.clone(), check.port)).collect();
        }
        let checks = self.checks.iter().map(|(name, port)| format!("{name}: {port}")).collect();
        (self.ports.values().map(Vec::len).sum(), updated, checks)
    }
}

fn cluster_ip() -> Svc {
    svc("ns1/cluster-ip", "172.16.55.4").port("p1 1234/UDP").port("p2 1235/UDP")
}

fn node_port() -> Svc {
    svc("ns1/node-port", "172.16.55.10").kind("NodePort").port("port1 345/UDP np 678").port("port2 344/TCP np 677")
}

fn load_balancer() -> Svc {
    let svc = svc("ns1/load-balancer", "172.16.55.11").kind("LoadBalancer").ingress("10.1.2.4", None);
    svc.port("p1 8675/UDP np 30061").port("p2 8676/UDP np 30062")
}

fn only_local() -> Svc {
    let svc = svc("ns1/only-local", "172.16.55.12").kind("LoadBalancer").external_local().health_check(345);
    svc.port("p1 8677/UDP np 30063").port("p2 8678/UDP np 30064").ingress("10.1.2.3", None)
}

#[test]
fn services_come_change_and_go() {
    let headless = || vec![put(&svc("ns2/a", "None").port("1234/UDP")), put(&svc("ns2/b", "None"))];
    let external_name = svc("ns2/x", "172.16.55.4").kind("ExternalName").port("1234/UDP");
    let all = || vec![put(&cluster_ip()), put(&node_port()), put(&load_balancer()), put(&only_local())];
    let fewer = || {
        let one_port = svc("ns1/cluster-ip", "172.16.55.4").port("p2 1235/UDP");
        let gone = ["ns1/node-port", "ns1/load-balancer", "ns1/only-local"].map(gone);
        std::iter::once(put(&one_port)).chain(gone).collect()
    };
    let plain = || svc("ns1/svc1", "172.16.55.4").port("p1 1234/UDP").port("p2 1235/TCP");
    let balanced = || plain().kind("LoadBalancer").external_local().health_check(345).ingress("10.1.2.3", None);
    let svc1 = &["ns1/svc1: 345"][..];
    for steps in [
        vec![("T01", headless(), 0, 0, &[][..])],
        vec![("T02", vec![put(&external_name)], 0, 0, &[])],
        vec![("T03a", all(), 8, 4, &["ns1/only-local: 345"]), ("T03b", fewer(), 1, 4, &[])],
        vec![
            ("T04a", vec![put(&plain())], 2, 1, &[]),
            ("T04b", vec![put(&balanced())], 2, 1, svc1),
            ("T04c", vec![put(&balanced())], 2, 0, svc1),
            ("T04d", vec![put(&plain())], 2, 1, &[]),
        ],
        vec![("T05", vec![put(&plain()), gone("ns1/svc1")], 0, 0, &[])],
        vec![("S01", vec![], 0, 0, &[])],
    ] {
        let mut followed = Followed::new();
        for (id, updates, ports, updated, checks) in steps {
            let expected = (ports, updated, checks.iter().map(ToString::to_string).collect());
            assert_eq!(followed.step(updates), expected, "{id}");
        }
        followed.step(vec![Update::Services(vec![])]);
        check_no_leak(&mut followed.engine);
    }
}
