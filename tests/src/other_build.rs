//! A build of sheave whose programs for the kernel are others, and do the same.

use std::{fs, path::Path};

use anyhow::{Context, Result, ensure};
use sheave_agent::OBJECT;

use crate::place::program;

/// `SHF_EXECINSTR`: a section of code.
const CODE: u64 = 0x4;
/// Length of an instruction of BPF.
const INSTRUCTION: usize = 8;
/// `dst = constant`, of 64 bits, and of 32: the same for a constant that is not negative, since the upper half is zero.
const MOVE_64: u8 = 0xb7;
const MOVE_32: u8 = 0xb4;

/// Writes one to that file. Compiling another object would take longer than all that is tested with it.
///
/// # Errors
/// When `sheave` is not built, or holds another object than this test.
pub fn write(to: &Path) -> Result<()> {
    let from = program("sheave")?;
    let mut bytes = fs::read(&from).with_context(|| from.display().to_string())?;
    let places = (0..bytes.len()).step_by(INSTRUCTION); // it is aligned
    let at = places.into_iter().find(|at| bytes[*at..].starts_with(OBJECT));
    let at = at.with_context(|| format!("{} is of another build: run `cargo build --workspace`", from.display()))?;
    let changed = change(&mut bytes[at..at + OBJECT.len()]).context("the object is no ELF file")?;
    ensure!(changed > 100, "only {changed} instructions are others");
    fs::write(to, bytes).with_context(|| to.display().to_string())?;
    let permissions = fs::metadata(&from)?.permissions();
    fs::set_permissions(to, permissions).with_context(|| to.display().to_string())
}

/// Changes every program of an object; how many instructions are others.
fn change(object: &mut [u8]) -> Option<usize> {
    // Of the ELF header: where the section headers are, how long one is, how many there are.
    let (headers, length, count) = (number::<8>(object, 0x28)?, number::<2>(object, 0x3a)?, number::<2>(object, 0x3c)?);
    let mut changed = 0;
    for header in (0..count).map(|index| headers + index * length) {
        let [flags, start, size] = [8, 24, 32].map(|field| number::<8>(object, header + field));
        if flags? as u64 & CODE == 0 {
            continue;
        }
        for instruction in object.get_mut(start?..start? + size?)?.chunks_exact_mut(INSTRUCTION) {
            let is_negative = instruction[INSTRUCTION - 1] & 0x80 != 0;
            if instruction[0] == MOVE_64 && !is_negative {
                instruction[0] = MOVE_32;
                changed += 1;
            }
        }
    }
    Some(changed)
}

/// A little-endian number of up to eight bytes.
fn number<const BYTES: usize>(object: &[u8], at: usize) -> Option<usize> {
    let bytes: [u8; BYTES] = object.get(at..)?.first_chunk().copied()?;
    bytes.iter().rev().try_fold(0_usize, |sum, byte| sum.checked_mul(256)?.checked_add(usize::from(*byte)))
}
