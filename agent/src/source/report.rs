//! What a source last said, so that it says nothing twice.

use std::collections::HashMap;

use super::{Sender, SourceEvent, SourceState};
use crate::model::Update;

/// Sends, and remembers which objects have problems.
pub struct Report {
    events: Sender,
    problems: HashMap<String, String>,
    state: Option<SourceState>,
}

impl Report {
    /// Nothing said yet.
    pub fn new(events: Sender) -> Self {
        Self { events, problems: HashMap::new(), state: None }
    }

    /// Nobody listens any more.
    pub fn is_closed(&self) -> bool {
        self.events.is_closed()
    }

    /// Sends an update.
    pub fn update(&self, update: Update) {
        self.send(SourceEvent::Update(update));
    }

    /// Says what is wrong with `object`, or that nothing is any more, if that is news.
    pub fn object(&mut self, object: &str, problems: &[String]) {
        if problems.is_empty() {
            if self.problems.remove(object).is_some() {
                self.send(SourceEvent::Resolved { object: object.to_owned() });
            }
            return;
        }
        let message = problems.join(" ");
        if self.problems.get(object) != Some(&message) {
            self.problems.insert(object.to_owned(), message.clone());
            self.send(SourceEvent::Problem { object: object.to_owned(), message });
        }
    }

    /// Resolves the problems of every object that is not present any more.
    pub fn retain(&mut self, is_present: impl Fn(&String) -> bool) {
        let gone: Vec<String> = self.problems.keys().filter(|object| !is_present(object)).cloned().collect();
        for object in gone {
            self.object(&object, &[]);
        }
    }

    /// Says how the source is, if that is news.
    pub fn state(&mut self, state: SourceState) {
        if self.state.as_ref() != Some(&state) {
            self.state = Some(state.clone());
            self.send(SourceEvent::State(state));
        }
    }

    fn send(&self, event: SourceEvent) {
        // Without a receiver the agent is shutting down, and the source soon sees it by `is_closed`.
        let _ = self.events.send(event);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_problem_is_told_once_until_it_changes_or_goes() {
        let (events, mut told) = tokio::sync::mpsc::unbounded_channel();
        let mut report = Report::new(events);
        let broken = ["a is broken.".to_owned()];
        report.object("a", &[]);
        report.object("a", &broken);
        report.object("a", &broken);
        report.object("b", &["b is broken.".to_owned(), "Twice.".to_owned()]);
        report.retain(|object| object == "b");
        report.object("a", &broken);
        report.object("b", &[]);
        drop(report);
        let problem =
            |object: &str, message: &str| SourceEvent::Problem { object: object.into(), message: message.into() };
        let resolved = |object: &str| SourceEvent::Resolved { object: object.into() };
        for expected in [
            problem("a", "a is broken."),
            problem("b", "b is broken. Twice."),
            resolved("a"),
            problem("a", "a is broken."),
            resolved("b"),
        ] {
            assert_eq!(told.try_recv(), Ok(expected));
        }
        assert!(told.try_recv().is_err(), "nothing else");
    }
}
