//! Services, EndpointSlices and Nodes as tests write them: the one-line notation of the cases, as builders.
//!
//! ```text
//! SVC web ip=10.96.0.20 [http 80/TCP]          Svc::new("web").ip("10.96.0.20").port("http", 80, "TCP")
//! SLICE web-1 of web IPv4 [http 8080/TCP]      Slice::new("web-1", "web").port("http", 8080, "TCP")
//!     { 10.244.1.10 n1 ready }                     .ready("10.244.1.10", "n1")
//! ```

use serde_json::{Value, json};

/// Namespace of every object of the tests.
pub const NAMESPACE: &str = "t";

/// Something that can be applied to a lab.
pub trait Object {
    /// Name of its file among the manifests.
    fn file(&self) -> String;
    /// Its YAML. (JSON is YAML.)
    fn text(&self) -> String;
}

/// A Service without a selector: the test writes the slices itself.
#[derive(Clone, Debug)]
pub struct Svc {
    name: String,
    spec: Value,
    ingress: Value,
    metadata: Value,
}

impl Svc {
    /// A ClusterIP Service without address and ports.
    #[must_use]
    pub fn new(name: &str) -> Self {
        let metadata = json!({"name": name, "namespace": NAMESPACE, "annotations": {}, "labels": {}});
        let spec = json!({"clusterIPs": [], "ports": []});
        Self { name: name.into(), spec, ingress: json!([]), metadata }
    }

    /// TCP port 80, named "t", and UDP port 80, named "u": what [`Slice::web`] answers.
    #[must_use]
    pub fn web(name: &str, ip: &str) -> Self {
        Self::new(name).ip(ip).port("t", 80, "TCP").port("u", 80, "UDP")
    }

    /// One more cluster IP; the first also stands in `clusterIP`. "None" makes it headless.
    #[must_use]
    pub fn ip(mut self, address: &str) -> Self {
        push(&mut self.spec["clusterIPs"], json!(address));
        let addresses = self.spec["clusterIPs"].as_array().map_or(&[][..], Vec::as_slice);
        let families: Vec<_> =
            addresses.iter().filter_map(Value::as_str).filter(|a| *a != "None").map(family).collect();
        self.spec["clusterIP"] = self.spec["clusterIPs"][0].clone();
        self.spec["ipFamilyPolicy"] = json!(if families.len() > 1 { "PreferDualStack" } else { "SingleStack" });
        self.spec["ipFamilies"] = json!(families);
        self
    }

    /// One more port.
    #[must_use]
    pub fn port(mut self, name: &str, port: u16, protocol: &str) -> Self {
        push(
            &mut self.spec["ports"],
            json!({"name": name, "port": port, "protocol": protocol, "targetPort": target(name)}),
        );
        self
    }

    /// The node port of the port added last; the type becomes NodePort, unless it is LoadBalancer already.
    #[must_use]
    pub fn node_port(mut self, port: u16) -> Self {
        if let Some(last) = self.spec["ports"].as_array_mut().and_then(|ports| ports.last_mut()) {
            last["nodePort"] = json!(port);
        }
        if self.spec["type"] != "LoadBalancer" {
            self.spec["type"] = json!("NodePort");
        }
        self
    }

    /// `sessionAffinity: ClientIP` with that timeout.
    #[must_use]
    pub fn affinity(self, seconds: u32) -> Self {
        self.set("sessionAffinity", json!("ClientIP"))
            .set("sessionAffinityConfig", json!({"clientIP": {"timeoutSeconds": seconds}}))
    }

    /// Any other field of the spec.
    #[must_use]
    pub fn set(mut self, field: &str, value: Value) -> Self {
        self.spec[field] = value;
        self
    }

    /// An annotation.
    #[must_use]
    pub fn annotate(mut self, key: &str, value: &str) -> Self {
        self.metadata["annotations"][key] = json!(value);
        self
    }

    /// A label.
    #[must_use]
    pub fn label(mut self, key: &str, value: &str) -> Self {
        self.metadata["labels"][key] = json!(value);
        self
    }

    /// A load balancer's address; the type becomes LoadBalancer. `mode` is `ipMode`, "VIP" or "Proxy".
    #[must_use]
    pub fn ingress(mut self, address: &str, mode: &str) -> Self {
        push(&mut self.ingress, json!({"ip": address, "ipMode": mode}));
        self.set("type", json!("LoadBalancer"))
    }

    /// `metadata.creationTimestamp`: second of a day long ago.
    #[must_use]
    pub fn created(mut self, second: u8) -> Self {
        self.metadata["creationTimestamp"] = json!(format!("2026-01-01T00:00:{second:02}Z"));
        self
    }
}

impl Object for Svc {
    fn file(&self) -> String {
        format!("service-{}.yaml", self.name)
    }

    fn text(&self) -> String {
        let status = json!({"loadBalancer": {"ingress": self.ingress}});
        json!({"apiVersion": "v1", "kind": "Service", "metadata": self.metadata, "spec": self.spec, "status": status})
            .to_string()
    }
}

/// An EndpointSlice.
#[derive(Clone, Debug)]
pub struct Slice {
    name: String,
    family: Option<String>,
    ports: Value,
    endpoints: Value,
    labels: Value,
    annotations: Value,
}

impl Slice {
    /// A slice without ports and endpoints, of a service.
    #[must_use]
    pub fn new(name: &str, service: &str) -> Self {
        let labels = json!({"kubernetes.io/service-name": service});
        Self { name: name.into(), labels, family: None, ports: json!([]), endpoints: json!([]), annotations: json!({}) }
    }

