//! Services.

use std::net::IpAddr;

use super::super::{
    ConvertOptions, Converted,
    fixtures::{Svc, service_name, svc},
    service,
};
use crate::model::{Algorithm, Family, Service};

fn convert(svc: &Svc) -> Converted<Service> {
    service(&svc.0, &ConvertOptions::default()).unwrap()
}

/// Why a Service has no frontend; empty when it has.
fn reason(svc: &Svc, options: &ConvertOptions) -> String {
    service(&svc.0, options).unwrap().value.no_frontend.map(|why| why.to_string()).unwrap_or_default()
}

const PROXY_NAME: &str = "service.kubernetes.io/service-proxy-name";

#[test]
fn only_services_with_a_cluster_ip_are_handled() {
    let with = |ip: &str| svc("ns/a", ip).port("80/TCP");
    let proxied = |name: &str| with("10.0.0.1").label(PROXY_NAME, name);
    let default = ConvertOptions::default();
    let named = ConvertOptions { proxy_name: Some("sheave".to_owned()), ..ConvertOptions::default() };
    let skipping = ConvertOptions { skip: [service_name("ns/a")].into(), ..ConvertOptions::default() };
    let long = "x".repeat(64);

    for (id, svc, options, expected) in [
        ("SK-1", with("None"), &default, "headless"),
        ("SK-1 without port", svc("ns/a", "None"), &default, "headless"),
        ("SK-2", with(""), &default, "no cluster IP"),
        ("SK-3", with("172.16.55.4").kind("ExternalName"), &default, "external name"),
        ("SK-3 without ClusterIP", with("").kind("ExternalName"), &default, "external name"),
        ("SK-4", with("10.0.0.1").kind("ClusterIP"), &default, ""),
        ("SK-4 NodePort", with("10.0.0.1").kind("NodePort"), &default, ""),
        ("SK-4 LoadBalancer", with("10.0.0.1").kind("LoadBalancer"), &default, ""),
        ("SK-4 without type", with("10.0.0.1"), &default, ""),
        ("SK-5", proxied("other"), &default, "handled by another proxy"),
        ("SK-5 empty value", proxied(""), &default, "handled by another proxy"),
        ("a proxy name of our own", proxied("sheave"), &named, ""),
        ("another's, with a name of our own", proxied("other"), &named, "handled by another proxy"),
        ("without the label, with a name of our own", with("10.0.0.1"), &named, "handled by another proxy"),
        ("F52 annotation", with("10.0.0.1").annotation("sheave.io/skip", "true"), &default, "left alone on request"),
        ("F52 annotation, other value", with("10.0.0.1").annotation("sheave.io/skip", "false"), &default, ""),
        ("F52 list", with("10.0.0.1"), &skipping, "left alone on request"),
        ("no port", svc("ns/a", "10.0.0.1"), &default, "invalid: no port of spec.ports can be used"),
        ("bad port", svc("ns/a", "10.0.0.1").port("0/TCP"), &default, "invalid: no port of spec.ports can be used"),
        ("bad ClusterIP", with("10.0.0"), &default, "invalid: the cluster IP \"10.0.0\" cannot be served"),
        ("loopback", with("127.0.0.1"), &default, "invalid: the cluster IP \"127.0.0.1\" cannot be served"),
        ("unspecified", with("::"), &default, "invalid: the cluster IP \"::\" cannot be served"),
        ("type", with("10.0.0.1").kind("Magic"), &default, "invalid: spec.type is unknown"),
        (
            "long name",
            svc(&format!("ns/{long}"), "10.0.0.1").port("80/TCP"),
            &default,
            "invalid: the name or namespace is longer than 63 bytes",
        ),
    ] {
        assert_eq!(reason(&svc, options), expected, "{id}");
    }
    for nameless in ["/a", "ns/", "/"] {
        assert_eq!(service(&svc(nameless, "10.0.0.1").0, &ConvertOptions::default()), None, "{nameless:?}");
    }
}

