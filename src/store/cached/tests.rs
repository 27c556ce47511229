//! What is served from memory, and until when, on a paused clock.

use std::sync::atomic::Ordering;

use tokio::time::advance;

use super::*;
use crate::{
    record::{OnExpiry, StoredResult, Token},
    store::memory::Memory,
    write::{Finish, Reservation},
};

const SECOND: Duration = Duration::from_secs(1);

struct World {
    memory: Arc<Memory>,
    cached: Cached,
}

impl World {
    fn new() -> Self {
        Self::with_bytes(1 << 20)
    }

    fn with_bytes(bytes: u64) -> Self {
        let memory = Arc::new(Memory::new());
        Self { cached: Cached::new(memory.clone(), bytes), memory }
    }

    async fn write(&self, write: Write) -> Option<Stamp> {
        self.cached.write(vec![write]).await.pop().unwrap().unwrap()
    }

    /// Reserves a key and finishes it in this way.
    async fn finished(&self, value: &str, status: Status, retention: Duration) {
        assert!(self.write(insert(value)).await.is_some());
        let result = (status != Status::FailedRetryable).then(StoredResult::default);
        let finish = Finish { status, resolved: false, result, retention: Some(retention), checkpoint: None };
        let action = Action::Finish(Condition::Holder(token()), finish);
        assert!(self.write(Write { key: key(value), action }).await.is_some());
    }

    async fn load(&self, values: &[&str]) -> Loaded {
        let keys = values.iter().map(|value| key(value)).collect();
        self.cached.load(keys, Urgency::Reservation).await.unwrap()
    }

    fn loads(&self) -> usize {
        self.memory.loads.load(Ordering::Relaxed)
    }
}

fn key(value: &str) -> Key {
    Key::new("n", "", value).unwrap()
}

fn token() -> Token {
    Token::new("t").unwrap()
}

fn insert(value: &str) -> Write {
    let reservation = Reservation {
        token: token(),
        fingerprint: None,
        lock_ttl: SECOND,
        retention: 10 * SECOND,
        owner: None,
        on_expiry: OnExpiry::Retry,
        origin: None,
    };
    Write { key: key(value), action: Action::Insert(reservation) }
}

#[tokio::test(start_paused = true)]
async fn a_finished_record_is_loaded_once() {
    for status in [Status::Completed, Status::Failed] {
        let world = World::new();
        world.finished("a", status, 30 * SECOND).await;
        let first = world.load(&["a"]).await;
        advance(SECOND).await;
        let second = world.load(&["a"]).await;
        assert_eq!(world.loads(), 1);
        assert_eq!(first.records, second.records);
        assert_eq!(second.now, first.now.after(SECOND), "the clock goes on");
    }
}

