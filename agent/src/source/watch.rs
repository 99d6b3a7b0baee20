//! The watch of one kind: list, then follow, then again, for ever.
//!
//! Written on kube's client rather than on its `watcher`, which starts over without a pause after a clean close, keeps
//! polling a stream that has failed, and holds whole API objects.

use std::{
    collections::{BTreeMap, HashSet},
    sync::Arc,
    time::Duration,
};

use futures::{AsyncBufRead, AsyncBufReadExt, StreamExt, io::Lines};
use kube::{
    api::{ListParams, WatchParams},
    core::{Request, Status},
};
use serde::Deserialize;
use serde_json::Value;
use tokio::time::{error::Elapsed, sleep, timeout};

use super::{
    convert::ConvertOptions,
    decode::{Decoded, Key, Kind, Lists, Object, Origin, decode},
    kube::Cluster,
    pace::{Pace, jitter},
    report::Report,
};

/// A server that has not begun to answer by then counts as away.
const ANSWER: Duration = Duration::from_secs(15);
/// Silence after which a watch is opened anew from where it was: the connection may have died without a word. API
/// servers send bookmarks about every minute.
const SILENCE: Duration = Duration::from_secs(90);
/// Silence inside a list.
const LIST_SILENCE: Duration = Duration::from_secs(30);
/// The server ends a watch after this time, and up to a quarter more, so that clients spread over its replicas again.
const WATCH: Duration = Duration::from_secs(230);
/// Until a server that does not know a kind is asked for it again.
const UNKNOWN_KIND: Duration = Duration::from_secs(300);
/// Objects a page, where the server cannot stream lists.
const PAGE: u32 = 500;
/// Marks the bookmark that ends a streamed list (Kubernetes 1.27).
const LIST_ENDS: &str = "k8s.io/initial-events-end";

const PROXY_NAME: &str = "service.kubernetes.io/service-proxy-name";

/// One kind, watched.
pub struct Watch {
    kind: Kind,
    path: &'static str,
    labels: Option<String>,
    options: ConvertOptions,
    cluster: Arc<Cluster>,
    report: Report,
    pace: Pace,
    /// From where to follow; `None` = a list is due.
    version: Option<String>,
    /// Whether the server may know streamed lists.
    streams: bool,
}

/// Why a session ended early.
#[derive(Debug)]
pub enum Failure {
    /// The server answered with an error.
    Refused(Box<Status>),
    /// No answer, or it broke off: what the client says.
    Unreachable(String),
}

impl Watch {
    /// Nothing happens before [`Watch::run`].
    pub fn new(kind: Kind, options: ConvertOptions, cluster: Arc<Cluster>, report: Report) -> Self {
        let (path, labels) = match (kind, &options.proxy_name) {
            (Kind::Service, None) => ("/api/v1/services", Some(format!("!{PROXY_NAME}"))),
            (Kind::Service, Some(name)) => ("/api/v1/services", Some(format!("{PROXY_NAME}={name}"))),
            (Kind::Slice, _) => {
                ("/apis/discovery.k8s.io/v1/endpointslices", Some("!service.kubernetes.io/headless".to_owned()))
            }
            (Kind::Node, _) => ("/api/v1/nodes", None),
            (Kind::ServiceCidr, _) => ("/apis/networking.k8s.io/v1/servicecidrs", None),
        };
        Self { kind, path, labels, options, cluster, report, pace: Pace::default(), version: None, streams: true }
    }

    /// Watches for as long as somebody listens.
    pub async fn run(mut self) {
        while !self.report.is_closed() {
            self.pace.turn().await;
            let server = self.cluster.current();
            match self.session(&server.client).await {
                Ok(()) => self.pace.succeeded(),
                Err(Failure::Refused(status)) if self.is_ordinary(&status) => {}
                Err(Failure::Refused(status)) if self.is_unknown_kind(&status) => {
                    self.listed(Listed::default(), None);
                    sleep(UNKNOWN_KIND).await;
                }
                Err(failure) => {
                    self.pace.failed();
                    self.cluster.failed(self.kind, &server, &failure).await;
                }
            }
        }
    }

    /// Whether the answer only means that another kind of request is due.
    fn is_ordinary(&mut self, status: &Status) -> bool {
        if status.code == 410 {
            // What we know is too old to go on from, as happens where nothing changes for long: list.
            self.version = None;
            return true;
        }
        // Kubernetes before 1.27, or with the feature off, refuses streamed lists as invalid.
        let without_streams = self.version.is_none() && matches!(status.code, 400 | 422);
        without_streams && std::mem::take(&mut self.streams)
    }

    /// Whether the server does not know what is asked for, and need not. It may be replaced by a newer one.
    fn is_unknown_kind(&self, status: &Status) -> bool {
        self.kind == Kind::ServiceCidr && self.version.is_none() && status.code == 404
    }

    /// One list or watch, until it ends.
    async fn session(&mut self, client: &kube::Client) -> Result<(), Failure> {
        if self.version.is_none() && !self.streams {
            self.pages(client).await?;
        }
        let request = Request::new(self.path);
        let list = self.version.is_none();
        let params = WatchParams {
            label_selector: self.labels.clone(),
            timeout: Some(jitter(WATCH, 4).as_secs() as u32),
            send_initial_events: list,
            ..WatchParams::default()
        };
        let request = request.watch(&params, self.version.as_deref().unwrap_or_default()).map_err(unreachable)?;
        let stream = timeout(ANSWER, client.request_stream(request)).await.map_err(no_answer)??;
        if list {
            self.follow(stream.lines(), Some(Listed::default())).await
        } else {
            self.in_step();
            self.follow(stream.lines(), None).await
        }
    }

