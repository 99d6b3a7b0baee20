//! One copy of every name. 100,000 endpoints name the same few nodes and zones.

use std::{
    collections::HashSet,
    sync::{Arc, LazyLock, Mutex, PoisonError},
};

/// The shared copy of `text`.
#[must_use]
pub fn intern(text: &str) -> Arc<str> {
    static SHARED: LazyLock<Mutex<Interner>> = LazyLock::new(Mutex::default);
    // A set of strings is whole at every instant: a panic elsewhere cannot have spoilt it.
    SHARED.lock().unwrap_or_else(PoisonError::into_inner).get(text)
}

/// Texts seen. What nobody else holds any more is dropped whenever the set has doubled, so that names of nodes and
/// namespaces long gone do not pile up.
#[derive(Default)]
struct Interner {
    texts: HashSet<Arc<str>>,
    sweep_at: usize,
}

const SWEEP_FROM: usize = 1024;

impl Interner {
    fn get(&mut self, text: &str) -> Arc<str> {
        if let Some(shared) = self.texts.get(text) {
            return shared.clone();
        }
        if self.texts.len() >= self.sweep_at {
            self.texts.retain(|t| Arc::strong_count(t) > 1);
            self.sweep_at = SWEEP_FROM.max(self.texts.len() * 2);
        }
        let shared: Arc<str> = text.into();
        self.texts.insert(shared.clone());
        shared
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::{Interner, SWEEP_FROM, intern};

    #[test]
    fn equal_texts_share_one_copy() {
        let elsewhere = String::from("node-1");
        assert!(Arc::ptr_eq(&intern("node-1"), &intern(&elsewhere)));
        assert!(!Arc::ptr_eq(&intern("node-1"), &intern("node-2")));
    }

    #[test]
    fn texts_nobody_holds_are_dropped() {
        let mut interner = Interner::default();
        let kept = interner.get("kept");
        for n in 0..10 * SWEEP_FROM {
            interner.get(&n.to_string());
        }
        assert!(interner.texts.len() <= SWEEP_FROM + 1, "{} texts", interner.texts.len());
        assert!(Arc::ptr_eq(&kept, &interner.get("kept")));
    }
}
