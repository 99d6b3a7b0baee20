//! An async runtime on a thread of its own, for tests that otherwise wait and look.

use std::{
    future::Future,
    thread::{self, JoinHandle},
};

use anyhow::Result;
use tokio::{
    runtime::{Builder, Handle},
    sync::oneshot,
};

/// The runtime; what runs in it ends when this is dropped.
#[derive(Debug)]
pub struct Background {
    /// To spawn with.
    pub handle: Handle,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Background {
    /// Starts.
    ///
    /// # Errors
    /// When the kernel grants no epoll instance.
    pub fn start() -> Result<Self> {
        let runtime = Builder::new_current_thread().enable_all().build()?;
        let handle = runtime.handle().clone();
        let (stop, stopped) = oneshot::channel();
        let thread = thread::spawn(move || drop(runtime.block_on(stopped)));
        Ok(Self { handle, stop: Some(stop), thread: Some(thread) })
    }

    /// Runs a future to its end.
    pub fn run<F: Future>(&self, future: F) -> F::Output {
        self.handle.block_on(future)
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // a panic there has been printed
        }
    }
}
