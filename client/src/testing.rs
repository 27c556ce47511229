//! The whole service inside a test: on an embedded store in memory, gone when it is dropped.
//!
//! ```
//! use onceward_client::{Key, Reservation, testing::Server};
//!
//! # #[tokio::main] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let server = Server::start()?;
//! let client = server.client()?;
//!
//! let Reservation::Acquired(guard) = client.reserve(Key::new("mails.welcome", "ann")).await? else { panic!() };
//! guard.complete("sent").await?;
//! let Reservation::Completed(finished) = client.reserve(Key::new("mails.welcome", "ann")).await? else { panic!() };
//! assert_eq!(finished.result.body, "sent");
//! # Ok(())
//! # }
//! ```
//!
//! It runs on a thread of its own, so a test may block its runtime. A test with a paused clock would see each call time out,
//! since the answers come from outside of it.

use std::{
    io,
    net::{Ipv4Addr, SocketAddr},
    sync::mpsc,
    thread::JoinHandle,
};

use clap::Parser;
use onceward::{
    config::Command,
    server::{self, Listeners},
    store,
};
use tokio::sync::oneshot;

use crate::{builder::ClientBuilder, client::Client};

/// A server inside this process.
#[derive(Debug)]
pub struct Server {
    address: SocketAddr,
    stop: Option<oneshot::Sender<Stop>>,
    thread: Option<JoinHandle<()>>,
}

/// How a server ends.
#[derive(Debug)]
enum Stop {
    /// It drains.
    Drain,
    /// As by a crash.
    Kill,
}

impl Server {
    /// Starts one on a free port of the loopback, with its records in memory.
    ///
    /// # Errors
    ///
    /// There is no port, or no thread.
    pub fn start() -> io::Result<Self> {
        Self::with(&["--database-url=sqlite::memory:"])
    }

    /// Starts one with these flags of `onceward serve`, such as `--database-url=sqlite:test.db` and `--lock-ttl-min=1ms`.
    ///
    /// # Errors
    ///
    /// The flags are wrong, the database cannot be opened, or there is no port.
    pub fn with(flags: &[&str]) -> io::Result<Self> {
        Self::on(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), flags)
    }

    /// Starts one on this address: in the place of one that was killed, say.
    ///
    /// # Errors
    ///
    /// As [`with`](Self::with), or the address is taken.
    pub fn on(address: SocketAddr, flags: &[&str]) -> io::Result<Self> {
        let flags: Vec<String> =
            std::iter::once("onceward").chain(flags.iter().copied()).map(ToOwned::to_owned).collect();
        let (started, starting) = mpsc::channel();
        let (stop, stopping) = oneshot::channel();
        let thread = std::thread::Builder::new().name("onceward".into()).spawn(move || {
            let served =
                server::runtime(1).and_then(|runtime| runtime.block_on(serve(address, &flags, &started, stopping)));
            if let Err(error) = served {
                let _ = started.send(Err(error));
            }
        })?;
        let address = starting.recv().map_err(io::Error::other)??;
        Ok(Self { address, stop: Some(stop), thread: Some(thread) })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The endpoint, as [`Client::builder`] takes it.
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// A client of it.
    ///
    /// # Errors
    ///
    /// There is no runtime.
    pub fn client(&self) -> Result<Client, crate::BuildError> {
        self.builder().lazy()
    }

    /// A client of it, to be configured.
    pub fn builder(&self) -> ClientBuilder {
        Client::builder([self.endpoint()])
    }

    /// Lets it drain, and waits for its end.
    pub fn stop(mut self) {
        self.end(Stop::Drain);
    }

    /// Ends it at once, as a crash would.
    pub fn kill(mut self) {
        self.end(Stop::Kill);
    }

    fn end(&mut self, how: Stop) {
        if let Some(stop) = self.stop.take() {
            let _ = stop.send(how);
        }
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.end(Stop::Kill);
    }
}

/// Serves until it is told to stop, and tells where once it does.
async fn serve(
    address: SocketAddr,
    flags: &[String],
    started: &mpsc::Sender<io::Result<SocketAddr>>,
    stopping: oneshot::Receiver<Stop>,
) -> io::Result<()> {
    let config = Command::try_parse_from(flags).map_err(io::Error::other)?.serve;
    let options = config.validate().map_err(io::Error::other)?;
    let url = config.database.url().map_err(io::Error::other)?;
    let store = store::open(&url, &config.open_options(&url)).await.map_err(io::Error::other)?;
    let admin = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let listeners = Listeners::bind(address, admin).await.map_err(io::Error::other)?;
    let _ = started.send(listeners.calls.local_addr());
    let (drain, draining) = oneshot::channel::<()>();
    let served = server::run(listeners, store, options, async {
        let _ = draining.await;
    });
    let killed = async {
        if let Ok(Stop::Drain) = stopping.await {
            let _ = drain.send(());
            std::future::pending::<()>().await;
        }
    };
    tokio::select! {
        served = served => served.map_err(io::Error::other),
        () = killed => Ok(()),
    }
}
