//! What others see of an agent: load balancers and kubelets by its health, scrapers by its metrics, people by its Events.

pub mod events;
pub mod health;
pub mod health_check;
pub mod metrics;
pub mod server;
