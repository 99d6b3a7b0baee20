//! The order of writes for one group; the table is in [`super`].

use std::collections::BTreeSet;

use sheave_ebpf::{
    backend::{Backend, FLAG_LOCAL, RETIRED},
    frontend::{Frontend, FrontendKey, KIND_LOOPBACK},
    maps, meta, proto,
    service::{
        Config, FLAG_HOST_ALLOWED, FLAG_PODS_ALLOWED, FLAG_PODS_BY_PACKET, FLAG_SOURCE_RANGES, VERDICT_DROP, Word,
        config_index, word_index,
    },
    source_range::{SERVICE_BITS, SourceRange},
};

use super::{
    Identity, Programmed, Reconciler, UNKNOWN_PORT, Work,
    adopt::{SCOPES, name_record},
};
use crate::{
    datapath::{Datapath, Error, RangeKey, Result, Stale, prefix_bits},
    model::Protocol,
    plan::{
        group::{BackendPlan, GroupKey, GroupPlan, ScopePlan},
        kind::Kind,
    },
};
use ipnet::IpNet;

impl From<&BackendPlan> for Identity {
    fn from(plan: &BackendPlan) -> Self {
        Self { addr: plan.addr, port: plan.port.to_be(), local: plan.local }
    }
}

impl<D: Datapath> Reconciler<D> {
    /// Steps 1 to 6. A new group that does not fit is not begun; an old one then keeps to the backends it has.
    pub(super) fn build(&mut self, plan: &GroupPlan, owned: &[(FrontendKey, Kind)]) -> Result<()> {
        let is_new = !self.groups.contains_key(&plan.key);
        let fits = self.make_room(plan, owned);
        if is_new {
            fits?;
            self.begin(&plan.key)?;
            let built = self.build_within(plan, owned, None);
            if matches!(built, Err(Error::NoSpace { .. })) {
                // What it holds may be just what another service lacks.
                self.clear(&Work { key: &plan.key, plan: None, frontends: Vec::new() })?;
            }
            return built?.map_or(Ok(()), Err);
        }
        self.build_within(plan, owned, fits.err())?.map_or(Ok(()), Err)
    }

    /// Whether everything fits; gives resting things back first where that helps.
    fn make_room(&mut self, plan: &GroupPlan, owned: &[(FrontendKey, Kind)]) -> Result<()> {
        if self.shortage(plan, owned).is_none() {
            return Ok(());
        }
        self.reclaim()?;
        self.shortage(plan, owned).map_or(Ok(()), Err)
    }

    fn shortage(&self, plan: &GroupPlan, owned: &[(FrontendKey, Kind)]) -> Option<Error> {
        let limits = self.datapath.limits();
        let full = |map, capacity, flag| Some(Error::NoSpace { map, capacity, flag: Some(flag) });
        let group = self.groups.get(&plan.key);
        let frontends = owned.iter().filter(|(key, _)| !self.frontends.contains_key(key)).count();
        if self.frontends.len() - self.unknown_ports + frontends > limits.frontends as usize
            || (group.is_none() && self.services.available() == 0)
        {
            return full(maps::FRONTENDS, limits.frontends, "--max-frontends");
        }
        let known = |b: &&BackendPlan| group.is_some_and(|g| g.backends.contains_key(&Identity::from(*b)));
        if plan.backends.iter().filter(|b| !known(b)).count() > self.backends.available() {
            return full(maps::BACKENDS, limits.backends, "--max-backends");
        }
        if group.is_none() && !self.has_room_for_new(plan.backends.len()) {
            return full(maps::TABLES, limits.slots, "--max-table-slots");
        }
        None
    }

    /// Step 1.
    fn begin(&mut self, key: &GroupKey) -> Result<()> {
        let record = name_record(key)
            .ok_or_else(|| Error::Incompatible(format!("{} has a name of more than 63 bytes", key.service)))?;
        let limit = self.datapath.limits().frontends;
        let full = Error::NoSpace { map: maps::FRONTENDS, capacity: limit, flag: Some("--max-frontends") };
        let id = self.services.take().ok_or(full)?;
        if let Err(error) = self.datapath.put_name(id, &record) {
            self.services.release(id);
            return Err(error);
        }
        // Words of a former life are gone since it was dismantled; a killed agent may have left them.
        self.groups.insert(key.clone(), Programmed { id, ..Programmed::default() });
        for scope in SCOPES {
            self.datapath.put_word(word_index(id, scope), 0)?;
        }
        self.datapath.put_word(config_index(id), 0)
    }

