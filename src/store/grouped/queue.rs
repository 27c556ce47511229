//! [`Queue`]: what waits for its batch.
//!
//! Bounded in length, in bytes and in time, with room and precedence for completions: the effect of theirs has happened
//! already. Nothing waits for a timer: whoever asks for a batch gets what is there. Keys take turns, so that a crowd at one
//! key takes one place in each batch and keeps no other key waiting.

#[cfg(test)]
mod tests;

use std::{
    collections::{HashMap, HashSet, VecDeque, hash_map::Entry},
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{sync::Notify, task::yield_now, time::Instant};

use crate::{
    record::Key,
    store::{StoreError, Urgency},
};

/// How many reservations may wait; as many completions may wait beside them.
pub(super) const QUEUE_ITEMS_MAX: usize = 4096;
/// How many bytes of each may wait.
const QUEUE_BYTES_MAX: usize = 64 << 20;
/// How long anything waits before it is sent away: nothing was done for it.
const QUEUE_TIMEOUT: Duration = Duration::from_secs(5);
/// How many items of one key may wait, so that a single key never takes all the room.
const KEY_ITEMS_MAX: usize = QUEUE_ITEMS_MAX / 2;

/// One call that waits.
pub(super) trait Item: Send + 'static {
    /// Whether two batches in flight may not have the same key: one would wait for the other in the store.
    const EXCLUSIVE: bool;

    /// What it is about. A batch has each key once.
    fn key(&self) -> &Key;
    /// What it takes of a batch.
    fn bytes(&self) -> usize;
    /// Whether it may be answered along with an earlier one of its key.
    fn follows(&self) -> bool;
    /// Whether nobody waits for it any more and nothing is lost if it is never done.
    fn is_abandoned(&self) -> bool;
    /// Answers it without having done anything.
    fn refuse(self, error: StoreError);
}

/// Bounds of one batch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    /// The most keys.
    pub(super) items: usize,
    /// The most bytes; an item that is larger goes alone.
    pub(super) bytes: usize,
}

/// An item that is to be done, and those that are answered along with it.
pub(super) struct Group<T> {
    pub(super) leader: T,
    pub(super) followers: Vec<T>,
}

/// What waits for its batch.
pub(super) struct Queue<T> {
    bounds: Bounds,
    lanes: Mutex<Lanes<T>>,
    /// There may be a batch to take.
    filled: Notify,
}

struct Lanes<T> {
    completions: Lane<T>,
    reservations: Lane<T>,
    /// Keys of batches in flight, where these exclude each other.
    in_flight: HashSet<Key>,
    closed: bool,
}

struct Lane<T> {
    /// Keys that something waits for, each once, in the order of their turns.
    turns: VecDeque<Key>,
    /// What waits, by key, in order.
    items: HashMap<Key, VecDeque<(Instant, T)>>,
    count: usize,
    bytes: usize,
    /// What those are answered who waited too long.
    late: StoreError,
}

impl<T: Item> Queue<T> {
    pub(super) fn new(bounds: Bounds) -> Self {
        let lane = |late| Lane { turns: VecDeque::new(), items: HashMap::new(), count: 0, bytes: 0, late };
        let lanes = Lanes {
            completions: lane(StoreError::Unavailable),
            reservations: lane(StoreError::Overloaded),
            in_flight: HashSet::new(),
            closed: false,
        };
        Self { bounds, lanes: Mutex::new(lanes), filled: Notify::new() }
    }

    /// Puts an item in, or answers it at once where there is no room.
    pub(super) fn push(&self, urgency: Urgency, item: T) {
        let mut lanes = self.lanes();
        if lanes.closed {
            drop(lanes);
            return item.refuse(StoreError::Unavailable);
        }
        let lane = match urgency {
            Urgency::Completion => &mut lanes.completions,
            Urgency::Reservation => &mut lanes.reservations,
        };
        let refused = lane.push(item);
        drop(lanes);
        if let Some(item) = refused {
            return item.refuse(StoreError::Overloaded);
        }
        // Also if something waits already: it may be of keys in flight.
        self.filled.notify_one();
    }

