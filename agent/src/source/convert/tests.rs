//! Services, slices and Nodes, field by field, and objects that no API server would let through.

mod services;
mod slices;

use k8s_openapi::api::core::v1 as core;

use super::node;

fn node_api(json: serde_json::Value) -> core::Node {
    serde_json::from_value(json).unwrap()
}

#[test]
fn a_node_gives_its_addresses_zone_and_networks() {
    let with_labels = |labels| node_api(serde_json::json!({ "metadata": { "name": "n1", "labels": labels } }));
    for (id, labels, zone) in [
        ("TP-1", serde_json::json!({ "a": "b" }), None),
        ("TP-2", serde_json::json!({ "topology.kubernetes.io/region": "us-west-2" }), None),
        ("TP-3", serde_json::json!({ "topology.kubernetes.io/zone": "us-west-2a" }), Some("us-west-2a")),
        (
            "TP-4",
            serde_json::json!({
                "topology.kubernetes.io/zone": "us-east-1b", "topology.kubernetes.io/region": "us-east-1"
            }),
            Some("us-east-1b"),
        ),
        ("C05", serde_json::json!({ "topology.kubernetes.io/zone": "" }), None),
    ] {
        assert_eq!(node(&with_labels(labels)).unwrap().value.zone.as_deref(), zone, "{id}");
    }
    let plain = with_labels(serde_json::json!({ "a": "b" }));
    let other = with_labels(serde_json::json!({ "a": "c" }));
    assert_eq!(node(&plain), node(&other), "TP-5");

    let full = node(&node_api(serde_json::json!({
        "metadata": { "name": "n1" },
        "spec": { "podCIDR": "10.244.1.0/24", "podCIDRs": ["10.244.1.0/24", "fd00:10::/64", "no"] },
        "status": { "addresses": [
            { "type": "Hostname", "address": "n1" },
            { "type": "ExternalIP", "address": "203.0.113.9" },
            { "type": "InternalIP", "address": "192.0.2.011" },
            { "type": "InternalIP", "address": "2001:db8::1" },
            { "type": "ExternalIP", "address": "192.0.2.11" },
            { "type": "InternalIP", "address": "nowhere" },
        ] },
    })))
    .unwrap();
    let text = |items: Vec<String>| items.join(" ");
    let addresses = text(full.value.addresses.iter().map(ToString::to_string).collect());
    assert_eq!(addresses, "192.0.2.11 2001:db8::1 203.0.113.9", "internal addresses first, none twice");
    assert_eq!(text(full.value.pod_cidrs.iter().map(ToString::to_string).collect()), "10.244.1.0/24 fd00:10::/64");
    assert_eq!(full.problems.len(), 2, "{:?}", full.problems);

    let old = node_api(serde_json::json!({ "metadata": { "name": "n1" }, "spec": { "podCIDR": "10.0.0.0/24" } }));
    assert_eq!(node(&old).unwrap().value.pod_cidrs, ["10.0.0.0/24".parse().unwrap()]);
    assert_eq!(node(&core::Node::default()), None);
}

#[test]
fn a_node_that_leaves_says_so() {
    let tainted = |key| serde_json::json!({ "taints": [{ "key": key, "effect": "NoSchedule" }] });
    for (id, spec, deleted, going) in [
        ("NE-1", serde_json::json!({}), None, false),
        ("NE-2", tainted("node.kubernetes.io/not-ready"), None, false),
        ("NE-3", tainted("ToBeDeletedByClusterAutoscaler"), None, true),
        ("NE-4", serde_json::json!({}), Some("2026-01-01T00:00:00Z"), true),
    ] {
        let api =
            node_api(serde_json::json!({ "metadata": { "name": "n1", "deletionTimestamp": deleted }, "spec": spec }));
        assert_eq!(node(&api).unwrap().value.going_away, going, "{id}");
    }
}
