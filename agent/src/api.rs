//! The agent's unix socket, through which `svc` and `status` ask what it wants and how it is doing.
//!
//! HTTP/1 with JSON. `GET /v1/services` (`?namespace=`, `?name=` narrow it) and `GET /v1/status`; with `?watch` the
//! answer is repeated, one line each, whenever it may have changed. The socket is for root only: mode 0600.

pub mod client;

use std::{
    convert::Infallible,
    fs, io,
    os::unix::fs::{MetadataExt as _, PermissionsExt as _},
    path::{Path, PathBuf},
    time::Duration,
};

use axum::{
    Router,
    body::Body,
    extract::{Query, State},
    http::{StatusCode, header::CONTENT_TYPE},
    response::{IntoResponse as _, Response},
    routing::get,
};
use futures::stream;
use serde::{Deserialize, Serialize};
use tokio::{
    net::UnixListener,
    sync::{mpsc, oneshot, watch},
    time::sleep,
};

use crate::{
    lifecycle::upkeep::{PERIOD, Part, Upkeep},
    observe::metrics::Snapshot,
    view::{Items, ServiceView, StatusView},
};

/// A question to the core loop. It answers from its own state, between two events; a dropped sender means "no answer".
#[derive(Debug)]
pub enum Request {
    /// Every Service, as wanted.
    Services {
        /// No answer before every source has told its first complete lists.
        complete: bool,
        /// Where the answer goes.
        reply: oneshot::Sender<Items<ServiceView>>,
    },
    /// How the agent is.
    Status(oneshot::Sender<StatusView>),
    /// What metrics are read from.
    Metrics {
        /// At most so many services, and so many backends, are told apart by their connections.
        series: usize,
        /// Where the answer goes.
        reply: oneshot::Sender<Snapshot>,
    },
}

/// What the server needs of the core loop.
#[derive(Clone, Debug)]
pub struct ApiHandle {
    /// Where questions go.
    pub requests: mpsc::Sender<Request>,
    /// Changes whenever an answer may have changed.
    pub version: watch::Receiver<u64>,
}

/// A stream does not repeat itself faster than this: a busy cluster must not keep the core loop busy with answers.
const PACE: Duration = Duration::from_millis(100);

/// Binds the socket for root only, over what a dead agent left. Call it with the run directory's lock held.
///
/// # Errors
///
/// When the directory cannot be written, or the path is longer than a unix socket's may be (107 bytes).
pub fn bind(path: &Path) -> io::Result<UnixListener> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        Ok(()) | Err(_) => {}
    }
    let listener = UnixListener::bind(path)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}

/// Serves until the listener fails for good; puts the socket back when it or its directory is removed.
///
/// # Errors
///
/// That failure.
pub async fn keep(path: PathBuf, listener: UnixListener, handle: ApiHandle, upkeep: Upkeep) -> io::Result<()> {
    let mut serving = Box::pin(serve(listener, handle.clone()));
    let mut ours = inode(&path).ok();
    loop {
        tokio::select! {
            ended = &mut serving => return ended,
            () = sleep(PERIOD) => {}
        }
        let is_there = ours.is_some() && inode(&path).ok() == ours;
        let outcome = if is_there {
            Ok(false)
        } else {
            bind_again(&path).map(|listener| {
                serving = Box::pin(serve(listener, handle.clone()));
                ours = inode(&path).ok();
                true
            })
        };
        upkeep.note(Part::Socket, path.display(), outcome);
        upkeep.report();
    }
}

fn bind_again(path: &Path) -> io::Result<UnixListener> {
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory)?;
    }
    bind(path)
}

/// Tells our socket from another file of its name.
fn inode(path: &Path) -> io::Result<u64> {
    fs::symlink_metadata(path).map(|metadata| metadata.ino())
}

/// Serves until the listener fails for good.
///
/// # Errors
///
/// That failure.
pub async fn serve(listener: UnixListener, handle: ApiHandle) -> io::Result<()> {
    let router = Router::new().route("/v1/services", get(services)).route("/v1/status", get(status)).with_state(handle);
    axum::serve(listener, router).await
}

/// Which Services are meant; `None` = any.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Filter {
    /// Namespace.
    pub namespace: Option<String>,
    /// Name.
    pub name: Option<String>,
}

impl Filter {
    fn admits(&self, service: &ServiceView) -> bool {
        self.namespace.as_ref().is_none_or(|n| *n == service.namespace)
            && self.name.as_ref().is_none_or(|n| *n == service.name)
    }
}

#[derive(Debug, Deserialize)]
struct Watch {
    watch: Option<String>,
}

impl Watch {
    /// `?watch`, `?watch=true` and the like.
    fn is_wanted(&self) -> bool {
        self.watch.as_deref().is_some_and(|w| !matches!(w, "false" | "0"))
    }
}

async fn services(
    State(handle): State<ApiHandle>,
    Query(filter): Query<Filter>,
    Query(watch): Query<Watch>,
) -> Response {
    respond(handle, Question::Services(filter), watch.is_wanted()).await
}

async fn status(State(handle): State<ApiHandle>, Query(watch): Query<Watch>) -> Response {
    respond(handle, Question::Status, watch.is_wanted()).await
}

enum Question {
    Services(Filter),
    Status,
}

impl Question {
    /// The answer as one line of JSON; `None` when the core loop has ended, or cannot give a `complete` one yet.
    async fn ask(&self, handle: &ApiHandle, complete: bool) -> Option<String> {
        match self {
            Self::Services(filter) => {
                let (reply, answer) = oneshot::channel();
                handle.requests.send(Request::Services { complete, reply }).await.ok()?;
                let mut services = answer.await.ok()?;
                services.items.retain(|s| filter.admits(s));
                line(&services)
            }
            Self::Status => {
                let (sender, answer) = oneshot::channel();
                handle.requests.send(Request::Status(sender)).await.ok()?;
                line(&answer.await.ok()?)
            }
        }
    }
}

fn line(answer: &impl Serialize) -> Option<String> {
    let mut line = serde_json::to_string(answer).ok()?;
    line.push('\n');
    Some(line)
}

async fn respond(handle: ApiHandle, question: Question, watch: bool) -> Response {
    let json = [(CONTENT_TYPE, "application/json")];
    if !watch {
        return match question.ask(&handle, false).await {
            Some(answer) => (json, answer).into_response(),
            None => (StatusCode::SERVICE_UNAVAILABLE, "the agent is shutting down\n").into_response(),
        };
    }
    let mut version = handle.version.clone();
    version.mark_changed(); // the first answer comes at once
    let lines = stream::unfold((handle, version, question), |(handle, mut version, question)| async move {
        loop {
            version.changed().await.ok()?;
            // To whoever watched the agent before, a list that is not complete would say that Services are gone.
            if let Some(answer) = question.ask(&handle, true).await {
                sleep(PACE).await;
                return Some((Ok::<_, Infallible>(answer), (handle, version, question)));
            }
        }
    });
    (json, Body::from_stream(lines)).into_response()
}

#[cfg(test)]
mod tests;
