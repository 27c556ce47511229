//! What becomes of calls, on a store that is held up, refuses, and tells what it was asked.

use std::sync::Mutex;

use futures_util::FutureExt;
use tokio::task::yield_now;

use super::{queue::QUEUE_ITEMS_MAX, *};
use crate::{
    record::{OnExpiry, Status, StoredResult, Token},
    store::memory::Memory,
    write::{Condition, Finish, Reservation},
};

/// A store whose calls wait to be let through. Keys that start with `bad` are refused with whatever goes along with them.
struct Inner {
    memory: Memory,
    gate: Semaphore,
    unavailable: AtomicBool,
    /// The keys of each call.
    writes: Mutex<Vec<Vec<String>>>,
    loads: Mutex<Vec<Vec<String>>>,
}

impl Inner {
    async fn pass(&self) -> Result<(), StoreError> {
        self.gate.acquire().await.unwrap().forget();
        if self.unavailable.load(Ordering::Relaxed) { Err(StoreError::Unavailable) } else { Ok(()) }
    }

    fn writes(&self) -> Vec<Vec<String>> {
        self.writes.lock().unwrap().clone()
    }

    fn loaded(&self) -> usize {
        self.loads.lock().unwrap().iter().map(Vec::len).sum()
    }
}

#[async_trait]
impl Store for Inner {
    async fn write(&self, writes: Vec<Write>) -> Vec<Result<Option<Stamp>, StoreError>> {
        let values: Vec<String> = writes.iter().map(|write| write.key.value().to_owned()).collect();
        let bad = values.iter().any(|value| value.starts_with("bad"));
        self.writes.lock().unwrap().push(values);
        match self.pass().await {
            Ok(()) if bad => vec![Err(StoreError::Refused); writes.len()],
            Ok(()) => self.memory.write(writes).await,
            Err(error) => vec![Err(error); writes.len()],
        }
    }

    fn is_locked(&self, key: &Key) -> bool {
        key.value().starts_with("locked")
    }

    async fn load(&self, keys: Vec<Key>, urgency: Urgency) -> Result<Loaded, StoreError> {
        self.loads.lock().unwrap().push(keys.iter().map(|key| key.value().to_owned()).collect());
        self.pass().await?;
        self.memory.load(keys, urgency).await
    }

    async fn purge(&self, after: Timestamp, grace: Duration, limit: u32) -> Result<Purged, StoreError> {
        self.memory.purge(after, grace, limit).await
    }

    async fn check(&self) -> Result<(), StoreError> {
        self.memory.check().await
    }

    async fn close(&self) {
        self.memory.close().await;
    }
}

struct World {
    inner: Arc<Inner>,
    grouped: Arc<Grouped>,
}

type Written = tokio::task::JoinHandle<Result<Option<Stamp>, StoreError>>;

impl World {
    /// Nothing passes before it is let through.
    fn new() -> Self {
        let inner = Arc::new(Inner {
            memory: Memory::new(),
            gate: Semaphore::new(0),
            unavailable: AtomicBool::new(false),
            writes: Mutex::default(),
            loads: Mutex::default(),
        });
        Self { grouped: Arc::new(Grouped::new(inner.clone(), 1)), inner }
    }

    /// Lets so many calls of the store through.
    fn let_through(&self, calls: usize) {
        self.inner.gate.add_permits(calls);
    }

    async fn write(&self, write: Write) -> Written {
        let grouped = self.grouped.clone();
        let written = tokio::spawn(async move { grouped.write(vec![write]).await.pop().unwrap() });
        settle().await;
        written
    }

    async fn insert(&self, value: &str) -> Written {
        self.write(insert(value)).await
    }
}

/// Lets every task come to where it waits. There is one thread.
async fn settle() {
    for _ in 0..20 {
        yield_now().await;
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
        lock_ttl: Duration::from_secs(30),
        retention: Duration::from_secs(60),
        owner: None,
        on_expiry: OnExpiry::Retry,
        origin: None,
    };
    Write { key: key(value), action: Action::Insert(reservation) }
}

fn finish(value: &str) -> Write {
    let result = Some(StoredResult::default());
    let finish = Finish { status: Status::Completed, resolved: false, result, retention: None, checkpoint: None };
    Write { key: key(value), action: Action::Finish(Condition::Holder(token()), finish) }
}

#[tokio::test]
async fn a_call_that_comes_alone_goes_at_once_and_those_that_come_meanwhile_go_together() {
    let world = World::new();
    let alone = world.insert("a").await;
    let together = [world.insert("b").await, world.insert("c").await, world.write(finish("d")).await];
    assert_eq!(world.inner.writes(), [["a"]]);
    world.let_through(1);
    assert!(alone.await.unwrap().unwrap().is_some());
    settle().await;
    // Completions first.
    assert_eq!(world.inner.writes()[1..], [["d", "b", "c"]]);
    assert!(together.iter().all(|call| !call.is_finished()), "answered after the commit");
    world.let_through(1);
    let [b, c, d] = together;
    assert!(b.await.unwrap().unwrap().is_some() && c.await.unwrap().unwrap().is_some());
    assert_eq!(d.await.unwrap(), Ok(None), "there is nothing to finish");
}

