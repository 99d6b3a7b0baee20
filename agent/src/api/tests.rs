//! Server and client over a real socket, with a core loop that answers from a list.

use std::{
    env, fs,
    os::unix::fs::PermissionsExt as _,
    path::PathBuf,
    process,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use anyhow::bail;
use tokio::{
    io::Interest,
    sync::{mpsc, watch},
};

use super::{
    ApiHandle, Filter, Request, bind,
    client::{Client, Watched},
    serve,
};
use crate::view::{Items, ServiceView, StatusView};

fn service(namespace: &str, name: &str) -> ServiceView {
    ServiceView {
        namespace: namespace.to_owned(),
        name: name.to_owned(),
        kind: "ClusterIP".to_owned(),
        cluster_ips: Vec::new(),
        reason: None,
        labels: Default::default(),
        frontends: Vec::new(),
    }
}

/// A directory of its own, gone with the value.
struct Directory(PathBuf);

impl Directory {
    fn new() -> Self {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let name = format!("sheave-api-{}-{}", process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = env::temp_dir().join(name);
        fs::create_dir(&path).unwrap();
        Self(path)
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// An agent that has nothing but a socket.
struct Agent {
    services: Arc<Mutex<Vec<ServiceView>>>,
    version: watch::Sender<u64>,
    client: Client,
    _directory: Directory,
}

impl Agent {
    fn start(services: Vec<ServiceView>) -> Self {
        let directory = Directory::new();
        let socket = directory.0.join("agent.sock");
        fs::write(&socket, "left by a dead agent").unwrap();
        let listener = bind(&socket).unwrap();
        let (requests, mut questions) = mpsc::channel(1);
        let (version, changes) = watch::channel(0);
        let services = Arc::new(Mutex::new(services));
        let known = Arc::clone(&services);
        tokio::spawn(async move {
            while let Some(question) = questions.recv().await {
                match question {
                    Request::Services { complete: _, reply } => {
                        drop(reply.send(Items { items: known.lock().unwrap().clone() }));
                    }
                    Request::Status(answer) => {
                        drop(answer.send(StatusView { health: "ok".to_owned(), ..StatusView::default() }));
                    }
                    Request::Metrics { .. } => unreachable!("the socket does not ask for metrics"),
                }
            }
        });
        tokio::spawn(serve(listener, ApiHandle { requests, version: changes }));
        Self { services, version, client: Client { socket }, _directory: directory }
    }
}

/// What whoever watches was told.
#[derive(Default)]
struct Log(Vec<String>);

impl Watched for Log {
    fn away(&mut self, why: &anyhow::Error) {
        self.0.push(format!("{why:#}"));
    }

    fn here(&mut self) {
        self.0.push("here".to_owned());
    }
}

#[tokio::test]
async fn the_socket_is_for_root_only() {
    let agent = Agent::start(Vec::new());
    let mode = fs::metadata(&agent.client.socket).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
}

#[tokio::test]
async fn services_are_narrowed_by_namespace_and_name() {
    let agent = Agent::start(vec![service("a", "x"), service("a", "y"), service("b", "x")]);
    let odd = "x&namespace=b c/ü";
    agent.services.lock().unwrap().push(service("a", odd));
    for (namespace, name, expected) in [
        (Some("b"), None, &["b/x"] as &[_]),
        (None, Some(odd), &["a/x&namespace=b c/ü"]),
        (None, Some("y&namespace=b"), &[]),
        (None, Some("x"), &["a/x", "b/x"]),
        (Some("b"), Some("y"), &[]),
    ] {
        let filter = Filter { namespace: namespace.map(str::to_owned), name: name.map(str::to_owned) };
        let found = agent.client.services(&filter).await.unwrap();
        let found: Vec<String> = found.items.iter().map(|s| format!("{}/{}", s.namespace, s.name)).collect();
        assert_eq!(found, expected);
    }
    assert_eq!(agent.client.status().await.unwrap().health, "ok");
}

#[tokio::test]
async fn a_watch_tells_the_state_at_once_and_then_every_change() {
    let agent = Agent::start(vec![service("a", "x")]);
    let mut seen = Vec::new();
    let all = Filter::default();
    let each = |list: Items<ServiceView>| {
        seen.push(list.items.len());
        if seen.len() == 3 {
            bail!("enough");
        }
        agent.services.lock().unwrap().push(service("a", "z"));
        agent.version.send_modify(|v| *v += 1);
        Ok(())
    };
    let outcome = agent.client.watch_services(&all, each, &mut Log::default()).await;
    assert_eq!(outcome.unwrap_err().to_string(), "enough");
    assert_eq!(seen, [1, 2, 3]);
}

/// A predecessor that breaks off in its second answer, and the next agent in its place.
#[tokio::test]
async fn a_watch_outlives_the_agent() {
    let directory = Directory::new();
    let socket = directory.0.join("agent.sock");
    let dying = bind(&socket).unwrap();
    let next = async {
        let (stream, _) = dying.accept().await.unwrap();
        stream.async_io(Interest::READABLE, || stream.try_read(&mut [0; 1024])).await.unwrap();
        stream.try_write(b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n{\"items\":[]}\n{\"ite").unwrap();
        drop(stream);
        let agent = Agent::start(vec![service("a", "x")]);
        fs::rename(&agent.client.socket, &socket).unwrap();
        agent // lives until both are done
    };
    let (client, all) = (Client { socket: socket.clone() }, Filter::default());
    let (mut seen, mut log) = (Vec::new(), Log::default());
    let each = |list: Items<ServiceView>| {
        seen.push(list.items.len());
        if seen.len() == 2 { bail!("enough") } else { Ok(()) }
    };
    let (outcome, _agent) = tokio::join!(client.watch_services(&all, each, &mut log), next);
    assert_eq!(outcome.unwrap_err().to_string(), "enough");
    assert_eq!(seen, [0, 1]);
    assert_eq!(log.0, ["here", "the agent ended", "here"]);
}

#[tokio::test]
async fn an_absent_agent_is_named_with_what_works_without_it() {
    let directory = Directory::new();
    let client = Client { socket: directory.0.join("agent.sock") };
    let error = format!("{:#}", client.status().await.unwrap_err());
    assert!(error.starts_with("cannot reach the agent at ") && error.contains("agent.sock: No such file"), "{error}");
    assert!(error.ends_with("`sheave lb list` works without it"), "{error}");
}

#[tokio::test]
async fn a_core_loop_that_ended_is_an_error_not_a_hang() {
    let directory = Directory::new();
    let socket = directory.0.join("agent.sock");
    let (requests, questions) = mpsc::channel(1);
    let (_version, changes) = watch::channel(0);
    drop(questions);
    tokio::spawn(serve(bind(&socket).unwrap(), ApiHandle { requests, version: changes }));
    let error = Client { socket }.status().await.unwrap_err().to_string();
    assert!(error.contains("503"), "{error}");
}
