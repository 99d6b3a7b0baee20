//! `sheave monitor`: what the programs do, as it happens. Reads the kernel's buffer; works while the agent is down.

use std::{
    io::{self, IsTerminal as _},
    time::{Duration, SystemTime},
};

use clap::{Args, ValueEnum};
use jiff::Timestamp;
use tokio::{
    select,
    signal::unix::{SignalKind, signal},
    time::interval,
};

use super::{block_on, host::HostArgs, list::NamespaceArgs};
use crate::{
    datapath::{
        self,
        tables::{
            clock,
            watch::{LOOK, Watch},
        },
    },
    exit::{self, Refused},
    monitor::{EventView, Wanted},
    render::{self, Widths, events},
};

const EXAMPLES: &str = "\
Prints a line for each connection that is opened, and for each packet, connect or datagram that is refused or dropped, \
but not for later packets of a connection. REASON is a counter in `sheave status` and the metrics. The programs write \
records only while somebody reads them, and only one `sheave monitor` per node can read at a time. Times are in UTC.

Examples:
  sheave monitor
  sheave monitor web -n shop
  sheave monitor --drops -o wide
  sheave monitor -o json | jq -r 'select(.verdict == \"drop\") | .client'";

/// Flags of `sheave monitor`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct MonitorArgs {
    /// Only Services of this name: NAME, or NAMESPACE/NAME as printed by `svc list -o name`
    service: Option<String>,
    #[command(flatten)]
    namespace: NamespaceArgs,
    /// Only what is not forwarded
    #[arg(long)]
    drops: bool,
    /// Exit after N lines
    #[arg(long, value_name = "N")]
    count: Option<u64>,
    /// Output format
    #[arg(short, long, value_enum, value_name = "FORMAT", default_value_t = Format::Table)]
    output: Format,
    /// Leave out the header line
    #[arg(long)]
    no_headers: bool,
    #[command(flatten)]
    host: HostArgs,
}

/// Format of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Format {
    /// Aligned columns
    Table,
    /// More columns
    Wide,
    /// JSON: one object per line
    Json,
}

impl MonitorArgs {
    /// Follows until it is told to stop.
    pub fn run(self) -> anyhow::Result<()> {
        let watch = datapath::open_watch(&self.host.paths()).map_err(|e| Refused::because(&e))?;
        block_on(self.follow(watch))
    }

    async fn follow(self, mut watch: Watch) -> anyhow::Result<()> {
        let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
        let mut look = interval(LOOK);
        let mut stream = Stream::new(&self);
        stream.begin()?;
        while stream.left > 0 {
            select! {
                _ = interrupt.recv() => break,
                _ = terminate.recv() => break,
                _ = look.tick() => {
                    watch.renew()?;
                    stream.take(&mut watch)?;
                }
            }
        }
        Ok(())
    }

    fn wanted(&self) -> Wanted {
        let (namespace, service) = match self.service.as_deref().map(|name| (name, name.split_once('/'))) {
            Some((_, Some((namespace, name)))) => (Some(namespace), Some(name)),
            Some((name, None)) => (self.namespace.only(), Some(name)),
            None => (self.namespace.only(), None),
        };
        Wanted { namespace: namespace.map(str::to_owned), service: service.map(str::to_owned), drops: self.drops }
    }
}

/// What goes to stdout.
struct Stream {
    wanted: Wanted,
    format: Format,
    headers: bool,
    /// Lines still to be printed.
    left: u64,
    widths: Widths,
    colours: bool,
    /// When the kernel's monotonic clock was 0.
    boot: SystemTime,
}

impl Stream {
    fn new(args: &MonitorArgs) -> Self {
        let mut widths = Widths::default();
        events::table(&[sample()], false).grow(&mut widths);
        Self {
            wanted: args.wanted(),
            format: args.output,
            headers: !args.no_headers,
            left: args.count.unwrap_or(u64::MAX),
            widths,
            colours: render::colours_wanted(io::stdout().is_terminal()),
            boot: SystemTime::now() - clock::monotonic(),
        }
    }

    /// Headings. Whoever sees them knows that records are taken from now on.
    fn begin(&self) -> anyhow::Result<()> {
        if self.headers && self.format != Format::Json {
            exit::print(events::table(&[], self.format == Format::Wide).heading_line(&self.widths))?;
        }
        Ok(())
    }

    /// Prints all that is there.
    fn take(&mut self, watch: &mut Watch) -> anyhow::Result<()> {
        // In pieces, so that a flood is seen while it lasts.
        loop {
            let mut events = Vec::new();
            while events.len() < 256 && self.left > 0 {
                let Some(event) = watch.take() else { break };
                let time = Timestamp::try_from(self.boot + Duration::from_nanos(event.time)).unwrap_or_default();
                let view = EventView::new(&event, format!("{time:.6}"), watch.name(event.service).as_ref());
                if self.wanted.matches(&view) {
                    self.left -= 1;
                    events.push(view);
                }
            }
            if events.is_empty() {
                break;
            }
            self.print(&events)?;
        }
        let lost = watch.take_lost();
        if lost > 0 {
            exit::note(format_args!("{lost} records were lost: more came than could be printed"));
        }
        Ok(())
    }

    fn print(&mut self, events: &[EventView]) -> anyhow::Result<()> {
        if self.format == Format::Json {
            let lines: Vec<String> = events.iter().map(render::json_line).collect::<anyhow::Result<_>>()?;
            return exit::print(lines.concat());
        }
        let table = events::table(events, self.format == Format::Wide);
        table.grow(&mut self.widths);
        exit::print(table.lines(&self.widths, self.colours))
    }
}

/// As wide as most lines are, so that columns seldom move.
fn sample() -> EventView {
    let address = "255.255.255.255:65535".parse().ok();
    EventView {
        time: "0000-00-00T00:00:00.000000Z".to_owned(),
        verdict: "forward".to_owned(),
        reason: "packet_unknown_port".to_owned(),
        path: String::new(),
        protocol: "TCP".to_owned(),
        client: address,
        process: None,
        pid: None,
        frontend: address.unwrap_or_else(|| ([0; 4], 0).into()),
        backend: address,
        service: Some("some-namespace/some-name".to_owned()),
    }
}
