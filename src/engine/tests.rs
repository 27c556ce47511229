//! Waiting, by a clock that stands still unless everybody waits.

use std::sync::atomic::Ordering;

use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::*;
use crate::{
    record::{OnExpiry, Status, StoredResult},
    store::memory::Memory,
    waiters::{POLL_INTERVAL, WaiterLimits},
};

const LOCK: Duration = Duration::from_secs(30);
const WAIT: Duration = Duration::from_secs(20);

struct World {
    engine: Engine,
    store: Arc<Memory>,
    key: Key,
}

impl World {
    fn new() -> Self {
        let store = Arc::new(Memory::new());
        Self { engine: replica(&store), store, key: Key::new("n", "", "k").unwrap() }
    }

    async fn acquire(&self, name: &str) {
        let reserved = self.engine.reserve(&self.key, &reservation(name), Duration::ZERO).await;
        assert!(matches!(reserved, Ok(Reserved::Acquired(_))), "{reserved:?}");
    }

    fn wait(&self, engine: &Engine, name: &str) -> JoinHandle<(Result<Reserved, EngineError>, Duration)> {
        let (engine, key, reservation) = (engine.clone(), self.key.clone(), reservation(name));
        tokio::spawn(async move {
            let began = Instant::now();
            let reserved = engine.reserve(&key, &reservation, WAIT).await;
            (reserved, began.elapsed())
        })
    }

    async fn finish(&self, name: &str, status: Status) {
        let result = (status != Status::FailedRetryable).then(StoredResult::default);
        let finish = Finish { status, resolved: false, result, retention: None, checkpoint: None };
        self.engine.finish(&self.key, &Token::new(name).unwrap(), &finish).await.unwrap();
    }
}

/// Another replica on the same store.
fn replica(store: &Arc<Memory>) -> Engine {
    let waiters = Waiters::new(WaiterLimits { per_key: 100, total: 100 });
    let poll = waiters.clone();
    let polled = store.clone();
    tokio::spawn(async move { poll.poll(polled, CancellationToken::new()).await });
    Engine::new(store.clone(), waiters)
}

fn reservation(name: &str) -> Reservation {
    Reservation {
        token: Token::new(name).unwrap(),
        fingerprint: None,
        lock_ttl: LOCK,
        retention: LOCK,
        owner: None,
        on_expiry: OnExpiry::Retry,
        origin: None,
    }
}

async fn pass(duration: Duration) {
    tokio::time::sleep(duration).await;
}

#[tokio::test(start_paused = true)]
async fn a_finish_here_is_known_at_once_and_elsewhere_within_a_poll() {
    let world = World::new();
    let elsewhere = replica(&world.store);
    world.acquire("holder").await;
    let (near, far) = (world.wait(&world.engine, "near"), world.wait(&elsewhere, "far"));
    // Not at a tick.
    let until = 10 * POLL_INTERVAL + Duration::from_millis(33);
    pass(until).await;
    world.finish("holder", Status::Completed).await;
    let (answer, took) = near.await.unwrap();
    assert!(matches!(answer, Ok(Reserved::Completed(_))));
    assert_eq!(took, until, "at once");
    let (answer, took) = far.await.unwrap();
    assert!(matches!(answer, Ok(Reserved::Completed(_))));
    assert!(took > until && took <= until + POLL_INTERVAL);
}

#[tokio::test(start_paused = true)]
async fn many_who_wait_share_one_look() {
    let world = World::new();
    world.acquire("holder").await;
    let waiting: Vec<_> = (0..100).map(|n| world.wait(&world.engine, &n.to_string())).collect();
    pass(POLL_INTERVAL / 2).await;
    let before = world.store.loads.load(Ordering::Relaxed);
    pass(10 * POLL_INTERVAL).await;
    assert_eq!(world.store.loads.load(Ordering::Relaxed) - before, 10);
    world.finish("holder", Status::Completed).await;
    for waiter in waiting {
        assert!(matches!(waiter.await.unwrap().0, Ok(Reserved::Completed(_))));
    }
}

#[tokio::test(start_paused = true)]
async fn of_those_who_wait_one_reserves_a_key_that_becomes_free() {
    let world = World::new();
    world.acquire("holder").await;
    let waiting: Vec<_> = (0..50).map(|n| world.wait(&world.engine, &n.to_string())).collect();
    pass(POLL_INTERVAL / 2).await;
    world.finish("holder", Status::FailedRetryable).await;
    let mut acquired = 0;
    for waiter in waiting {
        match waiter.await.unwrap() {
            (Ok(Reserved::Acquired(next)), took) => {
                acquired += 1;
                assert_eq!((next.attempt, took), (2, POLL_INTERVAL / 2));
            }
            (Ok(Reserved::InProgress(_)), took) => assert_eq!(took, WAIT),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(acquired, 1);
}

#[tokio::test(start_paused = true)]
async fn a_short_outage_is_sat_out_and_a_long_one_is_told() {
    let world = World::new();
    world.acquire("holder").await;
    let (short, long) = (world.wait(&world.engine, "a"), world.wait(&world.engine, "b"));
    let down = |down| world.store.down.store(down, Ordering::Relaxed);
    pass(POLL_INTERVAL / 2).await;
    down(true);
    pass(OUTAGE_MAX / 2).await;
    down(false);
    pass(POLL_INTERVAL).await;
    assert!(!short.is_finished() && !long.is_finished());
    down(true);
    let began = Instant::now();
    for waiter in [short, long] {
        assert_eq!(waiter.await.unwrap().0, Err(StoreError::Unavailable.into()));
    }
    assert!(began.elapsed() <= OUTAGE_MAX + 3 * POLL_INTERVAL);
}

#[tokio::test(start_paused = true)]
async fn a_wait_that_ends_in_an_outage_is_not_told_what_was_true_before_it() {
    let world = World::new();
    world.acquire("holder").await;
    let waiter = world.wait(&world.engine, "a");
    pass(WAIT - 2 * POLL_INTERVAL).await;
    world.store.down.store(true, Ordering::Relaxed);
    assert_eq!(waiter.await.unwrap(), (Err(StoreError::Unavailable.into()), WAIT));
}
