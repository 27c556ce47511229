//! [`Grouped`]: group commit. Turns concurrent calls for one key each into one statement and one commit for many.
//!
//! Writes wait in one queue and loads in another. As soon as a batch ends, the next one is whatever waits by then: there is no
//! timer, so a call that comes alone goes alone and at once, and the busier the store the larger the batches. (The scheme
//! is the group commit of DeWitt et al., "Implementation Techniques for Main Memory Database Systems", 1984, without its
//! delay.)
//!
//! What always holds:
//!
//! - a caller is answered after the commit of its own batch, with its own result;
//! - one bad write never fails its neighbours: a batch that is refused is split until the bad one is alone (several bad ones
//!   may take others with them, so that a store that refuses everything is not asked for each write);
//! - a reservation whose caller has left is left out; a completion never is, since its effect has happened already;
//! - a batch has each key once, and no two batches in flight have the same; of several inserts of one key one is tried, and the
//!   others are told to look again;
//! - while the store cannot be reached nothing is grouped: whoever comes finds out alone, and nobody waits for a batch that
//!   waits for a connection;
//! - whatever is in the queue when the store closes is still done, as long as the closing is waited for.

mod queue;
#[cfg(test)]
mod tests;

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use async_trait::async_trait;
use futures_util::future::join_all;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio_util::task::TaskTracker;

use self::queue::{Bounds, Group, Item, Queue};
use super::{BATCH_ITEMS_MAX, Loaded, Purged, Store, StoreError, Urgency};
use crate::{
    record::{Key, Record, Timestamp},
    telemetry,
    write::{Action, Stamp, Write},
};

/// A batch of writes. More items make callers wait longer without sparing much.
const WRITES: Bounds = Bounds { items: BATCH_ITEMS_MAX, bytes: 4 << 20 };
/// A batch of loads: records may be large, and only those who hold them know how large.
const LOADS: Bounds = Bounds { items: 32, bytes: usize::MAX };
/// How many loaded records may be on their way to those who asked, which bounds the memory they take.
const LOADED_MAX: usize = 64;
/// How many statements a batch that is refused may be split into before the rest is refused as it is.
const SPLITS_MAX: usize = 32;

/// A store whose calls for one key each are done many at a time.
pub struct Grouped {
    store: Arc<Watched>,
    writes: Arc<Queue<WriteCall>>,
    loads: Arc<Queue<LoadCall>>,
    workers: TaskTracker,
}

/// The store, and whether it could be reached when it was last tried.
struct Watched {
    store: Arc<dyn Store>,
    unreachable: AtomicBool,
}

impl Watched {
    async fn write(&self, writes: Vec<Write>) -> Vec<Result<Option<Stamp>, StoreError>> {
        let results = self.store.write(writes).await;
        self.note(results.iter().all(|result| *result == Err(StoreError::Unavailable)));
        results
    }

    async fn load(&self, keys: Vec<Key>, urgency: Urgency) -> Result<Loaded, StoreError> {
        let loaded = self.store.load(keys, urgency).await;
        self.note(loaded == Err(StoreError::Unavailable));
        loaded
    }

    fn is_unreachable(&self) -> bool {
        self.unreachable.load(Ordering::Relaxed)
    }

    fn note(&self, unreachable: bool) {
        self.unreachable.store(unreachable, Ordering::Relaxed);
    }
}

impl Grouped {
    /// `store`, with at most so many batches of writes, and as many of loads, in flight. Call it on a runtime: it spawns
    /// that many tasks of either kind, which end with [`close`](Store::close).
    pub fn new(store: Arc<dyn Store>, batches_in_flight: usize) -> Self {
        let grouped = Self {
            store: Arc::new(Watched { store, unreachable: AtomicBool::new(false) }),
            writes: Arc::new(Queue::new(WRITES)),
            loads: Arc::new(Queue::new(LOADS)),
            workers: TaskTracker::new(),
        };
        let room = Arc::new(Semaphore::new(LOADED_MAX));
        for _ in 0..batches_in_flight.max(1) {
            grouped.workers.spawn(write_batches(grouped.writes.clone(), grouped.store.clone()));
            grouped.workers.spawn(load_batches(grouped.loads.clone(), grouped.store.clone(), room.clone()));
        }
        grouped
    }

