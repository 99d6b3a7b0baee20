//! What `sheave monitor` says of a record, and which ones are wanted. Pure.

use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};
use sheave_ebpf::{
    addr::Addr,
    counter::Counter,
    event::{AT_SOCKET, Event},
    names::{ServiceName, unpad},
};

use crate::lb;

/// A connection or datagram that was opened, refused or dropped. Contract: fields may be added, never renamed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EventView {
    /// When, in UTC: RFC 3339 with microseconds.
    pub time: String,
    /// forward, reject, drop, or untouched.
    pub verdict: String,
    /// A counter's name, as `status` and the metrics have it.
    pub reason: String,
    /// socket: a process dialled; packet: a packet came along.
    pub path: String,
    /// TCP, UDP or SCTP.
    pub protocol: String,
    /// The packet's source; null at a socket, which has no address yet.
    pub client: Option<SocketAddr>,
    /// Name of the thread that dials; null where the kernel does not tell, and for packets.
    pub process: Option<String>,
    /// Its process id; null likewise.
    pub pid: Option<u32>,
    /// What is dialled.
    pub frontend: SocketAddr,
    /// Where it is sent; null = nowhere.
    pub backend: Option<SocketAddr>,
    /// "namespace/name" of the Service; null where there is none.
    pub service: Option<String>,
}

impl EventView {
    /// From a record and the time of it.
    #[must_use]
    pub fn new(event: &Event, time: String, name: Option<&ServiceName>) -> Self {
        let reason = Counter::ALL.iter().find(|counter| **counter as u32 == event.reason);
        let at_socket = event.place == AT_SOCKET;
        let process = unpad_command(&event.command);
        let socket = |addr: &Addr, port: u16| SocketAddr::new(IpAddr::from(*addr), u16::from_be(port));
        let known = |addr: &Addr, port: u16| (*addr != Addr { words: [0; 4] }).then(|| socket(addr, port));
        Self {
            time,
            verdict: reason.map_or("unknown", |reason| verdict(*reason)).to_owned(),
            reason: reason.map_or_else(|| event.reason.to_string(), |reason| reason.name().to_owned()),
            path: if at_socket { "socket" } else { "packet" }.to_owned(),
            protocol: lb::protocol(event.proto),
            client: known(&event.client, event.client_port),
            process: (!process.is_empty()).then_some(process),
            pid: (event.pid != 0).then_some(event.pid),
            frontend: socket(&event.frontend, event.frontend_port),
            backend: known(&event.backend, event.backend_port),
            service: name.map(|n| format!("{}/{}", unpad(&n.namespace), unpad(&n.name))),
        }
    }
}

/// What a reason means for whoever dialled.
const fn verdict(reason: Counter) -> &'static str {
    match reason {
        Counter::SocketConnect
        | Counter::SocketSend
        | Counter::PacketForward
        | Counter::PacketPing
        | Counter::PacketOtherPort => "forward",
        Counter::SocketReject
        | Counter::SocketUnknownPort
        | Counter::BindRefused
        | Counter::PacketReject
        | Counter::PacketUnknownPort => "reject",
        Counter::SocketBroken
        | Counter::PacketBroken
        | Counter::SocketNoStorage
        | Counter::SocketNoPeer
        | Counter::AffinityFull
        | Counter::SnatRetry
        | Counter::SnatGivenUp
        | Counter::EventLost => "untouched",
        Counter::SocketDrop
        | Counter::PacketErrorLimit
        | Counter::SocketSourceRange
        | Counter::SocketUnknownAddress
        | Counter::PacketDrop
        | Counter::PacketUnknownAddress
        | Counter::PacketClusterIpFromOutside
        | Counter::PacketSourceRange
        | Counter::SnatExhausted
        | Counter::SnatNoAddress
        | Counter::ConntrackFull
        | Counter::PacketMalformed
        | Counter::PacketSctpPort
        | Counter::PacketClash => "drop",
    }
}

/// Programs choose what they are called.
fn unpad_command(command: &[u8; 16]) -> String {
    let end = command.iter().position(|byte| *byte == 0).unwrap_or(command.len());
    String::from_utf8_lossy(&command[..end]).into_owned()
}

/// Which records are wanted; every wish must be met.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    /// Those of this namespace.
    pub namespace: Option<String>,
    /// Those of a Service of this name.
    pub service: Option<String>,
    /// Not what is forwarded.
    pub drops: bool,
}

