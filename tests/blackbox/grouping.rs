//! Group commit and the cache: what they spare the database, and what they may not change.

use onceward::proto::{
    BatchOperation, BatchRequest, CompleteRequest, ReserveRequest, batch_operation::Operation,
    batch_result::Result as Answer, reserve_response::Outcome,
};
use sqlx::{Connection, PgConnection};
use tonic::Code;

use crate::support::*;

/// The value of a metric without labels, or with these.
async fn metric(program: &Program, name: &str) -> f64 {
    let (_, metrics) = get(&program.admin, "/metrics").await;
    let line = metrics.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.map_or(0.0, |value| value.parse().unwrap())
}

async fn commits(database: &Database) -> i64 {
    let mut connection = PgConnection::connect(&database.url).await.unwrap();
    let wrote = "SELECT count(DISTINCT xmin::text) FROM onceward_record";
    sqlx::query_scalar(wrote).fetch_one(&mut connection).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_operations_of_a_batch_share_commits() {
    let (client, (program, database)) = Backend::Postgres.program(&[]).await;
    let keys: Vec<_> = (0..500).map(|_| fresh_key()).collect();
    for complete_them in [false, true] {
        let operation = |key| match complete_them {
            false => Operation::Reserve(reserve(key, "t")),
            true => Operation::Complete(complete(key, "t", b"r")),
        };
        let operations = keys.iter().map(|key| BatchOperation { operation: Some(operation(key)) }).collect::<Vec<_>>();
        let results = client.0.clone().batch(BatchRequest { operations }).await.unwrap().into_inner().results;
        for result in results {
            match result.result.unwrap() {
                Answer::Reserve(answer) => assert!(matches!(answer.outcome, Some(Outcome::Acquired(_)))),
                Answer::Complete(answer) => assert!(!answer.already_completed),
                other => panic!("{other:?}"),
            }
        }
        // A batch of the store has 256 writes at the most, and the first of them may go alone.
        assert!(commits(&database).await <= 4, "{}", commits(&database).await);
    }
    assert_eq!(metric(&program, "onceward_batch_writes_sum").await, 1000.0);
    assert!(metric(&program, "onceward_batch_writes_count").await <= 8.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_that_come_at_once_share_commits_and_are_all_durable() {
    let (client, (program, database)) = Backend::Postgres.program(&[]).await;
    let calls = (0..200).map(|_| {
        let client = client.clone();
        tokio::spawn(async move { client.acquire(reserve(&fresh_key(), "t")).await })
    });
    for call in calls.collect::<Vec<_>>() {
        call.await.unwrap();
    }
    let writes = metric(&program, "onceward_batch_writes_sum").await;
    let batches = metric(&program, "onceward_batch_writes_count").await;
    assert_eq!(writes, 200.0);
    assert!(batches <= 100.0, "{batches} batches");
    assert!(commits(&database).await <= 100);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_storm_of_duplicates_of_a_finished_key_asks_the_database_nothing() {
    let postgres = onceward_testing::Postgres::start(&[]).unwrap();
    let program = Program::lenient(&postgres.url("postgres"), &["--migrate"]).await;
    let client = program.client().await;
    let key = fresh_key();
    let fingerprinted =
        |token: &str, hash: &str| ReserveRequest { fingerprint: Some(hash.into()), ..reserve(&key, token) };
    client.acquire(fingerprinted("t", "x:01")).await;
    client.complete(&key, "t", b"r").await.unwrap();
    assert_eq!(body(completed(client.reserve(fingerprinted("first", "x:01")).await)), "r");
    // So surely nothing that it is not even there.
    postgres.kill().unwrap();
    for n in 0..100 {
        assert_eq!(body(completed(client.reserve(fingerprinted(&n.to_string(), "x:01")).await)), "r");
    }
    refused(client.reserve(fingerprinted("u", "x:02")).await, Code::FailedPrecondition, "FINGERPRINT_MISMATCH");
    assert!(client.complete(&key, "t", b"r").await.unwrap().already_completed);
    refused(client.complete(&key, "u", b"r").await, Code::Aborted, "LEASE_LOST");
    refused(client.renew(&key, "t").await, Code::FailedPrecondition, "ALREADY_FINISHED");
    assert_eq!(client.lookup(&key).await.unwrap().attempt, 1);
    assert!(metric(&program, "onceward_cache_looks_total{found=\"true\"}").await >= 100.0);
    refused(client.reserve(reserve(&fresh_key(), "t")).await, Code::Unavailable, "STORE_UNAVAILABLE");
}

/// One server remembers a record that another one sees expire and be reserved anew.
#[tokio::test(flavor = "multi_thread")]
async fn a_finished_record_is_not_replayed_past_its_expiry_by_any_server() {
    let database = Backend::Postgres.database().await;
    let [one, other] = [Server::start(&database.url, &[]).await, Server::start(&database.url, &[]).await];
    let [one, other] = [one.client().await, other.client().await];
    let key = fresh_key();
    one.acquire(reserve(&key, "t")).await;
    let brief = CompleteRequest { retention: Some(duration(SECOND)), ..complete(&key, "t", b"old") };
    one.complete_with(brief).await.unwrap();
    assert_eq!(body(completed(one.reserve(reserve(&key, "u")).await)), "old");
    let anew = async || matches!(other.reserve(reserve(&key, "v")).await.unwrap(), Outcome::Acquired(_));
    eventually("expired", anew).await;
    in_progress(one.reserve(reserve(&key, "w")).await);
    other.complete(&key, "v", b"new").await.unwrap();
    assert_eq!(body(completed(one.reserve(reserve(&key, "w")).await)), "new");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_without_a_cache_replays_all_the_same() {
    let (client, (program, _database)) = Backend::Postgres.program(&["--cache-bytes", "0"]).await;
    let key = fresh_key();
    client.acquire(reserve(&key, "t")).await;
    client.complete(&key, "t", b"r").await.unwrap();
    for _ in 0..10 {
        assert_eq!(body(completed(client.reserve(reserve(&key, "u")).await)), "r");
    }
    assert_eq!(metric(&program, "onceward_cache_looks_total{found=\"true\"}").await, 0.0);
}

/// Several batches in flight, and several threads, change nothing but the time it takes.
#[tokio::test(flavor = "multi_thread")]
async fn one_of_many_acquires_however_many_batches_are_in_flight() {
    let flags = ["--batches-in-flight", "4", "--worker-threads", "4"];
    let (client, _program) = Backend::Postgres.program(&flags).await;
    for _ in 0..50 {
        let key = fresh_key();
        let rivals: Vec<_> = (0..32)
            .map(|n| {
                let (client, key) = (client.clone(), key.clone());
                tokio::spawn(async move {
                    let reserved = insist(|| client.reserve(reserve(&key, &n.to_string()))).await.unwrap();
                    matches!(reserved, Outcome::Acquired(_)).then_some(n)
                })
            })
            .collect();
        let mut holders = Vec::new();
        for rival in rivals {
            holders.extend(rival.await.unwrap());
        }
        let [holder] = holders[..] else { panic!("{holders:?}") };
        client.complete(&key, &holder.to_string(), b"r").await.unwrap();
    }
}