    async fn write_one(&self, write: Write) -> Result<Option<Stamp>, StoreError> {
        // Others would have to wait along with it, or it along with others.
        if self.is_locked(&write.key) || self.store.is_unreachable() {
            return self.store.write(vec![write]).await.pop().unwrap_or(Err(StoreError::Unavailable));
        }
        let urgency = Urgency::of(std::slice::from_ref(&write));
        let (sender, answer) = oneshot::channel();
        self.writes.push(urgency, WriteCall { write, sender });
        answer.await.unwrap_or(Err(StoreError::Unavailable))
    }
}

#[async_trait]
impl Store for Grouped {
    async fn write(&self, mut writes: Vec<Write>) -> Vec<Result<Option<Stamp>, StoreError>> {
        match (writes.pop(), writes.is_empty()) {
            (Some(write), true) => vec![self.write_one(write).await],
            (last, _) => join_all(writes.into_iter().chain(last).map(|write| self.write_one(write))).await,
        }
    }

    fn is_locked(&self, key: &Key) -> bool {
        self.store.store.is_locked(key)
    }

    async fn load(&self, keys: Vec<Key>, urgency: Urgency) -> Result<Loaded, StoreError> {
        if self.store.is_unreachable() {
            return self.store.load(keys, urgency).await;
        }
        let ask = |key: Key| {
            let (sender, answer) = oneshot::channel();
            self.loads.push(urgency, LoadCall { key, sender });
            answer
        };
        let answers = keys.into_iter().map(ask).map(async |answer| {
            let Found { now, record, _room } = answer.await.unwrap_or(Err(StoreError::Unavailable))?;
            Ok((now, record))
        });
        let found: Vec<Result<(Timestamp, _), StoreError>> = join_all(answers).await;
        // Each clock was read before its records were, so the earliest one was read before all of them.
        let now = match (found.iter().flatten().map(|(now, _)| *now).min(), found.first()) {
            (Some(now), _) => now,
            (None, Some(Err(error))) => return Err(*error),
            (None, _) => Timestamp(0),
        };
        Ok(Loaded { now, records: found.into_iter().map(|found| found.and_then(|(_, record)| record)).collect() })
    }

    async fn purge(&self, after: Timestamp, grace: Duration, limit: u32) -> Result<Purged, StoreError> {
        self.store.store.purge(after, grace, limit).await
    }

    async fn check(&self) -> Result<(), StoreError> {
        if self.writes.is_closed() || self.loads.is_closed() {
            return Err(StoreError::Unavailable);
        }
        self.store.store.check().await
    }

    async fn close(&self) {
        self.writes.close();
        self.loads.close();
        self.workers.close();
        self.workers.wait().await;
        self.store.store.close().await;
    }
}

/// A write that waits for its batch.
struct WriteCall {
    write: Write,
    sender: oneshot::Sender<Result<Option<Stamp>, StoreError>>,
}

impl WriteCall {
    /// The caller may have left.
    fn answer(self, result: Result<Option<Stamp>, StoreError>) {
        let _ = self.sender.send(result);
    }
}

impl Item for WriteCall {
    const EXCLUSIVE: bool = true;

    fn key(&self) -> &Key {
        &self.write.key
    }

    fn bytes(&self) -> usize {
        self.write.bytes()
    }

    /// An insert behind a write that takes does not take. Behind one that does not, it is tried next.
    fn follows(&self) -> bool {
        matches!(self.write.action, Action::Insert(_))
    }

    fn is_abandoned(&self) -> bool {
        self.write.is_reservation() && self.sender.is_closed()
    }

    fn refuse(self, error: StoreError) {
        self.answer(Err(error));
    }
}

/// A load that waits for its batch.
struct LoadCall {
    key: Key,
    sender: oneshot::Sender<Result<Found, StoreError>>,
}

/// What was found under one key, with its room among what is on its way.
struct Found {
    now: Timestamp,
    record: Result<Option<Record>, StoreError>,
    _room: Arc<Option<OwnedSemaphorePermit>>,
}

impl Item for LoadCall {
    const EXCLUSIVE: bool = false;

    fn key(&self) -> &Key {
        &self.key
    }

