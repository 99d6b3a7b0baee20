//! The other end of the socket.

use std::{fmt::Display, path::PathBuf, time::Duration};

use anyhow::{Context as _, anyhow, bail};
use http_body_util::{BodyExt as _, Collected, Empty};
use hyper::{Request, Response, StatusCode, body::Bytes, body::Incoming, client::conn::http1, header::HOST};
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;
use tokio::{net::UnixStream, time::timeout};

use super::Filter;
use crate::view::{Items, ServiceView, StatusView};

/// The answer of a busy agent with 50,000 Services takes a fraction of this.
const PATIENCE: Duration = Duration::from_secs(20);

/// Asks the agent of this node.
#[derive(Clone, Debug)]
pub struct Client {
    /// Path of its socket.
    pub socket: PathBuf,
}

impl Client {
    /// The Services that the agent wants programmed.
    ///
    /// # Errors
    ///
    /// When no agent answers, or not in the way of this version.
    pub async fn services(&self, filter: &Filter) -> anyhow::Result<Items<ServiceView>> {
        self.get(&services_path(filter, false)).await
    }

    /// The same again and again, whenever it may have changed.
    ///
    /// # Errors
    ///
    /// When no agent answers, it ends, or `each` fails.
    pub async fn watch_services(
        &self,
        filter: &Filter,
        each: impl FnMut(Items<ServiceView>) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        self.follow(&services_path(filter, true), each).await
    }

    /// How the agent is.
    ///
    /// # Errors
    ///
    /// When no agent answers, or not in the way of this version.
    pub async fn status(&self) -> anyhow::Result<StatusView> {
        self.get("/v1/status").await
    }

    /// The same again and again, whenever it may have changed.
    ///
    /// # Errors
    ///
    /// When no agent answers, it ends, or `each` fails.
    pub async fn watch_status(&self, each: impl FnMut(StatusView) -> anyhow::Result<()>) -> anyhow::Result<()> {
        self.follow("/v1/status?watch", each).await
    }

    async fn get<T: DeserializeOwned>(&self, path: &str) -> anyhow::Result<T> {
        let answer = async {
            let response = self.open(path).await?;
            response.into_body().collect().await.context("the agent broke off its answer")
        };
        let body = timeout(PATIENCE, answer).await.map_err(|_| {
            let socket = self.socket.display();
            anyhow!("the agent at {socket} does not answer within {PATIENCE:?}; is it stopped, or stuck?")
        })??;
        parse(&body.to_bytes())
    }

    async fn follow<T: DeserializeOwned>(
        &self,
        path: &str,
        mut each: impl FnMut(T) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let mut body = self.open(path).await?.into_body();
        let mut pending = Vec::new();
        while let Some(frame) = body.frame().await {
            let Ok(data) = frame.context("the connection to the agent broke")?.into_data() else { continue };
            pending.extend_from_slice(&data);
            while let Some(end) = pending.iter().position(|b| *b == b'\n') {
                let line: Vec<u8> = pending.drain(..=end).collect();
                each(parse(&line)?)?;
            }
        }
        bail!("the agent ended")
    }

    async fn open(&self, path: &str) -> anyhow::Result<Response<Incoming>> {
        let unreachable = |reason: &dyn Display| {
            let socket = self.socket.display();
            anyhow!(
                "cannot reach the agent at {socket}: {reason}; is `sheave agent` running on this node? `sheave lb list` \
                 works without it"
            )
        };
        let stream = UnixStream::connect(&self.socket).await.map_err(|e| unreachable(&e))?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(|e| unreachable(&e))?;
        tokio::spawn(connection); // its error reaches us through `sender` too
        let request = Request::get(path).header(HOST, "agent").body(Empty::<Bytes>::new());
        let request = request.with_context(|| format!("{path:?} cannot be asked for"))?;
        let response = sender.send_request(request).await.map_err(|e| unreachable(&e))?;
        if response.status() != StatusCode::OK {
            let status = response.status();
            let body = response.into_body().collect().await.map(Collected::to_bytes).unwrap_or_default();
            bail!("the agent answered {status}: {}", String::from_utf8_lossy(&body).trim_end());
        }
        Ok(response)
    }
}

fn services_path(filter: &Filter, watch: bool) -> String {
    let namespace = filter.namespace.as_ref().map(|n| format!("namespace={n}"));
    let name = filter.name.as_ref().map(|n| format!("name={n}"));
    let query: Vec<String> = namespace.into_iter().chain(name).chain(watch.then(|| "watch".to_owned())).collect();
    format!("/v1/services?{}", query.join("&"))
}

fn parse<T: DeserializeOwned>(json: &[u8]) -> anyhow::Result<T> {
    serde_json::from_slice(json).context("the agent's answer is not what this version of sheave expects")
}