#[tokio::test]
async fn one_bad_write_never_fails_its_neighbours() {
    let world = World::new();
    let first = world.insert("first").await;
    let mut calls = Vec::new();
    for n in 0..200 {
        calls.push(world.insert(&if n == 77 { "bad".to_owned() } else { n.to_string() }).await);
    }
    world.let_through(100);
    first.await.unwrap().unwrap();
    for (n, call) in calls.into_iter().enumerate() {
        match call.await.unwrap() {
            Ok(stamp) => assert!(stamp.is_some() && n != 77),
            Err(error) => assert_eq!((error, n), (StoreError::Refused, 77)),
        }
    }
    assert!(world.inner.writes().len() <= 20, "by halves: {}", world.inner.writes().len());
}

#[tokio::test]
async fn a_store_that_refuses_everything_is_not_asked_for_each_write() {
    let world = World::new();
    let first = world.insert("first").await;
    let mut calls = Vec::new();
    for n in 0..200 {
        calls.push(world.insert(&format!("bad {n}")).await);
    }
    world.let_through(1000);
    first.await.unwrap().unwrap();
    for call in calls {
        assert_eq!(call.await.unwrap(), Err(StoreError::Refused));
    }
    assert!(world.inner.writes().len() <= 1 + 2 * SPLITS_MAX);
}

#[tokio::test]
async fn a_reservation_whose_caller_has_left_is_left_out_and_a_completion_is_not() {
    let world = World::new();
    let first = world.insert("first").await;
    for call in [world.insert("reservation").await, world.write(finish("completion")).await] {
        call.abort();
        assert!(call.await.unwrap_err().is_cancelled());
    }
    let stays = world.insert("stays").await;
    world.let_through(2);
    first.await.unwrap().unwrap();
    stays.await.unwrap().unwrap();
    assert_eq!(world.inner.writes()[1..], [["completion", "stays"]]);
}

#[tokio::test]
async fn of_many_inserts_of_one_key_one_is_tried() {
    let world = World::new();
    let first = world.insert("first").await;
    let mut copies = Vec::new();
    for _ in 0..100 {
        copies.push(world.insert("same").await);
    }
    world.let_through(2);
    first.await.unwrap().unwrap();
    let mut took = 0;
    for copy in copies {
        took += usize::from(copy.await.unwrap().unwrap().is_some());
    }
    assert_eq!(took, 1);
    assert_eq!(world.inner.writes()[1..], [["same"]]);
}

/// A holder whose record is gone renews and renews; that must not keep everybody else from the key.
#[tokio::test]
async fn an_insert_behind_a_completion_that_does_not_take_is_tried_next() {
    let world = World::new();
    let first = world.insert("first").await;
    let [completion, insert, copy] = [world.write(finish("a")).await, world.insert("a").await, world.insert("a").await];
    world.let_through(3);
    first.await.unwrap().unwrap();
    assert_eq!(completion.await.unwrap(), Ok(None));
    assert!(insert.await.unwrap().unwrap().is_some());
    assert_eq!(copy.await.unwrap(), Ok(None));
    assert_eq!(world.inner.writes(), [["first"], ["a"], ["a"]]);
}

#[tokio::test]
async fn completions_of_one_key_go_one_after_the_other() {
    let world = World::new();
    let first = world.insert("a").await;
    let [b, c] = [world.write(finish("a")).await, world.write(finish("a")).await];
    world.let_through(3);
    first.await.unwrap().unwrap();
    assert!(b.await.unwrap().unwrap().is_some());
    assert_eq!(c.await.unwrap(), Ok(None));
    assert_eq!(world.inner.writes(), [["a"], ["a"], ["a"]]);
}

#[tokio::test]
async fn a_full_queue_refuses_reservations_at_once_and_takes_completions() {
    let world = World::new();
    let _first = world.insert("first").await;
    let mut calls = Vec::new();
    for n in 0..QUEUE_ITEMS_MAX {
        let grouped = world.grouped.clone();
        calls.push(tokio::spawn(async move { grouped.write(vec![insert(&n.to_string())]).await }));
    }
    settle().await;
    assert_eq!(world.insert("one too many").await.await.unwrap(), Err(StoreError::Overloaded));
    let completion = world.write(finish("completion")).await;
    assert!(!completion.is_finished());
    world.let_through(100);
    assert_eq!(completion.await.unwrap(), Ok(None));
    assert!(world.inner.writes()[1].contains(&"completion".to_owned()), "it goes with the next batch");
}

