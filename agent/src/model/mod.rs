//! What the API says, compactly, and the rules that concern one object at a time.
//!
//! No clock, no kernel, no Kubernetes type, no async runtime: facts in, facts out.

pub mod endpoint;
pub mod node;
pub mod service;
mod service_cidr;
pub mod state;
pub mod topology;

pub use endpoint::{Endpoint, EndpointSlice, SliceName, SlicePort};
pub use node::Node;
pub use service::{Algorithm, Family, Protocol, Service, ServiceName, ServicePort, ServiceType};
pub use service_cidr::ServiceCidr;
pub use state::{Changes, Noted, SliceChange, State, Update};
