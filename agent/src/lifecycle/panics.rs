//! A panic in any thread or task ends the agent: without that part it would be deaf, and answer that all is well. The
//! kernel keeps what it has, and whoever started the agent starts it again.

use std::{
    panic::{self, PanicHookInfo},
    thread,
};

use tokio::sync::mpsc;

/// The panics of this process from now on, a sentence each. They are printed as before.
#[must_use]
pub fn follow() -> mpsc::UnboundedReceiver<String> {
    let (tell, told) = mpsc::unbounded_channel();
    let print = panic::take_hook();
    panic::set_hook(Box::new(move |panic| {
        print(panic);
        let _ = tell.send(sentence(panic)); // nobody listens: the agent is ending
    }));
    told
}

fn sentence(panic: &PanicHookInfo<'_>) -> String {
    let thread = thread::current();
    let place = panic.location().map_or_else(|| "an unknown place".to_owned(), ToString::to_string);
    let why = panic.payload_as_str().unwrap_or("without a message");
    format!("the thread {:?} panicked at {place}: {why}", thread.name().unwrap_or("without a name"))
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::follow;

    #[test]
    fn panics_of_threads_and_of_tasks_are_told() {
        let mut told = follow();
        let thread = thread::Builder::new().name("closer".to_owned()).spawn(|| panic!("of a thread")).unwrap();
        assert!(thread.join().is_err());
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async { tokio::spawn(async { panic!("of a task") }).await }).unwrap_err();

        let told: Vec<String> = std::iter::from_fn(|| told.try_recv().ok()).collect(); // other tests' among them
        for end in ["panics.rs", ": of a thread", ": of a task"] {
            assert!(told.iter().any(|sentence| sentence.contains(end)), "{end}: {told:?}");
        }
        assert!(told.iter().any(|sentence| sentence.starts_with("the thread \"closer\" panicked at ")), "{told:?}");
    }
}
