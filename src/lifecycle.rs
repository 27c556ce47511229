//! The rules: what a call on a record means. The whole protocol is on this page.
//!
//! Every rule is a pure function of the stored record, the request and the store's clock. It gives a [`Step`]: an answer,
//! or a [`Write`] to try; a write that does not take says nothing, so the caller loads the record and asks again. In each
//! rule the first arm that applies decides, like the first row of a table.
//!
//! What always holds, whatever the order of calls:
//!
//! - one live holder at a time, and each new one has a higher fence;
//! - a final result (completed, or failed for good) never changes until it expires;
//! - a call that is sent again has the same outcome, unless somebody else acted or a lock or retention ran out between;
//! - after a lock that ran out under [`OnExpiry::Hold`] nobody executes.

#[cfg(test)]
mod properties;
#[cfg(test)]
mod tables;

use std::{convert::Infallible, time::Duration};

use bytes::Bytes;

use crate::{
    record::{Fingerprint, Key, OnExpiry, Origin, Owner, Record, Status, StoredResult, Timestamp, Token},
    write::{Action, Condition, Extension, Finish, NextReservation, Reservation, Write},
};

/// What a rule says: an answer, or a write to try.
#[derive(Clone, PartialEq, Debug)]
pub enum Step<A> {
    /// Nothing is to be written.
    Answer(A),
    /// Try this. If it does not take, load the record and ask the rule again.
    Write(Write),
}

/// Why a call is refused. Each is an outcome of the rules, not a fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The key is in use for another request.
    #[error("the key is in use for a request with another fingerprint")]
    FingerprintMismatch,
    /// This token's reservation has finished in another way.
    #[error("the reservation of this token has already finished")]
    AlreadyFinished,
    /// The reservation belongs to somebody else by now.
    #[error("the reservation is held or was finished by another")]
    LeaseLost,
    /// There is no such record, or it has expired.
    #[error("there is no record of this key")]
    KeyNotFound,
    /// The reservation to resolve is not the current one.
    #[error("the record has another fence")]
    FenceMismatch,
    /// The reservation to resolve still holds its lock.
    #[error("the lock of the reservation is live")]
    LockLive,
}

/// What a Reserve gets.
#[derive(Clone, PartialEq, Debug)]
pub enum Reserved {
    /// The caller executes.
    Acquired(Acquired),
    /// The operation has completed.
    Completed(Finished),
    /// The operation has failed for good.
    Failed(Finished),
    /// Somebody else executes.
    InProgress(InProgress),
    /// Somebody executed, and nobody knows with what outcome.
    InDoubt(Box<Record>),
}

/// A reservation that was granted.
#[derive(Clone, PartialEq, Debug)]
pub struct Acquired {
    /// The fencing token.
    pub fence: i64,
    /// Where it stands in the life of the record.
    pub attempt: i32,
    /// How long it is exclusive: what was asked for, never more than what is left.
    pub lock_ttl: Duration,
    /// The end of the lock.
    pub locked_until: Timestamp,
    /// What an earlier attempt saved.
    pub checkpoint: Option<Bytes>,
}

/// A result that duplicates get.
#[derive(Clone, PartialEq, Debug)]
pub struct Finished {
    /// The result.
    pub result: StoredResult,
    /// The attempt that finished.
    pub attempt: i32,
    /// When it finished.
    pub finished_at: Timestamp,
    /// Until when it counts.
    pub expires_at: Option<Timestamp>,
    /// The trace that it comes from.
    pub origin: Option<Origin>,
}

/// A reservation that somebody else holds.
#[derive(Clone, PartialEq, Debug)]
pub struct InProgress {
    /// The end of the lock.
    pub locked_until: Timestamp,
    /// What was left of it.
    pub left: Duration,
    /// Who holds it.
    pub owner: Option<Owner>,
    /// The attempt that runs.
    pub attempt: i32,
}

/// Reserves a key for an execution.
pub fn reserve(
    key: &Key,
    request: &Reservation,
    record: Option<&Record>,
    now: Timestamp,
) -> Result<Step<Reserved>, Refusal> {
    let Some(record) = record else {
        return Ok(Step::Write(insert(key, request)));
    };
    let mine = record.token == request.token;
    let hold = record.on_expiry.or(request.on_expiry) == OnExpiry::Hold;
    match record.status {
        _ if record.is_expired(now) => Ok(replace(request, record)),
        _ if mismatch(record.fingerprint.as_ref(), request.fingerprint.as_ref()) => Err(Refusal::FingerprintMismatch),
        Status::InProgress if mine && (record.is_live(now) || record.on_expiry == OnExpiry::Retry) => {
            Ok(reserve_again(request, record))
        }
        Status::InProgress if record.is_live(now) => Ok(Step::Answer(in_progress(record, now))),
        Status::InProgress if hold => Ok(Step::Answer(Reserved::InDoubt(Box::new(record.clone())))),
        Status::InProgress if record.earlier_tokens.contains(&request.token) => Err(Refusal::LeaseLost),
        Status::InProgress => Ok(take_over(request, record)),
        Status::Completed => Ok(Step::Answer(Reserved::Completed(finished(record)))),
        Status::Failed => Ok(Step::Answer(Reserved::Failed(finished(record)))),
        Status::FailedRetryable if mine => Err(Refusal::AlreadyFinished),
        Status::FailedRetryable if record.earlier_tokens.contains(&request.token) => Err(Refusal::LeaseLost),
        Status::FailedRetryable => Ok(take_over(request, record)),
    }
}

