//! The state of the cluster as known so far.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use ipnet::IpNet;

use super::{
    endpoint::{EndpointSlice, SliceName},
    node::Node,
    service::{Family, Service, ServiceName},
    service_cidr::ServiceCidr,
};

/// What a source reports. Complete lists come first, and again whenever a watch had to start over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Update {
    /// All Services there are; whatever else was known is gone.
    Services(Vec<Service>),
    /// All EndpointSlices there are.
    Slices(Vec<EndpointSlice>),
    /// All Nodes there are.
    Nodes(Vec<Node>),
    /// All ServiceCIDRs there are; none where the API does not know the kind.
    ServiceCidrs(Vec<ServiceCidr>),
    /// A Service was added or changed.
    Service(Box<Service>),
    /// A Service was deleted.
    ServiceGone(ServiceName),
    /// A slice was added or changed.
    Slice(Box<EndpointSlice>),
    /// A slice was deleted, or is none of ours any more.
    SliceGone(SliceName),
    /// A Node was added or changed.
    Node(Box<Node>),
    /// A Node was deleted.
    NodeGone(Arc<str>),
    /// A ServiceCIDR was added or changed.
    ServiceCidr(ServiceCidr),
    /// A ServiceCIDR was deleted.
    ServiceCidrGone(Arc<str>),
}

/// What an update touched.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// Services whose object or slices changed, appeared or went.
    pub services: BTreeSet<ServiceName>,
    /// Some Node changed: what depends on addresses, zones and CIDRs must be looked at again.
    pub nodes: bool,
    /// Some ServiceCIDR changed, or they are known at last.
    pub service_cidrs: bool,
    /// What metrics count.
    pub noted: Noted,
}

/// How many objects an update changed, and when those who changed them did so.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Noted {
    /// Services that appeared, changed or went.
    pub services: usize,
    /// Slices whose ports or endpoints appeared, changed or went.
    pub slices: Vec<SliceChange>,
}

impl Noted {
    /// Adds what came later.
    pub fn add(&mut self, later: Self) {
        self.services += later.services;
        self.slices.extend(later.slices);
    }
}

/// A slice that appeared, changed or went.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SliceChange {
    /// Its owner.
    pub service: ServiceName,
    /// Its family.
    pub family: Family,
    /// It went, or belongs to another Service now.
    pub removed: bool,
    /// When the change behind it was made, Unix nanoseconds.
    pub trigger_time: Option<i128>,
}

impl Changes {
    /// Adds what `other` touched.
    pub fn merge(&mut self, other: Self) {
        self.services.extend(other.services);
        self.nodes |= other.nodes;
        self.service_cidrs |= other.service_cidrs;
        self.noted.add(other.noted);
    }

    /// Nothing touched.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.services.is_empty() && !self.nodes && !self.service_cidrs
    }
}

/// Services, their slices and the Nodes.
#[derive(Clone, Debug, Default)]
pub struct State {
    services: BTreeMap<ServiceName, Service>,
    /// Boxed: most Services have one, and the first node of a map has room for eleven.
    slices: BTreeMap<ServiceName, BTreeMap<Arc<str>, Box<EndpointSlice>>>,
    /// Owner of every slice, since a slice may change its owner.
    owners: BTreeMap<SliceName, ServiceName>,
    nodes: BTreeMap<Arc<str>, Node>,
    /// `None` = not known yet, and nothing else waits for them.
    service_cidrs: Option<BTreeMap<Arc<str>, Vec<IpNet>>>,
    listed: [bool; 3],
}

impl State {
    /// Whether every kind has delivered its first complete list; before that nothing may be deleted (invariant 3).
    #[must_use]
    pub fn is_synced(&self) -> bool {
        self.listed == [true; 3]
    }

    /// Every Service, handled or not, in order of its name.
    pub fn services(&self) -> impl Iterator<Item = &Service> {
        self.services.values()
    }

    /// One Service.
    #[must_use]
    pub fn service(&self, name: &ServiceName) -> Option<&Service> {
        self.services.get(name)
    }

    /// The slices of a Service in order of their names; none when there are none.
    pub fn slices(&self, service: &ServiceName) -> impl Iterator<Item = &EndpointSlice> + Clone {
        self.slices.get(service).into_iter().flat_map(BTreeMap::values).map(AsRef::as_ref)
    }

    /// Every Node.
    pub fn nodes(&self) -> impl Iterator<Item = &Node> {
        self.nodes.values()
    }

    /// One Node.
    #[must_use]
    pub fn node(&self, name: &str) -> Option<&Node> {
        self.nodes.get(name)
    }

    /// The networks that ClusterIPs come from, each once; `None` = not known yet.
    #[must_use]
    pub fn service_cidrs(&self) -> Option<BTreeSet<IpNet>> {
        Some(self.service_cidrs.as_ref()?.values().flatten().copied().collect())
    }

