//! Response bodies, byte for byte those of kube-proxy 1.36.

use jiff::Timestamp;
use serde::Serialize;

use super::{Health, Moment, NOT_READY};
use crate::model::Family;

/// What is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Probe {
    /// Should a load balancer send traffic to this node?
    Healthz,
    /// Does the agent work, whatever the Node says?
    Livez,
    /// Has the kernel everything that the agent knew at its start? kube-proxy does not have this one.
    Readyz,
}

/// Well or not, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// 200 or 503.
    pub is_well: bool,
    /// JSON; for [`Probe::Readyz`] a word or a sentence.
    pub body: String,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Body {
    last_updated: String,
    current_time: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    node_eligible: Option<bool>,
    healthy: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    status: Option<Status>,
}

#[derive(Serialize)]
struct Status {
    #[serde(rename = "IPv4", skip_serializing_if = "Option::is_none")]
    v4: Option<Part>,
    #[serde(rename = "IPv6", skip_serializing_if = "Option::is_none")]
    v6: Option<Part>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Part {
    last_updated: String,
    healthy: bool,
}

impl Health {
    /// Answers a probe.
    #[must_use]
    pub fn answer(&self, probe: Probe, now: Moment) -> Answer {
        let healthy = self.is_healthy(now);
        let node_eligible = match probe {
            Probe::Healthz => Some(self.eligible),
            Probe::Livez => None,
            Probe::Readyz => return self.readiness(),
        };
        let finished = self.families.iter().filter_map(|work| work.finished).max_by_key(|moment| moment.monotonic);
        let as_of = |healthy: bool, finished: Moment| text(if healthy { now } else { finished });
        let part = |family: Family| {
            let work = self.families[family as usize];
            let healthy = work.is_healthy(self.timeout, now);
            work.finished.map(|finished| Part { last_updated: as_of(healthy, finished), healthy })
        };
        let body = Body {
            last_updated: as_of(healthy, finished.unwrap_or(now)),
            current_time: text(now),
            node_eligible,
            healthy,
            status: finished.map(|_| Status { v4: part(Family::V4), v6: part(Family::V6) }),
        };
        Answer {
            is_well: healthy && node_eligible.unwrap_or(true),
            body: serde_json::to_string(&body).unwrap_or_default(), // strings and truth values cannot fail
        }
    }

    fn readiness(&self) -> Answer {
        let sentence = if self.ready { "ok" } else { NOT_READY };
        Answer { is_well: self.ready, body: sentence.to_owned() }
    }
}

/// RFC 3339 with nanoseconds, as Go prints it.
pub(super) fn text(moment: Moment) -> String {
    // Clocks beyond the year 9999 show the epoch.
    Timestamp::try_from(moment.wall).unwrap_or_default().to_string()
}
