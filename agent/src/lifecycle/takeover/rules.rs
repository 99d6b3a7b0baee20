//! Which chains and rules are kube-proxy's. Pure: tables of nf_tables and of legacy iptables look the same from here.

use std::collections::BTreeSet;

/// What kube-proxy calls its chains, in iptables and ipvs mode, of all versions (its own names, not kubelet's:
/// KUBE-FIREWALL, KUBE-IPTABLES-HINT, KUBE-KUBELET-CANARY, KUBE-MARK-DROP).
const CHAINS: [&str; 16] = [
    "KUBE-SERVICES",
    "KUBE-EXTERNAL-SERVICES",
    "KUBE-NODEPORTS",
    "KUBE-POSTROUTING",
    "KUBE-MARK-MASQ",
    "KUBE-FORWARD",
    "KUBE-PROXY-FIREWALL",
    "KUBE-PROXY-CANARY",
    "KUBE-NODE-PORT",
    "KUBE-LOAD-BALANCER",
    "KUBE-SOURCE-RANGES-FIREWALL",
    "KUBE-IPVS-FILTER",
    "KUBE-IPVS-OUT-FILTER",
    "KUBE-PORTALS-CONTAINER",
    "KUBE-PORTALS-HOST",
    "KUBE-NODEPORT-NON-LOCAL",
];
/// One chain for each service port or endpoint; what follows is a hash.
const PREFIXES: [&str; 6] = ["KUBE-SVC-", "KUBE-SVL-", "KUBE-FW-", "KUBE-EXT-", "KUBE-XLB-", "KUBE-SEP-"];
/// The chains that the kernel calls.
const BUILT_IN: [&str; 5] = ["PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING"];

/// A table: its chains, and its rules by what identifies one: a handle, or its text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Table<R> {
    /// Names of all chains.
    pub chains: BTreeSet<String>,
    /// All rules, in order.
    pub rules: Vec<Rule<R>>,
}

/// A rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule<R> {
    /// Where it stands.
    pub chain: String,
    /// The chain that it jumps or goes to.
    pub target: Option<String>,
    /// What names it.
    pub id: R,
}

/// What has to go so that nothing of kube-proxy's is left, and what has to stay.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Removal<R> {
    /// Rules outside of its chains that lead into them.
    pub jumps: Vec<Rule<R>>,
    /// Its chains, with all that is in them.
    pub chains: Vec<String>,
    /// Its chains that a rule of somebody else jumps to, and those that these need.
    pub kept: Vec<String>,
}

impl<R> Removal<R> {
    /// Nothing of kube-proxy's is there.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.jumps.is_empty() && self.chains.is_empty()
    }
}

fn is_ours_to_remove(chain: &str) -> bool {
    CHAINS.contains(&chain) || PREFIXES.iter().any(|prefix| chain.starts_with(prefix))
}

