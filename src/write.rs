//! [`Write`]: everything that can be done to a record, in the terms that a store can do in one atomic step.
//!
//! The rules in [`lifecycle`](crate::lifecycle) make writes; stores apply them. A write names durations, never instants:
//! the store adds them to its own clock when it writes. [`Write::apply`] is what a write means; the SQL of each store
//! says the same, and the contract suite holds the two against each other.

use std::time::Duration;

use bytes::Bytes;

use crate::record::{
    EarlierTokens, Fingerprint, Key, OnExpiry, Origin, Owner, Record, Status, StoredResult, Timestamp, Token, micros,
};

/// One atomic step on the record of one key.
#[derive(Clone, PartialEq, Debug)]
pub struct Write {
    /// Whose record.
    pub key: Key,
    /// What to do, and when it is allowed.
    pub action: Action,
}

/// What to do, and when it is allowed.
#[derive(Clone, PartialEq, Debug)]
pub enum Action {
    /// A new record, if there is none.
    Insert(Reservation),
    /// A new reservation on an existing record.
    Reserve(Condition, NextReservation),
    /// More time, and perhaps a checkpoint, for the reservation that holds.
    Extend(Condition, Extension),
    /// The end of a reservation.
    Finish(Condition, Finish),
}

/// When a change is allowed.
#[derive(Clone, PartialEq, Debug)]
pub enum Condition {
    /// This token holds the record, and the record is in progress. Nothing needs to have been loaded.
    Holder(Token),
    /// The record is still the very version that was loaded.
    Seen(i64),
}

/// What a caller reserves with.
#[derive(Clone, PartialEq, Debug)]
pub struct Reservation {
    /// Names the execution.
    pub token: Token,
    /// The hash of the request.
    pub fingerprint: Option<Fingerprint>,
    /// How long it is exclusive.
    pub lock_ttl: Duration,
    /// How long the finished record answers duplicates.
    pub retention: Duration,
    /// Who reserves.
    pub owner: Option<Owner>,
    /// What it means when the lock runs out.
    pub on_expiry: OnExpiry,
    /// The trace that reserves.
    pub origin: Option<Origin>,
}

/// A new reservation on an existing record.
#[derive(Clone, PartialEq, Debug)]
pub struct NextReservation {
    /// The reservation.
    pub reservation: Reservation,
    /// Where it stands in the life of the record.
    pub attempt: i32,
    /// Who held the record before. Empty at the first attempt.
    pub earlier_tokens: EarlierTokens,
}

impl NextReservation {
    /// Whether the record goes on, with its checkpoint and its beginning; at the first attempt a new record replaces an
    /// expired one and inherits its fence and version alone.
    pub fn continues(&self) -> bool {
        self.attempt > 1
    }
}

/// More time for the reservation that holds. A lock never gets shorter.
#[derive(Clone, PartialEq, Debug)]
pub struct Extension {
    /// How long it is exclusive from now; as granted at the reservation if `None`.
    pub lock_ttl: Option<Duration>,
    /// Whether the record is to be held from now on.
    pub on_expiry: OnExpiry,
    /// What the next attempt receives; the stored one is kept if `None`.
    pub checkpoint: Option<Checkpoint>,
}

/// What the next attempt receives.
#[derive(Clone, PartialEq, Debug)]
pub struct Checkpoint {
    /// Where to resume. Empty clears the stored one.
    pub bytes: Bytes,
    /// Its number. One that is lower than the stored number is ignored.
    pub sequence: Option<i64>,
}

/// The end of a reservation.
#[derive(Clone, PartialEq, Debug)]
pub struct Finish {
    /// How it ends; never in progress.
    pub status: Status,
    /// Whether a resolver ends it.
    pub resolved: bool,
    /// What duplicates get, if it ends for good.
    pub result: Option<StoredResult>,
    /// How long it answers duplicates; as reserved if `None`.
    pub retention: Option<Duration>,
    /// What the next attempt receives; the stored one is kept if `None`, empty clears it.
    pub checkpoint: Option<Bytes>,
}

/// What a store tells of a write that it did.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Stamp {
    /// The store's clock at the write.
    pub now: Timestamp,
    /// The record's fence.
    pub fence: i64,
    /// The record's version.
    pub version: i64,
    /// The lock that was granted at the reservation.
    pub lock_ttl: Duration,
    /// The end of the lock.
    pub locked_until: Timestamp,
    /// The record's expiry.
    pub expires_at: Option<Timestamp>,
}

impl Write {
    /// The record after this write at `now`, or `None` if the write is not allowed on `record`.
    pub fn apply(&self, record: Option<&Record>, now: Timestamp) -> Option<Record> {
        match (&self.action, record) {
            (Action::Insert(reservation), None) => Some(reservation.begin(&self.key, now, 0)),
            (Action::Reserve(condition, next), Some(record)) if condition.allows(record) => {
                Some(next.apply(record, now))
            }
            (Action::Extend(condition, extension), Some(record)) if condition.allows(record) => {
                Some(extension.apply(record, now))
            }
            (Action::Finish(condition, finish), Some(record)) if condition.allows(record) => {
                Some(finish.apply(record, now))
            }
            _ => None,
        }
    }

