//! Services as text.

use std::collections::BTreeMap;

use super::{
    Cell, Row, Table, colours_wanted, endpoint, json,
    services::{details, names, table},
    yaml,
};
use crate::view::{BackendView, FrontendView, Items, ServiceView};

fn service(name: &str, kind: &str, reason: Option<&str>, frontends: Vec<FrontendView>) -> ServiceView {
    ServiceView {
        namespace: "t".to_owned(),
        name: name.to_owned(),
        kind: kind.to_owned(),
        cluster_ips: if reason.is_none() { vec!["10.96.0.20".to_owned()] } else { Vec::new() },
        reason: reason.map(str::to_owned),
        labels: BTreeMap::from([("app".to_owned(), name.to_owned())]),
        frontends,
    }
}

fn frontend(kind: &str, address: &str, port: u16, message: Option<&str>) -> FrontendView {
    let backend = |n: u8, ready| BackendView {
        address: format!("10.244.1.{n}"),
        port: 8080,
        node: Some("n1".to_owned()),
        zone: (n == 10).then(|| "z1".to_owned()),
        ready,
        serving: true,
        terminating: !ready,
        selected: ready,
    };
    FrontendView {
        kind: kind.to_owned(),
        address: address.to_owned(),
        port,
        protocol: "TCP".to_owned(),
        port_name: "http".to_owned(),
        ready: 1,
        total: 2,
        programmed: message.is_none(),
        message: message.map(str::to_owned),
        backends: vec![backend(10, true), backend(11, false)],
    }
}

fn sample() -> Items<ServiceView> {
    let full = "map FRONTENDS is full (1000 entries); raise --max-frontends";
    Items {
        items: vec![
            service(
                "web",
                "NodePort",
                None,
                vec![
                    frontend("ClusterIP", "10.96.0.20", 80, None),
                    frontend("NodePort", "2001:db8::11", 40000, Some(full)),
                ],
            ),
            service("none", "ClusterIP", Some("headless"), Vec::new()),
            service("bad", "ClusterIP", Some("invalid: port 0"), Vec::new()),
        ],
    }
}

#[test]
fn svc_list_has_one_line_for_every_frontend_and_one_for_a_service_without() {
    let expected = "
NAMESPACE   NAME   TYPE        ADDRESS                    READY   PROGRAMMED
t           web    ClusterIP   10.96.0.20:80/TCP          1/2     yes
t           web    NodePort    [2001:db8::11]:40000/TCP   1/2     no: map FRONTENDS is full (1000 entries); raise --max-frontends
t           none   ClusterIP   -                          -       -: headless
t           bad    ClusterIP   -                          -       -: invalid: port 0";
    assert_eq!(table(&sample(), false).text().trim_end(), expected.trim());
}

#[test]
fn the_wide_list_names_the_port_and_the_backends_in_use() {
    let text = table(&Items { items: vec![sample().items.remove(0)] }, true).text();
    let line = text.lines().nth(1).unwrap();
    assert_eq!(
        line.split_whitespace().collect::<Vec<_>>()[3..],
        ["10.96.0.20:80/TCP", "1/2", "yes", "http", "10.244.1.10:8080"]
    );
}

#[test]
fn svc_get_is_a_page() {
    let mut service = sample().items.remove(0);
    service.frontends.truncate(1);
    let expected = "
Name:        web
Namespace:   t
Type:        NodePort
Cluster IPs: 10.96.0.20
Labels:      app=web

ClusterIP 10.96.0.20:80/TCP
  Port name:   http
  Ready:       1/2
  Programmed:  yes
  BACKEND            NODE      READY   SERVING   TERMINATING   SELECTED
  10.244.1.10:8080   n1 (z1)   yes     yes       no            yes
  10.244.1.11:8080   n1        no      yes       yes           no";
    assert_eq!(details(&service).trim_end(), expected.trim());
    assert!(details(&sample().items[1]).contains("No frontend: headless"));
}

