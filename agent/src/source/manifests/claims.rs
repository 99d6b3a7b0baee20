//! Which file says what about which object, and which of them counts.

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    hash::{BuildHasher, RandomState},
    sync::Arc,
};

use super::{
    read::{Read, read_all},
    text::{Document, documents},
};
use crate::source::{
    convert::ConvertOptions,
    decode::{Decoded, Key, Lists, Object},
};

/// What all files say.
pub struct Claims {
    options: ConvertOptions,
    files: HashMap<Arc<str>, File>,
    /// By file name: the first counts. Never empty.
    objects: HashMap<Key, Vec<Claim>>,
    hasher: RandomState,
}

/// What was read of a file.
#[derive(Default)]
struct File {
    /// By the hash of their text: a large file in which little changed is mostly not read again.
    documents: HashMap<u64, Contents>,
    /// An object is in it twice, so that a document's text does not say what counts of it.
    has_doubles: bool,
}

/// What is in a document.
#[derive(Clone)]
struct Contents {
    keys: Vec<Key>,
    notes: BTreeSet<String>,
}

/// What a file says about an object.
struct Claim {
    file: Arc<str>,
    object: Option<Object>,
    problems: Vec<String>,
}

/// An object that a file began, changed or ceased to speak of.
#[derive(Debug, PartialEq, Eq)]
pub struct Touched {
    /// Which.
    pub key: Key,
    /// What counts about it is not what it was.
    pub changed: bool,
}

impl Claims {
    /// Of no files yet.
    pub fn new(options: ConvertOptions) -> Self {
        Self { options, files: HashMap::new(), objects: HashMap::new(), hasher: RandomState::new() }
    }

    /// Takes what `text` says in place of what the file said before.
    ///
    /// # Errors
    /// What is wrong with the text; then everything is as it was before.
    pub fn read(&mut self, name: &str, text: &str) -> Result<Vec<Touched>, String> {
        let file: Arc<str> = name.into();
        let is_json = name.ends_with(".json");
        let documents = if is_json { vec![Document { lines_before: 0, text }] } else { documents(text) };
        let old = self.files.get(&file).filter(|old| !old.has_doubles);
        let mut new = File::default();
        let (mut hashes, mut unread) = (Vec::new(), Vec::new());
        for document in documents {
            let hash = self.hasher.hash_one(document.text);
            if let Some(known) = old.and_then(|old| old.documents.get(&hash)) {
                new.has_doubles |= new.documents.insert(hash, known.clone()).is_some();
            } else {
                hashes.push(hash);
                unread.push(document);
            }
        }
        let kept: HashSet<&Key> = new.documents.values().flat_map(|contents| contents.keys.iter()).collect();
        let read = read_all(&unread, is_json, &self.options)?;
        if read.iter().flat_map(|read| &read.objects).any(|object| kept.contains(&object.key)) {
            // Which of the two comes first can only be told by reading the whole file.
            self.files.entry(file).or_default().has_doubles = true;
            return self.read(name, text);
        }
        let mut fresh: HashMap<Key, Claim> = HashMap::new();
        for (hash, Read { objects, notes }) in hashes.into_iter().zip(read) {
            let keys = objects.iter().map(|object| object.key.clone()).collect();
            new.documents.insert(hash, Contents { keys, notes });
            for Decoded { key, object, problems } in objects {
                if let Some(first) = fresh.get_mut(&key) {
                    new.has_doubles = true;
                    first.problems.push(format!("{key} is in {file} more than once; the first counts."));
                } else {
                    fresh.insert(key, Claim { file: file.clone(), object, problems });
                }
            }
        }
        Ok(self.replace(file, new, fresh))
    }

    fn replace(&mut self, file: Arc<str>, new: File, fresh: HashMap<Key, Claim>) -> Vec<Touched> {
        let kept: BTreeSet<Key> = new.documents.values().flat_map(|contents| contents.keys.iter().cloned()).collect();
        let mut touched = self.forget(&file, |key| !kept.contains(key));
        for (key, claim) in fresh {
            let changed = self.put(key.clone(), claim);
            touched.push(Touched { key, changed });
        }
        self.files.insert(file, new);
        touched
    }

    /// Forgets a file.
    pub fn remove(&mut self, name: &str) -> Vec<Touched> {
        let touched = self.forget(name, |_| true);
        self.files.remove(name);
        touched
    }

