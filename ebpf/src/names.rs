//! Names for people: which Service an id stands for, readable while the agent is down and adopted by the next one.

/// Longest name that Kubernetes allows for a namespace, a Service and a port (DNS label).
pub const MAX_NAME: usize = 63;

pod! {
    /// Who a service id stands for. Texts are padded with zero bytes.
    pub struct ServiceName [200] {
        /// Namespace.
        pub namespace: [u8; 64],
        /// Name of the Service.
        pub name: [u8; 64],
        /// Name of the port, possibly empty.
        pub port_name: [u8; 64],
        /// IANA protocol number.
        pub proto: u8,
        /// 4 or 6.
        pub family: u8,
        /// Always 0.
        pub zero: [u8; 6],
    }
}

/// `text` padded with zero bytes; `None` when longer than [`MAX_NAME`].
#[must_use]
pub fn pad(text: &str) -> Option<[u8; 64]> {
    let mut padded = [0; 64];
    padded.get_mut(..text.len().min(MAX_NAME + 1))?.get_mut(..text.len())?.copy_from_slice(text.as_bytes());
    (text.len() <= MAX_NAME).then_some(padded)
}

/// The text before the first zero byte; empty when it is not UTF-8.
#[must_use]
pub fn unpad(padded: &[u8; 64]) -> &str {
    let end = padded.iter().position(|b| *b == 0).unwrap_or(padded.len());
    core::str::from_utf8(&padded[..end]).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::{pad, unpad};

    #[test]
    fn a_name_is_kept_whole_or_refused() {
        for text in ["", "a", "kube-dns", "x".repeat(63).as_str()] {
            assert_eq!(unpad(&pad(text).unwrap()), text);
        }
        assert!(pad(&"x".repeat(64)).is_none() && pad(&"x".repeat(5000)).is_none());
    }
}
