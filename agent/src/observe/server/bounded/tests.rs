//! Connections end; a new one always finds a place.

use std::future::poll_fn;

use tokio::{net::UnixStream, time::timeout};

use super::*;

/// Nothing here takes so long.
const NEVER: Duration = Duration::from_secs(60);

/// How many bytes came, of one.
async fn read(stream: &mut (impl AsyncRead + Unpin)) -> io::Result<usize> {
    let mut byte = [0];
    let mut buffer = ReadBuf::new(&mut byte);
    poll_fn(|context| Pin::new(&mut *stream).poll_read(context, &mut buffer)).await?;
    Ok(buffer.filled().len())
}

async fn write(stream: &mut (impl AsyncWrite + Unpin)) -> io::Result<usize> {
    poll_fn(|context| Pin::new(&mut *stream).poll_write(context, b"x")).await
}

/// What a connection ends with, while its peer sends a byte at a time or nothing.
async fn end(limits: Limits, is_fed: bool) -> io::ErrorKind {
    let (mut peer, ours) = UnixStream::pair().unwrap();
    let (_life, ended) = oneshot::channel();
    let mut ours = Impatient::new(ours, limits, ended, None);
    loop {
        if is_fed {
            write(&mut peer).await.unwrap();
        }
        if let Err(error) = read(&mut ours).await {
            return error.kind();
        }
    }
}

#[tokio::test]
async fn a_connection_ends_when_nothing_moves_and_when_it_is_old() {
    let short = Duration::from_millis(50);
    for (row, limits, is_fed) in [
        ("silent", Limits { most: 1, idle: short, life: NEVER }, false),
        ("a byte now and then", Limits { most: 1, idle: NEVER, life: short }, true),
    ] {
        let ended = timeout(NEVER / 2, end(limits, is_fed)).await;
        assert_eq!(ended.ok(), Some(io::ErrorKind::TimedOut), "{row}");
    }
}

#[tokio::test]
async fn the_oldest_connection_makes_room_for_the_next() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let mut bounded = Bounded::within(Limits { most: 2, idle: NEVER, life: NEVER }, listener);
    tokio::spawn(async move {
        loop {
            let (mut stream, _) = bounded.accept().await;
            tokio::spawn(async move {
                while read(&mut stream).await? > 0 && write(&mut stream).await? > 0 {}
                io::Result::Ok(())
            });
        }
    });
    /// Whether it is answered; the other outcome is an end.
    async fn speaks(client: &mut TcpStream) -> bool {
        let answer = async { write(client).await.is_ok() && read(client).await.is_ok_and(|count| count > 0) };
        timeout(NEVER / 2, answer).await.expect("an answer or an end")
    }
    let mut clients = Vec::new();
    for number in 0..4 {
        let mut client = TcpStream::connect(address).await.unwrap();
        assert!(speaks(&mut client).await, "client {number}");
        clients.push(client);
    }
    let mut alive = Vec::new();
    for client in &mut clients {
        alive.push(speaks(client).await);
    }
    assert_eq!(alive, [false, false, true, true], "the two oldest are gone");
}
