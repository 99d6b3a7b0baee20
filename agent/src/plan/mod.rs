//! From the model to the tables: every rule about what is programmed lives here and in `model`.
//!
//! Pure like the model. [`group`] plans one port of one Service in one family, looking at nothing else;
//! [`tables`] holds all groups and settles who owns an address that several claim.

mod frontends;
pub mod group;
pub mod ids;
pub mod kind;
pub mod maglev;
pub mod node_ports;
mod run;
pub mod tables;