    /// Steps 2 to 6; `shortage` = only with the backends and frontends that are there already. Returns what there was
    /// too little of, if the group works and is not quite as wanted.
    fn build_within(
        &mut self,
        plan: &GroupPlan,
        owned: &[(FrontendKey, Kind)],
        shortage: Option<Error>,
    ) -> Result<Option<Error>> {
        let room = shortage.is_none();
        if room {
            self.put_backends(plan)?;
        }
        self.put_ranges(&plan.key, &plan.source_ranges)?;
        self.put_config(&plan.key, plan.config)?;
        let (words, plainer) = self.put_runs(plan)?;
        self.put_words(plan, words)?;
        self.retire(plan)?;
        for (key, kind) in owned {
            if room || self.frontends.contains_key(key) {
                self.put_frontend(&plan.key, key, *kind)?;
            }
        }
        self.drop_backends(plan)?;
        Ok(shortage.or(plainer))
    }

    /// Step 2.
    fn put_backends(&mut self, plan: &GroupPlan) -> Result<()> {
        for backend in &plan.backends {
            let identity = Identity::from(backend);
            let Some(group) = self.groups.get_mut(&plan.key) else { return Ok(()) };
            if group.backends.contains_key(&identity) {
                continue;
            }
            let capacity = self.datapath.limits().backends;
            let full = Error::NoSpace { map: maps::BACKENDS, capacity, flag: Some("--max-backends") };
            let id = self.backends.take().ok_or(full)?;
            group.backends.insert(identity, id); // ours from here on, written or not
            let record = Backend {
                addr: identity.addr,
                port: identity.port,
                proto: plan.key.protocol.number(),
                flags: if identity.local { FLAG_LOCAL } else { 0 },
                service: group.id,
            };
            let high = u64::from(id) + 1;
            let written = self
                .datapath
                .reset_connections(id)
                .and_then(|()| {
                    if self.datapath.meta(meta::BACKEND_HIGH_WATER) < high {
                        self.datapath.put_meta(meta::BACKEND_HIGH_WATER, high)?;
                    }
                    Ok(())
                })
                .and_then(|()| self.datapath.put_backend(id, &record));
            if let Err(error) = written {
                if let Some(group) = self.groups.get_mut(&plan.key) {
                    group.backends.remove(&identity);
                }
                self.backends.release(id);
                return Err(error);
            }
        }
        Ok(())
    }

    /// Step 3: admits before anything is refused.
    fn put_ranges(&mut self, key: &GroupKey, ranges: &[IpNet]) -> Result<()> {
        let Some(group) = self.groups.get_mut(key) else { return Ok(()) };
        for range in wanted_ranges(group.id, ranges) {
            if !group.ranges.contains(&range) {
                self.datapath.put_source_range(&range)?;
                group.ranges.insert(range);
            }
        }
        Ok(())
    }

    fn put_config(&mut self, key: &GroupKey, config: Config) -> Result<()> {
        let Some(group) = self.groups.get_mut(key) else { return Ok(()) };
        if group.config != config {
            self.datapath.put_word(config_index(group.id), config.0)?;
            if group.config.affinity_timeout() != 0 && config.affinity_timeout() == 0 {
                self.forgetful.insert(group.id); // switched on again it starts empty
            }
            if admits_more(group.config, config) {
                self.stale.extend(group.frontends.iter().map(|key| dialled_before(key, group.id, true)));
            }
            group.config = config;
        }
        Ok(())
    }