#[test]
fn json_and_yaml_say_the_same_and_keep_the_contract() {
    let parsed: serde_json::Value = serde_json::from_str(&json(&sample()).unwrap()).unwrap();
    let from_yaml: serde_json::Value = serde_saphyr::from_str(&yaml(&sample()).unwrap()).unwrap();
    assert_eq!(parsed, from_yaml);
    for (path, expected) in [
        ("/items/0/namespace", r#""t""#),
        ("/items/0/type", r#""NodePort""#),
        ("/items/0/clusterIPs/0", r#""10.96.0.20""#),
        ("/items/0/reason", "null"),
        ("/items/1/reason", r#""headless""#),
        ("/items/1/frontends", "[]"),
        ("/items/0/frontends/1/kind", r#""NodePort""#),
        ("/items/0/frontends/1/address", r#""2001:db8::11""#),
        ("/items/0/frontends/1/port", "40000"),
        ("/items/0/frontends/1/protocol", r#""TCP""#),
        ("/items/0/frontends/1/portName", r#""http""#),
        ("/items/0/frontends/1/ready", "1"),
        ("/items/0/frontends/1/total", "2"),
        ("/items/0/frontends/1/programmed", "false"),
        ("/items/0/frontends/0/backends/1/terminating", "true"),
        ("/items/0/frontends/0/backends/1/selected", "false"),
        ("/items/0/frontends/0/backends/0/zone", r#""z1""#),
    ] {
        assert_eq!(parsed.pointer(path).map(ToString::to_string).as_deref(), Some(expected), "{path}");
    }
}

#[test]
fn case_36_services_show_ports_as_in_the_api() {
    for port in [1, 80, 443, 8080, 30800, 32768, 40000, 65535] {
        for address in ["10.96.0.20", "2001:db8::20"] {
            let items = Items {
                items: vec![service("web", "ClusterIP", None, vec![frontend("ClusterIP", address, port, None)])],
            };
            let shown = endpoint(address, port) + "/TCP";
            assert_eq!(shown.rsplit_once(':').unwrap().1, format!("{port}/TCP"));
            for text in [table(&items, false).text(), table(&items, true).text(), details(&items.items[0])] {
                assert!(text.split_whitespace().any(|word| word == shown), "{shown} is not in\n{text}");
            }
            for text in [json(&items).unwrap().replace('"', ""), yaml(&items).unwrap()] {
                assert!(text.contains(&format!("port: {port}")), "{port} is not in\n{text}");
            }
        }
    }
    assert_eq!(names(&sample()), "t/web\nt/none\nt/bad\n");
}

#[test]
fn colour_is_for_terminals_and_does_not_move_columns() {
    assert!(!colours_wanted(false));
    let table = table(&sample(), false);
    let plain = table.page(true).replace("\x1b[32m", "").replace("\x1b[31m", "").replace("\x1b[0m", "");
    assert!(table.page(true).contains("\x1b[32myes\x1b[0m"));
    assert_eq!(plain, table.text());
}

#[test]
fn changes_are_new_lines_changed_lines_and_lines_that_went() {
    let table = |rows: &[(&str, &str)]| Table {
        headings: vec!["NAME", "STATE"],
        status: 1,
        rows: rows
            .iter()
            .map(|(name, state)| Row { key: (*name).to_owned(), cells: vec![Cell::from(*name), Cell::from(*state)] })
            .collect(),
    };
    let before = table(&[("same", "1"), ("changed", "1"), ("gone", "1")]);
    let after = table(&[("same", "1"), ("changed", "2"), ("new", "1")]);
    let lines: Vec<String> = after.changes_since(&before).text().lines().skip(1).map(str::to_owned).collect();
    assert_eq!(lines, ["changed   2", "new       1", "gone      deleted"]);
    assert!(after.changes_since(&after).rows.is_empty());
}
