//! What the kube-proxies that are measured beside us watch: a real API server, where its programs have been built.

use std::{
    fs, io,
    net::{Ipv4Addr, TcpListener, TcpStream},
    path::{Path, PathBuf},
    thread,
};

use anyhow::{Context, Result};

use crate::{
    api_server::{self, ApiServer},
    lab::Lab,
    objects::{self, Object},
    place::Place,
};

/// Where every node reaches the API server: the fabric's own address.
const API: (Ipv4Addr, u16) = (Ipv4Addr::new(192, 0, 2, 1), 6443);

/// A cluster's API for the kube-proxies of a lab.
#[derive(Debug)]
pub struct Cluster {
    _api: ApiServer,
    kubeconfig: PathBuf,
}

impl Cluster {
    /// An API server with all Nodes of the lab and these objects; `None` when a program that it takes is not there.
    ///
    /// # Errors
    /// When it does not get ready, or refuses an object.
    pub fn start(lab: &Lab, objects: &[&dyn Object]) -> Result<Option<Self>> {
        if !api_server::programs()?.join("kube-proxy").exists() {
            eprintln!("bench: no kube-proxy to compare with: run `cargo xtask kubernetes kube-proxy`");
            return Ok(None);
        }
        // An API server asks the default route which address it has.
        lab.fabric.ip("route replace default dev br0")?;
        let Some(api) = ApiServer::start(Some(&lab.fabric))? else { return Ok(None) };
        for node in &lab.nodes {
            api.apply(&[&objects::node(node.number)])?;
        }
        api.apply(objects)?;
        let text = fs::read_to_string(api.kubeconfig())?;
        let port: u16 = text
            .split("https://127.0.0.1:")
            .nth(1)
            .and_then(|rest| rest.split('\'').next()?.parse().ok())
            .context("no port in the kubeconfig")?;
        relay(&lab.fabric, port)?;
        let own = format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: c\n\
             clusters: [{{name: c, cluster: {{server: 'https://{}:{}', insecure-skip-tls-verify: true}}}}]\n\
             users: [{{name: u, user: {{token: secret}}}}]\n\
             contexts: [{{name: c, context: {{cluster: c, user: u}}}}]\n",
            API.0, API.1
        );
        let kubeconfig = api.kubeconfig().with_file_name("kubeconfig-of-nodes");
        fs::write(&kubeconfig, own)?;
        Ok(Some(Self { _api: api, kubeconfig }))
    }

    /// Where kube-proxies find it.
    pub fn kubeconfig(&self) -> &Path {
        &self.kubeconfig
    }
}

/// Carries connections from the fabric's address to a loopback port there, for as long as this process lives.
fn relay(fabric: &Place, port: u16) -> Result<()> {
    let listener = fabric.enter(|| TcpListener::bind(API))?.context("the address of the API server")?;
    let fabric = fabric.clone();
    thread::spawn(move || {
        fabric.enter(move || {
            for near in listener.incoming().flatten() {
                let Ok(far) = TcpStream::connect((Ipv4Addr::LOCALHOST, port)) else { continue };
                let _ = carry(&near, &far).and_then(|()| carry(&far, &near));
            }
        })
    });
    Ok(())
}

fn carry(from: &TcpStream, to: &TcpStream) -> io::Result<()> {
    let (mut from, mut to) = (from.try_clone()?, to.try_clone()?);
    thread::spawn(move || {
        let _ = io::copy(&mut from, &mut to);
        let _ = to.shutdown(std::net::Shutdown::Write);
    });
    Ok(())
}
