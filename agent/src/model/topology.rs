//! Which endpoints may be chosen: kube-proxy's rules, as a pure function.
//!
//! 1. Ready endpoints come first.
//! 2. If there are none, those that are serving and terminating take their place.
//! 3. Hints narrow the cluster-wide set to this node or zone, if every ready endpoint has them and one names us.
//! 4. Traffic is refused only if no endpoint anywhere could take it; a Local policy without local endpoints drops it.
//! 5. `ready` is what the slice says, not worked out from the other conditions.

use super::endpoint::PortEndpoint;

/// What of a Service and a Node the choice depends on.
#[derive(Clone, Copy, Debug, Default)]
pub struct Selection<'a> {
    /// internalTrafficPolicy Local.
    pub internal_local: bool,
    /// externalTrafficPolicy Local, where it counts.
    pub external_local: bool,
    /// The port has a NodePort, load-balancer or external IP in this family.
    pub externally_accessible: bool,
    /// This node's name; empty = nothing is local.
    pub node: &'a str,
    /// This node's zone; empty = none.
    pub zone: &'a str,
}

impl Selection<'_> {
    /// The cluster-wide set is needed: for ClusterIP traffic, or for the short-circuit of inside clients.
    const fn uses_cluster(self) -> bool {
        !self.internal_local || self.externally_accessible
    }

    const fn uses_local(self) -> bool {
        self.internal_local || (self.external_local && self.externally_accessible)
    }

    /// Whether an endpoint runs on this node.
    #[must_use]
    pub fn is_local(self, endpoint: &PortEndpoint<'_>) -> bool {
        !self.node.is_empty() && endpoint.endpoint.node.as_deref() == Some(self.node)
    }
}

/// The sets to choose from, as indexes into the endpoints given.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Categories {
    /// For policy Cluster and for inside clients; `None` = not used.
    pub cluster: Option<Vec<usize>>,
    /// For policy Local; `None` = not used.
    pub local: Option<Vec<usize>>,
    /// Whether any endpoint could take traffic somewhere: if not, traffic is refused, else dropped.
    pub has_any: bool,
}

/// Chooses; the comments name the rules above.
#[must_use]
pub fn categorize(endpoints: &[PortEndpoint<'_>], selection: Selection<'_>) -> Categories {
    let mut categories = Categories::default();
    let ready = |i: &usize| endpoints[*i].endpoint.ready; // rule 5: as given
    let draining = |i: &usize| endpoints[*i].endpoint.serving && endpoints[*i].endpoint.terminating;
    let all = || 0..endpoints.len();
    let ready_or_draining = |candidates: &dyn Fn(&usize) -> bool| {
        let preferred: Vec<usize> = all().filter(|i| candidates(i) && ready(i)).collect();
        if preferred.is_empty() { all().filter(|i| candidates(i) && draining(i)).collect() } else { preferred }
    };

    if selection.uses_cluster() {
        let level = Level::of(endpoints, selection);
        let near: Vec<usize> = all().filter(|i| ready(i) && level.admits(&endpoints[*i], selection)).collect();
        let cluster = if near.is_empty() { all().filter(draining).collect() } else { near }; // rule 2
        categories.has_any = !cluster.is_empty();
        categories.cluster = Some(cluster);
    }
    if selection.uses_local() {
        let local = ready_or_draining(&|i| selection.is_local(&endpoints[*i]));
        categories.has_any |= all().any(|i| ready(&i) || draining(&i)); // rule 4
        categories.local = Some(local);
    }
    categories
}

/// How far traffic may go, by hints.
#[derive(Clone, Copy)]
enum Level {
    Node,
    Zone,
    Anywhere,
}

impl Level {
    /// Rule 3: a level holds only when every ready endpoint is hinted for it and one names us.
    fn of(endpoints: &[PortEndpoint<'_>], selection: Selection<'_>) -> Self {
        let ready = || endpoints.iter().filter(|e| e.endpoint.ready);
        let holds = |level: Self| {
            let hinted = ready().all(|e| match (&e.endpoint.hints, level) {
                (Some(hints), Self::Node) => !hints.nodes.is_empty(),
                (Some(hints), Self::Zone) => !hints.zones.is_empty(),
                (None, _) => false,
                (Some(_), Self::Anywhere) => true,
            });
            hinted && ready().any(|e| level.admits(e, selection))
        };
        if holds(Self::Node) {
            Self::Node
        } else if holds(Self::Zone) {
            Self::Zone
        } else {
            Self::Anywhere
        }
    }

    fn admits(self, endpoint: &PortEndpoint<'_>, selection: Selection<'_>) -> bool {
        let hints = endpoint.endpoint.hints.as_deref();
        match self {
            Self::Node => hints.is_some_and(|h| h.nodes.iter().any(|n| !n.is_empty() && **n == *selection.node)),
            Self::Zone => hints.is_some_and(|h| h.zones.iter().any(|z| !z.is_empty() && **z == *selection.zone)),
            Self::Anywhere => true,
        }
    }
}

#[cfg(test)]
mod tests;