    fn forget(&mut self, name: &str, which: impl Fn(&Key) -> bool) -> Vec<Touched> {
        let Some(file) = self.files.get(name) else { return Vec::new() };
        let keys = file.documents.values().flat_map(|contents| contents.keys.iter());
        let keys: BTreeSet<Key> = keys.filter(|key| which(key)).cloned().collect();
        keys.into_iter().map(|key| Touched { changed: self.take(&key, name), key }).collect()
    }

    /// Adds or replaces a claim; whether that changes what counts.
    fn put(&mut self, key: Key, claim: Claim) -> bool {
        let claims = self.objects.entry(key).or_insert_with(|| Vec::with_capacity(1)); // nearly always one file
        match claims.binary_search_by(|known| known.file.cmp(&claim.file)) {
            Ok(place) => {
                let old = std::mem::replace(&mut claims[place], claim);
                place == 0 && claims[0].object != old.object
            }
            Err(place) => {
                claims.insert(place, claim);
                place == 0 && claims[0].object.as_ref() != claims.get(1).and_then(|claim| claim.object.as_ref())
            }
        }
    }

    /// Takes a claim away; whether that changes what counts.
    fn take(&mut self, key: &Key, name: &str) -> bool {
        let Some(claims) = self.objects.get_mut(key) else { return false };
        let Some(place) = claims.iter().position(|claim| *claim.file == *name) else { return false };
        let old = claims.remove(place);
        let changed = place == 0 && old.object.as_ref() != claims.first().and_then(|claim| claim.object.as_ref());
        if claims.is_empty() {
            self.objects.remove(key);
        }
        changed
    }

    /// What counts about an object.
    pub fn get(&self, key: &Key) -> Option<&Object> {
        self.objects.get(key)?.first()?.object.as_ref()
    }

    /// Everything that counts.
    pub fn lists(&self) -> Lists {
        let mut lists = Lists::default();
        for claims in self.objects.values() {
            if let Some(object) = claims.first().and_then(|claim| claim.object.clone()) {
                lists.push(object);
            }
        }
        lists
    }

    /// What is wrong with an object, one sentence each.
    pub fn problems(&self, key: &Key) -> Vec<String> {
        let Some([first, others @ ..]) = self.objects.get(key).map(Vec::as_slice) else { return Vec::new() };
        let mut problems = first.problems.clone();
        if let Some(other) = others.first() {
            problems.push(format!("{key} is also in {}; the one in {} counts.", other.file, first.file));
        }
        problems
    }

