//! Reserves that wait for a key which somebody else holds.

use std::time::Duration;

use onceward::proto::{ReserveRequest, reserve_response::Outcome};
use rstest::rstest;
use sqlx::{Connection, PgConnection};
use tokio::task::JoinHandle;
use tonic::Status;

use crate::support::*;

type Answer = JoinHandle<(Result<Outcome, Status>, Duration)>;

/// A Reserve that waits, from a task of its own.
fn wait(client: &Client, request: ReserveRequest) -> Answer {
    let client = client.clone();
    tokio::spawn(async move { timed(client.reserve(waiting(request, 30 * SECOND))).await })
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn a_finish_on_the_same_replica_is_told_to_all_who_wait(
    #[values(Backend::Sqlite, Backend::Postgres)] backend: Backend,
) {
    let (client, (program, _database)) = backend.program(&[]).await;
    let key = fresh_key();
    client.acquire(reserve(&key, "a")).await;
    let answers: Vec<_> = (0..50).map(|n| wait(&client, reserve(&key, &n.to_string()))).collect();
    program.waiters(answers.len()).await;
    let (finished, took) = timed(client.complete(&key, "a", b"r")).await;
    finished.unwrap();
    assert!(took < SECOND, "waiters hold no connection that a Complete needs");
    for answer in answers {
        assert_eq!(body(completed(answer.await.unwrap().0)), "r");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_finish_on_another_replica_is_known_within_a_quarter_of_a_second() {
    let database = Backend::Postgres.database().await;
    let [here, there] = [Program::lenient(&database.url, &[]).await, Program::lenient(&database.url, &[]).await];
    let (here_client, there_client) = (here.client().await, there.client().await);
    let mut slowest = Duration::ZERO;
    for _ in 0..5 {
        let key = fresh_key();
        here_client.acquire(reserve(&key, "a")).await;
        let answer = wait(&there_client, reserve(&key, "b"));
        there.waiters(1).await;
        here_client.complete(&key, "a", b"r").await.unwrap();
        let ((answer, _), took) = timed(async { answer.await.unwrap() }).await;
        completed(answer);
        slowest = slowest.max(took);
    }
    assert!(slowest < SECOND / 4, "{slowest:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn waiters_hold_no_database_session() {
    let (client, (program, database)) = Backend::Postgres.program(&["--database-pool-size", "5"]).await;
    let key = fresh_key();
    client.acquire(reserve(&key, "a")).await;
    let answers: Vec<_> = (0..50).map(|n| wait(&client, reserve(&key, &n.to_string()))).collect();
    program.waiters(answers.len()).await;
    let mut observer = PgConnection::connect(&database.url).await.unwrap();
    let busy: i64 = sqlx::query_scalar(
        "SELECT count(*) FROM pg_stat_activity
         WHERE datname = current_database() AND pid <> pg_backend_pid() AND state <> 'idle' AND xact_start < now() - interval '50ms'",
    )
    .fetch_one(&mut observer)
    .await
    .unwrap();
    assert_eq!(busy, 0);
    let (_, took) = timed(client.complete(&key, "a", b"r")).await;
    assert!(took < SECOND, "{took:?}");
    for answer in answers {
        completed(answer.await.unwrap().0);
    }
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn one_of_those_who_wait_reserves_a_key_that_becomes_free(
    #[values(Backend::Sqlite, Backend::Postgres)] backend: Backend,
) {
    let (client, (program, _database)) = backend.program(&[]).await;
    let key = fresh_key();
    client.acquire(reserve(&key, "first")).await;
    let mut answers: Vec<_> = (0..20).map(|n| wait(&client, reserve(&key, &n.to_string()))).collect();
    program.waiters(answers.len()).await;
    client.fail(&key, "first", true).await.unwrap();
    // Each that gets it fails too, until none is left.
    for attempt in 2..22 {
        let (answer, place, others) = futures_util::future::select_all(answers).await;
        let Ok(Outcome::Acquired(acquired)) = answer.unwrap().0 else { panic!("{place} got no turn") };
        assert_eq!(acquired.attempt, attempt);
        answers = others;
        assert!(answers.iter().all(|other| !other.is_finished()), "the others go on waiting");
        let holder = {
            let record = client.lookup(&key).await.unwrap();
            assert_eq!(record.attempt, attempt);
            // Whoever holds it is one of the twenty.
            let mut holder = None;
            for n in 0..20 {
                if client.renew(&key, &n.to_string()).await.is_ok() {
                    holder = Some(n.to_string());
                }
            }
            holder.unwrap()
        };
        client.fail(&key, &holder, true).await.unwrap();
        if answers.is_empty() {
            break;
        }
    }
    assert!(answers.is_empty());
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn a_lock_that_ends_while_others_wait_is_taken_over_or_in_doubt(
    #[values(Backend::Sqlite, Backend::Postgres)] backend: Backend,
) {
    let (client, (_program, _database)) = backend.program(&[]).await;
    let short = |key| ReserveRequest { lock_ttl: Some(duration(SECOND / 2)), ..reserve(key, "a") };
    let (retried, held) = (fresh_key(), fresh_key());
    client.acquire(short(&retried)).await;
    client.acquire(hold(short(&held))).await;
    let [retried, held] = [wait(&client, reserve(&retried, "b")), wait(&client, reserve(&held, "b"))];
    let (answer, took) = retried.await.unwrap();
    assert!(matches!(answer.unwrap(), Outcome::Acquired(acquired) if acquired.attempt == 2));
    assert!(took < 2 * SECOND);
    in_doubt(held.await.unwrap().0);
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn a_wait_ends_by_itself_and_before_the_calls_own_deadline(
    #[values(Backend::Sqlite, Backend::Postgres)] backend: Backend,
) {
    let (client, (_program, _database)) = backend.program(&[]).await;
    let key = fresh_key();
    client.acquire(reserve(&key, "a")).await;
    let (answer, took) = timed(client.reserve(waiting(reserve(&key, "b"), SECOND / 2))).await;
    in_progress(answer);
    assert!((SECOND / 2..2 * SECOND).contains(&took), "{took:?}");
    let (answer, took) = timed(client.reserve_within(waiting(reserve(&key, "b"), 30 * SECOND), SECOND)).await;
    in_progress(answer);
    assert!(took < SECOND, "{took:?}");
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn those_who_find_no_room_to_wait_are_answered_at_once(
    #[values(Backend::Sqlite, Backend::Postgres)] backend: Backend,
) {
    let flags = ["--waiters-per-key-max", "2", "--waiters-max", "3"];
    let (client, (program, _database)) = backend.program(&flags).await;
    let (a, b) = (fresh_key(), fresh_key());
    for key in [&a, &b] {
        client.acquire(reserve(key, "holder")).await;
    }
    let mut answers = vec![wait(&client, reserve(&a, "1")), wait(&client, reserve(&a, "2"))];
    program.waiters(answers.len()).await;
    in_progress(wait(&client, reserve(&a, "3")).await.unwrap().0);
    answers.push(wait(&client, reserve(&b, "1")));
    program.waiters(answers.len()).await;
    in_progress(wait(&client, reserve(&b, "2")).await.unwrap().0);
    for key in [&a, &b] {
        client.complete(key, "holder", b"r").await.unwrap();
    }
    for answer in answers {
        completed(answer.await.unwrap().0);
    }
    // Whoever left has made room.
    let key = fresh_key();
    client.acquire(reserve(&key, "holder")).await;
    let _answer = wait(&client, reserve(&key, "1"));
    program.waiters(1).await;
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn the_same_token_may_wait_twice_and_another_fingerprint_may_not(
    #[values(Backend::Sqlite, Backend::Postgres)] backend: Backend,
) {
    let (client, (program, _database)) = backend.program(&[]).await;
    let key = fresh_key();
    let printed = |token, print: &str| ReserveRequest { fingerprint: Some(print.into()), ..reserve(&key, token) };
    client.acquire(printed("a", "x:01")).await;
    let answers = [wait(&client, printed("b", "x:01")), wait(&client, printed("b", "x:01"))];
    program.waiters(answers.len()).await;
    refused(
        client.reserve(waiting(printed("c", "x:02"), 30 * SECOND)).await,
        tonic::Code::FailedPrecondition,
        "FINGERPRINT_MISMATCH",
    );
    client.fail(&key, "a", true).await.unwrap();
    for answer in answers {
        let Ok(Outcome::Acquired(acquired)) = answer.await.unwrap().0 else { panic!("it is the same reservation") };
        assert_eq!(acquired.attempt, 2);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_that_leave_in_flight_harm_neither_their_channel_nor_who_waits_on_it() {
    let (client, (program, _database)) = Backend::Postgres.program(&[]).await;
    let key = fresh_key();
    client.acquire(reserve(&key, "a")).await;
    let answer = wait(&client, reserve(&key, "b"));
    program.waiters(1).await;
    for n in 0..1500_u64 {
        let left = tokio::time::timeout(Duration::from_micros(n % 300), client.reserve(reserve(&fresh_key(), "t")));
        let _ = left.await;
    }
    if answer.is_finished() {
        panic!("the waiter was harmed: {:?}", answer.await);
    }
    client.complete(&key, "a", b"r").await.unwrap();
    completed(answer.await.unwrap().0);
}