    /// The slice of a [`Svc::web`], named like it: ports 8080, as of [`Node::server`](crate::node::Node::server).
    #[must_use]
    pub fn web(service: &str) -> Self {
        Self::new(service, service).port("t", 8080, "TCP").port("u", 8080, "UDP")
    }

    /// One more port.
    #[must_use]
    pub fn port(mut self, name: &str, port: u16, protocol: &str) -> Self {
        push(&mut self.ports, json!({"name": name, "port": port, "protocol": protocol}));
        self
    }

    /// One more endpoint that takes new connections.
    #[must_use]
    pub fn ready(self, address: &str, node: &str) -> Self {
        self.endpoint(address, node, &json!({"ready": true, "serving": true, "terminating": false}))
    }

    /// One more endpoint that is neither ready nor serving.
    #[must_use]
    pub fn not_ready(self, address: &str, node: &str) -> Self {
        self.endpoint(address, node, &json!({"ready": false, "serving": false, "terminating": false}))
    }

    /// One more endpoint on its way out that still answers.
    #[must_use]
    pub fn terminating(self, address: &str, node: &str) -> Self {
        self.endpoint(address, node, &json!({"ready": false, "serving": true, "terminating": true}))
    }

    /// One more endpoint with these conditions.
    #[must_use]
    pub fn endpoint(mut self, address: &str, node: &str, conditions: &Value) -> Self {
        self.family.get_or_insert_with(|| family(address).into());
        push(&mut self.endpoints, json!({"addresses": [address], "nodeName": node, "conditions": conditions}));
        self
    }

    /// Any other field of the endpoint added last: `hints`, `zone` …
    #[must_use]
    pub fn with(mut self, field: &str, value: Value) -> Self {
        if let Some(last) = self.endpoints.as_array_mut().and_then(|endpoints| endpoints.last_mut()) {
            last[field] = value;
        }
        self
    }

    /// `addressType`, where it is not what the first address looks like.
    #[must_use]
    pub fn address_type(mut self, family: &str) -> Self {
        self.family = Some(family.into());
        self
    }

    /// A label.
    #[must_use]
    pub fn label(mut self, key: &str, value: &str) -> Self {
        self.labels[key] = json!(value);
        self
    }

    /// An annotation.
    #[must_use]
    pub fn annotate(mut self, key: &str, value: &str) -> Self {
        self.annotations[key] = json!(value);
        self
    }
}

impl Object for Slice {
    fn file(&self) -> String {
        format!("slice-{}.yaml", self.name)
    }

    fn text(&self) -> String {
        let metadata = json!({
            "name": self.name,
            "namespace": NAMESPACE,
            "labels": self.labels,
            "annotations": self.annotations,
        });
        json!({
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": metadata,
            "addressType": self.family.as_deref().unwrap_or("IPv4"),
            "ports": self.ports,
            "endpoints": self.endpoints,
        })
        .to_string()
    }
}

/// Any object, as text.
#[derive(Clone, Debug)]
pub struct Text {
    /// Name of the file.
    pub file: String,
    /// What stands in it.
    pub text: String,
}

impl Object for Text {
    fn file(&self) -> String {
        self.file.clone()
    }

    fn text(&self) -> String {
        self.text.clone()
    }
}

/// The Node object of a node of the lab.
#[must_use]
pub fn node(number: u8) -> Text {
    let digits = 10 + number;
    let zone = format!("zone-{number}");
    node_with(number, &zone, &[&format!("192.0.2.{digits}"), &format!("2001:db8::{digits}")])
}

/// The same, when its zone or its InternalIPs are others.
#[must_use]
pub fn node_with(number: u8, zone: &str, ips: &[&str]) -> Text {
    let mut addresses = json!([{"type": "Hostname", "address": format!("n{number}")}]);
    ips.iter().for_each(|ip| push(&mut addresses, json!({"type": "InternalIP", "address": ip})));
    let cidrs = [format!("10.244.{number}.0/24"), format!("2001:db8:{number}::/64")];
    let labels = json!({"topology.kubernetes.io/zone": zone});
    let text = json!({
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": format!("n{number}"), "labels": labels},
        "spec": {"podCIDR": cidrs[0], "podCIDRs": cidrs},
        "status": {"addresses": addresses},
    });
    Text { file: format!("node-n{number}.yaml"), text: text.to_string() }
}

/// The Node object of a node of the lab with a taint, such as the cluster autoscaler's.
///
/// # Panics
/// Never: the text was made of JSON.
#[must_use]
pub fn tainted_node(number: u8, key: &str) -> Text {
    let Text { file, text } = node(number);
    let mut object: Value = serde_json::from_str(&text).expect("our own JSON");
    object["spec"]["taints"] = json!([{"key": key, "effect": "NoSchedule"}]);
    Text { file, text: object.to_string() }
}

/// A ServiceCIDR.
#[must_use]
pub fn service_cidr(name: &str, networks: &[&str]) -> Text {
    let metadata = json!({"name": name});
    let spec = json!({"cidrs": networks});
    let object =
        json!({"apiVersion": "networking.k8s.io/v1", "kind": "ServiceCIDR", "metadata": metadata, "spec": spec});
    Text { file: format!("service-cidr-{name}.yaml"), text: object.to_string() }
}

fn family(address: &str) -> &'static str {
    if address.contains(':') { "IPv6" } else { "IPv4" }
}

/// A target port is only for the controller that makes slices; it must be valid nevertheless.
fn target(name: &str) -> Value {
    if name.is_empty() { json!(1) } else { json!(name) }
}

fn push(list: &mut Value, item: Value) {
    if let Some(list) = list.as_array_mut() {
        list.push(item);
    }
}
