//! Short ways to say a write.

use std::{sync::Arc, time::Duration};

use crate::{
    record::{Key, OnExpiry, Record, Status, StoredResult, Timestamp, Token},
    store::{Store, StoreError},
    write::{Action, Condition, Extension, Finish, NextReservation, Reservation, Stamp, Write},
};

pub(super) use crate::store::Urgency;

pub(super) type Shared = Arc<dyn Store>;

pub(super) const DAY: Duration = Duration::from_secs(24 * 3600);

pub(super) fn key(value: &str) -> Key {
    Key::new("payments.charge", "ann", value).unwrap()
}

pub(super) fn token(name: &str) -> Token {
    Token::new(name).unwrap()
}

pub(super) fn reservation(name: &str) -> Reservation {
    Reservation {
        token: token(name),
        fingerprint: None,
        lock_ttl: DAY,
        retention: DAY,
        owner: None,
        on_expiry: OnExpiry::Retry,
        origin: None,
    }
}

/// A reservation whose lock is over at once.
pub(super) fn lapsed(name: &str) -> Reservation {
    Reservation { lock_ttl: Duration::ZERO, ..reservation(name) }
}

/// A reservation that is over and expired at once.
pub(super) fn expired(name: &str) -> Reservation {
    Reservation { retention: Duration::ZERO, ..lapsed(name) }
}

pub(super) fn insert(key: &Key, reservation: Reservation) -> Write {
    Write { key: key.clone(), action: Action::Insert(reservation) }
}

pub(super) fn reserve(key: &Key, seen: i64, name: &str, attempt: i32) -> Write {
    let next = NextReservation { reservation: reservation(name), attempt, earlier_tokens: Default::default() };
    Write { key: key.clone(), action: Action::Reserve(Condition::Seen(seen), next) }
}

pub(super) fn extend(key: &Key, condition: Condition) -> Write {
    let extension = Extension { lock_ttl: None, on_expiry: OnExpiry::Retry, checkpoint: None };
    Write { key: key.clone(), action: Action::Extend(condition, extension) }
}

pub(super) fn finish(key: &Key, condition: Condition, code: i32) -> Write {
    let result = Some(StoredResult { code, ..StoredResult::default() });
    let finish = Finish { status: Status::Completed, resolved: false, result, retention: None, checkpoint: None };
    Write { key: key.clone(), action: Action::Finish(condition, finish) }
}

pub(super) fn holder(name: &str) -> Condition {
    Condition::Holder(token(name))
}

/// Writes; again for as long as a rival's commit, on a slow disk, takes longer than the lock timeout.
pub(super) async fn write(store: &Shared, write: Write) -> Option<Stamp> {
    loop {
        match store.write(vec![write.clone()]).await.pop().unwrap() {
            Err(StoreError::Locked) => {}
            written => return written.unwrap(),
        }
    }
}

/// Deletes what expired at least `grace` ago, and gives how many were deleted and how many put off.
pub(super) async fn purge(store: &Shared, grace: Duration, limit: u32) -> (u64, u64) {
    let purged = store.purge(Timestamp(0), grace, limit).await.unwrap();
    (purged.deleted, purged.postponed)
}

pub(super) async fn load(store: &Shared, key: &Key) -> Option<Record> {
    store.load(vec![key.clone()], Urgency::Reservation).await.unwrap().records.pop().unwrap().unwrap()
}

pub(super) async fn version(store: &Shared, key: &Key) -> i64 {
    load(store, key).await.unwrap().version
}
