//! Flags of netfilter's connection tracking: kube-proxy's, with its names and defaults.

use std::{path::PathBuf, time::Duration};

use clap::{ArgAction::Set, Args};
use jiff::SignedDuration;

use crate::datapath::host::conntrack_sysctls::{ConntrackSysctls, FOLDER};

/// What the agent sets of netfilter's connection tracking at its start.
#[derive(Debug, Args)]
#[command(
    next_help_heading = "Connection tracking (netfilter's, for CNIs and NetworkPolicies; set at the start. Flows of clients \
                         outside have a table of sheave's own, with fixed timeouts)"
)]
pub struct ConntrackArgs {
    /// Directory of netfilter's sysctls, writable; "" = leave them alone
    #[arg(long, value_name = "DIR", default_value = FOLDER, env = "SHEAVE_NETFILTER_SYSCTLS")]
    netfilter_sysctls: String,
    /// Raise nf_conntrack_max to so many entries for each processor, 1,048,576 at most; 0 = leave it alone
    #[arg(long, value_name = "N", default_value_t = 32_768)]
    conntrack_max_per_core: u32,
    /// And to so many at least
    #[arg(long, value_name = "N", default_value_t = 131_072)]
    conntrack_min: u32,
    /// How long an established TCP connection may rest; 0 = leave it alone, so everywhere below
    #[arg(long, value_name = "DURATION", default_value = "24h", value_parser = duration)]
    conntrack_tcp_timeout_established: Duration,
    /// How long a TCP connection may wait for one end to close
    #[arg(long, value_name = "DURATION", default_value = "1h", value_parser = duration)]
    conntrack_tcp_timeout_close_wait: Duration,
    /// TCP segments outside the window are not marked as invalid
    #[arg(long, action = Set, default_value_t = false)]
    conntrack_tcp_be_liberal: bool,
    /// How long a UDP flow may rest that was not answered
    #[arg(long, value_name = "DURATION", default_value = "0s", value_parser = duration)]
    conntrack_udp_timeout: Duration,
    /// How long an answered UDP flow may rest
    #[arg(long, value_name = "DURATION", default_value = "0s", value_parser = duration)]
    conntrack_udp_timeout_stream: Duration,
}

impl ConntrackArgs {
    /// What to set; `None` = nothing.
    pub fn sysctls(self) -> Option<ConntrackSysctls> {
        (!self.netfilter_sysctls.is_empty()).then(|| ConntrackSysctls {
            folder: PathBuf::from(self.netfilter_sysctls),
            max_per_core: self.conntrack_max_per_core,
            min: self.conntrack_min,
            tcp_established: self.conntrack_tcp_timeout_established,
            tcp_close_wait: self.conntrack_tcp_timeout_close_wait,
            tcp_be_liberal: self.conntrack_tcp_be_liberal,
            udp: self.conntrack_udp_timeout,
            udp_stream: self.conntrack_udp_timeout_stream,
        })
    }
}

/// As Go writes durations: `24h0m0s`, or 0.
fn duration(text: &str) -> Result<Duration, String> {
    let parsed = if text == "0" { Ok(SignedDuration::ZERO) } else { text.parse::<SignedDuration>() };
    parsed
        .ok()
        .and_then(|length| length.try_into().ok())
        .ok_or_else(|| "expected a duration such as 24h0m0s".to_owned())
}

#[cfg(test)]
mod tests {
    use super::duration;

    #[test]
    fn durations_are_read_as_go_writes_them() {
        for (text, seconds) in
            [("24h0m0s", Some(86_400)), ("1h", Some(3600)), ("1h30m", Some(5400)), ("90s", Some(90)), ("0s", Some(0))]
                .into_iter()
                .chain([("0", Some(0)), ("", None), ("90", None), ("-1s", None), ("1 fortnight", None)])
        {
            assert_eq!(duration(text).ok().map(|length| length.as_secs()), seconds, "{text:?}");
        }
    }
}
