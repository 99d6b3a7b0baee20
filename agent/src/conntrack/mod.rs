//! Flows of the packet path, as the agent sees them: which are over, and what people are shown. Pure.

mod view;

use sheave_ebpf::{
    addr::Addr,
    conntrack::{
        FLAG_MASQUERADE, Flow, HOOK_EGRESS, HOOK_INGRESS, PATIENCE, Phase, ROLE_DIAL, ROLE_MASQUERADE, ROLE_REPLY,
        Tuple, is_dispensable, is_over, seen,
    },
};

pub use view::{FlowView, views};

/// The table, to ask for one entry.
pub trait ReadFlows {
    /// The entry of a packet.
    fn flow(&self, tuple: &Tuple) -> Option<Flow>;
}

/// What an entry whose other half was pushed out of the full table is kept for, while packets come.
const ORPHAN_TIMEOUT: u32 = 120;

/// What is no longer wanted at `now`, in boot-time seconds, given a copy of one entry: nothing, the entry alone, or its
/// whole flow. The entries of the two directions decide together; those that masquerade the client go with them.
/// Reads other entries only where this one alone could be old enough. A table that `is_crowded` would push out whoever is
/// idle to make room, so that whatever is dispensable goes before that.
///
/// To be deleted at once: a client may use its port again at any moment, and then the same keys are another flow's. So an
/// entry that is no longer what was copied stays.
#[must_use]
pub fn sweep(now: u32, is_crowded: bool, tuple: &Tuple, flow: &Flow, table: &impl ReadFlows) -> Vec<Tuple> {
    let idle = |flow: &Flow| now.saturating_sub(seen::time(flow.seen));
    let mut gone = Vec::new();
    let is_unwanted = match flow.role() {
        ROLE_DIAL => {
            let shortest = Phase::Opening.timeout(tuple.proto).min(Phase::Closed.timeout(tuple.proto));
            if idle(flow) <= if is_crowded { PATIENCE.min(shortest) } else { shortest } {
                return gone;
            }
            let reply = tuple.reply(flow);
            let found = table.flow(&reply);
            // The replies may be another flow's by now: two CPUs opened both, or a full table lost ours.
            let is_ours = found.is_none_or(|found| reply.dial(&found) == *tuple);
            let replies = found.filter(|_| is_ours).map_or(0, |found| found.seen);
            let may_go = if is_crowded { is_dispensable } else { is_over };
            if !may_go(tuple.proto, now, flow.seen, replies) {
                return gone;
            }
            if is_ours {
                let masquerade = table.flow(&reply.reversed());
                gone.extend(masquerade.map(|flow| reply.to(flow.to, flow.to_port).at(HOOK_INGRESS)));
                gone.extend([reply, reply.reversed()]);
            }
            true
        }
        ROLE_REPLY => {
            // Its client may have been led elsewhere since, or been given another port.
            let dial = tuple.dial(flow);
            idle(flow) > ORPHAN_TIMEOUT && table.flow(&dial).is_none_or(|flow| dial.reply(&flow) != *tuple)
        }
        ROLE_MASQUERADE => table.flow(&tuple.reversed()).is_none(),
        _ => table.flow(&tuple.to(flow.to, flow.to_port).at(HOOK_EGRESS)).is_none(),
    };
    if !is_unwanted || table.flow(tuple) != Some(*flow) {
        return Vec::new();
    }
    gone.push(*tuple);
    gone
}

/// Which kinds of flows there are: what the programs' quick checks ask.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Kinds {
    /// Some client is masqueraded.
    pub masqueraded: bool,
    /// Replies reach egress unmarked: the client is not masqueraded, or a process of this node answers.
    pub plain: bool,
}

impl Kinds {
    /// Takes an entry that stays into account.
    pub fn add(&mut self, flow: &Flow, is_own: impl Fn(&Addr) -> bool) {
        match flow.role() {
            ROLE_DIAL => {
                let is_masqueraded = flow.flags & FLAG_MASQUERADE != 0;
                self.masqueraded |= is_masqueraded;
                self.plain |= !is_masqueraded || is_own(&flow.to);
            }
            ROLE_REPLY => {}
            _ => self.masqueraded = true,
        }
    }
}

#[cfg(test)]
mod tests;
