//! A cluster: which API servers to ask, as whom, and how that goes.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use anyhow::{Context, anyhow};
use kube::{
    Client, Config,
    client::ClientBuilder,
    config::{KubeConfigOptions, Kubeconfig},
};

use crate::observe::metrics::Metrics;

use super::{
    Sender, SourceState,
    convert::ConvertOptions,
    decode::Kind,
    meter::Meter,
    report::Report,
    watch::{Failure, Watch},
    whereabouts,
};

/// How to reach the API.
#[derive(Clone, Debug, Default)]
pub struct Access {
    /// A kubeconfig file; `None` = the service account of the pod.
    pub kubeconfig: Option<PathBuf>,
    /// Such as `https://10.0.0.1:6443`, asked in turn when one fails. Empty: the one of the kubeconfig or, in a
    /// pod, of `KUBERNETES_SERVICE_HOST`. In a pod they should be given: that variable holds the ClusterIP of the API,
    /// which works only while a proxy does.
    pub servers: Vec<http::Uri>,
    /// Where requests are counted.
    pub metrics: Metrics,
}

/// Starts to watch Services, EndpointSlices, Nodes and ServiceCIDRs. An API server that is away is waited for.
/// What is returned may tell events.
///
/// # Errors
/// When there are no credentials, or they or the URLs cannot be read.
pub async fn start(access: Access, options: &ConvertOptions, events: Sender) -> anyhow::Result<Arc<Cluster>> {
    let servers = access.connect().await?;
    let hosts = servers.iter().map(|server| server.host.clone()).collect();
    tokio::spawn(whereabouts::follow(hosts, events.clone()));
    let cluster = Arc::new(Cluster {
        access,
        servers: Mutex::new(Servers { all: servers, current: 0 }),
        health: Mutex::new(Health {
            report: Report::new(events.clone()),
            problems: Kind::ALL.map(|_| Some(WAITING.to_owned())),
        }),
    });
    cluster.tell(&mut lock(&cluster.health));
    for kind in Kind::ALL {
        tokio::spawn(Watch::new(kind, options.clone(), cluster.clone(), Report::new(events.clone())).run());
    }
    Ok(cluster)
}

/// What is wrong with a watch that has just begun.
const WAITING: &str = "The first lists have not all arrived yet.";

/// What the watches share.
pub struct Cluster {
    access: Access,
    servers: Mutex<Servers>,
    health: Mutex<Health>,
}

/// An API server.
#[derive(Clone)]
pub struct Server {
    /// Its URL.
    pub url: Arc<str>,
    /// Where that leads.
    host: whereabouts::Host,
    /// Where requests to it go.
    pub client: Client,
}

struct Servers {
    all: Vec<Server>,
    current: usize,
}

struct Health {
    report: Report,
    /// What is wrong with the watch of each kind.
    problems: [Option<String>; Kind::ALL.len()],
}

impl Cluster {
    /// Whom to ask now.
    pub fn current(&self) -> Server {
        let servers = lock(&self.servers);
        servers.all[servers.current].clone()
    }

    /// The watch of `kind` knows what the API server knows.
    pub fn in_step(&self, kind: Kind) {
        let mut health = lock(&self.health);
        health.problems[kind as usize] = None;
        self.tell(&mut health);
    }

    /// The watch of `kind` failed at `server`: the next try is somebody else's, if it is the server's fault, and made
    /// with fresh credentials, if it may be ours.
    pub async fn failed(&self, kind: Kind, server: &Server, failure: &Failure) {
        let url = &server.url;
        let sentence = match failure {
            Failure::Refused(status) => {
                let message: String = status.message.chars().take(200).collect(); // of a proxy it may be a whole page
                format!("the API server {url} answered {} {}: {message}", status.code, status.reason)
            }
            Failure::Unreachable(why) => format!("cannot use the API server {url}: {why}"),
        };
        match failure {
            Failure::Refused(status) if status.code == 401 => self.renew().await,
            Failure::Refused(status) if status.code < 500 => {}
            Failure::Refused(_) => self.pass_over(url),
            // A server whose new certificate we cannot judge for want of its new CA looks like one that is away.
            Failure::Unreachable(_) => {
                self.pass_over(url);
                self.renew().await;
            }
        }
        let mut health = lock(&self.health);
        health.problems[kind as usize] = Some(format!("{}s are not being watched: {sentence}.", kind.name()));
        self.tell(&mut health);
    }

    /// Moves on to the next server, unless another watch already has.
    fn pass_over(&self, url: &Arc<str>) {
        let mut servers = lock(&self.servers);
        if servers.all[servers.current].url == *url {
            servers.current = (servers.current + 1) % servers.all.len();
        }
    }

    /// Reads the credentials again. Tokens in files are kept fresh by kube; certificates, the CA's too, are not. As
    /// often as a watch may fail, which has its own rhythm.
    async fn renew(&self) {
        match self.access.connect().await {
            Ok(all) => lock(&self.servers).all = all, // as many as before: one a URL
            Err(error) => tracing::debug!("cannot read the credentials again: {error:#}"),
        }
    }

    fn tell(&self, health: &mut Health) {
        let source = format!("kubernetes {}", self.current().url);
        let mut problems: Vec<String> = health.problems.iter().flatten().cloned().collect();
        problems.sort();
        problems.dedup();
        health.report.state(SourceState { source, problems });
    }
}

/// What is behind the locks is whole after every statement, so a panic elsewhere cannot have spoilt it.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Access {
    /// A client for each server; none is dialled yet.
    async fn connect(&self) -> anyhow::Result<Vec<Server>> {
        let mut config = match &self.kubeconfig {
            Some(path) => from_file(path).await?,
            None => self.in_pod()?,
        };
        config.connect_timeout = Some(Duration::from_secs(5));
        config.default_retry = false; // the watches have a rhythm of their own
        let own = config.cluster_url.clone();
        let urls = if self.servers.is_empty() { std::slice::from_ref(&own) } else { &self.servers };
        urls.iter().map(|url| server(url, config.clone(), &self.metrics)).collect()
    }

    fn in_pod(&self) -> anyhow::Result<Config> {
        // With URLs of its own it does not need the variables that only pods have.
        let config = if self.servers.is_empty() { Config::incluster_env() } else { Config::incluster_dns() };
        // The client's errors repeat their causes: the first one says it.
        config.map_err(|e| {
            anyhow!(
                "there is no pod service account to use ({e}); outside a pod, give --kubeconfig FILE, or --manifests DIR \
                 to run without a cluster"
            )
        })
    }
}

async fn from_file(path: &Path) -> anyhow::Result<Config> {
    // The client's errors repeat their causes and quote the file, over several lines.
    let unusable = |error: &dyn std::fmt::Display| {
        let sentence = error.to_string().lines().next().unwrap_or_default().to_owned();
        anyhow!("cannot use the kubeconfig {}: {sentence}", path.display())
    };
    fs::File::open(path).map_err(|e| unusable(&e))?;
    let file = Kubeconfig::read_from(path).map_err(|e| unusable(&e))?;
    Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await.map_err(|e| unusable(&e))
}

fn server(url: &http::Uri, mut config: Config, metrics: &Metrics) -> anyhow::Result<Server> {
    config.cluster_url = url.clone();
    let client = ClientBuilder::try_from(config).with_context(|| format!("cannot make a client for {url}"))?;
    let client = client.with_layer(&Meter(metrics.clone())).build();
    Ok(Server { url: url.to_string().trim_end_matches('/').into(), host: whereabouts::host(url), client })
}
