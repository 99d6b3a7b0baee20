//! Kubernetes API objects → model, field by field.
//!
//! Nothing here fails: what cannot be understood is left out and named in a sentence (invariant 7: no object stops the
//! agent). Nothing of the API object is kept.

mod node;
mod service;
mod service_cidr;
mod slice;

#[cfg(test)]
pub(crate) mod fixtures;

use std::collections::BTreeSet;

use k8s_openapi::{api::core::v1 as core, api::discovery::v1 as discovery, api::networking::v1 as networking};

use crate::model::{EndpointSlice, Node, Protocol, Service, ServiceCidr, ServiceName, SliceName};

/// What the operator chose about whose Services are ours.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ConvertOptions {
    /// Handle only Services whose label `service.kubernetes.io/service-proxy-name` has this value; `None` = those
    /// without the label, as kube-proxy does.
    pub proxy_name: Option<String>,
    /// Leave these alone, like the annotation `sheave.io/skip: "true"`: another agent of the node serves their
    /// addresses, as NodeLocal DNSCache does with the one of kube-dns.
    pub skip: BTreeSet<ServiceName>,
}

/// An object of the model, and what of the API object could not be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Converted<T> {
    /// What could be used.
    pub value: T,
    /// One sentence each, naming the object and the field.
    pub problems: Vec<String>,
}

/// A slice that is none of ours: the same as no slice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Skip {
    /// Who it is; `None` when it has no name or namespace.
    pub name: Option<SliceName>,
}

/// `None` only when it has no name or namespace. A Service that cannot be served says so in `no_frontend`.
#[must_use]
pub fn service(api: &core::Service, options: &ConvertOptions) -> Option<Converted<Service>> {
    service::convert(api, options)
}

/// The slice, unless a row of I has it ignored.
///
/// # Errors
/// [`Skip`] for a slice without owner, of FQDNs, or of a headless Service: whoever knew it before must forget it.
pub fn slice(api: &discovery::EndpointSlice) -> Result<Converted<EndpointSlice>, Skip> {
    slice::convert(api)
}

/// What the API server would have filled in. Objects that did not come through one need it: there, a slice port
/// without name is ignored.
pub fn default_slice(api: &mut discovery::EndpointSlice) {
    for port in api.ports.iter_mut().flatten() {
        port.name.get_or_insert_default();
    }
}

/// `None` only when it has no name.
#[must_use]
pub fn node(api: &core::Node) -> Option<Converted<Node>> {
    node::convert(api)
}

/// `None` only when it has no name.
#[must_use]
pub fn service_cidr(api: &networking::ServiceCIDR) -> Option<Converted<ServiceCidr>> {
    service_cidr::convert(api)
}

/// Collects sentences about one object.
struct Problems {
    object: String,
    found: Vec<String>,
}

impl Problems {
    const fn of(object: String) -> Self {
        Self { object, found: Vec::new() }
    }

    fn add(&mut self, sentence: impl std::fmt::Display) {
        self.found.push(format!("{}: {sentence}.", self.object));
    }

    /// A port number; 0 is none.
    fn port(&mut self, field: impl std::fmt::Display, number: i32) -> u16 {
        u16::try_from(number).unwrap_or_else(|_| {
            self.add(format_args!("{field} is {number}, which is not a port number, so it is ignored"));
            0
        })
    }

    /// A protocol; the API's default is TCP.
    fn protocol(&mut self, field: impl std::fmt::Display, text: Option<&str>) -> Option<Protocol> {
        match text.unwrap_or_default() {
            "" | "TCP" => Some(Protocol::Tcp),
            "UDP" => Some(Protocol::Udp),
            "SCTP" => Some(Protocol::Sctp),
            other => {
                self.add(format_args!("{field} is {other:?}, not TCP, UDP or SCTP, so the port is ignored"));
                None
            }
        }
    }
}

#[cfg(test)]
mod tests;
