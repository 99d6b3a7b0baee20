//! Which programs the devices of workloads have. Every packet of a pod pays for them, so they are there only while they
//! may have something to do: masquerade a client towards a workload of this node and bring the reply back, or translate what
//! pods dial.

use sheave_ebpf::meta::{MASQUERADED_FLOWS, PLAIN_FLOWS, PODS_DIAL, WORKLOAD_PROGRAMS};

use crate::datapath::tables::words::Words;

/// What the devices of workloads have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Equipment {
    /// Nothing.
    Bare,
    /// Still the programs of [`Replies`](Self::Replies), but no client of a workload is masqueraded any more: by the next
    /// look, a packet that was on its way has arrived.
    Leaving,
    /// Programs that masquerade the clients of workloads and bring their replies back.
    Replies,
    /// Those for clients, too: pods dial packet by packet, or did while flows began that still live.
    Clients,
}

/// What decides.
#[derive(Clone, Copy, Debug, Default)]
struct Needs {
    /// All devices have all programs at any time.
    always: bool,
    /// There are flows whose clients are masqueraded.
    masqueraded_flows: bool,
    /// There are others.
    plain_flows: bool,
    /// A client outside dialled an address that is meant for the cluster alone. It may come again.
    was_asked: bool,
    /// Clients outside the cluster have something to dial; `None` = not known yet.
    serves_outsiders: Option<bool>,
    /// Pods are to dial packet by packet; `None` = not known yet.
    pods_dial: Option<bool>,
}

impl Equipment {
    fn next(self, needs: &Needs) -> Self {
        let had_clients = self == Self::Clients;
        let dial =
            needs.pods_dial.unwrap_or(had_clients) || had_clients && (needs.masqueraded_flows || needs.plain_flows);
        let masquerade =
            needs.masqueraded_flows || needs.was_asked || needs.serves_outsiders.unwrap_or(self != Self::Bare);
        match self {
            _ if needs.always || dial => Self::Clients,
            _ if masquerade => Self::Replies,
            Self::Replies | Self::Clients => Self::Leaving,
            Self::Leaving | Self::Bare => Self::Bare,
        }
    }
}

/// Decides, and tells the programs what was decided.
pub struct WorkloadWatch {
    meta: Words,
    equipment: Equipment,
    needs: Needs,
}

impl WorkloadWatch {
    /// As a predecessor left it, unless they are `always` there; `meta` is the map of that name.
    pub fn adopt(meta: Words, always: bool) -> Self {
        let is_set = |word| meta.load(word) != 0;
        let equipment = match (always || is_set(PODS_DIAL), is_set(WORKLOAD_PROGRAMS)) {
            (true, _) => Equipment::Clients,
            (false, true) => Equipment::Replies,
            (false, false) => Equipment::Bare,
        };
        Self { meta, equipment, needs: Needs { always, ..Needs::default() } }
    }

    /// What devices are to have.
    pub const fn equipment(&self) -> Equipment {
        self.equipment
    }

    /// Whether clients outside the cluster have something to dial, and whether pods dial packet by packet.
    pub const fn order(&mut self, serves_outsiders: bool, pods_dial: bool) {
        self.needs.serves_outsiders = Some(serves_outsiders);
        self.needs.pods_dial = Some(pods_dial);
    }

    /// Decides anew; says whether anything changes. Off takes two looks.
    pub fn look(&mut self) -> bool {
        let are_there = |kind| self.meta.load(kind) != 0;
        self.needs.masqueraded_flows = are_there(MASQUERADED_FLOWS);
        self.needs.plain_flows = are_there(PLAIN_FLOWS);
        self.needs.was_asked |= self.needs.masqueraded_flows && self.equipment == Equipment::Bare;
        let next = self.equipment.next(&self.needs);
        std::mem::replace(&mut self.equipment, next) != next
    }

    /// To be called when devices have their programs: only then is a client masqueraded.
    pub fn tell_programs(&self) {
        let masquerade = matches!(self.equipment, Equipment::Replies | Equipment::Clients);
        for (word, value) in [(WORKLOAD_PROGRAMS, masquerade), (PODS_DIAL, self.equipment == Equipment::Clients)] {
            if let Err(error) = self.meta.store(word, value.into()) {
                tracing::warn!(%error, "cannot tell the programs, and a successor, of which devices they are");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{
        Equipment::{self, Bare, Clients, Leaving, Replies},
        Needs,
    };

    #[test]
    fn devices_of_workloads_have_what_they_need_and_lose_it_in_two_looks() {
        let told = |serves_outsiders, pods_dial| Needs {
            serves_outsiders: Some(serves_outsiders),
            pods_dial: Some(pods_dial),
            ..Needs::default()
        };
        let [nothing, outsiders, dial, both] =
            [told(false, false), told(true, false), told(false, true), told(true, true)];
        let cases: [(&str, Needs, &[Equipment]); 16] = [
            ("nothing known, nothing there", Needs::default(), &[Bare, Bare]),
            ("nothing known: as a predecessor left it", Needs::default(), &[Replies, Replies]),
            ("the same, for clients", Needs::default(), &[Clients, Clients]),
            ("nothing to do", nothing, &[Bare, Bare]),
            ("no more to do", nothing, &[Replies, Leaving, Bare, Bare]),
            ("no more to dial", nothing, &[Clients, Leaving, Bare, Bare]),
            ("outsiders dial", outsiders, &[Bare, Replies, Replies]),
            ("outsiders dial again", outsiders, &[Leaving, Replies]),
            ("pods dial", dial, &[Bare, Clients, Clients]),
            ("pods dial, too", both, &[Replies, Clients]),
            ("pods do no more, outsiders do", outsiders, &[Clients, Replies]),
            ("a masqueraded flow lives", Needs { masqueraded_flows: true, ..nothing }, &[Replies, Replies]),
            ("a masqueraded flow of a pod lives", Needs { masqueraded_flows: true, ..nothing }, &[Clients, Clients]),
            ("a plain flow of a pod lives", Needs { plain_flows: true, ..nothing }, &[Clients, Clients]),
            ("a plain flow needs nobody else", Needs { plain_flows: true, ..nothing }, &[Replies, Leaving, Bare]),
            ("always", Needs { always: true, ..nothing }, &[Bare, Clients, Clients]),
        ];
        for (name, needs, states) in cases {
            for pair in states.windows(2) {
                assert_eq!(pair[0].next(&needs), pair[1], "{name}: {states:?}");
            }
        }
        let asked = Needs { was_asked: true, ..nothing };
        assert_eq!(Bare.next(&asked), Replies, "somebody outside dials what is not for him");
    }
}