#[test]
fn the_cluster_ip_of_a_family_is_its_first() {
    // ipFamilies says the same as the addresses do, so it is not read.
    let old = |ip: &str| {
        let mut svc = svc("ns/a", ip).port("80/TCP");
        svc.0.spec.as_mut().unwrap().cluster_ips = None;
        svc
    };
    let new = |ips: &str| svc("ns/a", ips).port("80/TCP");
    for (id, svc, v4, v6) in [
        ("CIP-1", old("10.0.0.10"), "10.0.0.10", ""),
        ("CIP-2", old("2000::1"), "", "2000::1"),
        ("CIP-3", new("10.0.0.10"), "10.0.0.10", ""),
        ("CIP-4", new("2000::1"), "", "2000::1"),
        ("CIP-5", new("10.0.0.10,2000::1"), "10.0.0.10", "2000::1"),
        ("CIP-6", new("2000::1,10.0.0.10"), "10.0.0.10", "2000::1"),
    ] {
        let service = svc.build();
        let text = |family| service.cluster_ip(family).map(|ip| ip.to_string()).unwrap_or_default();
        assert_eq!((&*text(Family::V4), &*text(Family::V6)), (v4, v6), "{id}");
    }
}

/// What 2.5 lists of a Service in one family: `clusterIP port…; HC n; ext …; ranges …; VIPs …`. Parts that are empty
/// are left out.
fn entries(service: &Service, family: Family) -> String {
    let Some(ip) = service.cluster_ip(family).filter(|_| service.no_frontend.is_none()) else { return String::new() };
    let mut parts = vec![ip.to_string()];
    for port in &service.ports {
        let node_port = if port.node_port == 0 { String::new() } else { format!(" np {}", port.node_port) };
        parts.push(format!("{} {}/{}{node_port}", port.name, port.port, port.protocol).trim().to_owned());
    }
    let ips = |ips: &[IpAddr]| {
        let of_family = ips.iter().filter(|ip| Family::of(**ip) == family);
        of_family.map(ToString::to_string).collect::<Vec<_>>().join(" ")
    };
    let ranges = service.source_ranges.iter().filter(|range| Family::of(range.addr()) == family);
    let health = service.health_check_node_port;
    for (name, text) in [
        ("HC", if health == 0 { String::new() } else { health.to_string() }),
        ("ext", ips(&service.external_ips)),
        ("ranges", ranges.map(ToString::to_string).collect::<Vec<_>>().join(" ")),
        ("VIPs", ips(&service.load_balancer_ips)),
    ] {
        if !text.is_empty() {
            parts.push(format!("{name} {text}"));
        }
    }
    parts.join("; ")
}

const V6_VIP: &str = "2001:db8:85a3::8a2e:370:7335";