impl Wanted {
    /// Whether a record is.
    #[must_use]
    pub fn matches(&self, event: &EventView) -> bool {
        let (namespace, name) = event.service.as_deref().and_then(|s| s.split_once('/')).unwrap_or_default();
        self.namespace.as_ref().is_none_or(|wanted| wanted == namespace)
            && self.service.as_ref().is_none_or(|wanted| wanted == name)
            && !(self.drops && event.verdict == "forward")
    }
}

#[cfg(test)]
mod tests {
    use sheave_ebpf::{event::AT_PACKET, names::pad, proto};

    use super::*;

    fn event() -> Event {
        let addr = |text: &str| Addr::from(text.parse::<IpAddr>().unwrap());
        Event {
            time: 7,
            client: addr("198.51.100.10"),
            frontend: addr("192.0.2.11"),
            backend: addr("10.244.1.10"),
            client_port: 40_000_u16.to_be(),
            frontend_port: 30_080_u16.to_be(),
            backend_port: 8080_u16.to_be(),
            proto: proto::TCP,
            place: AT_PACKET,
            reason: Counter::PacketForward as u32,
            service: 3,
            pid: 0,
            zero: 0,
            command: [0; 16],
        }
    }

    fn name(namespace: &str, name: &str) -> ServiceName {
        let pad = |text| pad(text).unwrap();
        ServiceName {
            namespace: pad(namespace),
            name: pad(name),
            port_name: pad(""),
            proto: 6,
            family: 4,
            zero: [0; 6],
        }
    }

    #[test]
    fn a_record_reads_as_what_happened() {
        let nowhere = Addr { words: [0; 4] };
        let mut command = [0; 16];
        command[..4].copy_from_slice(b"curl");
        let at_socket = Event { place: AT_SOCKET, client: nowhere, client_port: 0, pid: 4711, command, ..event() };
        let refused = Event { backend: nowhere, backend_port: 0, reason: Counter::PacketReject as u32, ..event() };
        let cases = [
            ("a packet", event(), "forward packet_forward packet 198.51.100.10:40000 - -> 10.244.1.10:8080"),
            (
                "a connect",
                Event { reason: Counter::SocketConnect as u32, ..at_socket },
                "forward socket_connect socket - curl -> 10.244.1.10:8080",
            ),
            ("a refusal", refused, "reject packet_reject packet 198.51.100.10:40000 - -> -"),
            ("of a later version", Event { reason: 63, ..refused }, "unknown 63 packet 198.51.100.10:40000 - -> -"),
        ];
        for (what, event, expected) in cases {
            let view = EventView::new(&event, "now".to_owned(), Some(&name("shop", "web")));
            let text = |addr: Option<SocketAddr>| addr.map_or("-".to_owned(), |addr| addr.to_string());
            let process = view.process.as_deref().unwrap_or("-");
            let told = format!(
                "{} {} {} {} {process} -> {}",
                view.verdict,
                view.reason,
                view.path,
                text(view.client),
                text(view.backend)
            );
            assert_eq!(told, expected, "{what}");
            assert_eq!(view.service.as_deref(), Some("shop/web"), "{what}");
            assert_eq!(view.frontend, "192.0.2.11:30080".parse().unwrap(), "{what}");
        }
    }

    #[test]
    fn every_wish_must_be_met() {
        let view = |service: Option<ServiceName>, reason: Counter| {
            let event = Event { reason: reason as u32, ..event() };
            EventView::new(&event, String::new(), service.as_ref())
        };
        let web = view(Some(name("shop", "web")), Counter::PacketForward);
        let refused = view(Some(name("shop", "web")), Counter::PacketReject);
        let nobodys = view(None, Counter::SocketUnknownAddress);
        let wanted = |namespace: &str, service: &str, drops| Wanted {
            namespace: (!namespace.is_empty()).then(|| namespace.to_owned()),
            service: (!service.is_empty()).then(|| service.to_owned()),
            drops,
        };
        let cases = [
            (wanted("", "", false), [true, true, true]),
            (wanted("shop", "", false), [true, true, false]),
            (wanted("other", "", false), [false, false, false]),
            (wanted("", "web", false), [true, true, false]),
            (wanted("other", "web", false), [false, false, false]),
            (wanted("shop", "we", false), [false, false, false]),
            (wanted("", "", true), [false, true, true]),
            (wanted("shop", "web", true), [false, true, false]),
        ];
        for (wanted, expected) in cases {
            assert_eq!([&web, &refused, &nobodys].map(|event| wanted.matches(event)), expected, "{wanted:?}");
        }
    }
}