    /// What of a file is ignored, one sentence each.
    pub fn notes(&self, name: &str) -> Vec<String> {
        let contents = self.files.get(name).into_iter().flat_map(|file| file.documents.values());
        let notes: BTreeSet<String> = contents.flat_map(|contents| contents.notes.iter().cloned()).collect();
        notes.into_iter().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::ServiceName;

    fn service(name: &str, port: u16) -> String {
        format!(
            "apiVersion: v1\nkind: Service\nmetadata: {{name: {name}}}\nspec: {{clusterIP: 10.96.0.1, ports: [{{port: {port}}}]}}\n"
        )
    }

    fn key(name: &str) -> Key {
        Key::Service(ServiceName::new("default", name))
    }

    fn port(claims: &Claims, name: &str) -> Option<u16> {
        match claims.get(&key(name))? {
            Object::Service(service) => Some(service.ports[0].port),
            other => panic!("{other:?}"),
        }
    }

    /// Names of what changed, sorted.
    fn changed(touched: Result<Vec<Touched>, String>) -> Vec<String> {
        let touched = touched.expect("well-formed").into_iter().filter(|touched| touched.changed);
        let mut names: Vec<String> = touched.map(|touched| touched.key.to_string()).collect();
        names.sort();
        names
    }

    #[test]
    fn only_what_differs_counts_as_changed() {
        let mut claims = Claims::new(ConvertOptions::default());
        let (a, b, c) = (service("a", 80), service("b", 80), service("c", 80));
        assert_eq!(changed(claims.read("x.yaml", &format!("{a}---\n{b}"))), ["Service default/a", "Service default/b"]);
        assert_eq!(changed(claims.read("x.yaml", &format!("{b}---\n# moved\n{a}"))), [""; 0]);
        assert_eq!(changed(claims.read("x.yaml", &format!("{b}---\n{c}"))), ["Service default/a", "Service default/c"]);
        assert_eq!(changed(claims.read("x.yaml", &format!("{}---\n{c}", service("b", 81)))), ["Service default/b"]);
        assert_eq!(changed(Ok(claims.remove("x.yaml"))), ["Service default/b", "Service default/c"]);
        assert!(claims.objects.is_empty());
    }

    #[test]
    fn the_first_file_by_name_counts() {
        let mut claims = Claims::new(ConvertOptions::default());
        claims.read("m.yaml", &service("a", 80)).expect("well-formed");
        assert_eq!(changed(claims.read("z.yaml", &service("a", 90))), [""; 0]);
        assert_eq!(port(&claims, "a"), Some(80));
        assert_eq!(claims.problems(&key("a")), ["Service default/a is also in z.yaml; the one in m.yaml counts."]);
        assert_eq!(changed(claims.read("b.yaml", &service("a", 70))), ["Service default/a"]);
        assert_eq!(port(&claims, "a"), Some(70));
        claims.remove("b.yaml");
        assert_eq!(port(&claims, "a"), Some(80));
        claims.remove("m.yaml");
        assert_eq!(port(&claims, "a"), Some(90));
        assert_eq!(claims.problems(&key("a")), [""; 0]);
    }

    #[test]
    fn the_first_of_two_in_one_file_counts() {
        let mut claims = Claims::new(ConvertOptions::default());
        let (first, second) = (service("a", 80), service("a", 81));
        claims.read("x.yaml", &format!("{first}---\n{second}")).expect("well-formed");
        assert_eq!(port(&claims, "a"), Some(80));
        assert_eq!(claims.problems(&key("a")), ["Service default/a is in x.yaml more than once; the first counts."]);
        assert_eq!(changed(claims.read("x.yaml", &second)), ["Service default/a"]);
        assert_eq!(port(&claims, "a"), Some(81));
        assert_eq!(claims.problems(&key("a")), [""; 0]);
    }

    #[test]
    fn one_that_is_added_to_the_file_counts_only_if_it_comes_first() {
        let (old, new) = (service("a", 80), service("a", 81));
        for (text, expected) in [(format!("{old}---\n{new}"), 80), (format!("{new}---\n{old}"), 81)] {
            let mut claims = Claims::new(ConvertOptions::default());
            claims.read("x.yaml", &format!("{old}---\n")).expect("well-formed");
            claims.read("x.yaml", &text).expect("well-formed");
            assert_eq!(port(&claims, "a"), Some(expected), "{text}");
            assert_eq!(claims.problems(&key("a")).len(), 1, "{text}");
        }
    }

    #[test]
    fn many_documents_are_read_in_their_order() {
        let mut claims = Claims::new(ConvertOptions::default());
        let text = |last: &str| -> String {
            (1..=500).map(|port| service(&format!("s{}", port % 499), port) + "---\n").collect::<String>() + last
        };
        claims.read("x.yaml", &text("")).expect("well-formed");
        assert_eq!(claims.objects.len(), 499);
        assert_eq!(port(&claims, "s1"), Some(1), "port 1 comes first, port 500 last");
        assert_eq!(claims.problems(&key("s1")), ["Service default/s1 is in x.yaml more than once; the first counts."]);
        let error = claims.read("x.yaml", &text("kind: [")).expect_err("half a list");
        assert!(error.starts_with("line 2501: "), "five lines for each of 500: {error}");
    }

    #[test]
    fn a_broken_file_says_what_it_said_before() {
        let mut claims = Claims::new(ConvertOptions::default());
        claims.read("x.yaml", &service("a", 80)).expect("well-formed");
        let error = claims.read("x.yaml", &format!("{}---\nkind: [", service("a", 81))).expect_err("half a list");
        assert!(error.starts_with("line "), "{error}");
        assert_eq!(port(&claims, "a"), Some(80));
    }

    #[test]
    fn other_kinds_are_noted_until_they_go() {
        let mut claims = Claims::new(ConvertOptions::default());
        let (pod, a) = ("apiVersion: v1\nkind: Pod\n", service("a", 80));
        claims.read("x.yaml", &format!("{pod}---\n{a}---\n{pod}# again\n---\nkind: Odd\n")).expect("well-formed");
        assert_eq!(claims.notes("x.yaml"), ["? Odd in it is ignored.", "v1 Pod in it is ignored."]);
        claims.read("x.yaml", &format!("{pod}---\n{a}")).expect("well-formed");
        assert_eq!(claims.notes("x.yaml"), ["v1 Pod in it is ignored."]);
        claims.read("x.yaml", &a).expect("well-formed");
        assert_eq!(claims.notes("x.yaml"), [""; 0]);
    }
}