#[test]
fn services_become_ports() {
    let balancer = |mode| {
        let ports = ["p1 8675/UDP np 30061", "p2 8676/UDP np 30062"];
        let mut svc = ports.iter().fold(svc("ns/a", "172.16.55.11"), |svc, port| svc.port(port)).kind("LoadBalancer");
        svc.0.spec.as_mut().unwrap().load_balancer_ip = Some("5.6.7.8".to_owned());
        svc.ingress("10.1.2.4", mode)
    };
    let s07 = "172.16.55.11; p1 8675/UDP np 30061; p2 8676/UDP np 30062";
    let local_balancer = svc("ns/a", "172.16.55.12")
        .port("p1 8677/UDP np 30063")
        .port("p2 8678/UDP np 30064")
        .kind("LoadBalancer")
        .external_local()
        .health_check(345)
        .ingress("10.1.2.3", None);
    let both_vips = |svc: Svc| svc.kind("LoadBalancer").ingress("8.8.8.8", None).ingress(V6_VIP, None);
    let plain = |ip| svc("ns/a", ip).port("12345/TCP");
    let mixed = |ip| both_vips(plain(ip).external(&["8.8.8.8", V6_VIP]).ranges(&["0.0.0.0/1", "2001:db8::/32"]));
    let ranges = |ranges| plain("10.0.0.1").ranges(ranges).ingress("8.8.8.8", None).kind("LoadBalancer");
    let v6_mixed =
        format!("2001:db8:85a3::8a2e:370:7334; 12345/TCP; ext {V6_VIP}; ranges 2001:db8::/32; VIPs {V6_VIP}");
    let v4_mixed = "10.0.0.1; 12345/TCP; ext 8.8.8.8; ranges 0.0.0.0/1; VIPs 8.8.8.8";

    for (id, svc, family, expected) in [
        ("S02", svc("ns/a", "None").port("rpc 1234/UDP"), Family::V4, ""),
        ("S03", svc("ns/a", "None").port("sip 1235/SCTP"), Family::V4, ""),
        ("S04", svc("ns/a", "None"), Family::V4, ""),
        (
            "S05",
            svc("ns/a", "172.16.55.4").port("p1 1234/UDP").port("p2 1235/UDP"),
            Family::V4,
            "172.16.55.4; p1 1234/UDP; p2 1235/UDP",
        ),
        (
            "S06",
            svc("ns/a", "172.16.55.10").port("port1 345/UDP np 678").port("port2 344/TCP np 677").kind("NodePort"),
            Family::V4,
            "172.16.55.10; port1 345/UDP np 678; port2 344/TCP np 677",
        ),
        ("S07", balancer(None), Family::V4, &*format!("{s07}; VIPs 10.1.2.4")),
        ("S08", balancer(Some("VIP")), Family::V4, &*format!("{s07}; VIPs 10.1.2.4")),
        ("S09, FLOW-10", balancer(Some("Proxy")), Family::V4, s07),
        (
            "S10",
            local_balancer,
            Family::V4,
            "172.16.55.12; p1 8677/UDP np 30063; p2 8678/UDP np 30064; HC 345; VIPs 10.1.2.3",
        ),
        ("S11", svc("ns/a", "172.16.55.4").port("80/TCP").kind("ExternalName"), Family::V4, ""),
        ("S12, SK-6", plain("2001:db8::1"), Family::V4, ""),
        ("S13, SK-6", plain("10.0.0.1"), Family::V6, ""),
        ("S14", both_vips(plain("10.0.0.1").external(&["8.8.8.8"]).ranges(&["0.0.0.0/1"])), Family::V4, v4_mixed),
        (
            "S15",
            both_vips(plain("2001:db8:85a3::8a2e:370:7334").external(&[V6_VIP]).ranges(&["2001:db8::/32"])),
            Family::V6,
            &*v6_mixed,
        ),
        ("S16, FS-1, FS-2", mixed("10.0.0.1"), Family::V4, v4_mixed),
        ("S17, FS-1, FS-2", mixed("2001:db8:85a3::8a2e:370:7334"), Family::V6, &*v6_mixed),
        ("FS-3", ranges(&[]).external(&[]), Family::V6, ""),
        ("FS-3", ranges(&[]).external(&[]), Family::V4, "10.0.0.1; 12345/TCP; VIPs 8.8.8.8"),
        ("S18", ranges(&[" 10.1.2.0/28"]), Family::V4, "10.0.0.1; 12345/TCP; ranges 10.1.2.0/28; VIPs 8.8.8.8"),
        ("S19", ranges(&["10.0.0.0/8", "0.0.0.0/0"]), Family::V4, "10.0.0.1; 12345/TCP; VIPs 8.8.8.8"),
        ("S20", plain("10.0.0.1").kind("LoadBalancer").health_check(345), Family::V4, "10.0.0.1; 12345/TCP"),
        ("S22", ranges(&["2001:db8::/32"]), Family::V4, "10.0.0.1; 12345/TCP; VIPs 8.8.8.8"),
        (
            "FLOW-11",
            svc("ns/a", "172.30.0.041")
                .port("80/TCP np 3001")
                .external(&["192.168.099.022"])
                .ranges(&["203.0.113.000/025"])
                .ingress("1.2.3.004", None)
                .kind("LoadBalancer"),
            Family::V4,
            "172.30.0.41; 80/TCP np 3001; ext 192.168.99.22; ranges 203.0.113.0/25; VIPs 1.2.3.4",
        ),
    ] {
        assert_eq!(entries(&svc.build(), family), expected, "{id}");
    }
}

#[test]
fn policies_and_affinity_count_where_they_should() {
    let base = || svc("ns/a", "10.0.0.1").port("80/TCP");
    let external = |svc: &Svc| svc.build().external_local;
    assert!(!external(&base().external_local()), "S21");
    assert!(external(&base().external_local().external(&["8.8.8.8"])), "ClusterIP with externalIPs");
    assert!(external(&base().external_local().kind("NodePort")));
    assert!(external(&base().external_local().kind("LoadBalancer")));
    assert!(!external(&base().kind("LoadBalancer")));
    assert!(base().internal_local().build().internal_local && !base().build().internal_local);

    for (timeout, expected) in [(None, 10_800), (Some(1), 1), (Some(86_400), 86_400)] {
        assert_eq!(base().affinity(timeout).build().affinity, Some(expected));
    }
    assert_eq!(base().build().affinity, None);
}

