//! The text of a manifest file → API objects in JSON, one at a time.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

/// One YAML document of a file, or a whole JSON file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Document<'a> {
    /// Lines of the file before it.
    pub lines_before: usize,
    /// It.
    pub text: &'a str,
}

/// Splits a YAML file at its document marks: `---` or `...` at the start of a line, which nothing else may have there.
pub fn documents(text: &str) -> Vec<Document<'_>> {
    let text = text.trim_start_matches('\u{feff}');
    let mut documents = Vec::new();
    let (mut start, mut start_line) = (0, 0);
    let mut end = 0;
    for (number, line) in text.split_inclusive('\n').enumerate() {
        let is_mark = (line.starts_with("---") || line.starts_with("..."))
            && line[3..].starts_with(char::is_whitespace)
            || matches!(line, "---" | "...");
        if is_mark {
            documents.push(Document { lines_before: start_line, text: &text[start..end] });
            // What follows on the line of a `---` belongs to the document; a `...` only ends one.
            (start, start_line) = (end + 3, number);
        }
        end += line.len();
    }
    documents.push(Document { lines_before: start_line, text: &text[start..] });
    documents.retain(|document| document.text.lines().any(has_content));
    documents
}

/// Not a blank line, a comment or a directive (`%YAML 1.2`).
fn has_content(line: &str) -> bool {
    !line.starts_with('%') && !matches!(line.trim_start().as_bytes().first(), None | Some(b'#'))
}

/// Hands every object of a YAML document to `each`, items of lists one by one.
///
/// # Errors
/// What is wrong and in which line of the file.
pub fn read_yaml(document: Document<'_>, mut each: impl FnMut(Value)) -> Result<(), String> {
    // The budget guards against hostile input; whoever can write here rules the node's Services anyway, and a list of
    // 100,000 endpoints goes beyond it.
    let options = serde_saphyr::options! { budget: None, with_snippet: false };
    serde_saphyr::with_deserializer_from_str_with_options(document.text, options, |de| {
        Any(Objects(&mut each)).deserialize(de)
    })
    .map_err(|error| {
        let message = error.render_with_formatter(&serde_saphyr::UserMessageFormatter);
        match error.location() {
            Some(place) => format!("line {}: {message}", document.lines_before as u64 + place.line()),
            None => format!("document at line {}: {message}", document.lines_before + 1),
        }
    })
}

/// Hands every object of a JSON file to `each`, items of lists one by one.
///
/// # Errors
/// What is wrong and in which line of the file.
pub fn read_json(text: &str, mut each: impl FnMut(Value)) -> Result<(), String> {
    let mut de = serde_json::Deserializer::from_str(text.trim_start_matches('\u{feff}'));
    while de.end().is_err() {
        Any(Objects(&mut each)).deserialize(&mut de).map_err(|error| error.to_string())?;
    }
    Ok(())
}

/// Whatever comes, a visitor takes.
struct Any<V>(V);

impl<'de, V: Visitor<'de>> DeserializeSeed<'de> for Any<V> {
    type Value = V::Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<V::Value, D::Error> {
        deserializer.deserialize_any(self.0)
    }
}

/// Takes an object as a value, but a list item by item: a file may hold one list of everything.
struct Objects<'a, F>(&'a mut F);

impl<'de, F: FnMut(Value)> Visitor<'de> for Objects<'_, F> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a Kubernetes object or a list of them")
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(()) // an empty document
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<(), A::Error> {
        let mut object = Map::new();
        while let Some(field) = fields.next_key::<String>()? {
            if field == "items" {
                fields.next_value_seed(Any(Items(self.0)))?;
                object.insert("items".to_owned(), Value::Null);
            } else {
                object.insert(field, fields.next_value()?);
            }
        }
        if !object.contains_key("items") {
            (self.0)(Value::Object(object));
        }
        Ok(())
    }
}

/// The `items` of a list.
struct Items<'a, F>(&'a mut F);

impl<'de, F: FnMut(Value)> Visitor<'de> for Items<'_, F> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the items of a list")
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<(), A::Error> {
        while items.next_element_seed(Any(Objects(self.0)))?.is_some() {}
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(text: &str) -> Result<Vec<String>, String> {
        let mut names = Vec::new();
        for document in documents(text) {
            read_yaml(document, |object| names.push(object["metadata"]["name"].to_string().replace('"', "")))?;
        }
        Ok(names)
    }

    #[test]
    fn a_file_is_as_many_objects_as_it_says() {
        for (id, text, expected) in [
            ("nothing", "", vec![]),
            ("a comment", "# later\n", vec![]),
            ("one", "metadata: {name: a}\n", vec!["a"]),
            ("marks without need", "---\nmetadata: {name: a}\n---\n# none\n---\n", vec!["a"]),
            ("two", "metadata: {name: a}\n--- # next\nmetadata: {name: b}\n...\n", vec!["a", "b"]),
            ("on the line of the mark", "--- {metadata: {name: a}}\n--- {metadata: {name: b}}", vec!["a", "b"]),
            ("directives", "%YAML 1.2\n---\nmetadata: {name: a}\n", vec!["a"]),
            ("carriage returns", "metadata:\r\n  name: a\r\n---\r\nmetadata:\r\n  name: b\r\n", vec!["a", "b"]),
            ("a byte order mark", "\u{feff}metadata: {name: a}\n", vec!["a"]),
            ("dashes inside", "metadata: {name: a}\ntext: |\n  ---\n  more\n----: odd\n", vec!["a"]),
            ("a list", "kind: List\nitems:\n- metadata: {name: a}\n- metadata: {name: b}\n", vec!["a", "b"]),
            ("a list whose kind comes last", "items: [{metadata: {name: a}}]\nkind: List\n", vec!["a"]),
            ("a list in a list", "items: [{items: [{metadata: {name: a}}]}, {metadata: {name: b}}]", vec!["a", "b"]),
            ("empty lists", "items: []\n---\nitems:\n", vec![]),
            ("JSON is YAML", "{\"metadata\": {\"name\": \"a\"}}", vec!["a"]),
            ("anchors", "x: &m {name: a}\nmetadata: *m\n", vec!["a"]),
        ] {
            assert_eq!(names(text), Ok(expected.into_iter().map(str::to_owned).collect()), "{id}");
        }
    }

    #[test]
    fn an_error_names_the_line_of_the_file() {
        for (id, text, expected) in [
            ("first document", "a: [1\n", "line "),
            ("second document", "metadata: {name: a}\n---\nb: 1\nc: }\n", "line 4: "),
            ("no object", "kind: A\n---\n- 1\n", "document at line 2: "),
            ("twice the same field", "metadata: {name: a}\nkind: A\nkind: B\n", "line 3: "),
        ] {
            let error = names(text).expect_err(id);
            assert!(error.starts_with(expected), "{id}: {error}");
        }
    }

    #[test]
    fn json_holds_objects_one_after_another() {
        let mut names = Vec::new();
        let text = "{\"metadata\": {\"name\": \"a\"}}\n{\"items\": [{\"metadata\": {\"name\": \"b\"}}]}\n";
        read_json(text, |object| names.push(object["metadata"]["name"].clone())).expect("well-formed");
        assert_eq!(names, ["a", "b"]);
        let error = read_json("{\"a\": 1}\n{\"b\"}", |_| {}).expect_err("half an object");
        assert!(error.contains("line 2"), "{error}");
    }
}
