//! [`Waiters`]: callers that wait for a key which somebody else holds.
//!
//! A waiter holds no connection and asks the store nothing. One [`poll`](Waiters::poll) loop loads all keys that anybody
//! waits for, in batches, and shows each record to all who wait for its key: every [`POLL_INTERVAL`], and at once when this
//! process has changed a key. When a key becomes free, one of its waiters at a time has the turn to reserve it.
//!
//! What always holds: the number of waiters is bounded, per key and in all; whoever is not let in, or is told that waiting
//! is over, still has the answer that it came with.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{
    sync::{Notify, OwnedSemaphorePermit, Semaphore, watch},
    time::{MissedTickBehavior, interval},
};
use tokio_util::sync::CancellationToken;

use crate::{
    record::{Key, Record, Timestamp},
    store::{BATCH_ITEMS_MAX, Loaded, Store, StoreError, Urgency},
    telemetry,
};

/// How often the keys that are waited for are loaded. A finish on another replica is seen within this and one load.
pub const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// How many may wait.
#[derive(Clone, Copy, Debug)]
pub struct WaiterLimits {
    /// For one key.
    pub per_key: usize,
    /// In all.
    pub total: usize,
}

/// A look at a key, or why there was none.
pub type Sighted = Result<Sighting, StoreError>;

/// What the store knew of a key at some instant of its clock.
#[derive(Clone, Debug)]
pub struct Sighting {
    /// The record, if there was one.
    pub record: Option<Arc<Record>>,
    /// The store's clock.
    pub now: Timestamp,
}

/// Callers that wait, by key. Cloning gives another handle.
#[derive(Clone)]
pub struct Waiters(Arc<Inner>);

struct Inner {
    limits: WaiterLimits,
    queues: Mutex<Queues>,
    /// There is a key with news.
    news: Notify,
    closed: CancellationToken,
}

#[derive(Default)]
struct Queues {
    by_key: HashMap<Key, Queue>,
    waiting: usize,
}

/// Those who wait for one key.
struct Queue {
    sightings: watch::Sender<Option<Sighted>>,
    turn: Arc<Semaphore>,
    waiting: usize,
    /// Something has happened to the key since it was loaded last.
    news: bool,
}

impl Waiters {
    /// Nobody waits yet.
    pub fn new(limits: WaiterLimits) -> Self {
        let inner = Inner { limits, queues: Mutex::default(), news: Notify::new(), closed: CancellationToken::new() };
        Self(Arc::new(inner))
    }

    /// A place among those who wait for `key`; `None` if there is no room or waiting is over.
    ///
    /// The key is loaded soon after, so that nothing is missed between the caller's own look and its waiting.
    pub fn join(&self, key: &Key) -> Option<Waiter> {
        let mut queues = self.0.queues();
        if self.0.closed.is_cancelled() || queues.waiting >= self.0.limits.total {
            return None;
        }
        if queues.by_key.get(key).map_or(0, |queue| queue.waiting) >= self.0.limits.per_key {
            return None;
        }
        let queue = queues.by_key.entry(key.clone()).or_insert_with(|| Queue {
            sightings: watch::Sender::new(None),
            turn: Arc::new(Semaphore::new(1)),
            waiting: 0,
            news: false,
        });
        queue.waiting += 1;
        queue.news = true;
        let waiter = Waiter {
            sightings: queue.sightings.subscribe(),
            turn: queue.turn.clone(),
            key: key.clone(),
            inner: self.0.clone(),
        };
        queues.waiting += 1;
        drop(queues);
        telemetry::waiters_changed(1.0);
        self.0.news.notify_one();
        Some(waiter)
    }

    /// Tells those who wait for `key` that this process has changed it.
    pub fn wake(&self, key: &Key) {
        if let Some(queue) = self.0.queues().by_key.get_mut(key) {
            queue.news = true;
            self.0.news.notify_one();
        }
    }

    /// Ends all waiting, now and for ever: everybody gets the answer that it came with.
    pub fn close(&self) {
        self.0.closed.cancel();
    }

