//! Asks a server over HTTP, as a load balancer or a scraper does.

use std::{
    collections::BTreeMap,
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
};

use anyhow::{Context, Result};

use crate::{place::Place, wait::SOON};

/// What came back.
#[derive(Clone, Debug)]
pub struct Reply {
    /// Such as 200.
    pub code: u16,
    /// By name in lower case.
    pub headers: BTreeMap<String, String>,
    /// All of it.
    pub body: String,
}

/// `GET` from a place, on a connection of its own.
///
/// # Errors
/// When nobody listens, or what answers is not HTTP.
pub fn get(place: &Place, server: &str, path: &str) -> Result<Reply> {
    let address: SocketAddr = server.parse().with_context(|| format!("{server} is not an address and a port"))?;
    let text = place.enter(|| -> Result<String> {
        let mut stream = TcpStream::connect_timeout(&address, SOON)?;
        stream.set_read_timeout(Some(SOON))?;
        write!(stream, "GET {path} HTTP/1.1\r\nHost: {server}\r\nConnection: close\r\n\r\n")?;
        let mut text = String::new();
        stream.read_to_string(&mut text)?;
        Ok(text)
    })??;
    parse(&text).with_context(|| format!("{server}{path} answered {text:?}"))
}

/// Bodies of a stated length only: our servers send no others.
fn parse(text: &str) -> Option<Reply> {
    let (head, body) = text.split_once("\r\n\r\n")?;
    let mut lines = head.lines();
    let code = lines.next()?.split(' ').nth(1)?.parse().ok()?;
    let header = |line: &str| line.split_once(": ").map(|(name, value)| (name.to_lowercase(), value.to_owned()));
    Some(Reply { code, headers: lines.filter_map(header).collect(), body: body.to_owned() })
}
