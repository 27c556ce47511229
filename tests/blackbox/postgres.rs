//! What only a Postgres can do to a service: rows that others hold, settings of others, several migrating at once.

use onceward::proto::{RenewRequest, ReserveRequest};
use sqlx::{AssertSqlSafe, Connection, PgConnection};
use tonic::Code;

use crate::support::*;

async fn count(connection: &mut PgConnection, query: &'static str) -> i64 {
    sqlx::query_scalar(query).fetch_one(connection).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_row_that_somebody_holds_delays_no_other_key() {
    let (client, (_server, database)) = Backend::Postgres.client().await;
    let (held, free) = (fresh_key(), fresh_key());
    client.acquire(reserve(&held, "a")).await;
    let mut holder = PgConnection::connect(&database.url).await.unwrap();
    let lock = lock_record(&mut holder, &held).await;
    let stuck: Vec<_> = (0..20)
        .map(|n| {
            let (client, held) = (client.clone(), held.clone());
            tokio::spawn(async move {
                let renewal = client.renew(&held, "a");
                timed(async {
                    if n == 0 { renewal.await.map(drop) } else { client.reserve(reserve(&held, "b")).await.map(drop) }
                })
                .await
            })
        })
        .collect();
    let (_, took) = timed(client.acquire(reserve(&free, "a"))).await;
    assert!(took < SECOND, "{took:?}");
    for (n, call) in stuck.into_iter().enumerate() {
        let (answer, took) = call.await.unwrap();
        assert!(took < 2 * SECOND, "{took:?}");
        // An insert waits for the uncommitted change too, and then the caller is told to come back.
        if n == 0 {
            refused(answer, Code::Unavailable, "STORE_UNAVAILABLE");
        }
    }
    let mut observer = PgConnection::connect(&database.url).await.unwrap();
    let query = "SELECT count(*) FROM pg_stat_activity
        WHERE datname = current_database() AND application_name = 'onceward' AND state LIKE 'idle in transaction%'";
    assert_eq!(count(&mut observer, query).await, 0, "no session is left in a transaction");
    lock.rollback().await.unwrap();
    client.renew(&held, "a").await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crowd_at_a_row_that_somebody_holds_delays_no_other_key() {
    let (client, (_server, database)) = Backend::Postgres.client().await;
    let (held, free) = (fresh_key(), fresh_key());
    client.acquire(reserve(&held, "a")).await;
    client.acquire(reserve(&free, "a")).await;
    let mut holder = PgConnection::connect(&database.url).await.unwrap();
    let lock = lock_record(&mut holder, &held).await;
    let crowd: Vec<_> = (0..400)
        .map(|_| {
            let (client, held) = (client.clone(), held.clone());
            tokio::spawn(async move {
                loop {
                    match client.renew(&held, "a").await {
                        Ok(_) => return,
                        Err(_) => tokio::time::sleep(SECOND / 2).await,
                    }
                }
            })
        })
        .collect();
    for _ in 0..20 {
        let (renewed, took) = timed(client.renew(&free, "a")).await;
        renewed.unwrap();
        // One lock timeout before the row is known to be locked, and room for a busy machine. If each of the crowd occupied
        // a connection for a lock timeout, it would be more than two seconds.
        assert!(took < 2 * SECOND, "{took:?}");
        tokio::time::sleep(SECOND / 50).await;
    }
    lock.rollback().await.unwrap();
    for caller in crowd {
        caller.await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_holder_that_renews_keeps_its_key_while_large_records_are_swept() {
    let database = Backend::Postgres.database().await;
    let server = Server::start(&database.url, &["--sweep-interval", "1h"]).await;
    let client = server.client().await;
    let key = fresh_key();
    let brief = ReserveRequest { retention: Some(duration(MICROSECOND)), ..lapsed(&key, "a") };
    client.acquire(brief.clone()).await;
    let renewal = || RenewRequest { lock_ttl: Some(duration(2 * SECOND)), ..renew(&key, "a") };
    client.renew_with(renewal()).await.unwrap();
    for n in 0..150 {
        client.acquire(ReserveRequest { key: Some(self::key(&format!("large-{n}"))), ..brief.clone() }).await;
    }
    let mut connection = PgConnection::connect(&database.url).await.unwrap();
    let enlarge = "ALTER TABLE onceward_record ALTER result_body SET STORAGE EXTERNAL;
        UPDATE onceward_record SET result_body = decode(repeat('ff', 1 << 20), 'hex') WHERE value LIKE 'large-%'";
    sqlx::raw_sql(enlarge).execute(&mut connection).await.unwrap();
    let arguments = ["sweep", "--database-url", &database.url, "--sweep-grace", "0s"];
    let mut sweep = Program::command(&arguments).stdout(std::process::Stdio::null()).spawn().unwrap();
    let mut renewals = 0;
    while sweep.try_wait().unwrap().is_none() {
        client.renew_with(renewal()).await.expect("the sweeper is in nobody's way");
        renewals += 1;
    }
    assert!(renewals > 1);
    assert_eq!(count(&mut connection, "SELECT count(*) FROM onceward_record").await, 1);
    client.complete(&key, "a", b"r").await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn another_default_isolation_changes_nothing() {
    let database = Backend::Postgres.database().await;
    let mut connection = PgConnection::connect(&database.url).await.unwrap();
    let name: String = sqlx::query_scalar("SELECT current_database()::text").fetch_one(&mut connection).await.unwrap();
    let alter = format!("ALTER DATABASE {name} SET default_transaction_isolation = 'repeatable read'");
    sqlx::raw_sql(AssertSqlSafe(alter)).execute(&mut connection).await.unwrap();
    let server = Server::start(&database.url, &[]).await;
    let client = server.client().await;
    for _ in 0..20 {
        let key = fresh_key();
        client.acquire(lapsed(&key, "first")).await;
        let calls: Vec<_> = (0..64)
            .map(|n| {
                let (client, key) = (client.clone(), key.clone());
                tokio::spawn(async move { insist(|| client.reserve(reserve(&key, &n.to_string()))).await.unwrap() })
            })
            .collect();
        let mut acquired = 0;
        for call in calls {
            acquired +=
                usize::from(matches!(call.await.unwrap(), onceward::proto::reserve_response::Outcome::Acquired(_)));
        }
        assert_eq!(acquired, 1);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn replicas_that_migrate_at_once_all_start() {
    for _ in 0..20 {
        let url = onceward_testing::empty_database().await;
        let replicas: Vec<_> = (0..5)
            .map(|_| {
                let url = url.clone();
                tokio::spawn(async move {
                    let server = Server::start(&url, &["--migrate", "--database-pool-size", "1"]).await;
                    server.client().await.acquire(reserve(&fresh_key(), "a")).await;
                })
            })
            .collect();
        for replica in replicas {
            replica.await.unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_migration_that_was_killed_is_begun_again() {
    for delay in [5, 20, 40, 60, 80] {
        let url = onceward_testing::empty_database().await;
        let mut killed =
            Program::command(&["migrate", "--database-url", &url]).stdout(std::process::Stdio::null()).spawn().unwrap();
        tokio::time::sleep(std::time::Duration::from_millis(delay)).await;
        killed.kill().await.unwrap();
        let server = Server::start(&url, &["--migrate"]).await;
        server.client().await.acquire(reserve(&fresh_key(), "a")).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn neither_renewals_nor_the_sweeper_keep_updates_from_being_hot() {
    let database = Backend::Postgres.database().await;
    let flags = ["--sweep-interval", "10ms", "--sweep-grace", "0s", "--database-pool-size", "1"];
    let server = Server::start(&database.url, &flags).await;
    let client = server.client().await;
    let key = fresh_key();
    client.acquire(reserve(&key, "a")).await;
    for _ in 0..50 {
        let key = fresh_key();
        client.acquire(reserve(&key, "a")).await;
        for sequence in 0..3 {
            let renewal = RenewRequest {
                checkpoint: Some("here".into()),
                checkpoint_sequence: Some(sequence),
                ..renew(&key, "a")
            };
            client.renew_with(renewal).await.unwrap();
        }
        client.complete(&key, "a", b"r").await.unwrap();
    }
    // A session tells its statistics late, and with a statement.
    let updates = async || {
        client.lookup(&key).await.unwrap();
        let mut observer = PgConnection::connect(&database.url).await.unwrap();
        let query = "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 'onceward_record'";
        sqlx::query_as::<_, (i64, i64)>(query).fetch_one(&mut observer).await.unwrap()
    };
    eventually("every update is counted", async || updates().await.0 >= 200).await;
    let (all, hot) = updates().await;
    // Only a page that has filled up may need another: one update in a few tens.
    assert!(all - hot <= all / 10, "{hot} of {all} updates were HOT");
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_of_the_database_is_told_to_a_caller() {
    let (client, (_server, database)) = Backend::Postgres.client().await;
    let mut connection = PgConnection::connect(&database.url).await.unwrap();
    sqlx::raw_sql("ALTER TABLE onceward_record RENAME COLUMN fence TO wall").execute(&mut connection).await.unwrap();
    let status = client.reserve(reserve(&fresh_key(), "a")).await.unwrap_err();
    let shown = format!("{status:?}");
    refused::<()>(Err(status), Code::Unavailable, "STORE_UNAVAILABLE");
    for secret in ["column", "fence", "wall", "127.0.0.1", "onceward_record", "SELECT"] {
        assert!(!shown.contains(secret), "{shown}");
    }
}