    /// The complete list, page by page.
    async fn pages(&mut self, client: &kube::Client) -> Result<(), Failure> {
        let mut listed = Listed::default();
        let mut params = ListParams { label_selector: self.labels.clone(), limit: Some(PAGE), ..ListParams::default() };
        loop {
            let request = Request::new(self.path).list(&params).map_err(unreachable)?;
            let page: Page = timeout(LIST_SILENCE, client.request(request)).await.map_err(no_answer)??;
            for object in page.items {
                self.list(object, &mut listed);
            }
            params.continue_token = page.metadata.next.filter(|token| !token.is_empty());
            if params.continue_token.is_none() {
                self.listed(listed, page.metadata.resource_version);
                return Ok(());
            }
        }
    }

    /// Takes events until the stream ends; a list first, if `listed`.
    async fn follow(
        &mut self,
        mut lines: Lines<impl AsyncBufRead + Unpin>,
        mut listed: Option<Listed>,
    ) -> Result<(), Failure> {
        loop {
            let patience = if listed.is_some() { LIST_SILENCE } else { SILENCE };
            let line = match timeout(patience, lines.next()).await {
                Ok(Some(line)) => line.map_err(unreachable)?,
                Ok(None) | Err(_) if listed.is_none() => return Ok(()),
                Ok(None) => return Err(unreachable("it ended a list halfway")),
                Err(_) => return Err(unreachable("it fell silent in the middle of a list")),
            };
            let event: Event = match serde_json::from_str(&line) {
                Ok(event) => event,
                // The rest of the line is lost with the connection; the version before it still holds.
                Err(error) if error.is_eof() => return Err(unreachable("it broke off in the middle of an event")),
                Err(error) => {
                    self.version = None;
                    return Err(unreachable(format_args!("it sent an event that is not JSON: {error}")));
                }
            };
            match event.kind.as_str() {
                "ADDED" | "MODIFIED" => match &mut listed {
                    Some(listed) => self.list(event.object, listed),
                    None => self.changed(event.object),
                },
                "DELETED" => match &mut listed {
                    // Deleted while the server was still sending the list, which had it (KEP-3157).
                    Some(listed) => drop(Key::of(self.kind, &event.object).and_then(|key| listed.remove(&key))),
                    None => self.deleted(&event.object),
                },
                "BOOKMARK" => {
                    let version = version(&event.object);
                    if event.object["metadata"]["annotations"][LIST_ENDS] == "true"
                        && let Some(listed) = listed.take()
                    {
                        self.listed(listed, version);
                    } else if listed.is_none() && version.is_some() {
                        self.version = version;
                    }
                }
                "ERROR" => {
                    let status = serde_json::from_value(event.object).map_err(unreachable)?;
                    return Err(Failure::Refused(Box::new(status)));
                }
                _ => {} // a kind of event that is not invented yet
            }
        }
    }

    fn list(&mut self, object: Value, listed: &mut Listed) {
        if let Some(Decoded { key, object, problems }) = self.decode(object) {
            self.report.object(&key.to_string(), &problems);
            listed.insert(key, object);
        }
    }

    fn listed(&mut self, listed: Listed, version: Option<String>) {
        let present: HashSet<String> = listed.keys().map(ToString::to_string).collect();
        self.report.retain(|object| present.contains(object));
        let mut lists = Lists::default();
        listed.into_values().flatten().for_each(|object| lists.push(object));
        self.report.update(lists.complete(self.kind));
        self.version = version;
        self.in_step();
    }

    fn changed(&mut self, object: Value) {
        self.version = version(&object).or_else(|| self.version.take());
        if let Some(Decoded { key, object, problems }) = self.decode(object) {
            self.report.object(&key.to_string(), &problems);
            self.report.update(object.map_or_else(|| key.gone(), Object::update));
        }
    }

    fn deleted(&mut self, object: &Value) {
        self.version = version(object).or_else(|| self.version.take());
        if let Some(key) = Key::of(self.kind, object) {
            self.report.object(&key.to_string(), &[]);
            self.report.update(key.gone());
        }
    }

    fn decode(&mut self, object: Value) -> Option<Decoded> {
        match decode(self.kind, object, Origin::Server, &self.options) {
            Ok(decoded) => Some(decoded),
            Err(sentence) => {
                self.report.object(&format!("{}s without a name", self.kind.name()), &[sentence]);
                None
            }
        }
    }

    fn in_step(&mut self) {
        self.pace.succeeded();
        self.cluster.in_step(self.kind);
    }
}

/// A list that is not complete yet. A server that streams it may change its mind about an object meanwhile.
type Listed = BTreeMap<Key, Option<Object>>;

#[derive(Deserialize)]
struct Event {
    #[serde(rename = "type")]
    kind: String,
    object: Value,
}

#[derive(Deserialize)]
struct Page {
    metadata: PageMetadata,
    #[serde(default)]
    items: Vec<Value>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct PageMetadata {
    #[serde(rename = "continue")]
    next: Option<String>,
    resource_version: Option<String>,
}

fn version(object: &Value) -> Option<String> {
    object["metadata"]["resourceVersion"].as_str().filter(|v| !v.is_empty()).map(str::to_owned)
}

fn unreachable(why: impl std::fmt::Display) -> Failure {
    Failure::Unreachable(why.to_string())
}

fn no_answer(_: Elapsed) -> Failure {
    unreachable("it does not answer")
}

impl From<kube::Error> for Failure {
    fn from(error: kube::Error) -> Self {
        match error {
            kube::Error::Api(status) => Self::Refused(status),
            other => Self::Unreachable(innermost(&other)),
        }
    }
}

/// The last cause says what happened ("Connection refused"); those around it say which library noticed.
fn innermost(error: &dyn std::error::Error) -> String {
    let mut error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    error.to_string()
}
