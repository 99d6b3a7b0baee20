//! Looking after the socket path: its programs, every pin, and the discard device.

use tokio::time::sleep;

use crate::datapath::{
    host::discard::{self, Found},
    programs::{attach::Attached, link::Pinned},
};
use crate::lifecycle::upkeep::{PERIOD, Part, Upkeep};

/// What is held, so that it can be put back.
#[derive(Debug)]
pub struct Keep {
    /// Every map.
    pub maps: Vec<Pinned>,
    /// The programs of the cgroup.
    pub programs: Attached,
    /// The discard device was there when the agent began.
    pub has_discard: bool,
}

/// Looks again and again. The packet path looks after its own.
pub async fn follow(mut keep: Keep, upkeep: Upkeep) {
    loop {
        sleep(PERIOD).await;
        keep.programs.mend(&upkeep);
        for map in &keep.maps {
            upkeep.note(Part::Pin, map.path().display(), map.mend());
        }
        if keep.has_discard {
            let was_lost = discard::ensure().await.map(|found| found != Found::Whole);
            upkeep.note(Part::Discard, discard::DEVICE, was_lost);
        }
        upkeep.report();
    }
}
