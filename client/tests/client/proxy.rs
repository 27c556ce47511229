//! [`Proxy`]: a TCP proxy that injects faults, in each direction by itself.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        TcpListener, TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    sync::watch,
    task::JoinSet,
    time::sleep,
};

/// What happens to bytes that go one way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// They pass.
    None,
    /// They pass, later.
    Delay(Duration),
    /// They go nowhere, and nobody is told. What was held back passes when the fault is over.
    Blackhole,
    /// The connection is cut when bytes come.
    Cut,
}

/// Which way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// From the client to the server.
    There,
    /// From the server to the client.
    Back,
}

/// Stands between a client and a server.
pub struct Proxy {
    address: SocketAddr,
    faults: [Arc<watch::Sender<Fault>>; 2],
    cut: Arc<watch::Sender<u64>>,
    _accepting: JoinSet<()>,
}

impl Proxy {
    pub async fn start(server: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let faults = [Fault::None, Fault::None].map(|fault| Arc::new(watch::channel(fault).0));
        let cut = Arc::new(watch::channel(0).0);
        let mut accepting = JoinSet::new();
        let (by_faults, by_cut) = (faults.clone(), cut.clone());
        accepting.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((client, _)) = listener.accept().await {
                let (faults, mut cut) = (by_faults.clone(), by_cut.subscribe());
                connections.spawn(async move {
                    tokio::select! {
                        () = connect(client, server, &faults) => {}
                        _ = cut.changed() => {}
                    }
                });
            }
        });
        Self { address, faults, cut, _accepting: accepting }
    }

    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    pub fn fault(&self, way: Way, fault: Fault) {
        self.faults[way as usize].send_replace(fault);
    }

    pub fn both(&self, fault: Fault) {
        self.fault(Way::There, fault);
        self.fault(Way::Back, fault);
    }

    /// Cuts all connections that there are.
    pub fn cut_all(&self) {
        self.cut.send_modify(|cuts| *cuts += 1);
    }
}

async fn connect(client: TcpStream, server: SocketAddr, faults: &[Arc<watch::Sender<Fault>>; 2]) {
    let Ok(server) = TcpStream::connect(server).await else { return };
    for stream in [&client, &server] {
        stream.set_nodelay(true).unwrap();
    }
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    tokio::select! {
        () = pass(from_client, to_server, faults[Way::There as usize].subscribe()) => {}
        () = pass(from_server, to_client, faults[Way::Back as usize].subscribe()) => {}
    }
}

async fn pass(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, mut fault: watch::Receiver<Fault>) {
    let mut bytes = vec![0; 64 << 10];
    loop {
        let Ok(count @ 1..) = from.read(&mut bytes).await else { return };
        loop {
            let now = *fault.borrow_and_update();
            match now {
                Fault::None => break,
                Fault::Delay(delay) => break sleep(delay).await,
                Fault::Blackhole => fault.changed().await.unwrap(),
                Fault::Cut => return,
            }
        }
        if to.write_all(&bytes[..count]).await.is_err() {
            return;
        }
    }
}
