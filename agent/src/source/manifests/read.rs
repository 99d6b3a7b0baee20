//! Documents → objects of the model. A large file is read on several threads: YAML is slow, and a start with 100,000
//! endpoints is mostly this.

use std::{
    collections::BTreeSet,
    num::NonZero,
    thread::{self, Scope, ScopedJoinHandle},
};

use serde_json::Value;

use super::{
    STACK,
    text::{Document, read_json, read_yaml},
};
use crate::source::{
    convert::ConvertOptions,
    decode::{Decoded, Kind, Origin, decode},
};

/// Fewer documents are read before a thread has started.
const WORTH_A_THREAD: usize = 32;

/// What is in a document.
#[derive(Default)]
pub struct Read {
    /// Its objects, in order.
    pub objects: Vec<Decoded>,
    /// What of it is no object of ours, a sentence each.
    pub notes: BTreeSet<String>,
}

/// Reads documents of one file; the answer is in their order.
///
/// # Errors
/// What is wrong with the first that is not well-formed.
pub fn read_all(documents: &[Document<'_>], is_json: bool, options: &ConvertOptions) -> Result<Vec<Read>, String> {
    // To count the processors takes longer than to read a small file: their number is in the cgroup's.
    let is_large = documents.len() > WORTH_A_THREAD;
    let processors = if is_large { thread::available_parallelism().map_or(1, NonZero::get) } else { 1 };
    let share = documents.len().div_ceil(processors).max(WORTH_A_THREAD);
    let read_share = |share: &[Document<'_>]| share.iter().map(|d| read(*d, is_json, options)).collect();
    thread::scope(|scope| {
        let mut shares = documents.chunks(share);
        let first = shares.next().unwrap_or_default();
        let others = shares.map(|share| spawn(scope, move || read_share(share))).collect::<Result<Vec<_>, _>>()?;
        let mut all: Vec<Read> = read_share(first)?;
        for other in others {
            let read: Result<Vec<Read>, String> =
                other.join().unwrap_or_else(|_| Err("reading it ran into a bug in sheave".to_owned()));
            all.extend(read?);
        }
        Ok(all)
    })
}

/// A thread whose stack is as deep as that of the one that reads files.
fn spawn<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    work: impl FnOnce() -> T + Send + 'scope,
) -> Result<ScopedJoinHandle<'scope, T>, String> {
    let thread = thread::Builder::new().stack_size(STACK).spawn_scoped(scope, work);
    thread.map_err(|e| format!("cannot start a thread to read it: {e}"))
}

fn read(document: Document<'_>, is_json: bool, options: &ConvertOptions) -> Result<Read, String> {
    let mut read = Read::default();
    let object = |object| take(object, options, &mut read);
    if is_json { read_json(document.text, object) } else { read_yaml(document, object) }?;
    Ok(read)
}

fn take(object: Value, options: &ConvertOptions, read: &mut Read) {
    let Some(kind) = Kind::of(&object) else {
        let text = |field: &str| object[field].as_str().unwrap_or("?").to_owned();
        read.notes.insert(format!("{} {} in it is ignored.", text("apiVersion"), text("kind")));
        return;
    };
    match decode(kind, object, Origin::File, options) {
        Ok(decoded) => read.objects.push(decoded),
        Err(sentence) => {
            read.notes.insert(sentence);
        }
    }
}