/// Judges a table.
#[must_use]
pub fn judge<R: Clone>(table: &Table<R>) -> Removal<R> {
    let candidates: BTreeSet<&str> = table.chains.iter().map(String::as_str).filter(|c| is_ours_to_remove(c)).collect();
    let target =
        |rule: &Rule<R>| rule.target.as_deref().filter(|target| candidates.contains(target)).map(str::to_owned);
    // kube-proxy's own jumps start in the kernel's chains, and never lead straight to where packets are marked.
    let is_jump = |rule: &Rule<R>, target: &str| BUILT_IN.contains(&&*rule.chain) && target != "KUBE-MARK-MASQ";

    let mut kept = BTreeSet::new();
    for rule in table.rules.iter().filter(|rule| !candidates.contains(&*rule.chain)) {
        if let Some(target) = target(rule).filter(|target| !is_jump(rule, target)) {
            kept.insert(target);
        }
    }
    // A mark that somebody relies on is of use only where it is acted on; and a chain needs those that it jumps to.
    if kept.contains("KUBE-MARK-MASQ") && candidates.contains("KUBE-POSTROUTING") {
        kept.insert("KUBE-POSTROUTING".to_owned());
    }
    loop {
        let needed = table.rules.iter().filter(|rule| kept.contains(&rule.chain)).filter_map(target);
        let new: Vec<_> = needed.filter(|target| !kept.contains(target)).collect();
        if new.is_empty() {
            break;
        }
        kept.extend(new);
    }
    let leads_away = |rule: &&Rule<R>| {
        !candidates.contains(&*rule.chain) && target(rule).is_some_and(|target| !kept.contains(&target))
    };
    Removal {
        jumps: table.rules.iter().filter(leads_away).cloned().collect(),
        chains: candidates.iter().filter(|chain| !kept.contains(**chain)).map(|chain| (*chain).to_owned()).collect(),
        kept: kept.into_iter().collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(rules: &[&str]) -> Table<String> {
        let mut table = Table::default();
        for rule in rules {
            let mut words = rule.split(' ');
            let (chain, target) = (words.next().unwrap().to_owned(), words.next().map(str::to_owned));
            table.chains.insert(chain.clone());
            table.chains.extend(target.clone().filter(|target| target.contains('-')));
            table.rules.push(Rule { chain, target, id: (*rule).to_owned() });
        }
        table
    }

    /// A rule is "CHAIN TARGET".
    fn check(name: &str, rules: &[&str], jumps: &[&str], chains: &[&str], kept: &[&str]) {
        let removal = judge(&table(rules));
        let found: Vec<_> = removal.jumps.iter().map(|rule| &*rule.id).collect();
        assert_eq!(found, jumps, "{name}");
        assert_eq!(removal.chains, chains, "{name}");
        assert_eq!(removal.kept, kept, "{name}");
    }

    #[test]
    fn what_is_kube_proxys_goes_and_nothing_else() {
        check("an empty table", &[], &[], &[], &[]);
        check(
            "iptables mode",
            &[
                "PREROUTING KUBE-SERVICES",
                "PREROUTING CNI-HOSTPORT-DNAT",
                "OUTPUT KUBE-SERVICES",
                "POSTROUTING KUBE-POSTROUTING",
                "POSTROUTING FLANNEL-POSTRTG",
                "KUBE-SERVICES KUBE-SVC-ABC",
                "KUBE-SVC-ABC KUBE-SEP-DEF",
                "KUBE-SEP-DEF KUBE-MARK-MASQ",
                "KUBE-MARK-MASQ",
                "KUBE-SEP-DEF DNAT",
                "FLANNEL-POSTRTG MASQUERADE",
            ],
            &["PREROUTING KUBE-SERVICES", "OUTPUT KUBE-SERVICES", "POSTROUTING KUBE-POSTROUTING"],
            &["KUBE-MARK-MASQ", "KUBE-POSTROUTING", "KUBE-SEP-DEF", "KUBE-SERVICES", "KUBE-SVC-ABC"],
            &[],
        );
        check(
            "kubelet's and kube-router's chains",
            &[
                "INPUT KUBE-FIREWALL",
                "KUBE-FIREWALL DROP",
                "KUBE-KUBELET-CANARY",
                "KUBE-IPTABLES-HINT",
                "INPUT KUBE-ROUTER-INPUT",
                "KUBE-POD-FW-XYZ",
                "KUBE-MARK-DROP",
            ],
            &[],
            &[],
            &[],
        );
        check(
            "somebody else marks packets for masquerade: the mark stays, and what acts on it",
            &[
                "POSTROUTING KUBE-POSTROUTING",
                "KUBE-POSTROUTING MASQUERADE",
                "MY-CHAIN KUBE-MARK-MASQ",
                "KUBE-SVC-ABC KUBE-MARK-MASQ",
            ],
            &[],
            &["KUBE-SVC-ABC"],
            &["KUBE-MARK-MASQ", "KUBE-POSTROUTING"],
        );
        check(
            "somebody else jumps to a Service: its chains stay",
            &[
                "PREROUTING KUBE-SERVICES",
                "MY-CHAIN KUBE-SVC-ABC",
                "KUBE-SVC-ABC KUBE-SEP-DEF",
                "KUBE-SERVICES KUBE-SVC-ABC",
            ],
            &["PREROUTING KUBE-SERVICES"],
            &["KUBE-SERVICES"],
            &["KUBE-SEP-DEF", "KUBE-SVC-ABC"],
        );
        check("an administrator marks by hand", &["PREROUTING KUBE-MARK-MASQ"], &[], &[], &["KUBE-MARK-MASQ"]);
    }
}