/// A new record: what a Reserve tries before anything is known.
pub fn insert(key: &Key, request: &Reservation) -> Write {
    Write { key: key.clone(), action: Action::Insert(request.clone()) }
}

/// Ends a reservation in the name of its holder: Complete and Fail.
///
/// The answer is for a call that was made before: when the record expires.
pub fn finish(
    key: &Key,
    token: &Token,
    finish: &Finish,
    record: Option<&Record>,
    now: Timestamp,
) -> Result<Step<Timestamp>, Refusal> {
    let record = holder_finds(record, now)?;
    match record.status {
        Status::InProgress if record.token == *token => Ok(Step::Write(finish_as_holder(key, token, finish))),
        _ if record.token != *token || record.resolved => Err(Refusal::LeaseLost),
        status if status == finish.status => Ok(Step::Answer(record.expires_at.unwrap_or(now))),
        _ => Err(Refusal::AlreadyFinished),
    }
}

/// What a Complete or Fail tries before anything is known.
pub fn finish_as_holder(key: &Key, token: &Token, finish: &Finish) -> Write {
    let action = Action::Finish(Condition::Holder(token.clone()), finish.clone());
    Write { key: key.clone(), action }
}

/// Extends a lock in the name of its holder.
pub fn renew(
    key: &Key,
    token: &Token,
    extension: &Extension,
    record: Option<&Record>,
    now: Timestamp,
) -> Result<Step<Infallible>, Refusal> {
    let record = holder_finds(record, now)?;
    match record.status {
        Status::InProgress if record.token == *token => Ok(Step::Write(renew_as_holder(key, token, extension))),
        _ if record.token != *token || record.resolved => Err(Refusal::LeaseLost),
        _ => Err(Refusal::AlreadyFinished),
    }
}

/// What a Renew tries before anything is known.
pub fn renew_as_holder(key: &Key, token: &Token, extension: &Extension) -> Write {
    let action = Action::Extend(Condition::Holder(token.clone()), extension.clone());
    Write { key: key.clone(), action }
}

/// Shows a record as its holder would find it.
pub fn lookup(record: Option<&Record>, now: Timestamp) -> Result<&Record, Refusal> {
    holder_finds(record, now)
}

/// Ends a reservation in place of its holder.
pub fn resolve(
    fence: i64,
    force: bool,
    resolution: &Finish,
    record: Option<&Record>,
    now: Timestamp,
) -> Result<Step<Record>, Refusal> {
    let record = holder_finds(record, now)?;
    match record.status {
        _ if record.fence != fence => Err(Refusal::FenceMismatch),
        Status::InProgress if record.is_live(now) && !force => Err(Refusal::LockLive),
        Status::InProgress => {
            let action = Action::Finish(Condition::Seen(record.version), resolution.clone());
            Ok(Step::Write(Write { key: record.key.clone(), action }))
        }
        status if record.resolved && status == resolution.status => Ok(Step::Answer(record.clone())),
        _ => Err(Refusal::AlreadyFinished),
    }
}

/// An unfinished record exists for its holder until it is swept, a finished one until it expires.
fn holder_finds(record: Option<&Record>, now: Timestamp) -> Result<&Record, Refusal> {
    record.filter(|record| record.status == Status::InProgress || !record.is_expired(now)).ok_or(Refusal::KeyNotFound)
}

/// The same reservation, asked for again: it never gets shorter, and nothing else of it changes.
fn reserve_again(request: &Reservation, record: &Record) -> Step<Reserved> {
    let extension = Extension { lock_ttl: Some(request.lock_ttl), on_expiry: request.on_expiry, checkpoint: None };
    let action = Action::Extend(Condition::Seen(record.version), extension);
    Step::Write(Write { key: record.key.clone(), action })
}

/// A new record over an expired one.
fn replace(request: &Reservation, record: &Record) -> Step<Reserved> {
    let next = NextReservation { reservation: request.clone(), attempt: 1, earlier_tokens: Default::default() };
    let action = Action::Reserve(Condition::Seen(record.version), next);
    Step::Write(Write { key: record.key.clone(), action })
}

/// The next attempt of a record whose lock ran out, or that failed and may be tried again.
fn take_over(request: &Reservation, record: &Record) -> Step<Reserved> {
    let reservation = Reservation {
        fingerprint: record.fingerprint.clone().or_else(|| request.fingerprint.clone()),
        on_expiry: record.on_expiry.or(request.on_expiry),
        ..request.clone()
    };
    let next = NextReservation {
        reservation,
        attempt: record.attempt.saturating_add(1),
        earlier_tokens: record.earlier_tokens.with(&record.token),
    };
    let action = Action::Reserve(Condition::Seen(record.version), next);
    Step::Write(Write { key: record.key.clone(), action })
}

fn mismatch(stored: Option<&Fingerprint>, sent: Option<&Fingerprint>) -> bool {
    matches!((stored, sent), (Some(stored), Some(sent)) if stored.differs_from(sent))
}

fn in_progress(record: &Record, now: Timestamp) -> Reserved {
    Reserved::InProgress(InProgress {
        locked_until: record.locked_until,
        left: record.locked_until.since(now),
        owner: record.owner.clone(),
        attempt: record.attempt,
    })
}

fn finished(record: &Record) -> Finished {
    Finished {
        result: record.result.clone().unwrap_or_default(),
        attempt: record.attempt,
        finished_at: record.finished_at.unwrap_or(record.created_at),
        expires_at: record.expires_at,
        origin: record.origin.clone(),
    }
}
