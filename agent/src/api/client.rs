//! The other end of the socket.

use std::{fmt::Display, path::PathBuf, time::Duration};

use anyhow::{Context as _, anyhow, bail};
use http_body_util::{BodyExt as _, Collected, Empty};
use hyper::{Request, Response, StatusCode, body::Bytes, body::Incoming, client::conn::http1, header::HOST};
use hyper_util::rt::TokioIo;
use serde::de::DeserializeOwned;
use tokio::{
    net::UnixStream,
    time::{sleep, timeout},
};

use super::Filter;
use crate::view::{Items, ServiceView, StatusView};

/// The answer of a busy agent with 50,000 Services takes a fraction of this.
const PATIENCE: Duration = Duration::from_secs(20);

/// While the agent is away, it is called again so often.
const CALL_AGAIN: Duration = Duration::from_millis(500);

/// Learns when the thing that is watched goes away and comes back.
pub trait Watched {
    /// It is not there, or no longer; may be called repeatedly.
    fn away(&mut self, why: &anyhow::Error);
    /// It is there.
    fn here(&mut self);
}

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
        self.get(&services_path(filter, false)?).await
    }

    /// The same again and again, whenever it may have changed; never before the agent knows all of them. An agent that
    /// ends is waited for.
    ///
    /// # Errors
    ///
    /// When no agent answers at first, or `each` fails.
    pub async fn watch_services(
        &self,
        filter: &Filter,
        mut each: impl FnMut(Items<ServiceView>) -> anyhow::Result<()>,
        agent: &mut impl Watched,
    ) -> anyhow::Result<()> {
        let path = services_path(filter, true)?;
        let mut answer = self.open(&path).await?;
        loop {
            agent.here();
            let mut lines = Lines::of(answer);
            let ended = loop {
                match lines.next().await.and_then(|line| parse(&line)) {
                    Ok(list) => each(list)?,
                    Err(ended) => break ended,
                }
            };
            agent.away(&ended);
            answer = loop {
                sleep(CALL_AGAIN).await;
                if let Ok(answer) = self.open(&path).await {
                    break answer;
                }
            };
        }
    }

    /// How the agent is.
    ///
    /// # Errors
    ///
    /// When no agent answers, or not in the way of this version.
    pub async fn status(&self) -> anyhow::Result<StatusView> {
        self.get("/v1/status").await
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

/// The lines of an answer that goes on.
struct Lines {
    body: Incoming,
    pending: Vec<u8>,
}

impl Lines {
    fn of(answer: Response<Incoming>) -> Self {
        Self { body: answer.into_body(), pending: Vec::new() }
    }

    async fn next(&mut self) -> anyhow::Result<Vec<u8>> {
        let mut searched = 0;
        loop {
            if let Some(end) = self.pending[searched..].iter().position(|byte| *byte == b'\n') {
                return Ok(self.pending.drain(..=searched + end).collect());
            }
            searched = self.pending.len();
            // How far it came with its answer is nobody's concern.
            let frame = self.body.frame().await.and_then(Result::ok).context("the agent ended")?;
            if let Ok(data) = frame.into_data() {
                self.pending.extend_from_slice(&data);
            }
        }
    }
}

fn services_path(filter: &Filter, watch: bool) -> anyhow::Result<String> {
    let query = serde_urlencoded::to_string(filter).context("the filter cannot be written as a query")?;
    Ok(format!("/v1/services?{query}{}", if watch { "&watch" } else { "" }))
}

fn parse<T: DeserializeOwned>(json: &[u8]) -> anyhow::Result<T> {
    serde_json::from_slice(json).context("the agent's answer is not what this version of sheave expects")
}
