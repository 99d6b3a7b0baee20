//! What a source has told, as the agent would take it.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use sheave_agent::{
    model::{Family, Protocol, ServiceName, State, Update, endpoint},
    source::{Sender, SourceEvent, SourceState},
};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use crate::{objects::NAMESPACE, wait::eventually};

/// The receiving end of a source.
#[derive(Debug)]
pub struct Told {
    events: UnboundedReceiver<SourceEvent>,
    /// All updates, applied in order.
    pub state: State,
    /// Every update.
    pub updates: Vec<Update>,
    /// Problems that are not resolved.
    pub problems: BTreeMap<String, String>,
    /// Problems told so far, resolved or not.
    pub problems_told: usize,
    /// Where the source asks.
    pub api_servers: BTreeSet<SocketAddr>,
    /// How the source is.
    pub source: SourceState,
}

impl Told {
    /// Nothing yet; the sending end is for the source.
    #[must_use]
    pub fn new() -> (Sender, Self) {
        let (sender, events) = unbounded_channel();
        let told = Self {
            events,
            state: State::default(),
            updates: Vec::new(),
            problems: BTreeMap::new(),
            problems_told: 0,
            api_servers: BTreeSet::new(),
            source: SourceState::default(),
        };
        (sender, told)
    }

    /// Takes what has been told since the last time.
    pub fn take(&mut self) {
        while let Ok(event) = self.events.try_recv() {
            match event {
                SourceEvent::Update(update) => {
                    self.state.apply(update.clone());
                    self.updates.push(update);
                }
                SourceEvent::Problem { object, message } => {
                    self.problems.insert(object, message);
                    self.problems_told += 1;
                }
                SourceEvent::Resolved { object } => {
                    self.problems.remove(&object);
                }
                SourceEvent::ApiServers(addresses) => self.api_servers = addresses,
                SourceEvent::State(state) => self.source = state,
            }
        }
    }

    /// Takes until `is_so`; how long that took.
    ///
    /// # Errors
    /// When it is not so within `limit`; with all that is known.
    pub fn until(&mut self, what: &str, limit: Duration, mut is_so: impl FnMut(&Self) -> bool) -> Result<Duration> {
        let start = Instant::now();
        eventually(what, limit, || {
            self.take();
            ensure!(is_so(self), "known: {:?}; {:?}; problems: {:?}", self.lines(), self.source, self.problems);
            Ok(())
        })?;
        Ok(start.elapsed())
    }

    /// Takes until the Services are these: [`Told::lines`].
    ///
    /// # Errors
    /// When they are not within `limit`.
    pub fn until_lines(&mut self, what: &str, limit: Duration, lines: &[&str]) -> Result<Duration> {
        self.until(&format!("{what}: {lines:?}"), limit, |told| told.lines() == lines)
    }

    /// A line for each port of each Service in the tests' namespace: `web 80/TCP 10.244.1.10:8080 …`, sorted. Services
    /// without frontends: `web headless`.
    #[must_use]
    pub fn lines(&self) -> Vec<String> {
        let mut lines = Vec::new();
        for service in self.state.services().filter(|service| *service.name.namespace == *NAMESPACE) {
            let name = &service.name;
            if let Some(why) = &service.no_frontend {
                lines.push(format!("{} {why}", name.name));
                continue;
            }
            for port in &service.ports {
                let mut line = format!("{} {}/{}", name.name, port.port, port.protocol);
                for target in self.targets(name, &port.name, port.protocol) {
                    line += &format!(" {target}");
                }
                lines.push(line);
            }
        }
        lines
    }

    fn targets(&self, name: &ServiceName, port: &str, protocol: Protocol) -> Vec<String> {
        let of_family = |family| endpoint::Offers::of(self.state.slices(name)).endpoints(port, protocol, family);
        Family::ALL.into_iter().flat_map(of_family).map(|endpoint| endpoint.target.to_string()).collect()
    }
}
