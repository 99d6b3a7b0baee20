//! kube-proxy's own cases (`C01`…) and ours, row by row.

use super::{Selection, categorize};
use crate::{
    model::{Family, Protocol, endpoint},
    source::convert::fixtures::{OWN, slice_of},
};

/// One row: id; zone; this node's name; flags; endpoints; cluster set; local set; has_any. A set that is not used is
/// "-"; `L` marks endpoints on the node `own`.
type Row = (&'static str, &'static str, &'static str, &'static str, &'static str, &'static str, &'static str, bool);

const ZONES: &str = ".3 R za; .4 R zb; .5 R zc; .6 R za";
const NODES: &str = ".3 R za n1; .4 R zb n2; .5 R zc n3; .6 R za n4";

#[rustfmt::skip]
const ROWS: &[Row] = &[
    ("C01", "zone-a", OWN, "",               ZONES,                                      ".3 .6",       "-",     true),
    ("C02", "zone-a", OWN, "eTP-L np",       ".3 R za L; .4 R zb L; .5 R zc; .6 R za",    ".3 .6",       ".3 .4", true),
    ("C03", "zone-a", OWN, "iTP-L np",       ".3 R za L; .4 R zb L; .5 R zc; .6 R za",    ".3 .6",       ".3 .4", true),
    // C04, C05: a zone label that is absent or empty is the same in the model.
    ("C04", "",       OWN, "",               ".3 R za",                                   ".3",          "-",     true),
    ("C05", "",       OWN, "",               ".3 R za",                                   ".3",          "-",     true),
    ("C06", "zone-b", OWN, "",               ".3 R za",                                   ".3",          "-",     true),
    ("C07", "zone-a", OWN, "",               ".3 R za; .4 R zb; .5 R zc; .6 U za",        ".3",          "-",     true),
    ("C08", "zone-a", OWN, "",               ".3 U za; .4 R zb; .5 R zc; .6 U za",        ".4 .5",       "-",     true),
    ("C09", "zone-a", OWN, "",               ".3 R za; .4 R zb; .5 R; .6 R za",           ".3 .4 .5 .6", "-",     true),
    ("C10", "zone-c", OWN, "",               ".3 R z{abc}; .4 R z{bc}; .5 R z{bd}; .6 R zc", ".3 .4 .6", "-",     true),
    // C11 is for releases without node hints; what is left of it is that unusable node hints do no harm.
    ("C11", "zone-a", OWN, "",               NODES,                                      ".3 .6",       "-",     true),
    ("C12", "zone-a", "node-1", "",          NODES,                                      ".3",          "-",     true),
    ("C13", "zone-a", "node-1", "",          ".3 R za n1; .4 R; .5 R zc n3; .6 R za n4",  ".3 .4 .5 .6", "-",     true),
    ("C14", "zone-a", "node-0", "",          NODES,                                      ".3 .6",       "-",     true),
    ("C15", "zone-a", OWN, "eTP-L np",       ".0 R za L; .1 R zb L; .2 R za; .3 R zb",    ".0 .2",       ".0 .1", true),
    ("C16", "",       OWN, "iTP-L",          "",                                         "-",           "",      false),
    ("C17", "",       OWN, "iTP-L",          ".0 R; .1 R",                                "-",           "",      true),
    ("C18", "",       OWN, "iTP-L",          ".0 R L; .1 R L",                            "-",           ".0 .1", true),
    ("C19", "",       OWN, "iTP-L",          ".0 R L; .1 R",                              "-",           ".0",    true),
    ("C20", "",       OWN, "",               ".0 U; .1 U",                                "",            "-",     false),
    ("C21", "",       OWN, "",               ".0 U; .1 R",                                ".1",          "-",     true),
    ("C22", "",       OWN, "",               ".0 ST L; .1 ST",                            ".0 .1",       "-",     true),
    ("C23", "",       OWN, "iTP-L np",       ".0 R L; .1 R",                              ".0 .1",       ".0",    true),
    ("C24", "",       OWN, "eTP-L np",       ".0 R L; .1 R",                              ".0 .1",       ".0",    true),
    ("C25", "",       OWN, "iTP-L eTP-L np", ".0 R L; .1 R",                              ".0 .1",       ".0",    true),
    ("C26", "",       OWN, "iTP-L eTP-L np", ".0 R; .1 R",                                ".0 .1",       "",      true),
    ("C27", "",       OWN, "iTP-L eTP-L np", ".0 ST; .1 ST",                              ".0 .1",       "",      true),
    ("C28", "",       OWN, "eTP-L np",       ".0 R; .1 U L; .2 ST L; .3 ST",              ".0",          ".2",    true),
    ("C29", "",       OWN, "eTP-L",          ".0 R; .1 R L",                              ".0 .1",       "-",     true),
    ("C30", "",       OWN, "iTP-L",          ".0 R; .1 R L",                              "-",           ".1",    true),
    // C31: no list is an empty list here, and a set that is used is then empty.
    ("C31", "",       OWN, "",               "",                                         "",            "-",     false),
    ("C32", "zone-a", OWN, "",               ".0 U",                                      "",            "-",     false),
    ("C33", "zone-a", OWN, "",               ".3 ST za",                                  ".3",          "-",     true),
    ("C34", "zone-b", "node-9", "",          NODES,                                      ".4",          "-",     true),
    ("C35", "zone-a", OWN, "",               ".3 R za L; .4 ST zb",                       ".3",          "-",     true),
    ("C36", "zone-a", OWN, "",               ".3 R+T za; .4 R zb",                        ".3",          "-",     true),
    ("C37", "zone-a", "node-1", "",          ".3 R n1; .4 R n2; .5 R n3; .6 R n4",        ".3",          "-",     true),
    ("C38", "zone-a", OWN, "",               ".3 R za; .4 U",                             ".3",          "-",     true),
    ("rule 3: hints of the unready", "zone-a", OWN, "",    ".3 R za; .4 R zb; .5 U",                    ".3",          "-",     true),
    ("rule 4: draining elsewhere", "", OWN, "iTP-L",      ".0 ST",                                     "-",           "",      true),
    ("no own name: nothing is local", "", "", "iTP-L", ".0 R; .1 R L",                    "-",           "",      true),
];

#[test]
fn endpoints_are_categorised() {
    for (id, zone, node, flags, endpoints, cluster, local, has_any) in ROWS {
        let slice = slice_of("ns/s", "svc").ports("80/TCP").endpoints("10.0.0", endpoints).build();
        let endpoints = endpoint::Offers::of([&slice]).endpoints("", Protocol::Tcp, Family::V4);
        let has = |flag| flags.split(' ').any(|f| f == flag);
        let categories = categorize(
            &endpoints,
            Selection {
                internal_local: has("iTP-L"),
                external_local: has("eTP-L"),
                externally_accessible: has("np"),
                node,
                zone,
            },
        );
        let name = |i: &usize| endpoints[*i].target.ip().to_string().replace("10.0.0.", ".");
        let list = |set: &[usize]| set.iter().map(name).collect::<Vec<_>>().join(" ");
        let text = |set: &Option<Vec<usize>>| set.as_deref().map_or("-".to_owned(), list);
        assert_eq!((&*text(&categories.cluster), &*text(&categories.local)), (*cluster, *local), "{id}");
        assert_eq!(categories.has_any, *has_any, "{id}");
    }
}