    fn bytes(&self) -> usize {
        0
    }

    /// Whoever asks before the batch is sent may have its answer.
    fn follows(&self) -> bool {
        true
    }

    fn is_abandoned(&self) -> bool {
        self.sender.is_closed()
    }

    fn refuse(self, error: StoreError) {
        let _ = self.sender.send(Err(error));
    }
}

/// Closes a queue when its worker ends, however that comes about: nobody waits for a worker that is gone.
struct Worker<T: Item>(Arc<Queue<T>>);

impl<T: Item> Drop for Worker<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

async fn write_batches(queue: Arc<Queue<WriteCall>>, store: Arc<Watched>) {
    let worker = Worker(queue);
    while let Some(batch) = worker.0.next().await {
        let began = Instant::now();
        let keys: Vec<Key> = batch.iter().map(|group| group.leader.write.key.clone()).collect();
        write_split(&store, batch).await;
        worker.0.release(&keys);
        telemetry::batch_written(keys.len(), began.elapsed());
    }
}

/// Writes a batch; then what was refused, by halves, and the inserts that follow what did not take.
async fn write_split(store: &Watched, batch: Vec<Group<WriteCall>>) {
    let (mut parts, mut statements) = (VecDeque::from([batch]), 0);
    while let Some(part) = parts.pop_front() {
        statements += 1;
        let results = store.write(part.iter().map(|group| group.leader.write.clone()).collect()).await;
        let is_refused = |result: &Result<_, _>| *result == Err(StoreError::Refused);
        let split = results.iter().filter(|result| is_refused(result)).count() > 1 && statements < SPLITS_MAX;
        let (mut refused, mut next) = (Vec::new(), Vec::new());
        for (group, result) in part.into_iter().zip(results) {
            if split && is_refused(&result) {
                refused.push(group);
            } else {
                next.extend(group.answer(result));
            }
        }
        let half = refused.split_off(refused.len() / 2);
        parts.extend([refused, half, next].into_iter().filter(|part| !part.is_empty()));
    }
}

impl Group<WriteCall> {
    /// Answers the leader, and the inserts that follow it: they have lost, or are to look again. If the leader is no insert and did
    /// not take, the key may be free, and the first of them is still to be tried.
    fn answer(self, result: Result<Option<Stamp>, StoreError>) -> Option<Self> {
        let Self { leader, followers } = self;
        let may_be_free = result == Ok(None) && !leader.follows();
        leader.answer(result);
        let mut followers = followers.into_iter();
        let next = if may_be_free { followers.find(|call| !call.is_abandoned()) } else { None };
        if let Some(leader) = next {
            return Some(Self { leader, followers: followers.collect() });
        }
        for follower in followers {
            // Nothing was done for it, so whatever is wrong with the leader need not be wrong with it.
            let refused = result == Err(StoreError::Refused);
            follower.answer(if refused { Ok(None) } else { result.map(|_| None) });
        }
        None
    }
}

async fn load_batches(queue: Arc<Queue<LoadCall>>, store: Arc<Watched>, room: Arc<Semaphore>) {
    let worker = Worker(queue);
    while let Some(batch) = worker.0.next().await {
        load_batch(&store, batch, &room).await;
    }
}

async fn load_batch(store: &Watched, batch: Vec<Group<LoadCall>>, room: &Arc<Semaphore>) {
    let keys: Vec<_> = batch.iter().map(|group| group.leader.key.clone()).collect();
    // Nobody closes it.
    let Ok(mut rooms) = room.clone().acquire_many_owned(keys.len() as u32).await else { return };
    match store.load(keys, Urgency::Completion).await {
        Ok(Loaded { now, records }) => {
            for (group, record) in batch.into_iter().zip(records) {
                let room = Arc::new(rooms.split(1));
                for call in group.followers {
                    let found = Found { now, record: record.clone(), _room: room.clone() };
                    let _ = call.sender.send(Ok(found));
                }
                let _ = group.leader.sender.send(Ok(Found { now, record, _room: room }));
            }
        }
        Err(error) => {
            let calls = batch.into_iter().flat_map(|group| group.followers.into_iter().chain([group.leader]));
            calls.for_each(|call| call.refuse(error));
        }
    }
}