    /// The next batch, as soon as there is anything to do; `None` once the queue is closed and empty. Whoever has done it
    /// [`release`](Self::release)s its keys.
    ///
    /// # Cancel safety
    ///
    /// Dropped, nothing is taken.
    pub(super) async fn next(&self) -> Option<Vec<Group<T>>> {
        loop {
            let filled = self.filled.notified();
            tokio::pin!(filled);
            // From here on no word is missed.
            filled.as_mut().enable();
            // Whatever else is ready comes first: it may bring more for the batch. Where there is nothing, it takes no time.
            if self.waiting() > 1 {
                yield_now().await;
            }
            let closed = {
                let mut lanes = self.lanes();
                let batch = lanes.take(self.bounds);
                if !batch.is_empty() {
                    if !lanes.is_empty() {
                        self.filled.notify_one();
                    }
                    return Some(batch);
                }
                lanes.closed && lanes.is_empty()
            };
            if closed {
                return None;
            }
            filled.await;
        }
    }

    /// A batch with these keys is done.
    pub(super) fn release(&self, keys: &[Key]) {
        let mut lanes = self.lanes();
        keys.iter().for_each(|key| {
            lanes.in_flight.remove(key);
        });
        // Something may have waited for just these keys, and somebody for the end.
        let (waiting, closed) = (!lanes.is_empty(), lanes.closed);
        drop(lanes);
        match closed {
            true => self.filled.notify_waiters(),
            false if waiting => self.filled.notify_one(),
            false => {}
        }
    }

    /// Takes nothing more in. What waits is still to be done.
    pub(super) fn close(&self) {
        self.lanes().closed = true;
        self.filled.notify_waiters();
    }

    /// Takes nothing more in, and answers whatever waits.
    pub(super) fn abort(&self) {
        let mut lanes = self.lanes();
        lanes.closed = true;
        lanes.in_flight.clear();
        let waiting = [lanes.completions.clear(), lanes.reservations.clear()];
        drop(lanes);
        waiting.into_iter().flat_map(HashMap::into_values).flatten().for_each(|(_, item)| {
            item.refuse(StoreError::Unavailable);
        });
        self.filled.notify_waiters();
    }

    pub(super) fn is_closed(&self) -> bool {
        self.lanes().closed
    }

    fn waiting(&self) -> usize {
        let lanes = self.lanes();
        lanes.completions.count + lanes.reservations.count
    }

    fn lanes(&self) -> MutexGuard<'_, Lanes<T>> {
        self.lanes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: Item> Lanes<T> {
    fn is_empty(&self) -> bool {
        self.completions.count + self.reservations.count == 0
    }

    /// Completions first, but for a quarter of the room where reservations wait too.
    fn take(&mut self, bounds: Bounds) -> Vec<Group<T>> {
        let mut batch = Forming { groups: Vec::new(), places: HashMap::new(), bytes: 0 };
        let reserved = |room: usize, wanted: usize| room - wanted.min(room / 4);
        let most = Bounds {
            items: reserved(bounds.items, self.reservations.count),
            bytes: reserved(bounds.bytes, self.reservations.bytes),
        };
        self.completions.fill(&mut batch, most, &self.in_flight);
        self.reservations.fill(&mut batch, bounds, &self.in_flight);
        self.completions.fill(&mut batch, bounds, &self.in_flight);
        if T::EXCLUSIVE {
            self.in_flight.extend(batch.places.into_keys());
        }
        batch.groups
    }
}

impl<T: Item> Lane<T> {
    /// Gives the item back where there is no room.
    fn push(&mut self, item: T) -> Option<T> {
        let bytes = item.bytes();
        if self.count >= QUEUE_ITEMS_MAX || self.bytes + bytes > QUEUE_BYTES_MAX {
            return Some(item);
        }
        let items = match self.items.entry(item.key().clone()) {
            Entry::Occupied(items) => items.into_mut(),
            Entry::Vacant(place) => {
                self.turns.push_back(item.key().clone());
                place.insert(VecDeque::new())
            }
        };
        if items.len() >= KEY_ITEMS_MAX {
            return Some(item);
        }
        self.count += 1;
        self.bytes += bytes;
        items.push_back((Instant::now(), item));
        None
    }

