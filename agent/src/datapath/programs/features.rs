//! What this kernel can do of what is optional: the one list of it, from which programs are loaded, `status` and `check`
//! report, and `docs/kernel.md` tells.

use std::path::Path;

use aya::{
    programs::ProgramType,
    sys::{BpfHelper, is_helper_supported},
};

use crate::{
    datapath::{
        host::{discard, netns},
        programs::{
            probe::{KernelVersion, trial},
            tc,
        },
    },
    view::FeatureView,
};

/// What is there of what is optional.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features {
    /// `bpf_set_retval`, Linux 5.18.
    pub set_retval: bool,
    /// The cookie of this process's network namespace, Linux 5.14; 0 = unknown.
    pub host_netns: u64,
    /// The discard route is in place, or could be.
    pub discard: bool,
    /// What becomes of MPTCP sockets.
    pub mptcp: Mptcp,
    /// `BPF_F_IPV6`, Linux 6.16.
    pub csum_ipv6: bool,
    /// Programs may ask which process dials.
    pub current_task: bool,
    /// tcx, Linux 6.6.
    pub tcx: bool,
    /// Programs can be on devices at all.
    pub classifiers: bool,
}

/// What becomes of MPTCP sockets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mptcp {
    /// The kernel has none.
    #[default]
    Absent,
    /// Programs see only their subflows.
    Hidden,
    /// `bpf_skc_to_mptcp_sock`, Linux 5.19, leads to them.
    Seen,
}

impl Features {
    /// Asks the kernel. `discard` is what [`discard::ensure`] achieved.
    #[must_use]
    pub fn probe(discard: bool) -> Self {
        let has = |helper| is_helper_supported(ProgramType::CgroupSockAddr, helper).unwrap_or(false);
        let since = |major, minor| KernelVersion::running().is_some_and(|v| v >= KernelVersion(major, minor));
        // The helper is there without MPTCP too, but the verifier refuses who calls it.
        let mptcp = match (Path::new("/proc/sys/net/mptcp").exists(), has(BpfHelper::BPF_FUNC_skc_to_mptcp_sock)) {
            (false, _) => Mptcp::Absent,
            (true, false) => Mptcp::Hidden,
            (true, true) => Mptcp::Seen,
        };
        let tcx = tc::is_tcx_there();
        Self {
            set_retval: has(BpfHelper::BPF_FUNC_set_retval),
            host_netns: netns::cookie().unwrap_or(0),
            discard,
            mptcp,
            csum_ipv6: since(6, 16),
            current_task: has(BpfHelper::BPF_FUNC_get_current_pid_tgid) && has(BpfHelper::BPF_FUNC_get_current_comm),
            tcx,
            classifiers: tcx || trial::classifiers(),
        }
    }

    /// The same for a host on which no agent need run, and which stays as it is.
    #[must_use]
    pub fn foresee() -> Self {
        Self::probe(Path::new("/sys/class/net").join(discard::DEVICE).exists() || trial::discard())
    }

    /// As `status` and `check` show them.
    #[must_use]
    pub fn views(self) -> Vec<FeatureView> {
        let Self { set_retval, host_netns, discard, mptcp, csum_ipv6, current_task, tcx, classifiers } = self;
        let feature = |name: &str, available: bool, consequence: &str| FeatureView {
            name: name.to_owned(),
            available,
            consequence: consequence.to_owned(),
        };
        vec![
            feature(
                "set-retval",
                set_retval,
                "without it (Linux 5.18) a refused connection fails with EPERM instead of ECONNREFUSED",
            ),
            feature(
                "netns-cookie",
                host_netns != 0,
                "without it (Linux 5.14) NodePorts do not answer on loopback, processes can bind to NodePorts, and every \
                 socket counts as a pod's",
            ),
            feature(
                "mptcp",
                mptcp != Mptcp::Hidden,
                "without it (Linux 5.19) connections of MPTCP sockets stay counted and show the pod's address",
            ),
            feature(
                "discard-route",
                discard,
                "without it (a dummy or bridge device) connections that should be dropped silently fail with ETIMEDOUT at \
                 once",
            ),
            feature(
                "checksum-ipv6",
                csum_ipv6,
                "without it (Linux 6.16) network cards that leave the whole checksum to the kernel make it log \"hw csum \
                 failure\" for translated IPv6 packets, and sum them up again",
            ),
            feature("current-task", current_task, "without it `sheave monitor` does not name the process that dials"),
            feature(
                "tcx",
                tcx,
                "without it (Linux 6.6) the packet programs are filters of clsact, which programs of others on a device \
                 may come before",
            ),
            feature(
                "classifiers",
                classifiers,
                "without them (CONFIG_NET_SCH_INGRESS and CONFIG_NET_CLS_BPF, or tcx) there is no packet path: clients \
                 outside this node are not served",
            ),
        ]
    }
}
