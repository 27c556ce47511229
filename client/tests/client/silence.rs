//! Servers and connections that fall silent, and whom that costs what.

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicUsize, Ordering},
};

use onceward_client::{Client, testing::Server};
use tokio::{
    net::{TcpListener, TcpStream},
    task::JoinSet,
    time::{Instant, sleep},
};

use crate::{
    fake::{Call, Fake, granting},
    proxy::{Fault, Proxy},
    support::{MILLISECOND, SECOND, acquired, eventually, key, server, within},
};

/// A proxy, the number of connections that it had, and a flag: raised, it is lowered when the first of them has fallen silent
/// for good.
async fn silent_first(server: &Server) -> (String, Arc<AtomicUsize>, Arc<AtomicBool>, JoinSet<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let (accepted, silent) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
    let (counted, is_silent, address) = (accepted.clone(), silent.clone(), server.address());
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        let mut connections = JoinSet::new();
        while let Ok((mut client, _)) = listener.accept().await {
            let first = counted.fetch_add(1, Ordering::SeqCst) == 0;
            let is_silent = is_silent.clone();
            connections.spawn(async move {
                let mut server = TcpStream::connect(address).await.unwrap();
                let falls_silent = async {
                    while !first || !is_silent.load(Ordering::SeqCst) {
                        sleep(MILLISECOND).await;
                    }
                };
                tokio::select! {
                    _ = tokio::io::copy_bidirectional(&mut client, &mut server) => return,
                    () = falls_silent => {}
                }
                // Held open, and nothing passes.
                is_silent.store(false, Ordering::SeqCst);
                std::future::pending::<()>().await;
            });
        }
    });
    (endpoint, accepted, silent, tasks)
}

#[tokio::test]
async fn a_connection_that_falls_silent_for_good_is_left() {
    let server = server();
    for coalescing in [1, 256] {
        for _ in 0..5 {
            let (endpoint, accepted, silent, _tasks) = silent_first(&server).await;
            let builder = Client::builder([endpoint]).batch_calls_max(coalescing);
            let client = builder.attempt_timeout(200 * MILLISECOND).timeout(2 * SECOND).lazy().unwrap();
            client.lookup(key("k")).await.unwrap();
            silent.store(true, Ordering::SeqCst);
            eventually("it is silent", async || !silent.load(Ordering::SeqCst)).await;
            client.lookup(key("k")).await.unwrap();
            assert_eq!(accepted.load(Ordering::SeqCst), 2);
        }
    }
}

#[tokio::test]
async fn one_silent_server_of_two_costs_few_calls_their_time() {
    let server = server();
    let proxy = Proxy::start(server.address()).await;
    let client = Client::builder([proxy.endpoint(), server.endpoint()]).lazy().unwrap();
    for n in 0..10 {
        acquired(client.reserve(key(&format!("before {n}")))).await.complete("1").await.unwrap();
    }
    proxy.both(Fault::Blackhole);
    let mut pairs = JoinSet::new();
    for n in 0..100 {
        sleep(50 * MILLISECOND).await;
        let client = client.clone();
        pairs.spawn(async move {
            let begun = Instant::now();
            acquired(client.reserve(key(&n.to_string()))).await.complete("1").await.unwrap();
            begun.elapsed()
        });
    }
    let slow = within(20 * SECOND, pairs.join_all()).await.iter().filter(|took| **took > 500 * MILLISECOND).count();
    assert!(slow < 25, "{slow} of 100");
}

#[tokio::test]
async fn a_completion_is_sent_although_reserves_hang() {
    let fake = Fake::start(granting).await;
    let client = Client::builder([fake.endpoint()]).lazy().unwrap();
    fake.let_go(1);
    let guard = acquired(client.reserve(key("k"))).await;
    let mut hanging = JoinSet::new();
    for n in 0..20 {
        hanging.spawn(client.reserve(key(&n.to_string())).into_future());
        sleep(20 * MILLISECOND).await;
    }
    let completing = tokio::spawn(guard.complete("done"));
    let is_sent = || {
        fake.calls().iter().any(|call| match call {
            Call::Single(verb, _) => *verb == "complete",
            Call::Batch(items) => items.iter().any(|(verb, _)| *verb == "complete"),
        })
    };
    within(SECOND, eventually("it is sent", async || is_sent())).await;
    completing.abort();
}