    fn clear(&mut self) -> HashMap<Key, VecDeque<(Instant, T)>> {
        (self.count, self.bytes) = (0, 0);
        self.turns.clear();
        std::mem::take(&mut self.items)
    }

    /// Moves items into the batch up to these bounds, one of each key. A key whose next item cannot go keeps its turn.
    fn fill(&mut self, batch: &mut Forming<T>, bounds: Bounds, in_flight: &HashSet<Key>) {
        let mut kept = Vec::new();
        // Each key once: those that have more come to the end and have their next turn in a later batch.
        for _ in 0..self.turns.len() {
            let Some(key) = self.turns.pop_front() else { break };
            if in_flight.contains(&key) {
                kept.push(key);
                continue;
            }
            let Some(mut items) = self.items.remove(&key) else { continue };
            let end = self.fill_from(&mut items, batch, bounds);
            if !items.is_empty() {
                self.items.insert(key.clone(), items);
                match end {
                    End::Went => self.turns.push_back(key),
                    End::Stays | End::Full => kept.push(key),
                }
            }
            if end == End::Full {
                break;
            }
        }
        kept.into_iter().rev().for_each(|key| self.turns.push_front(key));
    }

    /// Moves the first item of a key into the batch, and those that may follow it.
    fn fill_from(&mut self, items: &mut VecDeque<(Instant, T)>, batch: &mut Forming<T>, bounds: Bounds) -> End {
        let mut end = End::Stays;
        while let Some((since, item)) = items.pop_front() {
            let bytes = item.bytes();
            let done = if item.is_abandoned() {
                true
            } else if since.elapsed() > QUEUE_TIMEOUT {
                item.refuse(self.late);
                true
            } else {
                match batch.add(item, bounds) {
                    Added::Yes => {
                        end = End::Went;
                        true
                    }
                    Added::KeyIsThere(item) => {
                        items.push_front((since, item));
                        false
                    }
                    Added::Full(item) => {
                        items.push_front((since, item));
                        end = End::Full;
                        false
                    }
                }
            };
            if !done {
                break;
            }
            self.count -= 1;
            self.bytes -= bytes;
        }
        end
    }
}

/// How a key's turn ended.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    /// Something of it went into the batch.
    Went,
    /// Nothing of it could.
    Stays,
    /// There is no more room.
    Full,
}

/// A batch that is being filled.
struct Forming<T> {
    groups: Vec<Group<T>>,
    places: HashMap<Key, usize>,
    bytes: usize,
}

enum Added<T> {
    Yes,
    /// The batch has another item of its key.
    KeyIsThere(T),
    /// There is no room.
    Full(T),
}

impl<T: Item> Forming<T> {
    fn add(&mut self, item: T, bounds: Bounds) -> Added<T> {
        let place = match self.places.entry(item.key().clone()) {
            Entry::Occupied(place) => {
                return match self.groups.get_mut(*place.get()) {
                    Some(group) if item.follows() => {
                        group.followers.push(item);
                        Added::Yes
                    }
                    _ => Added::KeyIsThere(item),
                };
            }
            Entry::Vacant(place) => place,
        };
        let full = self.groups.len() >= bounds.items || self.bytes.saturating_add(item.bytes()) > bounds.bytes;
        if full && !self.groups.is_empty() {
            return Added::Full(item);
        }
        place.insert(self.groups.len());
        self.bytes += item.bytes();
        self.groups.push(Group { leader: item, followers: Vec::new() });
        Added::Yes
    }
}
