//! The kernel that is packed in the file which boot loaders take: it starts sooner without that, where the unpacking is
//! emulated, too.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail, ensure};

/// Where a bzImage says how many sectors come before the part in which the kernel is packed, and where and how long it
/// is there: the kernel's Documentation/arch/x86/boot.rst.
const SETUP_SECTORS: usize = 0x1f1;
const PAYLOAD_OFFSET: usize = 0x248;
const PAYLOAD_LENGTH: usize = 0x24c;
const SECTOR: usize = 512;

/// What unpacks it, by how it begins.
const PACKERS: [(&[u8], &str); 3] =
    [(b"\x28\xb5\x2f\xfd", "zstd"), (b"\x02\x21\x4c\x18", "lz4"), (b"\xfd7zXZ\0", "xz")];

/// The file `vmlinux` beside a kernel, made when there is none.
pub fn beside(vmlinuz: &Path) -> Result<PathBuf> {
    let vmlinux = vmlinuz.with_file_name("vmlinux");
    if !vmlinux.exists() {
        let image = fs::read(vmlinuz).with_context(|| vmlinuz.display().to_string())?;
        let (packer, packed) = payload(&image).with_context(|| format!("{} is no bzImage", vmlinuz.display()))?;
        let partial = vmlinuz.with_file_name(format!("vmlinux.{}", std::process::id()));
        let unpacked = unpack(packer, packed, &partial);
        let _ = fs::remove_file(&partial);
        fs::write(&partial, unpacked?)?;
        fs::rename(&partial, &vmlinux)?; // so what is there is whole
    }
    Ok(vmlinux)
}

/// What packed the kernel, and the packed kernel: behind it comes its length before.
fn payload(image: &[u8]) -> Option<(&'static str, &[u8])> {
    let number = |at: usize| usize::try_from(u32::from_le_bytes(image.get(at..at + 4)?.try_into().ok()?)).ok();
    let setup = (usize::from(*image.get(SETUP_SECTORS)?) + 1) * SECTOR;
    let payload = image.get(setup + number(PAYLOAD_OFFSET)?..)?.get(..number(PAYLOAD_LENGTH)?.checked_sub(4)?)?;
    let (_, packer) = PACKERS.iter().find(|(magic, _)| payload.starts_with(magic))?;
    Some((packer, payload))
}

fn unpack(packer: &str, packed: &[u8], file: &Path) -> Result<Vec<u8>> {
    fs::write(file, packed).with_context(|| file.display().to_string())?;
    let output = Command::new(packer).args(["--decompress", "--stdout"]).arg(file).output();
    let output = output.with_context(|| format!("cannot start {packer}"))?;
    if !output.status.success() {
        bail!("{packer}: {}", String::from_utf8_lossy(&output.stderr));
    }
    ensure!(output.stdout.starts_with(b"\x7fELF"), "{packer} does not give a program");
    Ok(output.stdout)
}

#[cfg(test)]
mod tests {
    use super::{PAYLOAD_LENGTH, PAYLOAD_OFFSET, SETUP_SECTORS, payload};

    #[test]
    fn a_packed_kernel_is_found_in_its_image() {
        let mut image = vec![0; 4096];
        image[SETUP_SECTORS] = 1; // and one more
        image[PAYLOAD_OFFSET..][..4].copy_from_slice(&100_u32.to_le_bytes());
        image[PAYLOAD_LENGTH..][..4].copy_from_slice(&12_u32.to_le_bytes());
        assert_eq!(payload(&image), None, "packed by nobody");
        image[1024 + 100..][..8].copy_from_slice(b"\x28\xb5\x2f\xfdabcd");
        assert_eq!(payload(&image), Some(("zstd", b"\x28\xb5\x2f\xfdabcd".as_slice())));
        assert_eq!(payload(&image[..1124]), None, "cut short");
    }
}
