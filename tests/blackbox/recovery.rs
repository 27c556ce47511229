//! A database that goes away and comes back.

use onceward_testing::Postgres;
use sqlx::{AssertSqlSafe, Connection, PgConnection};
use tonic::Code;

use crate::support::*;

async fn execute(url: &str, statement: &str) {
    let mut connection = PgConnection::connect(url).await.unwrap();
    sqlx::raw_sql(AssertSqlSafe(statement.to_owned())).execute(&mut connection).await.unwrap();
    connection.close().await.unwrap();
}

async fn ready(server: &Server) -> bool {
    server.get("/readyz").await.0 == 200
}

#[tokio::test(flavor = "multi_thread")]
async fn a_database_that_was_killed_is_served_from_again_by_itself() {
    let mut postgres = Postgres::start(&[]).unwrap();
    let server = Server::start(&postgres.url("postgres"), &["--migrate"]).await;
    let client = server.client().await;
    let key = fresh_key();
    client.acquire(reserve(&key, "a")).await;
    // Several idle connections die with it.
    let warm: Vec<_> = (0..16)
        .map(|_| {
            let client = client.clone();
            tokio::spawn(async move { client.reserve(reserve(&fresh_key(), "a")).await })
        })
        .collect();
    for call in warm {
        call.await.unwrap().unwrap();
    }
    postgres.kill().unwrap();
    // Sessions outlive the killed server for a moment, and what they answer counts.
    let unavailable = async || match client.reserve(reserve(&fresh_key(), "a")).await {
        Ok(_) => false,
        Err(status) => {
            refused::<()>(Err(status), Code::Unavailable, "STORE_UNAVAILABLE");
            true
        }
    };
    eventually("unavailable", unavailable).await;
    eventually("not ready", async || !ready(&server).await).await;
    postgres.restart().unwrap();
    let (_, took) = timed(eventually("ready", async || ready(&server).await)).await;
    assert!(took < 5 * SECOND, "{took:?}");
    client.complete(&key, "a", b"r").await.unwrap();
    assert_eq!(body(completed(client.reserve(reserve(&key, "b")).await)), "r");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_database_that_comes_back_read_only_is_served_from_once_it_is_writable() {
    let postgres = Postgres::start(&[]).unwrap();
    let url = postgres.url("postgres");
    let server = Server::start(&url, &["--migrate"]).await;
    let client = server.client().await;
    client.acquire(reserve(&fresh_key(), "a")).await;
    execute(&url, "ALTER SYSTEM SET default_transaction_read_only = on").await;
    execute(&url, "SELECT pg_reload_conf()").await;
    let read_only = async || client.reserve(reserve(&fresh_key(), "a")).await.is_err();
    eventually("refused", read_only).await;
    refused(client.reserve(reserve(&fresh_key(), "a")).await, Code::Unavailable, "STORE_UNAVAILABLE");
    eventually("not ready", async || !ready(&server).await).await;
    let writable = format!("{url}?options=-c%20default_transaction_read_only%3Doff");
    execute(&writable, "ALTER SYSTEM RESET default_transaction_read_only").await;
    execute(&writable, "SELECT pg_reload_conf()").await;
    eventually("ready", async || ready(&server).await).await;
    let key = fresh_key();
    eventually("served", async || client.reserve(reserve(&key, "a")).await.is_ok()).await;
    client.complete(&key, "a", b"r").await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn those_who_wait_while_the_database_dies_are_told_to_come_back() {
    let postgres = Postgres::start(&[]).unwrap();
    let program = Program::lenient(&postgres.url("postgres"), &["--migrate"]).await;
    let client = program.client().await;
    let key = fresh_key();
    client.acquire(reserve(&key, "a")).await;
    let waiter = {
        let (client, key) = (client.clone(), key.clone());
        tokio::spawn(async move { client.reserve(waiting(reserve(&key, "b"), 30 * SECOND)).await })
    };
    program.waiters(1).await;
    postgres.kill().unwrap();
    refused(waiter.await.unwrap(), Code::Unavailable, "STORE_UNAVAILABLE");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_database_that_freezes_makes_nobody_wait_for_long() {
    let postgres = Postgres::start(&[]).unwrap();
    let server = Server::start(&postgres.url("postgres"), &["--migrate", "--database-pool-size", "4"]).await;
    let client = server.client().await;
    client.acquire(reserve(&fresh_key(), "a")).await;
    postgres.freeze().unwrap();
    let calls = (0..100).map(|_| timed(client.reserve(reserve(&fresh_key(), "a"))));
    for (answer, took) in futures_util::future::join_all(calls).await {
        let code = answer.unwrap_err().code();
        assert!(matches!(code, Code::Unavailable | Code::ResourceExhausted), "{code:?}");
        assert!(took < 12 * SECOND, "{took:?}");
    }
    eventually("not ready", async || !ready(&server).await).await;
    // One call at a time tries; whoever comes meanwhile is told at once.
    let call = || timed(client.reserve(reserve(&fresh_key(), "a")));
    let fails_fast = async || {
        let ((one, one_took), (other, other_took)) = tokio::join!(call(), call());
        one.is_err() && other.is_err() && one_took.min(other_took) < SECOND / 2
    };
    eventually("told at once", fails_fast).await;
    postgres.thaw().unwrap();
    let served = async || client.reserve(reserve(&fresh_key(), "a")).await.is_ok();
    let (_, took) = timed(eventually("served again", served)).await;
    assert!(took < 5 * SECOND, "{took:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn those_who_wait_sit_out_a_short_outage() {
    let (client, (program, database)) = Backend::Postgres.program(&[]).await;
    let key = fresh_key();
    client.acquire(reserve(&key, "a")).await;
    let waiter = {
        let (client, key) = (client.clone(), key.clone());
        tokio::spawn(async move { client.reserve(waiting(reserve(&key, "b"), 30 * SECOND)).await })
    };
    program.waiters(1).await;
    // Nobody can even look meanwhile.
    execute(&database.url, "BEGIN; LOCK TABLE onceward_record IN ACCESS EXCLUSIVE MODE; SELECT pg_sleep(0.7); COMMIT")
        .await;
    assert!(!waiter.is_finished());
    client.complete(&key, "a", b"r").await.unwrap();
    completed(waiter.await.unwrap());
}

#[tokio::test(flavor = "multi_thread")]
async fn sessions_that_an_administrator_ends_cost_one_call() {
    let (client, (_server, database)) = Backend::Postgres.client().await;
    client.acquire(reserve(&fresh_key(), "a")).await;
    execute(
        &database.url,
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
         WHERE datname = current_database() AND pid <> pg_backend_pid()",
    )
    .await;
    let mut refusals = 0;
    for _ in 0..20 {
        if client.reserve(reserve(&fresh_key(), "a")).await.is_err() {
            refusals += 1;
        }
    }
    assert!(refusals <= 1, "{refusals}");
}
