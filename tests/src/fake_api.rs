//! An API server with faults to order, over plain HTTP: it knows lists, streamed lists and watches, nothing else.

use std::{
    collections::BTreeMap,
    convert::Infallible,
    fs,
    net::{SocketAddr, TcpListener},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use axum::{
    Router,
    body::Body,
    extract::{Query, Request, State},
    response::Response,
};
use futures::stream;
use serde_json::{Value, json};
use tokio::sync::watch;

use crate::{
    background::Background,
    node::Node,
    objects::{self, Object as _},
    place::Place,
};

/// A request that the server got.
#[derive(Clone, Debug)]
pub struct Asked {
    /// When.
    pub at: Instant,
    /// `services`, `endpointslices` or `nodes`.
    pub kind: String,
    /// The query.
    pub query: BTreeMap<String, String>,
    /// The bearer token.
    pub token: String,
}

impl Asked {
    /// A field of the query; empty if it is not there.
    #[must_use]
    pub fn field(&self, name: &str) -> &str {
        self.query.get(name).map_or("", String::as_str)
    }

    /// Whether it asks to follow from a version, rather than for a list.
    #[must_use]
    pub fn follows(&self) -> bool {
        self.field("watch") == "true" && self.field("sendInitialEvents") != "true"
    }

    /// The version to follow from.
    #[must_use]
    pub fn version(&self) -> u64 {
        self.field("resourceVersion").parse().unwrap_or(0)
    }
}

/// What a fault makes of a request.
#[derive(Clone, Debug)]
pub enum Fault {
    /// An HTTP error.
    Status(u16, &'static str),
    /// The honest answer of a stream, each object of its first list so long after the one before.
    Slowly(Duration),
    /// Exactly these bytes, then the end, that much later.
    Bytes(String, Duration),
    /// No answer at all.
    Silence,
}

type Rule = Box<dyn FnMut(&Asked) -> Option<Fault> + Send>;

/// The server; it ends with the runtime that it was started in.
#[derive(Clone)]
pub struct FakeApi {
    /// Where it listens.
    pub address: SocketAddr,
    inner: Arc<Mutex<Inner>>,
    /// Told at every change; its value counts the times that all watches were closed.
    changed: Arc<watch::Sender<u32>>,
}

struct Inner {
    version: u64,
    objects: BTreeMap<(String, String), Value>,
    /// Version, kind, event.
    events: Vec<(u64, String, Value)>,
    asked: Vec<Asked>,
    streams: bool,
    rule: Rule,
}

impl FakeApi {
    /// Starts an empty one at version 1000, on a loopback address of a place or of this host. `streams`: whether it
    /// knows streamed lists.
    ///
    /// # Errors
    /// When there is no free port.
    pub fn start(background: &Background, place: Option<&Place>, streams: bool) -> Result<Self> {
        Self::start_at("127.0.0.1:0", background, place, streams)
    }

    /// The same, at that address.
    ///
    /// # Errors
    /// When somebody listens there.
    pub fn start_at(address: &str, background: &Background, place: Option<&Place>, streams: bool) -> Result<Self> {
        let bind = || TcpListener::bind(address).with_context(|| format!("cannot listen at {address}"));
        // A socket stays in the namespace that it was made in.
        let listener = place.map_or_else(|| Ok(bind()), |place| place.enter(bind))??;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let inner = Inner {
            version: 1000,
            objects: BTreeMap::new(),
            events: Vec::new(),
            asked: Vec::new(),
            streams,
            rule: Box::new(|_| None),
        };
        let api = Self { address, inner: Arc::new(Mutex::new(inner)), changed: Arc::new(watch::Sender::new(0)) };
        let router = Router::new().fallback(answer).with_state(api.clone());
        background.handle.spawn(async move {
            let listener = tokio::net::TcpListener::from_std(listener)?;
            axum::serve(listener, router).await
        });
        Ok(api)
    }

    /// One on a node, that knows its Node object and streamed lists, and the kubeconfig that leads to it.
    ///
    /// # Errors
    /// When there is no free port, or the file cannot be written.
    pub fn on(background: &Background, node: &Node) -> Result<(Self, PathBuf)> {
        let api = Self::start(background, Some(&node.host), true)?;
        let kubeconfig = node.paths().run.join("kubeconfig");
        api.kubeconfig(&kubeconfig)?;
        api.put(&objects::node(node.number).text());
        Ok((api, kubeconfig))
    }

    /// From now on every request meets this rule first; `None` = the honest answer.
    pub fn faults(&self, rule: impl FnMut(&Asked) -> Option<Fault> + Send + 'static) {
        self.lock().rule = Box::new(rule);
    }

    /// Creates or changes an object.
    pub fn put(&self, object: &str) {
        let mut object: Value = serde_json::from_str(object).expect("objects of the tests are JSON");
        let mut inner = self.lock();
        inner.version += 1;
        object["metadata"]["resourceVersion"] = json!(inner.version.to_string());
        let known = inner.objects.insert(id(&object), object.clone());
        inner.tell(if known.is_some() { "MODIFIED" } else { "ADDED" }, &object);
        drop(inner);
        self.changed.send_modify(|_| {});
    }

    /// Deletes an object; only its name counts.
    pub fn delete(&self, object: &str) {
        let object: Value = serde_json::from_str(object).expect("objects of the tests are JSON");
        let mut inner = self.lock();
        inner.version += 1;
        if let Some(mut object) = inner.objects.remove(&id(&object)) {
            object["metadata"]["resourceVersion"] = json!(inner.version.to_string());
            inner.tell("DELETED", &object);
        }
        drop(inner);
        self.changed.send_modify(|_| {});
    }

    /// A kubeconfig that leads to it, written to a file.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn kubeconfig(&self, file: &Path) -> Result<()> {
        let text = format!(
            "clusters: [{{name: c, cluster: {{server: 'http://{}'}}}}]\nusers: [{{name: u, user: {{token: t}}}}]\n\
             contexts: [{{name: c, context: {{cluster: c, user: u}}}}]\ncurrent-context: c\n",
            self.address
        );
        fs::write(file, text).with_context(|| file.display().to_string())
    }

    /// Closes every watch, as a server does from time to time.
    pub fn hang_up(&self) {
        self.changed.send_modify(|times| *times += 1);
    }

    /// What has been asked so far.
    #[must_use]
    pub fn asked(&self, kind: &str) -> Vec<Asked> {
        self.lock().asked.iter().filter(|asked| asked.kind == kind).cloned().collect()
    }

    /// Moves the version on, as changes of other kinds do.
    pub fn skip_to(&self, version: u64) {
        self.lock().version = version;
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn tell(&mut self, what: &str, object: &Value) {
        let event = json!({"type": what, "object": object});
        self.events.push((self.version, id(&event["object"]).0, event));
    }

    fn list(&self, kind: &str) -> Vec<Value> {
        self.objects.iter().filter(|((of, _), _)| of == kind).map(|(_, object)| object.clone()).collect()
    }
}

fn id(object: &Value) -> (String, String) {
    let kind = object["kind"].as_str().unwrap_or_default().to_lowercase() + "s";
    (kind, format!("{}/{}", object["metadata"]["namespace"], object["metadata"]["name"]))
}

async fn answer(
    State(api): State<FakeApi>,
    Query(query): Query<BTreeMap<String, String>>,
    request: Request,
) -> Response {
    let kind = request.uri().path().rsplit('/').next().unwrap_or_default().to_owned();
    let authorization = request.headers().get("authorization").and_then(|value| value.to_str().ok());
    let token = authorization.and_then(|value| value.strip_prefix("Bearer ")).unwrap_or_default().to_owned();
    let asked = Asked { at: Instant::now(), kind, query, token };
    let (fault, streams) = {
        let mut inner = api.lock();
        inner.asked.push(asked.clone());
        ((inner.rule)(&asked), inner.streams)
    };
    match fault {
        Some(Fault::Status(code, reason)) => status(code, reason),
        Some(Fault::Silence) => std::future::pending().await,
        Some(Fault::Bytes(bytes, then)) => {
            let last = async move {
                tokio::time::sleep(then).await;
                Ok::<_, Infallible>(String::new())
            };
            let first = stream::iter([Ok(bytes)]);
            Response::new(Body::from_stream(stream::StreamExt::chain(first, stream::once(last))))
        }
        None if asked.field("sendInitialEvents") == "true" && !streams => status(422, "Invalid"),
        Some(Fault::Slowly(pause)) => Response::new(watching(&api, asked, pause)),
        None if asked.field("watch") == "true" => Response::new(watching(&api, asked, Duration::ZERO)),
        None => Response::new(Body::from(page(&api, &asked).to_string())),
    }
}

/// Pages of two objects at most.
fn page(api: &FakeApi, asked: &Asked) -> Value {
    let inner = api.lock();
    let items = inner.list(&asked.kind);
    let from: usize = asked.field("continue").parse().unwrap_or(0);
    let to = items.len().min(from + 2);
    let next = if to < items.len() { to.to_string() } else { String::new() };
    json!({"metadata": {"resourceVersion": inner.version.to_string(), "continue": next}, "items": items[from..to]})
}

/// Events as they come; the list first where that is asked for.
fn watching(api: &FakeApi, asked: Asked, pause: Duration) -> Body {
    let mut first = Vec::new();
    let mut seen = asked.version();
    if asked.field("sendInitialEvents") == "true" {
        let inner = api.lock();
        first.extend(inner.list(&asked.kind).into_iter().map(|object| json!({"type": "ADDED", "object": object})));
        first.push(bookmark(inner.version, true));
        seen = inner.version;
    }
    let start = stream::StreamExt::then(stream::iter(first), move |event| async move {
        tokio::time::sleep(pause).await;
        line(event)
    });
    let changed = api.changed.subscribe();
    let opened = *changed.borrow();
    let state = (api.clone(), asked.kind, seen, changed);
    let rest = stream::unfold(state, move |(api, kind, seen, mut changed)| async move {
        while *changed.borrow_and_update() == opened {
            let next = api.lock().events.iter().find(|(version, of, _)| *version > seen && *of == kind).cloned();
            if let Some((version, _, event)) = next {
                return Some((line(event), (api, kind, version, changed)));
            }
            changed.changed().await.ok()?;
        }
        None
    });
    Body::from_stream(stream::StreamExt::chain(start, rest))
}

#[expect(clippy::needless_pass_by_value, reason = "the items of an iterator")]
fn line(event: Value) -> Result<String, Infallible> {
    Ok(format!("{event}\n"))
}

/// A bookmark, as an event.
#[must_use]
pub fn bookmark(version: u64, ends_list: bool) -> Value {
    let annotations = if ends_list { json!({"k8s.io/initial-events-end": "true"}) } else { json!({}) };
    json!({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": version.to_string(), "annotations": annotations}}})
}

/// The event that a watch is told when its version is too old.
#[must_use]
pub fn expired() -> Value {
    json!({"type": "ERROR", "object": failure(410, "Expired")})
}

fn failure(code: u16, reason: &str) -> Value {
    json!({"kind": "Status", "status": "Failure", "code": code, "reason": reason, "message": "as the test wants it"})
}

fn status(code: u16, reason: &str) -> Response {
    let mut response = Response::new(Body::from(failure(code, reason).to_string()));
    *response.status_mut() = http::StatusCode::from_u16(code).expect("a status code of the tests");
    response
}
