//! The image, without building the agent.

use std::{collections::BTreeMap, fs, io::Read as _};

use serde_json::{Value, json};
use tar::Archive;

use super::{
    REPOSITORY, VERSION, config, is_static,
    oci::{File, Image, archive, layer},
};
use crate::root;

fn sample() -> Vec<File> {
    let file = |path: &str, mode| File { path: path.to_owned(), mode, content: path.as_bytes().to_vec() };
    vec![file("usr/local/bin/sheave", 0o755), file("usr/share/doc/sheave/LICENSE-MIT", 0o644)]
}

/// Paths, permissions and contents.
fn entries(tarball: &[u8]) -> BTreeMap<String, (u32, Vec<u8>)> {
    let read = |entry: std::io::Result<tar::Entry<'_, &[u8]>>| {
        let mut entry = entry.unwrap();
        let header = entry.header();
        assert_eq!((header.uid().unwrap(), header.gid().unwrap(), header.mtime().unwrap()), (0, 0, 0));
        let (path, mode) = (entry.path().unwrap().display().to_string(), header.mode().unwrap());
        let mut content = Vec::new();
        entry.read_to_end(&mut content).unwrap();
        (path, (mode, content))
    };
    Archive::new(tarball).entries().unwrap().map(read).collect()
}

fn json_of(entries: &BTreeMap<String, (u32, Vec<u8>)>, path: &str) -> Value {
    serde_json::from_slice(&entries[path].1).unwrap()
}

#[test]
fn the_layer_holds_the_files_and_their_folders() {
    let expected = [
        ("usr/", 0o755),
        ("usr/local/", 0o755),
        ("usr/local/bin/", 0o755),
        ("usr/local/bin/sheave", 0o755),
        ("usr/share/", 0o755),
        ("usr/share/doc/", 0o755),
        ("usr/share/doc/sheave/", 0o755),
        ("usr/share/doc/sheave/LICENSE-MIT", 0o644),
    ];
    let found = entries(&layer(&sample()).unwrap());
    let found: Vec<_> = found.iter().map(|(path, (mode, _))| (path.as_str(), *mode)).collect();
    assert_eq!(found, expected);
}

#[test]
fn from_the_index_every_digest_leads_to_what_it_names() {
    let layer = layer(&sample()).unwrap();
    let pack = || {
        let image = |tag| Image { name: format!("example.com/sheave:{tag}"), config: config(), layers: vec![&layer] };
        let mut output = Vec::new();
        archive(&[image(1), image(2)], &mut output).unwrap();
        output
    };
    let bytes = pack();
    assert_eq!(bytes, pack(), "the same bytes, twice");
    let entries = entries(&bytes);
    let blob = |descriptor: &Value| {
        let digest = descriptor["digest"].as_str().unwrap().strip_prefix("sha256:").unwrap();
        let path = format!("blobs/sha256/{digest}");
        assert_eq!(json!(entries[&path].1.len()), descriptor["size"]);
        path
    };

    assert_eq!(json_of(&entries, "oci-layout")["imageLayoutVersion"], "1.0.0");
    let index = json_of(&entries, "index.json");
    for (place, tag) in ["1", "2"].into_iter().enumerate() {
        let annotations = &index["manifests"][place]["annotations"];
        assert_eq!(annotations["io.containerd.image.name"], format!("example.com/sheave:{tag}"));
        assert_eq!(annotations["org.opencontainers.image.ref.name"], tag);
    }
    let manifest = json_of(&entries, &blob(&index["manifests"][0]));
    let config = json_of(&entries, &blob(&manifest["config"]));
    assert_eq!(config["rootfs"]["diff_ids"][0], manifest["layers"][0]["digest"]);
    assert_eq!(entries[&blob(&manifest["layers"][0])].1, layer);
    assert_eq!(entries.len(), 5, "what both have in common is there once");
}

#[test]
fn a_program_with_a_dynamic_linker_is_recognised() {
    let this = fs::read("/proc/self/exe").unwrap();
    assert!(!is_static(&this), "the tests are linked dynamically");
    let mut header = vec![0; 64 + 56];
    header[32] = 64; // program headers begin behind this one
    header[54] = 56;
    header[56] = 1;
    header[64] = 1; // PT_LOAD
    assert!(is_static(&header));
    header[64] = 3; // PT_INTERP
    assert!(!is_static(&header));
    assert!(!is_static(b"#!/bin/sh"));
}

#[test]
fn the_dockerfile_makes_the_same_image() {
    let text = fs::read_to_string(root::workspace().join("Dockerfile")).unwrap();
    let text = text.replace("\\\n", " ");
    let last = text.rsplit("FROM ").next().unwrap();
    let instruction = |name: &str| last.lines().find_map(|line| line.strip_prefix(name)).unwrap().trim();
    let list = |name: &str| serde_json::from_str::<Value>(instruction(name)).unwrap();
    let labels: Value = instruction("LABEL")
        .split("org.opencontainers")
        .filter_map(|label| label.trim().split_once('='))
        .map(|(key, value)| (format!("org.opencontainers{key}"), json!(value.trim_matches('"'))))
        .collect::<serde_json::Map<_, _>>()
        .into();
    let expected = &config();
    assert_eq!(last.lines().next(), Some("scratch"));
    assert_eq!(list("ENTRYPOINT"), expected["Entrypoint"]);
    assert_eq!(list("CMD"), expected["Cmd"]);
    assert_eq!(json!([instruction("ENV")]), expected["Env"]);
    assert_eq!(labels, expected["Labels"]);
}

#[test]
fn the_chart_wants_this_image() {
    let read = |path: &str| fs::read_to_string(root::workspace().join(path)).unwrap();
    assert!(read("helm/values.yaml").contains(&format!("  repository: {REPOSITORY}\n")));
    for version in ["version", "appVersion"] {
        assert!(read("helm/Chart.yaml").contains(&format!("\n{version}: {VERSION}\n")), "{version}");
    }
}
