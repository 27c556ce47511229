//! [`Steps`]: proxies that count what passes any of them, and inject a fault at one of these steps.
//!
//! A step is a piece of bytes that is about to pass in either direction, so a run of a program is a row of steps; with a fault at
//! each of them in turn, every point at which the world may end for it is visited.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream, tcp::OwnedReadHalf, tcp::OwnedWriteHalf},
    sync::watch,
    task::JoinSet,
};

/// What happens at the step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum At {
    /// All connections are cut for ever before it passes.
    Crash,
    /// Nothing passes until [`Steps::resume`].
    Pause,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Running,
    Paused,
    Resumed,
    Crashed,
}

#[derive(Clone)]
pub struct Steps {
    taken: Arc<AtomicU64>,
    fault: (u64, At),
    state: Arc<watch::Sender<State>>,
    tasks: Arc<std::sync::Mutex<JoinSet<()>>>,
}

impl Steps {
    /// With a fault at this step, counted from 1.
    pub fn new(step: u64, at: At) -> Self {
        Self {
            taken: Arc::default(),
            fault: (step, at),
            state: Arc::new(watch::channel(State::Running).0),
            tasks: Arc::default(),
        }
    }

    /// A proxy to this server, whose steps count.
    pub async fn before(&self, server: SocketAddr) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let steps = self.clone();
        self.tasks.lock().unwrap().spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((client, _)) = listener.accept().await {
                let steps = steps.clone();
                connections.spawn(async move {
                    if *steps.state.borrow() == State::Crashed {
                        return;
                    }
                    let Ok(server) = TcpStream::connect(server).await else { return };
                    client.set_nodelay(true).unwrap();
                    server.set_nodelay(true).unwrap();
                    let (from_client, to_client) = client.into_split();
                    let (from_server, to_server) = server.into_split();
                    let mut state = steps.state.subscribe();
                    tokio::select! {
                        () = steps.pass(from_client, to_server) => {}
                        () = steps.pass(from_server, to_client) => {}
                        _ = state.wait_for(|state| *state == State::Crashed) => {}
                    }
                });
            }
        });
        address
    }

    /// Waits until the fault happens.
    pub async fn happened(&self) {
        self.state.subscribe().wait_for(|state| *state != State::Running).await.unwrap();
    }

    pub fn resume(&self) {
        self.state.send_replace(State::Resumed);
    }

    async fn pass(&self, mut from: OwnedReadHalf, mut to: OwnedWriteHalf) {
        let mut bytes = vec![0; 64 << 10];
        loop {
            let Ok(count @ 1..) = from.read(&mut bytes).await else { return };
            let (step, at) = self.fault;
            if self.taken.fetch_add(1, Ordering::SeqCst) + 1 == step {
                self.state.send_replace(if at == At::Crash { State::Crashed } else { State::Paused });
            }
            let Ok(state) = self.state.subscribe().wait_for(|state| *state != State::Paused).await.map(|state| *state)
            else {
                return;
            };
            if state == State::Crashed || to.write_all(&bytes[..count]).await.is_err() {
                return;
            }
        }
    }
}
