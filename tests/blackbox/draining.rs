//! The end of a server: who is answered, who is refused, and how long it takes.

use std::time::Duration;

use onceward::proto::reserve_response::Outcome;
use sqlx::{Connection, PgConnection};
use tokio::{io::AsyncReadExt, net::TcpStream};
use tonic::Code;
use tonic_health::pb::{HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient};

use crate::support::*;

async fn health(channel: tonic::transport::Channel) -> ServingStatus {
    let request = HealthCheckRequest { service: "onceward.v1.IdempotencyService".into() };
    HealthClient::new(channel).check(request).await.unwrap().into_inner().status()
}

#[tokio::test(flavor = "multi_thread")]
async fn during_the_delay_calls_are_served_and_health_says_no() {
    let database = Backend::Sqlite.database().await;
    let mut server = Server::start(&database.url, &["--drain-delay", "1s"]).await;
    let (client, channel) = (server.client().await, server.channel().await);
    assert_eq!(health(channel.clone()).await, ServingStatus::Serving);
    assert_eq!(server.get("/readyz").await.0, 200);
    server.stop();
    eventually("not serving", async || health(channel.clone()).await == ServingStatus::NotServing).await;
    assert_eq!(server.get("/readyz").await.0, 503);
    assert_eq!(server.get("/healthz").await.0, 200);
    client.acquire(reserve(&fresh_key(), "a")).await;
    server.client().await.acquire(reserve(&fresh_key(), "a")).await;
    server.stopped().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn after_the_delay_waiters_and_calls_in_flight_are_answered() {
    let (client, (mut program, database)) = Backend::Postgres.program(&["--drain-timeout", "10s"]).await;
    let key = fresh_key();
    client.acquire(reserve(&key, "a")).await;
    let waiter = {
        let (client, key) = (client.clone(), key.clone());
        tokio::spawn(async move { client.reserve(waiting(reserve(&key, "b"), 30 * SECOND)).await })
    };
    program.waiters(1).await;
    // A call that takes longer than the drain's first steps: somebody holds the row.
    let mut holder = PgConnection::connect(&database.url).await.unwrap();
    let lock = lock_record(&mut holder, &key).await;
    let in_flight = {
        let (client, key) = (client.clone(), key.clone());
        tokio::spawn(async move { client.complete(&key, "a", b"r").await })
    };
    let queue = "SELECT count(*) FROM pg_stat_activity
        WHERE wait_event_type = 'Lock' AND datname = current_database()";
    let mut observer = PgConnection::connect(&database.url).await.unwrap();
    let mut blocked = async || sqlx::query_scalar::<_, i64>(queue).fetch_one(&mut observer).await.unwrap() > 0;
    while !blocked().await && !in_flight.is_finished() {}
    program.signal("TERM");
    lock.rollback().await.unwrap();
    assert!(matches!(waiter.await.unwrap().unwrap(), Outcome::InProgress(_) | Outcome::Completed(_)));
    match in_flight.await.unwrap() {
        Ok(_) => {}
        status => drop(refused(status, Code::Unavailable, "STORE_UNAVAILABLE")),
    }
    let (status, took) = timed(program.child.wait()).await;
    assert_eq!(status.unwrap().code(), Some(0));
    assert!(took < 5 * SECOND, "nothing is left to wait for: {took:?}");
    assert!(client.lookup(&key).await.is_err());
}

#[tokio::test(flavor = "multi_thread")]
async fn new_calls_on_an_old_connection_are_told_to_come_back() {
    let database = Backend::Postgres.database().await;
    let mut server = Server::start(&database.url, &["--database-pool-size", "1", "--drain-timeout", "20s"]).await;
    let client = server.client().await;
    let mut holder = PgConnection::connect(&database.url).await.unwrap();
    let table = lock_table(&mut holder).await;
    // Calls in flight keep the connection open while the server drains.
    let in_flight: Vec<_> = (0..20)
        .map(|_| {
            let client = client.clone();
            tokio::spawn(async move { client.reserve(reserve(&fresh_key(), "a")).await })
        })
        .collect();
    tokio::time::sleep(Duration::from_millis(100)).await;
    server.stop();
    let key = fresh_key();
    // One that came before the drain queues behind the others: it is given up.
    let call = || tokio::time::timeout(SECOND / 20, client.reserve(reserve(&key, "a")));
    let refused_ = async || match call().await {
        Ok(Err(status)) if status.message().contains("shutting down") => {
            refused::<Outcome>(Err(status), Code::Unavailable, "STORE_UNAVAILABLE");
            true
        }
        _ => false,
    };
    eventually("refused", refused_).await;
    for call in in_flight {
        refused(call.await.unwrap(), Code::Unavailable, "STORE_UNAVAILABLE");
    }
    table.rollback().await.unwrap();
    server.stopped().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn sigterm_ends_the_program_in_time_with_a_silent_connection_open() {
    for backend in [Backend::Sqlite, Backend::Postgres] {
        let database = backend.database().await;
        let mut program = Program::serve(&["--database-url", &database.url, "--drain-timeout", "5s"]).await;
        let client = program.client().await;
        client.acquire(reserve(&fresh_key(), "a")).await;
        let mut silent =
            [TcpStream::connect(&program.address).await.unwrap(), TcpStream::connect(&program.admin).await.unwrap()];
        program.signal("TERM");
        let (status, took) = timed(program.child.wait()).await;
        assert_eq!(status.unwrap().code(), Some(0));
        assert!(took < 5 * SECOND, "{took:?}");
        for stream in &mut silent {
            let _ = stream.read(&mut [0; 64]).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_left_at_the_drain_timeout_is_cut() {
    let database = Backend::Postgres.database().await;
    let flags = ["--database-url", &database.url, "--database-pool-size", "1", "--drain-timeout", "1s"];
    let mut program = Program::serve(&flags).await;
    let client = program.client().await;
    client.acquire(reserve(&fresh_key(), "warm up")).await;
    let mut holder = PgConnection::connect(&database.url).await.unwrap();
    let _table = lock_table(&mut holder).await;
    // Ten seconds' worth of lock timeouts.
    let calls: Vec<_> = (0..100)
        .map(|_| {
            let client = client.clone();
            tokio::spawn(async move { client.reserve(reserve(&fresh_key(), "a")).await })
        })
        .collect();
    tokio::time::sleep(Duration::from_millis(200)).await;
    program.signal("TERM");
    let (status, took) = timed(program.child.wait()).await;
    assert_eq!(status.unwrap().code(), Some(0));
    assert!(took < 3 * SECOND, "{took:?}");
    for call in calls {
        assert!(call.await.unwrap().is_err(), "none is told of an outcome it did not have");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_database_does_not_keep_the_program_from_ending() {
    let postgres = onceward_testing::Postgres::start(&[]).unwrap();
    let url = postgres.url("postgres");
    let mut program =
        Program::serve(&["--database-url", &url, "--migrate", "--drain-delay", "1s", "--drain-timeout", "5s"]).await;
    let channel = tonic::transport::Channel::from_shared(format!("http://{}", program.address)).unwrap();
    let channel = channel.connect().await.unwrap();
    assert_eq!(health(channel.clone()).await, ServingStatus::Serving);
    postgres.stop().unwrap();
    eventually("not serving", async || health(channel.clone()).await == ServingStatus::NotServing).await;
    program.signal("TERM");
    let (answer, took) = timed(health(channel.clone())).await;
    assert_eq!(answer, ServingStatus::NotServing);
    assert!(took < SECOND, "a probe asks no database: {took:?}");
    let (status, took) = timed(program.child.wait()).await;
    assert_eq!(status.unwrap().code(), Some(0));
    assert!(took < 5 * SECOND, "{took:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_signal_ends_the_program_at_once() {
    let database = Backend::Sqlite.database().await;
    let mut program = Program::serve(&["--database-url", &database.url, "--drain-delay", "30s"]).await;
    program.signal("TERM");
    // Until the first one has been taken.
    eventually("not ready", async || get(&program.admin, "/readyz").await.0 == 503).await;
    program.signal("TERM");
    let (status, took) = timed(program.child.wait()).await;
    assert_eq!(status.unwrap().code(), Some(0));
    assert!(took < 3 * SECOND, "{took:?}");
}

/// Callers that repeat a call elsewhere, with the same token, notice nothing when one of two servers goes.
#[tokio::test(flavor = "multi_thread")]
async fn the_loss_of_one_of_two_servers_costs_no_call_and_duplicates_none() {
    for signal in ["TERM", "KILL"] {
        let database = Backend::Postgres.database().await;
        let [mut leaving, staying] =
            [Program::lenient(&database.url, &[]).await, Program::lenient(&database.url, &[]).await];
        let clients = [leaving.client().await, staying.client().await];
        let callers: Vec<_> = (0..20)
            .map(|n| {
                let clients = clients.clone();
                tokio::spawn(async move {
                    let end = tokio::time::Instant::now() + 2 * SECOND;
                    let mut pairs = 0;
                    while tokio::time::Instant::now() < end {
                        let key = fresh_key();
                        let acquired = anywhere(&clients, n, |client| client.reserve(reserve(&key, "only"))).await;
                        let Outcome::Acquired(acquired) = acquired else { panic!("{acquired:?}") };
                        assert_eq!(acquired.attempt, 1);
                        anywhere(&clients, n, |client| client.complete(&key, "only", b"r")).await;
                        let rival = anywhere(&clients, n, |client| client.reserve(reserve(&key, "rival"))).await;
                        assert_eq!(body(completed(Ok(rival))), "r");
                        pairs += 1;
                    }
                    pairs
                })
            })
            .collect();
        tokio::time::sleep(SECOND / 2).await;
        leaving.signal(signal);
        leaving.child.wait().await.unwrap();
        for caller in callers {
            assert!(caller.await.unwrap() > 0);
        }
    }
}

/// Calls one server, and the other where the first one cannot answer.
async fn anywhere<'c, T, F: Future<Output = Result<T, tonic::Status>>>(
    clients: &'c [Client; 2],
    first: usize,
    call: impl Fn(&'c Client) -> F,
) -> T {
    let mut place = first;
    loop {
        match call(&clients[place % 2]).await {
            Ok(answer) => return answer,
            // The library tells a connection that goes away by any of these codes, without details of ours.
            Err(status)
                if status.code() == Code::Unavailable
                    || (status.details().is_empty()
                        && matches!(status.code(), Code::Cancelled | Code::Unknown | Code::Internal)) =>
            {
                place += 1;
            }
            Err(status) => panic!("{status:?}"),
        }
    }
}
