//! EndpointSlices.

use std::sync::Arc;

use super::super::{
    Skip, default_slice,
    fixtures::{Slice, slice_name, slice_of},
    slice,
};
use crate::model::Family;

fn base() -> Slice {
    slice_of("ns/s", "svc").ports("p 80/TCP").endpoints("10.0.0", ".1 R")
}

fn change(edit: impl FnOnce(&mut Slice)) -> Slice {
    let mut slice = base();
    edit(&mut slice);
    slice
}

#[test]
fn slices_of_others_are_skipped() {
    let owner = "kubernetes.io/service-name";
    let named = || Some(slice_name("ns/s"));
    for (id, api, name) in [
        ("no owner", change(|s| s.0.metadata.labels = None), named()),
        ("empty owner", base().label(owner, ""), named()),
        ("SK-7", base().label("service.kubernetes.io/headless", ""), named()),
        ("U03 FQDN", change(|s| s.0.address_type = "FQDN".to_owned()), named()),
        ("unknown type", change(|s| s.0.address_type = "IPv5".to_owned()), named()),
        ("no name", change(|s| s.0.metadata.name = None), None),
        ("empty name", change(|s| s.0.metadata.name = Some(String::new())), None),
        ("empty namespace", change(|s| s.0.metadata.namespace = Some(String::new())), None),
    ] {
        assert_eq!(slice(&api.0), Err(Skip { name }), "{id}");
    }
    assert_eq!(base().build().service.to_string(), "ns/svc", "the owner is in the slice's namespace");
}

#[test]
fn ports_need_a_name_and_a_number() {
    let port = |name: Option<&str>, port, protocol: Option<&str>| {
        change(|s| {
            let entry = &mut s.0.ports.as_mut().unwrap()[0];
            entry.name = name.map(str::to_owned);
            entry.port = port;
            entry.protocol = protocol.map(str::to_owned);
        })
    };
    for (id, api, expected, problems) in [
        ("plain", port(Some("p"), Some(80), Some("UDP")), "p 80/UDP", 0),
        ("empty name", port(Some(""), Some(80), Some("TCP")), " 80/TCP", 0),
        ("no protocol", port(Some("p"), Some(80), None), "p 80/TCP", 0),
        ("no name", port(None, Some(80), Some("TCP")), "", 0),
        ("I08", port(Some("p"), None, Some("TCP")), "", 0),
        ("port 0", port(Some("p"), Some(0), Some("TCP")), "", 0),
        ("port too large", port(Some("p"), Some(65_536), Some("TCP")), "", 1),
        ("unknown protocol", port(Some("p"), Some(80), Some("ICMP")), "", 1),
    ] {
        let converted = slice(&api.0).unwrap();
        let ports = converted.value.ports.iter().map(|p| format!("{} {}/{}", p.name, p.port, p.protocol));
        assert_eq!(ports.collect::<Vec<_>>().join(", "), expected, "{id}");
        assert_eq!(converted.problems.len(), problems, "{id}: {:?}", converted.problems);
    }

    let mut without_api_server = port(None, Some(80), None).0;
    default_slice(&mut without_api_server);
    assert_eq!(&*slice(&without_api_server).unwrap().value.ports[0].name, "");
}

#[test]
fn absent_conditions_have_the_defaults_of_the_api() {
    for (id, conditions, expected) in [
        ("none", serde_json::json!(null), (true, true, false)),
        ("empty", serde_json::json!({}), (true, true, false)),
        ("LR-8", serde_json::json!({ "ready": false }), (false, true, false)),
        ("terminating", serde_json::json!({ "ready": false, "terminating": true }), (false, true, true)),
        ("not serving", serde_json::json!({ "serving": false }), (true, false, false)),
    ] {
        let api = change(|s| {
            s.0.endpoints.as_mut().unwrap()[0].conditions = serde_json::from_value(conditions).unwrap();
        });
        let endpoint = &api.build().endpoints[0];
        assert_eq!((endpoint.ready, endpoint.serving, endpoint.terminating), expected, "{id}");
    }
}

#[test]
fn the_first_address_is_the_endpoint() {
    let addresses = |texts: &[&str]| {
        change(|s| {
            s.0.endpoints.as_mut().unwrap()[0].addresses = texts.iter().map(|t| (*t).to_owned()).collect();
        })
    };
    for (id, api, expected, problems) in [
        ("first", addresses(&["10.0.0.1", "10.0.0.2"]), "10.0.0.1", 0),
        ("FLOW-11", addresses(&["10.180.00.001"]), "10.180.0.1", 0),
        ("none", addresses(&[]), "", 0),
        ("other family", addresses(&["2001:db8::1"]), "", 1),
        ("no address", addresses(&["pod-1"]), "", 1),
        ("unspecified", addresses(&["0.0.0.0"]), "", 1),
        ("multicast", addresses(&["224.0.0.1"]), "", 1),
    ] {
        let converted = slice(&api.0).unwrap();
        let ips = converted.value.endpoints.iter().map(|e| e.ip.to_string());
        assert_eq!(ips.collect::<Vec<_>>().join(" "), expected, "{id}");
        assert_eq!(converted.problems.len(), problems, "{id}: {:?}", converted.problems);
    }
    let v6 = slice_of("ns/s", "svc").ports("p 80/TCP").endpoints("", "2001:db8::1 R").build();
    assert_eq!((v6.family, v6.endpoints.len()), (Family::V6, 1));
}

#[test]
fn nodes_zones_and_hints_are_kept_once() {
    let slice = slice_of("ns/s", "svc").endpoints("10.0.0", ".1 R @n1 za n2; .2 R @n1 z{bc}; .3 R").build();
    let [a, b, c] = &slice.endpoints[..] else { panic!("{slice:?}") };
    assert!(Arc::ptr_eq(a.node.as_ref().unwrap(), b.node.as_ref().unwrap()), "one copy of the node's name");
    let hints = a.hints.as_ref().unwrap();
    assert_eq!((&*hints.zones[0], &*hints.nodes[0]), ("zone-a", "node-2"));
    assert_eq!(b.hints.as_ref().unwrap().zones.len(), 2);
    assert!(c.hints.is_none() && c.node.is_none());

    let empty = change(|s| {
        let endpoint = &mut s.0.endpoints.as_mut().unwrap()[0];
        endpoint.node_name = Some(String::new());
        endpoint.hints = Some(Default::default());
    });
    let endpoint = &empty.build().endpoints[0];
    assert!(endpoint.node.is_none() && endpoint.hints.is_none(), "empty is absent");
}

#[test]
fn annotations_give_weight_and_trigger_time() {
    for (text, expected, problems) in
        [("0", Some(0), 0), ("100", Some(100), 0), ("101", None, 1), ("-1", None, 1), ("half", None, 1), ("", None, 1)]
    {
        let converted = slice(&base().annotation("sheave.io/weight", text).0).unwrap();
        assert_eq!(converted.value.weight, expected, "{text:?}");
        assert_eq!(converted.problems.len(), problems, "{text:?}: {:?}", converted.problems);
    }
    assert_eq!(base().build().weight, None);

    let trigger =
        |text| base().annotation("endpoints.kubernetes.io/last-change-trigger-time", text).build().trigger_time;
    assert_eq!(trigger("1970-01-01T00:00:01.5Z"), Some(1_500_000_000));
    assert_eq!(trigger("1970-01-01T01:00:01+01:00"), Some(1_000_000_000));
    assert_eq!((trigger("soon"), base().build().trigger_time), (None, None), "TT-4");
}
