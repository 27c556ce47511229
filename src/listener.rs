//! [`Incoming`]: connections as they come in, each of which can be cut.
//!
//! A graceful end waits for the other side, and a silent peer would keep it waiting for ever: cutting makes every
//! connection end with an error, and all of them can be waited for.

use std::{
    future::Future,
    io,
    net::SocketAddr,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use futures_util::{Stream, stream};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream},
    time::sleep,
};
use tokio_util::{
    sync::{CancellationToken, WaitForCancellationFutureOwned},
    task::{TaskTracker, task_tracker::TaskTrackerToken},
};
use tonic::transport::server::{Connected, TcpConnectInfo};
use tracing::warn;

/// How long to pause when a connection cannot be accepted: most often there is no file descriptor left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Every connection of a listener. Cloning gives another handle.
#[derive(Clone, Default)]
pub struct Connections {
    cut: CancellationToken,
    open: TaskTracker,
}

impl Connections {
    /// Until all are closed, once no more are accepted.
    ///
    /// # Cancel safety
    ///
    /// May be dropped and called again.
    pub async fn closed(&self) {
        self.open.close();
        self.open.wait().await;
    }

    /// Ends all, now.
    pub fn cut(&self) {
        self.cut.cancel();
    }
}

/// Connections as they come in.
pub struct Incoming {
    listener: TcpListener,
    connections: Connections,
}

impl Incoming {
    /// Accepts from `listener`.
    pub fn new(listener: TcpListener, connections: Connections) -> Self {
        Self { listener, connections }
    }

    /// The next connection. A failure to accept is logged and waited out.
    ///
    /// # Cancel safety
    ///
    /// Dropped, no connection is lost.
    pub async fn next(&mut self) -> (Connection, SocketAddr) {
        loop {
            match self.listener.accept().await {
                Ok((stream, peer)) => {
                    // Without it small answers wait for the peer's delayed acknowledgement. Failing, it is only slower.
                    let _ = stream.set_nodelay(true);
                    return (Connection::new(stream, &self.connections), peer);
                }
                Err(error) => {
                    warn!(%error, "cannot accept a connection");
                    sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }

    /// The same as an endless stream.
    pub fn into_stream(self) -> impl Stream<Item = Result<Connection, io::Error>> {
        stream::unfold(self, |mut incoming| async move {
            let (connection, _) = incoming.next().await;
            Some((Ok(connection), incoming))
        })
    }
}

impl axum::serve::Listener for Incoming {
    type Io = Connection;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Connection, SocketAddr) {
        self.next().await
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// A TCP connection that fails to read once it is cut.
pub struct Connection {
    stream: TcpStream,
    cut: Pin<Box<WaitForCancellationFutureOwned>>,
    _open: TaskTrackerToken,
}

impl Connection {
    fn new(stream: TcpStream, connections: &Connections) -> Self {
        let cut = Box::pin(connections.cut.clone().cancelled_owned());
        Self { stream, cut, _open: connections.open.token() }
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match Pin::new(&mut self.stream).poll_read(context, buffer) {
            Poll::Pending => self.cut.as_mut().poll(context).map(|()| Err(io::ErrorKind::ConnectionAborted.into())),
            ready => ready,
        }
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

impl Connected for Connection {
    type ConnectInfo = TcpConnectInfo;

    fn connect_info(&self) -> TcpConnectInfo {
        self.stream.connect_info()
    }
}
