//! Giving up what only the start of the agent needs.

use caps::{CapSet, Capability, CapsHashSet, errors::CapsError};

/// What a running agent may still do; with what it is given less than this, it keeps less.
pub const KEPT: [(Capability, &str); 7] = [
    (Capability::CAP_BPF, "to write maps, and to attach programs to devices that come"),
    (Capability::CAP_NET_ADMIN, "to attach, to close sockets of removed backends, to put back what was taken away"),
    (Capability::CAP_SYS_ADMIN, "to enter the network namespaces of pods, whose sockets are to be closed"),
    (
        Capability::CAP_SYS_PTRACE,
        "to find those namespaces by the processes in them, where they have no name below /run/netns",
    ),
    (Capability::CAP_NET_BIND_SERVICE, "to wait for a port that is still taken"),
    (Capability::CAP_DAC_OVERRIDE, "to read credentials again that belong to another user"),
    (Capability::CAP_DAC_READ_SEARCH, "the same"),
];

/// Gives up every other capability of this thread, and of those that it starts from now on.
///
/// # Errors
/// What the kernel says.
pub fn give_up() -> Result<(), CapsError> {
    let permitted = caps::read(None, CapSet::Permitted)?;
    let kept: CapsHashSet =
        KEPT.into_iter().map(|(capability, _)| capability).filter(|c| permitted.contains(c)).collect();
    caps::clear(None, CapSet::Inheritable)?;
    caps::set(None, CapSet::Effective, &kept)?;
    caps::set(None, CapSet::Permitted, &kept)
}
