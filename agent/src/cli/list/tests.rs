//! What a watch prints after each change.

use serde::Serialize;

use super::{FormatArgs, Listing, Output, Printer};
use crate::render::{Cell, Row, Table};

/// Names with a number.
#[derive(Serialize)]
#[serde(transparent)]
struct List(Vec<(&'static str, u8)>);

impl Listing for List {
    fn table(&self, wide: bool) -> Table {
        let row = |(name, number): &(&str, u8)| {
            let mut cells = vec![Cell::from(*name), number.to_string().into()];
            cells.extend(wide.then(|| Cell::from("more")));
            Row { key: (*name).to_owned(), cells }
        };
        let headings = if wide { vec!["NAME", "NUMBER", "MORE"] } else { vec!["NAME", "NUMBER"] };
        Table { headings, status: 1, rows: self.0.iter().map(row).collect() }
    }

    fn names(&self) -> String {
        self.0.iter().map(|(name, _)| format!("{name}\n")).collect()
    }
}

/// What is printed for each list in turn.
fn check(output: Output, watch: bool, no_headers: bool, steps: &[(&[(&'static str, u8)], &str)]) {
    let mut printer = Printer::new(FormatArgs { output, watch, no_headers });
    printer.colours = false;
    for (list, expected) in steps {
        assert_eq!(printer.next(&List(list.to_vec())).unwrap(), *expected, "{output:?} {list:?}");
    }
}

#[test]
fn a_table_is_followed_by_the_lines_that_change_under_the_same_columns() {
    check(
        Output::Table,
        true,
        false,
        &[
            (&[("long-name", 1), ("b", 1)], "NAME        NUMBER\nlong-name   1\nb           1\n"),
            (&[("long-name", 1), ("b", 2)], "b           2\n"),
            (&[("long-name", 1), ("b", 2)], ""),
            (&[("b", 2), ("c", 1)], "c           1\nlong-name   deleted\n"),
        ],
    );
    check(Output::Wide, false, false, &[(&[("a", 1)], "NAME   NUMBER   MORE\na      1        more\n")]);
    check(Output::Table, false, true, &[(&[("a", 1)], "a      1\n")]);
    check(Output::Table, false, false, &[(&[], "")]);
}

#[test]
fn documents_come_whole_once_for_every_change() {
    check(Output::Json, true, false, &[(&[("a", 1)], "[[\"a\",1]]\n"), (&[("a", 1)], ""), (&[], "[]\n")]);
    check(Output::Name, true, false, &[(&[("a", 1)], "a\n"), (&[("a", 2)], ""), (&[("b", 1)], "b\n")]);
    let mut printer = Printer::new(FormatArgs { output: Output::Yaml, watch: true, no_headers: false });
    assert!(!printer.next(&List(vec![("a", 1)])).unwrap().starts_with("---"));
    assert!(printer.next(&List(vec![("a", 2)])).unwrap().starts_with("---\n"));
}
