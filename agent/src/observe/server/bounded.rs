//! Strangers may ask too much: so many connections at a time, and none that says nothing for long.

use std::{
    io,
    net::SocketAddr,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use axum::serve::Listener;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Instant, Sleep, sleep},
};

/// Connections of one listener; each costs a file descriptor and some kilobytes.
const MOST: usize = 512;
/// A connection on which nothing moves is closed. Whoever scrapes less often connects again.
const IDLE: Duration = Duration::from_secs(20);

/// A listener with a limit; who comes later waits in the kernel.
pub struct Bounded {
    listener: TcpListener,
    room: Arc<Semaphore>,
}

impl Bounded {
    /// Around a listener.
    #[must_use]
    pub fn new(listener: TcpListener) -> Self {
        Self { listener, room: Arc::new(Semaphore::new(MOST)) }
    }
}

impl Listener for Bounded {
    type Io = Impatient<TcpStream>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, SocketAddr) {
        let place = self.room.clone().acquire_owned().await.ok(); // fails only once closed, and nobody closes it
        let (stream, peer) = Listener::accept(&mut self.listener).await;
        (Impatient::new(stream, IDLE, place), peer)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// A stream that fails when nothing moves.
pub struct Impatient<S> {
    stream: S,
    idle: Duration,
    end: Pin<Box<Sleep>>,
    _place: Option<OwnedSemaphorePermit>,
}

impl<S> Impatient<S> {
    fn new(stream: S, idle: Duration, place: Option<OwnedSemaphorePermit>) -> Self {
        Self { stream, idle, end: Box::pin(sleep(idle)), _place: place }
    }

    /// Something moved, or it is too late for that.
    fn judge<T>(&mut self, context: &mut Context<'_>, moved: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if moved.is_ready() {
            let end = Instant::now() + self.idle;
            self.end.as_mut().reset(end);
            return moved;
        }
        self.end.as_mut().poll(context).map(|()| Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Impatient<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let moved = Pin::new(&mut self.stream).poll_read(context, buffer);
        self.judge(context, moved)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Impatient<S> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let moved = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.judge(context, moved)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let moved = Pin::new(&mut self.stream).poll_flush(context);
        self.judge(context, moved)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use std::{future::poll_fn, io::Write as _, os::unix::net::UnixStream};

    use super::*;

    #[tokio::test]
    async fn a_connection_lasts_while_something_moves() {
        let idle = Duration::from_millis(50);
        let (mut peer, ours) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let ours = tokio::net::UnixStream::from_std(ours).unwrap();
        let mut ours = Impatient::new(ours, idle, None);
        let mut byte = [0];
        let started = Instant::now();
        while started.elapsed() < idle * 3 {
            peer.write_all(b"x").unwrap();
            poll_fn(|context| Pin::new(&mut ours).poll_read(context, &mut ReadBuf::new(&mut byte))).await.unwrap();
        }
        let silent = Instant::now();
        let read = poll_fn(|context| Pin::new(&mut ours).poll_read(context, &mut ReadBuf::new(&mut byte))).await;
        assert_eq!(read.unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert!(silent.elapsed() >= idle / 2);
    }
}
