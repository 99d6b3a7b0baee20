//! Where objects come from: a cluster ([`kube`]) or a directory of manifests ([`manifests`]). Both tell the same.
//!
//! A source is started with the sending end of a channel and lives as long as the receiving end. It never fails once
//! started: what is wrong is told as [`SourceEvent::State`] or [`SourceEvent::Problem`], and tried again.

pub mod address;
pub mod convert;
mod decode;
pub mod events;
pub mod intern;
pub mod kube;
pub mod manifests;
mod meter;
mod pace;
mod report;
mod watch;
mod whereabouts;

use std::{collections::BTreeSet, net::SocketAddr};

use tokio::sync::mpsc::UnboundedSender;

use crate::model::Update;

/// What a source reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SourceEvent {
    /// An object, or the complete list of a kind, as it is now. The first of each kind is always a complete list.
    Update(Update),
    /// Where the source asks its API servers; told at the start, and whenever a name leads elsewhere.
    ApiServers(BTreeSet<SocketAddr>),
    /// An object (or a file) that cannot be used, wholly or in part. Told once for as long as the message stays the
    /// same.
    Problem {
        /// What it is about, such as `Service default/web`.
        object: String,
        /// What is wrong with it, a sentence that names the object.
        message: String,
    },
    /// An object that had a problem is well now, or gone.
    Resolved {
        /// As in `Problem`.
        object: String,
    },
    /// How the source itself is; told at the start and whenever it changes.
    State(SourceState),
}

/// How a source is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SourceState {
    /// Where objects come from: `kubernetes https://10.0.0.1:6443`, `manifests /etc/sheave`.
    pub source: String,
    /// Why what was told may be out of date, one sentence each; empty while the source is connected and in step.
    pub problems: Vec<String>,
}

/// Where a source sends. Unbounded, since a source must not wait while the datapath is busy, and small: at most one
/// list of each kind and what changed since.
pub type Sender = UnboundedSender<SourceEvent>;
