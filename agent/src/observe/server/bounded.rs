//! Strangers may ask too much: so many connections at a time, none that says nothing for long, and none for ever. Whoever
//! opens as many as there may be cannot lock others out: the oldest makes room for the next.

use std::{
    cmp::min,
    collections::VecDeque,
    convert::Infallible,
    future::Future as _,
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
    sync::{OwnedSemaphorePermit, Semaphore, oneshot},
    time::{Instant, Sleep, sleep_until},
};

/// What a listener puts up with.
#[derive(Clone, Copy, Debug)]
struct Limits {
    /// Connections at a time; each costs a file descriptor and some kilobytes.
    most: usize,
    /// A connection on which nothing moves for so long is closed. Whoever scrapes less often connects again.
    idle: Duration,
    /// Any connection is closed after so long, even if a byte comes now and then.
    life: Duration,
}

const LIMITS: Limits = Limits { most: 512, idle: Duration::from_secs(20), life: Duration::from_secs(60) };

/// A listener with limits.
pub struct Bounded {
    listener: TcpListener,
    limits: Limits,
    room: Arc<Semaphore>,
    /// What connections live by, the oldest first; some have ended on their own.
    lives: VecDeque<oneshot::Sender<Infallible>>,
}

impl Bounded {
    /// Around a listener.
    #[must_use]
    pub fn new(listener: TcpListener) -> Self {
        Self::within(LIMITS, listener)
    }

    fn within(limits: Limits, listener: TcpListener) -> Self {
        Self { listener, limits, room: Arc::new(Semaphore::new(limits.most)), lives: VecDeque::new() }
    }
}

impl Listener for Bounded {
    type Io = Impatient<TcpStream>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, SocketAddr) {
        let (stream, peer) = Listener::accept(&mut self.listener).await;
        self.lives.retain(|life| !life.is_closed());
        if self.lives.len() >= self.limits.most {
            self.lives.pop_front();
        }
        let (life, ended) = oneshot::channel();
        self.lives.push_back(life);
        let place = self.room.clone().acquire_owned().await.ok(); // fails only once closed, and nobody closes it
        (Impatient::new(stream, self.limits, ended, place), peer)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// A stream that fails when nothing moves, when it is old, and when its place is needed.
pub struct Impatient<S> {
    stream: S,
    idle: Duration,
    /// When it fails if nothing moves until then.
    end: Pin<Box<Sleep>>,
    /// When it fails in any case.
    last: Instant,
    ended: oneshot::Receiver<Infallible>,
    _place: Option<OwnedSemaphorePermit>,
}

impl<S> Impatient<S> {
    fn new(
        stream: S,
        Limits { idle, life, .. }: Limits,
        ended: oneshot::Receiver<Infallible>,
        place: Option<OwnedSemaphorePermit>,
    ) -> Self {
        let now = Instant::now();
        let end = Box::pin(sleep_until(now + min(idle, life)));
        Self { stream, idle, end, last: now + life, ended, _place: place }
    }

    /// Something moved, or it is too late for that.
    fn judge<T>(&mut self, context: &mut Context<'_>, moved: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if Pin::new(&mut self.ended).poll(context).is_ready() {
            return Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into()));
        }
        let now = Instant::now();
        if moved.is_ready() && now < self.last {
            self.end.as_mut().reset(min(now + self.idle, self.last));
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
mod tests;
