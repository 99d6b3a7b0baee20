//! Case 34: more than the maps hold. What fits works whole, what does not is said.

use anyhow::{Context, Result, ensure};
use sheave_tests::{
    client::Way,
    lab::Lab,
    objects::{Slice, Svc},
    wait::{SOON, eventually},
};

const SERVICES: u8 = 200;
const BACKENDS: u8 = 20;

#[test]
fn case_34_a_service_works_whole_or_is_marked_as_left_out() -> Result<()> {
    let Some(lab) = Lab::new(1)? else { return Ok(()) };
    let pod = lab.n1().pod(10)?;
    let _server = pod.place.echo("A", &["8080/TCP"])?;
    let addresses: Vec<_> = (1..=BACKENDS).map(|number| format!("10.244.9.{number}")).collect();
    let lines: Vec<_> = addresses.iter().map(|address| format!("addr add {address}/32 dev eth0")).collect();
    pod.place.ip(&lines.join("\n"))?;
    lab.n1().host.ip("route add 10.244.9.0/24 via 10.244.1.10 dev pod10 onlink")?;
    let agent = lab.n1().agent_with(&["--max-backends=1000"])?;

    let name = |number: u8| format!("s{number:03}");
    let ip = |number: u8| format!("10.96.2.{number}");
    let service = |number| Svc::new(&name(number)).ip(&ip(number)).port("http", 80, "TCP");
    let slice = |number| {
        let slice = Slice::new(&name(number), &name(number)).port("http", 8080, "TCP");
        addresses.iter().fold(slice, |slice, address| slice.ready(address, "n1"))
    };
    for number in 1..=SERVICES {
        lab.apply(&[&slice(number), &service(number)])?;
    }
    eventually("all are known, not all fit", SOON, || {
        let status = agent.status()?;
        ensure!(status.services == usize::from(SERVICES), "{} services", status.services);
        ensure!(status.frontends_programmed < status.frontends && status.health == "degraded", "{status:#?}");
        ensure!(status.problems.iter().any(|problem| problem.contains("--max-backends")), "{:?}", status.problems);
        Ok(())
    })?;
    let client = lab.n1().host.client()?;
    let check = || -> Result<usize> {
        let (services, kernel) = (agent.services()?, agent.kernel()?);
        let mut works = 0;
        for service in &services {
            let frontend = service.frontends.first().context("no frontend")?;
            let rows: Vec<_> = kernel.iter().filter(|row| row.service == Some(format!("t/{}", service.name))).collect();
            if frontend.programmed {
                ensure!(rows.len() == 1 && rows[0].backends.len() == usize::from(BACKENDS), "{rows:?}");
                ensure!(client.outcome(Way::Tcp, &format!("{}:80", frontend.address))? == "A", "{frontend:?}");
                works += 1;
            } else {
                ensure!(frontend.message.is_some(), "left out, and no word why: {frontend:?}");
                ensure!(rows.iter().all(|row| row.backends.is_empty()), "half programmed: {rows:?}");
            }
        }
        Ok(works)
    };
    let works = eventually("each works or is marked", SOON, check)?;
    assert!((30..=50).contains(&works), "{works} fit into 1000 backends");

    for number in 51..=SERVICES {
        lab.delete(&[&service(number), &slice(number)])?;
    }
    eventually("those that were left out are in", 3 * SOON, || {
        let status = agent.status()?;
        ensure!(status.services == 50 && status.frontends_programmed == status.frontends, "{status:#?}");
        ensure!(status.health == "ok", "{:?}", status.problems);
        Ok(())
    })?;
    assert_eq!(check()?, 50);
    Ok(())
}