#[test]
fn the_annotation_chooses_the_algorithm() {
    let with = |text| convert(&svc("ns/a", "10.0.0.1").port("80/TCP").annotation("sheave.io/lb-algorithm", text));
    for (text, expected) in [
        ("random", Algorithm::Random),
        ("round-robin", Algorithm::RoundRobin),
        ("least-connections", Algorithm::LeastConnections),
        ("maglev", Algorithm::Maglev),
    ] {
        assert_eq!(with(text).value.algorithm, Some(expected));
    }
    let unknown = with("Maglev");
    assert_eq!(unknown.value.algorithm, None);
    assert_eq!(
        unknown.problems,
        ["Service ns/a: the annotation sheave.io/lb-algorithm is \"Maglev\", not random, round-robin, \
          least-connections, maglev."]
    );
}

#[test]
fn a_zero_range_admits_everyone_of_its_family() {
    let kept = |range: &str| {
        let balancer = svc("ns/a", "10.0.0.1").port("80/TCP").kind("LoadBalancer").ingress("8.8.8.8", None);
        let service = convert(&balancer.ranges(&["10.0.0.0/8", "2001:db8::/32", range])).value;
        service.source_ranges.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
    };
    for (id, range, expected) in [
        ("ZC-1", "", "10.0.0.0/8 2001:db8::/32"),
        ("ZC-2", "172.10.0.0/16", "10.0.0.0/8 172.10.0.0/16 2001:db8::/32"),
        ("ZC-3", "0.0.0.0/0", "2001:db8::/32"),
        ("ZC-4", "::/128", "10.0.0.0/8 ::/128 2001:db8::/32"),
        ("ZC-5", "::/0", "10.0.0.0/8"),
    ] {
        assert_eq!(kept(range), expected, "{id}");
    }
}

#[test]
fn the_age_of_a_service_is_known_or_infinite() {
    let base = svc("ns/a", "10.0.0.1").port("80/TCP");
    assert_eq!(base.clone().created(1_700_000_000).build().created, 1_700_000_000);
    assert_eq!(base.build().created, i64::MAX);
}

#[test]
fn what_cannot_be_used_is_left_out_and_named() {
    let base = || svc("ns/a", "10.0.0.1").port("good 80/TCP");
    let kept = "10.0.0.1; good 80/TCP";
    let bad_range = |ranges| base().kind("LoadBalancer").ingress("8.8.8.8", None).ranges(ranges);
    for (case, svc, expected, problems) in [
        ("port 0", base().port("bad 0/TCP"), kept, 1),
        ("port 65536", base().port("bad 65536/TCP"), kept, 1),
        ("negative port", base().port("bad -1/TCP"), kept, 1),
        ("protocol", base().port("bad 81/ICMP"), kept, 1),
        ("port name twice", base().port("good 81/TCP"), kept, 1),
        ("same name, other protocol", base().port("good 80/UDP"), "10.0.0.1; good 80/TCP; good 80/UDP", 0),
        ("long port name", base().port(&format!("{} 81/TCP", "p".repeat(64))), kept, 1),
        ("nodePort", base().port("np 81/TCP np 70000"), "10.0.0.1; good 80/TCP; np 81/TCP", 1),
        (
            "externalIP",
            base().external(&["x", "127.0.0.1", "0.0.0.0", "224.0.0.1", "::1", "8.8.8.8", "8.8.8.8"]),
            "10.0.0.1; good 80/TCP; ext 8.8.8.8",
            5,
        ),
        ("VIP", base().ingress("255.255.255.255", None).ingress("", None), kept, 1),
        ("one bad range", bad_range(&["10.0.0.0/8", "x"]), "10.0.0.1; good 80/TCP; ranges 10.0.0.0/8; VIPs 8.8.8.8", 1),
        ("no good range admits nobody", bad_range(&["10.0.0.0/99"]), kept, 2),
        ("health check port", base().kind("LoadBalancer").external_local().health_check(-3), kept, 1),
        ("affinity 0", base().affinity(Some(0)), kept, 1),
        ("affinity too long", base().affinity(Some(86_401)), kept, 1),
    ] {
        let converted = convert(&svc);
        assert_eq!(entries(&converted.value, Family::V4), expected, "{case}");
        assert_eq!(converted.problems.len(), problems, "{case}: {:?}", converted.problems);
        assert!(converted.problems.iter().all(|p| p.starts_with("Service ns/a: ")), "{case}: {:?}", converted.problems);
    }
}
