//! Pinned maps: how they are opened, and what their errors mean.

use std::io;

use aya::{
    maps::{Map, MapData, MapError},
    sys::SyscallError,
};

use crate::datapath::{
    Error, Result,
    tables::{pins::Pins, words::Words},
};

/// A pinned map of a kind, such as `Map::HashMap`, with the keys and values that the caller expects.
///
/// # Errors
/// When it is missing or is not what this build expects.
pub fn open<M: TryFrom<Map, Error = MapError>>(pins: &Pins, name: &str, kind: fn(MapData) -> Map) -> Result<M> {
    M::try_from(kind(bare(pins, name)?)).map_err(|e| Error::Incompatible(format!("map {name}: {}", flatten(&e))))
}

/// An array that is written through memory.
///
/// # Errors
/// When it is missing, is not what this build expects, or cannot be mapped.
pub fn words(pins: &Pins, name: &'static str) -> Result<Words> {
    Words::new(name, &bare(pins, name)?)
}

/// Entries that a pinned map holds at most.
///
/// # Errors
/// When it is missing.
pub fn size(pins: &Pins, name: &str) -> Result<u32> {
    Ok(bare(pins, name)?.info().map(|info| info.max_entries()).unwrap_or_default())
}

/// A pinned map of whatever kind.
///
/// # Errors
/// When it is missing.
pub fn bare(pins: &Pins, name: &str) -> Result<MapData> {
    let pin = pins.map(name);
    MapData::from_pin(&pin)
        .map_err(|e| Error::Incompatible(format!("cannot open the pinned map {}: {}", pin.display(), flatten(&e))))
}

/// The whole chain of an error in one line.
pub fn flatten(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

/// A map error as ours; `flag` sets the map's capacity. A full hash says E2BIG, a full trie ENOSPC.
pub fn failed(error: MapError, map: &'static str, capacity: u32, flag: Option<&'static str>) -> Error {
    match error {
        MapError::SyscallError(SyscallError { io_error, .. })
            if matches!(io_error.raw_os_error(), Some(libc::E2BIG | libc::ENOSPC)) =>
        {
            Error::NoSpace { map, capacity, flag }
        }
        MapError::SyscallError(SyscallError { call, io_error }) => Error::kernel(format!("{call} on {map}"), io_error),
        other => Error::Incompatible(format!("map {map}: {}", flatten(&other))),
    }
}

/// A missing key is already removed.
pub fn removed(result: std::result::Result<(), MapError>, map: &'static str) -> Result<()> {
    match result {
        Err(MapError::SyscallError(SyscallError { io_error, .. })) if io_error.kind() == io::ErrorKind::NotFound => {
            Ok(())
        }
        Err(e) => Err(failed(e, map, 0, None)),
        Ok(()) => Ok(()),
    }
}
