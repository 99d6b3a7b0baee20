//! Case 36: every list prints the numbers of the API objects, in every format.

use std::collections::BTreeSet;

use anyhow::{Result, ensure};
use sheave_tests::{
    lab::Lab,
    objects::{Slice, Svc},
    wait::{SOON, eventually},
};

const PORTS: [u16; 8] = [1, 80, 443, 8080, 30800, 32768, 40000, 65535];

#[test]
fn case_36_ports_and_addresses_are_printed_as_in_the_api() -> Result<()> {
    let Some((lab, agent)) = Lab::with_agent()? else { return Ok(()) };
    let mut service = Svc::new("ports").ip("10.96.1.200").ip("2001:db8:f::36");
    let slice = |family: &str, address: &str| {
        let slice = Slice::new(&format!("ports-{family}"), "ports").ready(address, "n1");
        PORTS.iter().fold(slice, |slice, port| {
            slice.port(&format!("t{port}"), *port, "TCP").port(&format!("u{port}"), *port, "UDP")
        })
    };
    for port in PORTS {
        service = service.port(&format!("t{port}"), port, "TCP").port(&format!("u{port}"), port, "UDP");
    }
    lab.apply(&[&service, &slice("4", "10.244.1.10"), &slice("6", "2001:db8:1::10")])?;
    let lines: Vec<_> = PORTS
        .iter()
        .flat_map(|port| {
            ["TCP", "UDP"].into_iter().flat_map(move |protocol| {
                [
                    format!("10.96.1.200:{port}/{protocol} → 10.244.1.10:{port}"),
                    format!("[2001:db8:f::36]:{port}/{protocol} → [2001:db8:1::10]:{port}"),
                ]
            })
        })
        .collect();
    agent.expect("ports", &lines.iter().map(String::as_str).collect::<Vec<_>>())?; // JSON of svc list and lb list

    for args in [
        vec!["svc", "list", "-A"],
        vec!["svc", "list", "-A", "-o", "wide"],
        vec!["svc", "list", "-A", "-o", "yaml"],
        vec!["lb", "list", "-A"],
        vec!["lb", "list", "-A", "-o", "wide"],
        vec!["lb", "list", "-A", "-o", "yaml"],
        vec!["lb", "list", "-A", "--frontends"],
        vec!["lb", "list", "-A", "--backends"],
    ] {
        let text = eventually("the list is printed", SOON, || {
            let text = agent.sheave(&args)?;
            ensure!(text.contains("65535"), "no port in {text}");
            Ok(text)
        })?;
        // Whatever stands where a port may stand: a number of its own, or what follows the last colon of an address.
        let numbers: BTreeSet<i64> = text
            .split(|c: char| c.is_whitespace() || "/,()\"'[]→".contains(c))
            .filter_map(|word| word.rsplit(':').next()?.parse().ok())
            .filter(|number| !(0..=40).contains(number)) // counts
            .collect();
        let expected: BTreeSet<i64> = PORTS.iter().map(|port| i64::from(*port)).filter(|port| *port > 40).collect();
        assert!(expected.is_subset(&numbers), "{args:?}: {numbers:?} in\n{text}");
        assert!(numbers.is_subset(&expected), "{args:?}: a number that nobody wrote: {numbers:?} in\n{text}");
        assert!(text.contains("10.96.1.200") || text.contains("10.244.1.10"), "{args:?}: {text}");
        assert!(!text.contains("200.1.96.10") && !text.contains("10.1.244.10"), "{args:?}: {text}");
    }
    Ok(())
}
