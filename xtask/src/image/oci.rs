//! OCI image layouts in a tarball, as `ctr images import` and its like read them.

use std::{collections::HashSet, io::Write, path::Path};

use anyhow::{Context, Result};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};
use tar::{Builder, EntryType, Header};

use super::architecture;

/// A file of a layer, with its path, without a leading slash, and its permissions.
pub struct File {
    /// Where it is in the image.
    pub path: String,
    /// Permission bits.
    pub mode: u32,
    /// What is in it.
    pub content: Vec<u8>,
}

/// An image of an archive.
pub struct Image<L: AsRef<[u8]> = Vec<u8>> {
    /// Repository and tag.
    pub name: String,
    /// How it runs: `Entrypoint`, `Cmd`, `Env` …
    pub config: Value,
    /// Tarballs, the lowest first.
    pub layers: Vec<L>,
}

/// The files and their folders as a tarball that tells nothing of the machine it was made on.
pub fn layer(files: &[File]) -> Result<Vec<u8>> {
    let mut tar = Builder::new(Vec::new());
    let mut folders: Vec<&Path> = files.iter().flat_map(|file| Path::new(&file.path).ancestors().skip(1)).collect();
    folders.sort_unstable();
    folders.dedup();
    for folder in folders.into_iter().filter(|folder| !folder.as_os_str().is_empty()) {
        append(&mut tar, &format!("{}/", folder.display()), EntryType::Directory, 0o755, &[])?;
    }
    for File { path, mode, content } in files {
        append(&mut tar, path, EntryType::Regular, *mode, content)?;
    }
    Ok(tar.into_inner()?)
}

/// Writes images into one archive; layers that they share are in it once.
pub fn archive<L: AsRef<[u8]>>(images: &[Image<L>], output: impl Write) -> Result<()> {
    let mut archive = Archive { tar: Builder::new(output), written: HashSet::new() };
    append(&mut archive.tar, "oci-layout", EntryType::Regular, 0o644, br#"{"imageLayoutVersion":"1.0.0"}"#)?;
    let manifests = images.iter().map(|image| archive.image(image)).collect::<Result<Vec<Value>>>()?;
    let index = json!({ "schemaVersion": 2, "mediaType": media_type("index.v1+json"), "manifests": manifests });
    append(&mut archive.tar, "index.json", EntryType::Regular, 0o644, index.to_string().as_bytes())?;
    archive.tar.into_inner()?.flush()?;
    Ok(())
}

struct Archive<W: Write> {
    tar: Builder<W>,
    /// Digests of the blobs that are in it.
    written: HashSet<String>,
}

impl<W: Write> Archive<W> {
    /// Puts an image in; gives its entry of the index.
    fn image<L: AsRef<[u8]>>(&mut self, image: &Image<L>) -> Result<Value> {
        let layers = image.layers.iter().map(|layer| self.blob("layer.v1.tar", layer.as_ref()));
        let layers = layers.collect::<Result<Vec<Value>>>()?;
        let digests: Vec<&Value> = layers.iter().map(|layer| &layer["digest"]).collect();
        let config = json!({
            "architecture": architecture(),
            "os": "linux",
            "config": image.config,
            "rootfs": { "type": "layers", "diff_ids": digests },
        });
        let config = self.blob("config.v1+json", config.to_string().as_bytes())?;
        let manifest = json!({
            "schemaVersion": 2,
            "mediaType": media_type("manifest.v1+json"),
            "config": config,
            "layers": layers,
        });
        let mut manifest = self.blob("manifest.v1+json", manifest.to_string().as_bytes())?;
        let name = &image.name;
        let tag = name.rsplit_once(':').map_or("latest", |(_, tag)| tag);
        // containerd reads the first, everybody else the second.
        manifest["annotations"] = json!({ "io.containerd.image.name": name, "org.opencontainers.image.ref.name": tag });
        Ok(manifest)
    }

    /// Puts a blob in, unless it is there; gives its descriptor.
    fn blob(&mut self, kind: &str, content: &[u8]) -> Result<Value> {
        let digest: String = Sha256::digest(content).iter().map(|byte| format!("{byte:02x}")).collect();
        if self.written.insert(digest.clone()) {
            append(&mut self.tar, &format!("blobs/sha256/{digest}"), EntryType::Regular, 0o644, content)?;
        }
        Ok(json!({ "mediaType": media_type(kind), "digest": format!("sha256:{digest}"), "size": content.len() }))
    }
}

fn append(tar: &mut Builder<impl Write>, path: &str, kind: EntryType, mode: u32, content: &[u8]) -> Result<()> {
    let mut header = Header::new_ustar();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    header.set_size(content.len().try_into()?);
    tar.append_data(&mut header, path, content).with_context(|| format!("cannot pack {path}"))
}

fn media_type(kind: &str) -> String {
    format!("application/vnd.oci.image.{kind}")
}
