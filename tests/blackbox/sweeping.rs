//! The sweeper: what has expired goes, and nothing else.

use onceward::proto::ReserveRequest;
use rstest::rstest;
use tonic::Code;

use crate::support::*;

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn expired_records_are_deleted_and_others_are_not(
    #[values(Backend::Sqlite, Backend::Postgres)] backend: Backend,
) {
    let database = backend.database().await;
    let server = Server::start(&database.url, &["--sweep-interval", "20ms", "--sweep-grace", "0s"]).await;
    let client = server.client().await;
    let brief = |key| ReserveRequest { retention: Some(duration(MICROSECOND)), ..lapsed(key, "a") };
    let (abandoned, held, renewed) = (fresh_key(), fresh_key(), fresh_key());
    client.acquire(hold(brief(&held))).await;
    client.acquire(ReserveRequest { lock_ttl: None, ..brief(&renewed) }).await;
    client.acquire(brief(&abandoned)).await;
    let gone = async || client.lookup(&abandoned).await.is_err();
    eventually("swept", gone).await;
    refused(client.complete(&abandoned, "a", b"late").await, Code::NotFound, "KEY_NOT_FOUND");
    in_doubt(client.reserve(reserve(&held, "b")).await);
    client.complete(&renewed, "a", b"r").await.unwrap();
}

/// A record that is reserved while the sweeper looks for it is never taken from its holder.
#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn whoever_acquires_a_key_can_complete_it_however_often_it_is_swept(
    #[values(Backend::Sqlite, Backend::Postgres)] backend: Backend,
) {
    let database = backend.database().await;
    let server = Server::start(&database.url, &["--sweep-interval", "50ms", "--sweep-grace", "0s"]).await;
    let client = server.client().await;
    let loops: Vec<_> = (0..50)
        .map(|n| {
            let client = client.clone();
            tokio::spawn(async move {
                let key = fresh_key();
                let end = tokio::time::Instant::now() + 3 * SECOND;
                let mut rounds = 0;
                while tokio::time::Instant::now() < end {
                    rounds += 1;
                    let token = format!("{n}-{rounds}");
                    let brief = ReserveRequest {
                        retention: Some(duration(SECOND / 100 * (n % 3 + 1))),
                        ..reserve(&key, &token)
                    };
                    if matches!(
                        client.reserve(brief).await.unwrap(),
                        onceward::proto::reserve_response::Outcome::Acquired(_)
                    ) {
                        client.complete(&key, &token, b"r").await.unwrap();
                    }
                }
                rounds
            })
        })
        .collect();
    for looped in loops {
        assert!(looped.await.unwrap() > 1);
    }
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn a_pass_by_hand_deletes_what_expired_before_the_grace(
    #[values(Backend::Sqlite, Backend::Postgres)] backend: Backend,
) {
    let database = backend.database().await;
    {
        let mut server = Server::start(&database.url, &["--sweep-interval", "1h"]).await;
        let client = server.client().await;
        for _ in 0..1500 {
            client
                .acquire(ReserveRequest { retention: Some(duration(MICROSECOND)), ..lapsed(&fresh_key(), "a") })
                .await;
        }
        client.acquire(reserve(&fresh_key(), "a")).await;
        server.stop();
        server.stopped().await.unwrap();
    }
    let sweep = async |grace: &str| {
        let output = Program::command(&["sweep", "--database-url", &database.url, "--sweep-grace", grace])
            .output()
            .await
            .unwrap();
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    assert_eq!(sweep("1h").await, "0 expired records deleted\n");
    assert_eq!(sweep("0s").await, "1500 expired records deleted\n");
    assert_eq!(sweep("0s").await, "0 expired records deleted\n");
}
