//! Our programs on a device of a node, as the kernel tells.

use anyhow::Result;
use aya::programs::{SchedClassifier, TcAttachType};

use crate::node::Node;

impl Node {
    /// Programs on a device by tcx, both directions together.
    ///
    /// # Errors
    /// When there is no such device, or the kernel is older than tcx (6.6).
    pub fn by_tcx(&self, device: &str) -> Result<usize> {
        let device = device.to_owned();
        self.host.enter(move || {
            let count = |direction| SchedClassifier::query_tcx(&device, direction).map(|(_, programs)| programs.len());
            Ok(count(TcAttachType::Ingress)? + count(TcAttachType::Egress)?)
        })?
    }

    /// Lines of `tc filter show` that name one of our programs, both directions together.
    ///
    /// # Errors
    /// When there is no such device, or no program `tc`.
    pub fn by_filter(&self, device: &str) -> Result<usize> {
        let show = |direction: &str| self.host.run("tc", &["filter", "show", "dev", device, direction]);
        let ours = |text: String| text.lines().filter(|line| line.contains("handle 0x5348")).count();
        Ok(ours(show("ingress")?) + ours(show("egress")?))
    }
}