    /// About how many bytes it takes to send it.
    pub fn bytes(&self) -> usize {
        /// Numbers, times, and texts of the usual length.
        const SMALL: usize = 256;
        let reservation = |reservation: &Reservation| {
            let fingerprint = reservation.fingerprint.as_ref().map_or(0, |text| text.as_str().len());
            let owner = reservation.owner.as_ref().map_or(0, |text| text.as_str().len());
            fingerprint + owner
        };
        let large = match &self.action {
            Action::Insert(inserted) => reservation(inserted),
            Action::Reserve(_, next) => reservation(&next.reservation),
            Action::Extend(_, extension) => {
                extension.checkpoint.as_ref().map_or(0, |checkpoint| checkpoint.bytes.len())
            }
            Action::Finish(_, finish) => {
                let checkpoint = finish.checkpoint.as_ref().map_or(0, Bytes::len);
                checkpoint + finish.result.as_ref().map_or(0, StoredResult::bytes)
            }
        };
        SMALL + self.key.bytes() + large
    }

    /// Whether it starts an execution: nothing has happened yet.
    pub fn is_reservation(&self) -> bool {
        matches!(self.action, Action::Insert(_) | Action::Reserve(..))
    }
}

impl Condition {
    /// The token that must hold the record, if that is the condition.
    pub fn holder(&self) -> Option<&Token> {
        match self {
            Self::Holder(token) => Some(token),
            Self::Seen(_) => None,
        }
    }

    /// The version that the record must have, if that is the condition.
    pub fn seen(&self) -> Option<i64> {
        match self {
            Self::Holder(_) => None,
            Self::Seen(version) => Some(*version),
        }
    }

    fn allows(&self, record: &Record) -> bool {
        match self {
            Self::Holder(token) => record.token == *token && record.status == Status::InProgress,
            Self::Seen(version) => record.version == *version,
        }
    }
}

impl Reservation {
    fn begin(&self, key: &Key, now: Timestamp, previous_fence: i64) -> Record {
        let fence = now.0.max(previous_fence.saturating_add(1));
        let locked_until = now.after(self.lock_ttl);
        Record {
            key: key.clone(),
            token: self.token.clone(),
            earlier_tokens: EarlierTokens::default(),
            fence,
            version: fence,
            attempt: 1,
            status: Status::InProgress,
            resolved: false,
            on_expiry: self.on_expiry,
            owner: self.owner.clone(),
            fingerprint: self.fingerprint.clone(),
            origin: self.origin.clone(),
            lock_ttl: self.lock_ttl,
            retention: self.retention,
            created_at: now,
            locked_until,
            finished_at: None,
            expires_at: unfinished_expiry(self.on_expiry, locked_until, self.retention),
            checkpoint: None,
            checkpoint_sequence: None,
            result: None,
        }
    }
}

impl NextReservation {
    fn apply(&self, record: &Record, now: Timestamp) -> Record {
        let next = Record {
            version: record.version + 1,
            attempt: self.attempt,
            earlier_tokens: self.earlier_tokens.clone(),
            ..self.reservation.begin(&record.key, now, record.fence)
        };
        if !self.continues() {
            return next;
        }
        Record { created_at: record.created_at, checkpoint: record.checkpoint.clone(), ..next }
    }
}

impl Extension {
    fn apply(&self, record: &Record, now: Timestamp) -> Record {
        let end = now.after(self.lock_ttl.unwrap_or(record.lock_ttl));
        let locked_until = record.locked_until.max(end);
        let on_expiry = record.on_expiry.or(self.on_expiry);
        let mut next = Record {
            version: record.version + 1,
            on_expiry,
            locked_until,
            expires_at: unfinished_expiry(on_expiry, locked_until, record.retention),
            ..record.clone()
        };
        if let Some(checkpoint) = &self.checkpoint
            && checkpoint.sequence.is_none_or(|new| record.checkpoint_sequence.is_none_or(|stored| new >= stored))
        {
            next.checkpoint = some_bytes(&checkpoint.bytes);
            next.checkpoint_sequence = checkpoint.sequence.or(record.checkpoint_sequence);
        }
        next
    }
}

impl Finish {
    fn apply(&self, record: &Record, now: Timestamp) -> Record {
        let retention = self.retention.unwrap_or(record.retention);
        Record {
            version: record.version + 1,
            status: self.status,
            resolved: self.resolved,
            retention,
            finished_at: Some(now),
            expires_at: Some(now.after(retention)),
            result: self.result.clone(),
            checkpoint: match &self.checkpoint {
                Some(checkpoint) => some_bytes(checkpoint),
                None => record.checkpoint.clone(),
            },
            ..record.clone()
        }
    }
}

/// An unfinished record counts until its lock has been over for its retention; one that is to be held, for ever.
fn unfinished_expiry(on_expiry: OnExpiry, locked_until: Timestamp, retention: Duration) -> Option<Timestamp> {
    (on_expiry == OnExpiry::Retry).then(|| Timestamp(locked_until.0.saturating_add(micros(retention))))
}

fn some_bytes(bytes: &Bytes) -> Option<Bytes> {
    (!bytes.is_empty()).then(|| bytes.clone())
}
