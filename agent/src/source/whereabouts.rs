//! The addresses behind the API servers' URLs, so that no Service takes them over.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    time::Duration,
};

use tokio::{net::lookup_host, time::sleep};

use super::{Sender, SourceEvent};

/// Until a name is looked up again.
const AGAIN: Duration = Duration::from_secs(60);

/// Host and port of a URL; an IPv6 address has no brackets.
pub type Host = (String, u16);

/// Host and port that a URL leads to.
pub fn host(url: &http::Uri) -> Host {
    let host = url.host().unwrap_or_default().trim_start_matches('[').trim_end_matches(']');
    let port = url.port_u16().unwrap_or(if url.scheme() == Some(&http::uri::Scheme::HTTP) { 80 } else { 443 });
    (host.to_owned(), port)
}

/// Tells where the hosts are, and again when that changes. What cannot be looked up is where it was.
pub async fn follow(hosts: Vec<Host>, events: Sender) {
    let mut known = BTreeMap::new();
    let mut told = BTreeSet::new();
    while !events.is_closed() {
        for host in &hosts {
            match lookup_host(host.clone()).await {
                Ok(addresses) => drop(known.insert(host, addresses.collect::<BTreeSet<SocketAddr>>())),
                Err(error) => tracing::debug!(host = host.0, %error, "cannot look up the API server's address"),
            }
            let all: BTreeSet<SocketAddr> = known.values().flatten().copied().collect();
            if all != told {
                told.clone_from(&all);
                let _ = events.send(SourceEvent::ApiServers(all)); // nobody listens: the loop ends
            }
        }
        sleep(AGAIN).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_leads_to_a_host_and_a_port() {
        for (url, name, port) in [
            ("https://192.0.2.1:6443", "192.0.2.1", 6443),
            ("https://[2001:db8::1]:6443/", "2001:db8::1", 6443),
            ("https://kubernetes.default.svc", "kubernetes.default.svc", 443),
            ("http://127.0.0.1", "127.0.0.1", 80),
        ] {
            assert_eq!(host(&url.parse().unwrap()), (name.to_owned(), port), "{url}");
        }
    }

    #[tokio::test]
    async fn addresses_are_told_before_anything_else() {
        let (events, mut told) = tokio::sync::mpsc::unbounded_channel();
        let hosts = vec![("192.0.2.1".to_owned(), 6443), ("2001:db8::1".to_owned(), 443)];
        let task = tokio::spawn(follow(hosts, events));
        let mut addresses = BTreeSet::new();
        while addresses.len() < 2 {
            let Some(SourceEvent::ApiServers(now)) = told.recv().await else { panic!("only addresses are told") };
            addresses = now;
        }
        assert_eq!(addresses, ["192.0.2.1:6443", "[2001:db8::1]:443"].map(|at| at.parse().unwrap()).into());
        task.abort();
    }
}