    /// Takes in an update; says what it touched. An update that changes nothing touches nothing.
    pub fn apply(&mut self, update: Update) -> Changes {
        let mut changes = Changes::default();
        match update {
            Update::Service(service) => self.put_service(*service, &mut changes),
            Update::ServiceGone(name) => self.remove_service(&name, &mut changes),
            Update::Slice(slice) => self.put_slice(*slice, &mut changes),
            Update::SliceGone(name) => self.remove_slice(&name, &mut changes),
            Update::Node(node) => self.put_node(*node, &mut changes),
            Update::NodeGone(name) => changes.nodes |= self.nodes.remove(&name).is_some(),
            Update::ServiceCidr(ServiceCidr { name, networks }) => {
                let known = self.service_cidrs.get_or_insert_default();
                changes.service_cidrs |= known.insert(name, networks.clone()).as_ref() != Some(&networks);
            }
            Update::ServiceCidrGone(name) => {
                changes.service_cidrs |= self.service_cidrs.as_mut().is_some_and(|known| known.remove(&name).is_some());
            }
            Update::ServiceCidrs(list) => {
                let list = Some(list.into_iter().map(|cidr| (cidr.name, cidr.networks)).collect());
                changes.service_cidrs |= self.service_cidrs != list;
                self.service_cidrs = list;
            }
            Update::Services(list) => {
                let kept: BTreeSet<_> = list.iter().map(|s| s.name.clone()).collect();
                for gone in self.services.keys().filter(|n| !kept.contains(*n)).cloned().collect::<Vec<_>>() {
                    self.remove_service(&gone, &mut changes);
                }
                list.into_iter().for_each(|s| self.put_service(s, &mut changes));
                self.listed[0] = true;
            }
            Update::Slices(list) => {
                let kept: BTreeSet<_> = list.iter().map(|s| s.name.clone()).collect();
                for gone in self.owners.keys().filter(|n| !kept.contains(*n)).cloned().collect::<Vec<_>>() {
                    self.remove_slice(&gone, &mut changes);
                }
                list.into_iter().for_each(|s| self.put_slice(s, &mut changes));
                self.listed[1] = true;
            }
            Update::Nodes(list) => {
                let kept: BTreeSet<_> = list.iter().map(|n| n.name.clone()).collect();
                let before = self.nodes.len();
                self.nodes.retain(|name, _| kept.contains(name));
                changes.nodes |= self.nodes.len() != before;
                list.into_iter().for_each(|n| self.put_node(n, &mut changes));
                self.listed[2] = true;
            }
        }
        debug_assert!(self.check());
        changes
    }

    fn put_service(&mut self, service: Service, changes: &mut Changes) {
        if self.services.get(&service.name) != Some(&service) {
            changes.services.insert(service.name.clone());
            changes.noted.services += 1;
            self.services.insert(service.name.clone(), service);
        }
    }

    fn remove_service(&mut self, name: &ServiceName, changes: &mut Changes) {
        if self.services.remove(name).is_some() {
            changes.services.insert(name.clone());
            changes.noted.services += 1;
        }
    }

    fn put_slice(&mut self, slice: EndpointSlice, changes: &mut Changes) {
        if self.owners.get(&slice.name).is_some_and(|owner| *owner != slice.service) {
            self.remove_slice(&slice.name, changes);
        }
        let slices = self.slices.entry(slice.service.clone()).or_default();
        let before = slices.get(&slice.name.name).map(AsRef::as_ref);
        if before != Some(&slice) {
            if before.is_none_or(|before| before.ports != slice.ports || before.endpoints != slice.endpoints) {
                changes.noted.slices.push(slice.change(false));
            }
            changes.services.insert(slice.service.clone());
            self.owners.insert(slice.name.clone(), slice.service.clone());
            slices.insert(slice.name.name.clone(), Box::new(slice));
        }
    }

    fn remove_slice(&mut self, name: &SliceName, changes: &mut Changes) {
        let Some(owner) = self.owners.remove(name) else { return };
        if let Some(slices) = self.slices.get_mut(&owner) {
            changes.noted.slices.extend(slices.remove(&name.name).map(|slice| slice.change(true)));
            if slices.is_empty() {
                self.slices.remove(&owner); // nothing stays behind
            }
        }
        changes.services.insert(owner);
    }

    fn put_node(&mut self, node: Node, changes: &mut Changes) {
        if self.nodes.get(&node.name) != Some(&node) {
            changes.nodes = true;
            self.nodes.insert(node.name.clone(), node);
        }
    }

    /// Every slice has exactly one owner that lists it.
    fn check(&self) -> bool {
        self.owners.len() == self.slices.values().map(BTreeMap::len).sum::<usize>()
            && self.slices.values().all(|s| !s.is_empty())
    }
}

impl EndpointSlice {
    fn change(&self, removed: bool) -> SliceChange {
        SliceChange { service: self.service.clone(), family: self.family, removed, trigger_time: self.trigger_time }
    }
}

#[cfg(test)]
mod tests;