    /// Loads what is waited for, until `shutdown`.
    ///
    /// # Cancel safety
    ///
    /// Whoever waits then sees nothing more.
    pub async fn poll(&self, store: Arc<dyn Store>, shutdown: CancellationToken) {
        let mut ticks = interval(POLL_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let all = tokio::select! {
                () = shutdown.cancelled() => return,
                () = self.0.news.notified() => false,
                _ = ticks.tick() => true,
            };
            for keys in self.0.due(all).chunks(BATCH_ITEMS_MAX) {
                self.0.show(keys, store.load(keys.to_vec(), Urgency::Reservation).await);
            }
        }
    }
}

impl Inner {
    fn queues(&self) -> MutexGuard<'_, Queues> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn due(&self, all: bool) -> Vec<Key> {
        let mut queues = self.queues();
        let due = queues.by_key.iter_mut().filter(|(_, queue)| all || queue.news);
        due.map(|(key, queue)| {
            queue.news = false;
            key.clone()
        })
        .collect()
    }

    fn show(&self, keys: &[Key], loaded: Result<Loaded, StoreError>) {
        let sightings: Vec<Sighted> = match loaded {
            Ok(loaded) => {
                let sighting = |record: Option<Record>| Sighting { record: record.map(Arc::new), now: loaded.now };
                loaded.records.into_iter().map(|record| record.map(sighting)).collect()
            }
            Err(error) => vec![Err(error); keys.len()],
        };
        let queues = self.queues();
        for (key, sighting) in keys.iter().zip(sightings) {
            if let Some(queue) = queues.by_key.get(key) {
                queue.sightings.send_replace(Some(sighting));
            }
        }
    }
}

/// A place among those who wait for a key, given up on drop.
pub struct Waiter {
    sightings: watch::Receiver<Option<Sighted>>,
    turn: Arc<Semaphore>,
    key: Key,
    inner: Arc<Inner>,
}

impl Waiter {
    /// The next sighting of the key; `None` once waiting is over.
    ///
    /// # Cancel safety
    ///
    /// Dropped and called again, it misses none but those that a later one replaces.
    pub async fn next(&mut self) -> Option<Sighted> {
        tokio::select! {
            biased;
            () = self.inner.closed.cancelled() => None,
            changed = self.sightings.changed() => {
                changed.ok()?;
                self.sightings.borrow_and_update().clone()
            }
        }
    }

    /// The turn to reserve the key, if nobody else has it; given back on drop.
    pub fn turn(&self) -> Option<OwnedSemaphorePermit> {
        self.turn.clone().try_acquire_owned().ok()
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        telemetry::waiters_changed(-1.0);
        let mut queues = self.inner.queues();
        queues.waiting -= 1;
        if let Some(queue) = queues.by_key.get_mut(&self.key) {
            queue.waiting -= 1;
            if queue.waiting == 0 {
                queues.by_key.remove(&self.key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn waiters(per_key: usize, total: usize) -> Waiters {
        Waiters::new(WaiterLimits { per_key, total })
    }

    fn key(value: &str) -> Key {
        Key::new("n", "", value).unwrap()
    }

    #[test]
    fn whoever_leaves_makes_room_and_leaves_nothing_behind() {
        let waiters = waiters(2, 3);
        let (a, b) = (key("a"), key("b"));
        let first = waiters.join(&a).unwrap();
        let _second = waiters.join(&a).unwrap();
        assert!(waiters.join(&a).is_none(), "the key is full");
        let third = waiters.join(&b).unwrap();
        assert!(waiters.join(&key("c")).is_none(), "all is full");
        drop((first, third));
        assert!(!waiters.0.queues().by_key.contains_key(&b));
        assert!(waiters.join(&a).is_some());
    }

    #[test]
    fn a_key_that_nobody_may_wait_for_is_not_looked_at() {
        let waiters = waiters(0, 10);
        assert!(waiters.join(&key("a")).is_none());
        assert!(waiters.0.due(true).is_empty());
    }

    #[test]
    fn one_waiter_at_a_time_has_the_turn() {
        let waiters = waiters(2, 2);
        let [first, second] = [waiters.join(&key("a")).unwrap(), waiters.join(&key("a")).unwrap()];
        let turn = first.turn();
        assert!(turn.is_some() && second.turn().is_none());
        drop(turn);
        assert!(second.turn().is_some());
    }

    #[tokio::test]
    async fn closing_ends_all_waiting() {
        let waiters = waiters(2, 2);
        let mut waiter = waiters.join(&key("a")).unwrap();
        waiters.close();
        assert!(waiter.next().await.is_none());
        assert!(waiters.join(&key("b")).is_none());
    }
}
