//! What was acknowledged survives a kill: of the service, and of the database.

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicUsize, Ordering},
};

use onceward::proto::Key;
use onceward_testing::Postgres;
use tokio::task::JoinSet;

use crate::support::*;

const PAIRS: usize = 1000;
const CALLERS: usize = 16;

/// What callers were told: how far each key was acknowledged.
#[derive(Default)]
struct Acknowledged {
    reserved: Mutex<Vec<(Key, i64)>>,
    completed: Mutex<Vec<Key>>,
    /// Pairs begun.
    begun: AtomicUsize,
}

/// Runs pairs until they fail, and notes what was acknowledged.
fn pairs(client: &Client, acknowledged: &Arc<Acknowledged>) -> JoinSet<()> {
    let mut callers = JoinSet::new();
    for caller in 0..CALLERS {
        let (client, acknowledged) = (client.clone(), acknowledged.clone());
        callers.spawn(async move {
            while acknowledged.begun.fetch_add(1, Ordering::Relaxed) < PAIRS {
                let key = fresh_key();
                let token = format!("token-{caller}");
                let Ok(onceward::proto::reserve_response::Outcome::Acquired(acquired)) =
                    client.reserve(reserve(&key, &token)).await
                else {
                    continue;
                };
                acknowledged.reserved.lock().unwrap().push((key.clone(), acquired.fence));
                if client.complete(&key, &token, key.value.as_bytes()).await.is_ok() {
                    acknowledged.completed.lock().unwrap().push(key);
                }
            }
        });
    }
    callers
}

/// Waits until a good part of the pairs is done.
async fn well_begun(acknowledged: &Arc<Acknowledged>) {
    eventually("a third of the pairs", async || acknowledged.completed.lock().unwrap().len() > PAIRS / 3).await;
}

/// Holds every answer against what is there.
async fn check(client: &Client, acknowledged: &Acknowledged) {
    let reserved = acknowledged.reserved.lock().unwrap().clone();
    let completed_ = acknowledged.completed.lock().unwrap().clone();
    assert!(completed_.len() < PAIRS, "the kill came in the middle");
    for (key, fence) in reserved {
        assert_eq!(client.lookup(&key).await.unwrap().fence, fence, "an acknowledged reservation is lost");
    }
    for key in completed_ {
        assert_eq!(body(completed(client.reserve(reserve(&key, "duplicate")).await)), key.value);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_answer_is_still_true_after_the_service_was_killed() {
    for backend in [Backend::Sqlite, Backend::Postgres] {
        let database = backend.database().await;
        let mut program = Program::serve(&["--database-url", &database.url]).await;
        let acknowledged = Arc::new(Acknowledged::default());
        let callers = pairs(&program.client().await, &acknowledged);
        well_begun(&acknowledged).await;
        program.signal("KILL");
        program.child.wait().await.unwrap();
        callers.join_all().await;
        let program = Program::serve(&["--database-url", &database.url]).await;
        check(&program.client().await, &acknowledged).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_answer_is_still_true_after_the_database_was_killed() {
    let mut postgres = Postgres::start(&[]).unwrap();
    let server = Server::start(&postgres.url("postgres"), &["--migrate"]).await;
    let client = server.client().await;
    let acknowledged = Arc::new(Acknowledged::default());
    let callers = pairs(&client, &acknowledged);
    well_begun(&acknowledged).await;
    postgres.kill().unwrap();
    callers.join_all().await;
    postgres.restart().unwrap();
    let served = async || client.reserve(reserve(&key("after"), "a")).await.is_ok();
    eventually("served again", served).await;
    check(&client, &acknowledged).await;
}