#[tokio::test]
async fn a_crowd_at_one_key_keeps_no_completion_of_another_waiting() {
    let world = World::new();
    let _first = world.insert("first").await;
    let mut crowd = Vec::new();
    for _ in 0..3000 {
        let grouped = world.grouped.clone();
        crowd.push(tokio::spawn(async move { grouped.write(vec![finish("hot")]).await }));
    }
    settle().await;
    let other = world.write(finish("other")).await;
    world.let_through(2);
    assert_eq!(other.await.unwrap(), Ok(None));
    assert_eq!(world.inner.writes()[1], ["hot", "other"]);
}

#[tokio::test]
async fn a_locked_row_goes_alone_and_keeps_nobody_waiting() {
    let world = World::new();
    let locked = world.insert("locked").await;
    let free = world.insert("free").await;
    assert_eq!(world.inner.writes(), [["locked"], ["free"]]);
    world.let_through(2);
    assert!(locked.await.unwrap().is_ok() && free.await.unwrap().is_ok());
}

#[tokio::test]
async fn while_the_store_cannot_be_reached_nobody_waits_for_a_batch() {
    let world = World::new();
    world.inner.unavailable.store(true, Ordering::Relaxed);
    world.let_through(1);
    assert_eq!(world.insert("a").await.await.unwrap(), Err(StoreError::Unavailable));
    let tries = world.insert("b").await;
    let other = world.insert("c").await;
    assert_eq!(world.inner.writes()[1..], [["b"], ["c"]], "each finds out alone");
    world.inner.unavailable.store(false, Ordering::Relaxed);
    world.let_through(2);
    assert!(tries.await.unwrap().is_ok() && other.await.unwrap().is_ok());
    let [_d, _e, _f] = [world.insert("d").await, world.insert("e").await, world.insert("f").await];
    world.let_through(1);
    settle().await;
    assert_eq!(world.inner.writes()[3..], [vec!["d"], vec!["e", "f"]], "and they go together again");
}

#[tokio::test]
async fn closing_does_what_waits_and_refuses_what_comes() {
    let world = World::new();
    let first = world.insert("first").await;
    let waits = world.insert("waits").await;
    let grouped = world.grouped.clone();
    let closing = tokio::spawn(async move { grouped.close().await });
    settle().await;
    assert_eq!(world.insert("late").await.await.unwrap(), Err(StoreError::Unavailable));
    assert_eq!(world.grouped.check().await, Err(StoreError::Unavailable));
    assert!(!closing.is_finished());
    world.let_through(2);
    closing.await.unwrap();
    assert!(first.await.unwrap().unwrap().is_some() && waits.await.unwrap().unwrap().is_some());
}

#[tokio::test]
async fn those_who_look_at_one_key_share_a_load() {
    let world = World::new();
    let load = |value| {
        let (grouped, keys) = (world.grouped.clone(), vec![key(value)]);
        tokio::spawn(async move { grouped.load(keys, Urgency::Reservation).await })
    };
    let first = load("first");
    settle().await;
    let others: Vec<_> = (0..10).map(|_| load("same")).collect();
    settle().await;
    world.let_through(2);
    first.await.unwrap().unwrap();
    for other in others {
        assert!(matches!(other.await.unwrap().unwrap().records[..], [Ok(None)]));
    }
    assert_eq!(*world.inner.loads.lock().unwrap(), [["first"], ["same"]]);
}

#[tokio::test]
async fn a_load_of_more_keys_than_a_batch_has_is_answered_in_order() {
    let world = World::new();
    world.let_through(100);
    for n in 0..100 {
        world.insert(&n.to_string()).await.await.unwrap().unwrap();
    }
    world.let_through(100);
    let keys: Vec<Key> = (0..100).map(|n| key(&n.to_string())).collect();
    let loaded = world.grouped.load(keys.clone(), Urgency::Completion).await.unwrap();
    for (key, record) in keys.iter().zip(loaded.records) {
        assert_eq!(record.unwrap().unwrap().key, *key);
    }
}

#[tokio::test]
async fn what_is_loaded_and_not_yet_received_is_bounded() {
    let world = World::new();
    world.let_through(1000);
    let mut loads: Vec<_> =
        (0..300).map(|n| world.grouped.load(vec![key(&n.to_string())], Urgency::Reservation)).collect();
    // They ask, and then do not look.
    assert!(loads.iter_mut().all(|load| load.now_or_never().is_none()));
    for _ in 0..10 {
        settle().await;
    }
    assert!(world.inner.loaded() <= LOADED_MAX, "{}", world.inner.loaded());
    join_all(loads).await.into_iter().for_each(|loaded| drop(loaded.unwrap()));
    assert_eq!(world.inner.loaded(), 300);
}