    /// Step 5, and what the old words led to rests.
    fn put_words(&mut self, plan: &GroupPlan, words: [Word; 3]) -> Result<()> {
        for (index, scope) in SCOPES.into_iter().enumerate() {
            let Some(group) = self.groups.get_mut(&plan.key) else { return Ok(()) };
            let old = group.words[index];
            if old == words[index] {
                continue;
            }
            if let Err(error) = self.datapath.put_word(word_index(group.id, scope), words[index].0) {
                // Runs that were made for this and later scopes have no word: they rest.
                let kept = group.words;
                let unused: BTreeSet<u64> = words[index..].iter().filter(|w| !kept.contains(w)).map(|w| w.0).collect();
                for word in unused {
                    self.rest_run_unless(Word(word), &kept);
                }
                return Err(error);
            }
            group.words[index] = words[index];
            if old.verdict() == VERDICT_DROP {
                self.stale.extend(group.frontends.iter().map(|key| dialled_before(key, group.id, true)));
            }
            // A run still wanted by a later scope is in `words`.
            let mut named = group.words.to_vec();
            named.extend(words);
            self.rest_run_unless(old, &named);
        }
        Ok(())
    }

    /// Datagram flows leave backends that no longer serve, and may stay with those that do.
    fn retire(&mut self, plan: &GroupPlan) -> Result<()> {
        let Some(group) = self.groups.get(&plan.key) else { return Ok(()) };
        for backend in &plan.backends {
            let Some(id) = group.backends.get(&Identity::from(backend)) else { continue };
            if (self.datapath.connections(*id) & RETIRED != 0) == backend.serving {
                self.datapath.set_retired(*id, !backend.serving)?;
                if !backend.serving && plan.key.protocol == Protocol::Udp {
                    let Identity { addr, port, local: _ } = Identity::from(backend);
                    self.stale.push(Stale::Backend { service: group.id, addr, port, proto: proto::UDP });
                }
            }
        }
        Ok(())
    }

    /// Step 6.
    fn put_frontend(&mut self, group: &GroupKey, key: &FrontendKey, kind: Kind) -> Result<()> {
        let Some(programmed) = self.groups.get(group) else { return Ok(()) };
        let value = Frontend { service: programmed.id, kind: kind.number() };
        if self.frontends.get(key) != Some(&value) {
            self.write_frontend(key, value)?;
        }
        if let Some(programmed) = self.groups.get_mut(group) {
            programmed.frontends.insert(*key);
        }
        Ok(())
    }

    /// The element of a frontend that was deleted or moved may still be read; only a grace period makes it free.
    pub(super) fn write_frontend(&mut self, key: &FrontendKey, value: Frontend) -> Result<()> {
        if self.deleted {
            self.grace()?;
        }
        self.datapath.put_frontend(key, &value)?;
        let replaced = self.frontends.insert(*key, value);
        if matches!(key.proto, proto::TCP | proto::UDP) && value.kind != KIND_LOOPBACK && replaced != Some(value) {
            self.stale.push(dialled_before(key, value.service, false));
        }
        self.unknown_ports += usize::from(value == UNKNOWN_PORT);
        self.unknown_ports -= usize::from(replaced == Some(UNKNOWN_PORT));
        self.deleted |= replaced.is_some();
        Ok(())
    }

    /// Backends in no slice any more.
    fn drop_backends(&mut self, plan: &GroupPlan) -> Result<()> {
        let wanted: BTreeSet<Identity> = plan.backends.iter().map(Identity::from).collect();
        let Some(group) = self.groups.get(&plan.key) else { return Ok(()) };
        let gone: Vec<Identity> = group.backends.keys().filter(|i| !wanted.contains(i)).copied().collect();
        self.release_backends(&plan.key, &gone)
    }

    fn release_backends(&mut self, key: &GroupKey, gone: &[Identity]) -> Result<()> {
        let Some(group) = self.groups.get_mut(key) else { return Ok(()) };
        for identity in gone {
            if let Some(id) = group.backends.get(identity).copied() {
                self.datapath.set_retired(id, true)?;
                group.backends.remove(identity);
                self.resting.backend(id);
                let Identity { addr, port, local: _ } = *identity;
                let proto = key.protocol.number();
                self.stale.push(Stale::Backend { service: group.id, addr, port, proto });
            }
        }
        Ok(())
    }