#[tokio::test(start_paused = true)]
async fn a_record_that_may_change_is_never_kept() {
    let world = World::new();
    assert!(world.write(insert("held")).await.is_some());
    world.finished("retryable", Status::FailedRetryable, 30 * SECOND).await;
    for value in ["held", "retryable", "absent"] {
        let before = world.loads();
        world.load(&[value]).await;
        world.load(&[value]).await;
        assert_eq!(world.loads(), before + 2, "{value}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_record_is_not_served_past_its_expiry() {
    let world = World::new();
    world.finished("a", Status::Completed, 5 * SECOND).await;
    world.load(&["a"]).await;
    advance(5 * SECOND - Duration::from_millis(1)).await;
    world.load(&["a"]).await;
    assert_eq!(world.loads(), 1);
    advance(Duration::from_millis(1)).await;
    world.load(&["a"]).await;
    assert_eq!(world.loads(), 2);
    // Nor is an expired record kept.
    world.load(&["a"]).await;
    assert_eq!(world.loads(), 3);
}

#[tokio::test(start_paused = true)]
async fn a_record_is_loaded_anew_after_a_while() {
    let world = World::new();
    world.finished("a", Status::Completed, 3600 * SECOND).await;
    world.load(&["a"]).await;
    advance(AGE_MAX).await;
    world.load(&["a"]).await;
    assert_eq!(world.loads(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_write_that_cannot_take_is_not_tried() {
    let world = World::new();
    world.finished("a", Status::Completed, 30 * SECOND).await;
    world.load(&["a"]).await;
    world.memory.down.store(true, Ordering::Relaxed);
    assert_eq!(world.write(insert("a")).await, None, "the store is not even there");
    assert_eq!(world.load(&["a"]).await.records.len(), 1);
    let both = world.cached.write(vec![insert("b"), insert("a")]).await;
    assert_eq!(both, [Err(StoreError::Unavailable), Ok(None)], "answered in order");
}

#[tokio::test(start_paused = true)]
async fn an_expired_record_can_be_reserved_anew() {
    let world = World::new();
    world.finished("a", Status::Completed, 5 * SECOND).await;
    world.load(&["a"]).await;
    advance(5 * SECOND).await;
    world.memory.purge(Timestamp(0), Duration::ZERO, 10).await.unwrap();
    assert!(world.write(insert("a")).await.is_some());
}

#[tokio::test(start_paused = true)]
async fn records_that_are_kept_and_those_that_are_not_are_answered_in_order() {
    let world = World::new();
    for value in ["a", "b", "c"] {
        world.finished(value, Status::Completed, 30 * SECOND).await;
    }
    world.load(&["b"]).await;
    let loaded = world.load(&["a", "b", "absent", "c"]).await;
    let keys: Vec<_> = loaded.records.into_iter().map(|record| record.unwrap().map(|record| record.key)).collect();
    assert_eq!(keys, [Some(key("a")), Some(key("b")), None, Some(key("c"))]);
}

/// The clock that goes with kept records must not make one of them look expired that is not: a caller would replace it.
#[tokio::test(start_paused = true)]
async fn the_clock_of_several_records_expires_none_of_them() {
    let world = World::new();
    world.finished("a", Status::Completed, 30 * SECOND).await;
    let real = world.load(&["a"]).await;
    // As if the load of another had taken long: its clock is far ahead.
    let Ok(Some(record)) = &real.records[0] else { panic!("it is there") };
    let ahead = Kept {
        record: Record { key: key("b"), expires_at: None, ..record.clone() },
        now: real.now.after(100 * SECOND),
        asked: Instant::now(),
    };
    world.cached.records.insert(key("b"), Arc::new(ahead));
    for values in [["a", "b"], ["b", "a"]] {
        assert_eq!(world.load(&values).await.now, real.now);
    }
}

/// The clock goes on while an answer is made. Whoever is shown a finished record with a clock by which it has expired replaces it.
#[tokio::test]
async fn no_record_is_shown_with_a_clock_by_which_it_has_expired() {
    for n in 0..100 {
        let world = World::new();
        let value = n.to_string();
        world.finished(&value, Status::Completed, Duration::from_millis(2)).await;
        while world.loads() < 3 {
            let before = world.loads();
            let loaded = world.load(&[&value]).await;
            let Ok(Some(record)) = &loaded.records[0] else { panic!("it is there") };
            let from_memory = world.loads() == before;
            assert!(!from_memory || !record.is_expired(loaded.now));
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_cache_without_room_keeps_nothing() {
    let world = World::with_bytes(0);
    world.finished("a", Status::Completed, 30 * SECOND).await;
    world.load(&["a"]).await;
    world.cached.records.run_pending_tasks();
    world.load(&["a"]).await;
    assert_eq!(world.loads(), 2);
}

#[tokio::test(start_paused = true)]
async fn what_is_kept_is_bounded_in_bytes() {
    let world = World::with_bytes(64 << 10);
    for n in 0..1000 {
        world.finished(&n.to_string(), Status::Completed, 30 * SECOND).await;
        world.load(&[&n.to_string()]).await;
    }
    world.cached.records.run_pending_tasks();
    assert!(world.cached.records.weighted_size() <= 64 << 10);
    assert!(world.cached.records.entry_count() > 0);
}