    /// Steps 7 to 9.
    pub(super) fn clear(&mut self, work: &Work<'_>) -> Result<()> {
        let owned: BTreeSet<FrontendKey> = work.frontends.iter().map(|(key, _)| *key).collect();
        let Some(group) = self.groups.get(work.key) else { return Ok(()) };
        let id = group.id;
        let gone: Vec<FrontendKey> = group.frontends.difference(&owned).copied().collect();
        for key in gone {
            // Step 6 may have given it to its new owner.
            if self.frontends.get(&key).is_some_and(|actual| actual.service == id) {
                self.remove_frontend(&key)?;
            }
            if let Some(group) = self.groups.get_mut(work.key) {
                group.frontends.remove(&key);
            }
        }
        match work.plan {
            Some(plan) => {
                for (index, scope) in plan.scopes.iter().enumerate() {
                    if *scope == ScopePlan::Unused {
                        self.clear_word(work.key, index)?;
                    }
                }
                self.remove_ranges(work.key, &wanted_ranges(id, &plan.source_ranges).collect())
            }
            None => self.dismantle(work.key),
        }
    }

    fn dismantle(&mut self, key: &GroupKey) -> Result<()> {
        for index in 0..SCOPES.len() {
            self.clear_word(key, index)?;
        }
        self.put_config(key, Config(0))?;
        self.remove_ranges(key, &BTreeSet::new())?;
        let Some(group) = self.groups.get(key) else { return Ok(()) };
        let gone: Vec<Identity> = group.backends.keys().copied().collect();
        self.release_backends(key, &gone)?;
        if let Some(group) = self.groups.remove(key) {
            self.resting.service(group.id); // its name goes when it has rested
        }
        Ok(())
    }

    fn clear_word(&mut self, key: &GroupKey, index: usize) -> Result<()> {
        let Some(group) = self.groups.get_mut(key) else { return Ok(()) };
        let old = group.words[index];
        if old == Word::default() {
            return Ok(());
        }
        self.datapath.put_word(word_index(group.id, SCOPES[index]), 0)?;
        group.words[index] = Word::default();
        let named = group.words;
        self.rest_run_unless(old, &named);
        Ok(())
    }

    fn remove_ranges(&mut self, key: &GroupKey, wanted: &BTreeSet<RangeKey>) -> Result<()> {
        let Some(group) = self.groups.get_mut(key) else { return Ok(()) };
        let gone: Vec<RangeKey> = group.ranges.difference(wanted).copied().collect();
        for range in gone {
            self.datapath.remove_source_range(&range)?;
            group.ranges.remove(&range);
        }
        Ok(())
    }

    /// The element may not be used again before a grace period is over.
    pub(super) fn remove_frontend(&mut self, key: &FrontendKey) -> Result<()> {
        self.datapath.remove_frontend(key)?;
        self.unknown_ports -= usize::from(self.frontends.remove(key) == Some(UNKNOWN_PORT));
        self.deleted = true;
        Ok(())
    }
}

/// Whether clients may now be admitted that were dropped for being outside the source ranges.
const fn admits_more(old: Config, new: Config) -> bool {
    let (old, new) = (old.flags(), new.flags());
    new & !old & (FLAG_HOST_ALLOWED | FLAG_PODS_ALLOWED | FLAG_PODS_BY_PACKET) != 0
        || old & !new & FLAG_SOURCE_RANGES != 0
}

/// Sockets that found something other than `service` here, or were dropped by it.
fn dialled_before(key: &FrontendKey, service: u32, was_silent: bool) -> Stale {
    let FrontendKey { addr, port, proto, zero: _ } = *key;
    Stale::Frontend { service, was_silent, addr, port, proto }
}

fn wanted_ranges(service: u32, ranges: &[IpNet]) -> impl Iterator<Item = RangeKey> {
    let addr = |net: &IpNet| net.network().into();
    ranges
        .iter()
        .map(move |net| (SERVICE_BITS + prefix_bits(net), SourceRange { service: service.to_be(), addr: addr(net) }))
}
