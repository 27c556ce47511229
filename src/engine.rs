//! [`Engine`]: the verbs. Plain single-key code: write, else load and decide, and write again.
//!
//! A call starts with the write that most often takes: a fresh Reserve is one insert, a Complete whose token holds is one
//! change. Where it does not take, the record is loaded and the rules of [`lifecycle`] say what to do next. Losing a race
//! means going round once more, a bounded number of times.

#[cfg(test)]
mod tests;
mod turns;

use std::{sync::Arc, time::Duration};

use tokio::time::{Instant, sleep_until};

use self::turns::Turns;
use crate::{
    lifecycle::{self, Acquired, Refusal, Reserved, Step},
    record::{Key, Record, Timestamp, Token},
    store::{Loaded, Store, StoreError, Urgency},
    waiters::{Sighting, Waiters},
    write::{Extension, Finish, Reservation, Stamp, Write},
};

/// How often a call goes round before it gives up for now. Each round lost means that another caller's write took.
const ROUNDS_MAX: usize = 16;
/// How long a caller that waits puts up with a store that does not answer.
const OUTAGE_MAX: Duration = Duration::from_secs(2);

/// Why a call has no outcome.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// The rules refuse it.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The store could not do it. Except for what [`StoreError`] says, it may have been done.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// What a Complete or Fail gets.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FinishedAnswer {
    /// When the record expires.
    pub expires_at: Timestamp,
    /// Whether a call before this one had finished it in the same way.
    pub already: bool,
}

/// What a Renew gets.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RenewedAnswer {
    /// For how long the reservation is exclusive from now, at least.
    pub lock_ttl: Duration,
    /// The end of the lock.
    pub locked_until: Timestamp,
}

/// The verbs, on one store. Cloning gives another handle.
///
/// # Cancel safety
///
/// Any call may be dropped: what it has handed to the store goes on to its end, and sent again it has the same outcome.
#[derive(Clone)]
pub struct Engine {
    store: Arc<dyn Store>,
    waiters: Waiters,
    turns: Arc<Turns>,
}

/// How a call was settled.
#[expect(clippy::large_enum_variant, reason = "it lives on the stack for a moment")]
enum Settled<A> {
    /// By an answer of the rules.
    Answer(A),
    /// By a write that took, on the record as it was seen before, if it was.
    Written { write: Write, seen: Option<Box<Record>>, stamp: Stamp },
}

impl Engine {
    /// The verbs on `store`; `waiters` are those whom they wake.
    pub fn new(store: Arc<dyn Store>, waiters: Waiters) -> Self {
        Self { store, waiters, turns: Arc::default() }
    }

    /// Reserves a key; if somebody else holds it, waits for at most `wait`.
    pub async fn reserve(&self, key: &Key, reservation: &Reservation, wait: Duration) -> Result<Reserved, EngineError> {
        let deadline = Instant::now() + wait;
        let first = self.reserve_now(key, reservation, lifecycle::insert(key, reservation), None).await?;
        if wait.is_zero() || !matches!(first, Reserved::InProgress(_)) {
            return Ok(first);
        }
        // What few calls need is not to make the future of every call large: it is moved about.
        Box::pin(self.wait(key, reservation, first, deadline)).await
    }

    /// Completes or fails a key in the name of its holder.
    pub async fn finish(&self, key: &Key, token: &Token, finish: &Finish) -> Result<FinishedAnswer, EngineError> {
        let first = lifecycle::finish_as_holder(key, token, finish);
        let rule = |record: Option<&Record>, now| lifecycle::finish(key, token, finish, record, now);
        match self.settle(Urgency::Completion, key, Some((first, None)), rule).await? {
            Settled::Answer(expires_at) => Ok(FinishedAnswer { expires_at, already: true }),
            Settled::Written { stamp, .. } => {
                self.waiters.wake(key);
                Ok(FinishedAnswer { expires_at: stamp.expires_at.unwrap_or(stamp.now), already: false })
            }
        }
    }

    /// Extends the lock of a key in the name of its holder.
    pub async fn renew(&self, key: &Key, token: &Token, extension: &Extension) -> Result<RenewedAnswer, EngineError> {
        let first = lifecycle::renew_as_holder(key, token, extension);
        let rule = |record: Option<&Record>, now| lifecycle::renew(key, token, extension, record, now);
        match self.settle(Urgency::Completion, key, Some((first, None)), rule).await? {
            Settled::Answer(never) => match never {},
            Settled::Written { stamp, .. } => {
                let lock_ttl = extension.lock_ttl.unwrap_or(stamp.lock_ttl);
                Ok(RenewedAnswer { lock_ttl, locked_until: stamp.locked_until })
            }
        }
    }

    /// Shows a record, and the store's clock.
    pub async fn lookup(&self, key: &Key) -> Result<(Record, Timestamp), EngineError> {
        let (record, now) = self.load(Urgency::Reservation, key).await?;
        Ok((lifecycle::lookup(record.as_ref(), now)?.clone(), now))
    }

    /// Finishes a key in place of its holder, and shows the record and the store's clock.
    pub async fn resolve(
        &self,
        key: &Key,
        fence: i64,
        force: bool,
        resolution: &Finish,
    ) -> Result<(Record, Timestamp), EngineError> {
        let rule = |record: Option<&Record>, now| {
            lifecycle::resolve(fence, force, resolution, record, now).map(|step| match step {
                Step::Answer(record) => Step::Answer((record, now)),
                Step::Write(write) => Step::Write(write),
            })
        };
        match self.settle(Urgency::Completion, key, None, rule).await? {
            Settled::Answer(answer) => Ok(answer),
            Settled::Written { write, seen, stamp } => {
                self.waiters.wake(key);
                let resolved = write.apply(seen.as_deref(), stamp.now).ok_or(StoreError::Unavailable)?;
                Ok((resolved, stamp.now))
            }
        }
    }

    /// Reserves without waiting, beginning with `write` on the record as it was `seen`.
    async fn reserve_now(
        &self,
        key: &Key,
        reservation: &Reservation,
        write: Write,
        seen: Option<Box<Record>>,
    ) -> Result<Reserved, EngineError> {
        let rule = |record: Option<&Record>, now| lifecycle::reserve(key, reservation, record, now);
        Ok(match self.settle(Urgency::Reservation, key, Some((write, seen)), rule).await? {
            Settled::Answer(answer) => answer,
            Settled::Written { write, seen, stamp } => acquired(reservation, &write, seen, &stamp),
        })
    }

    /// Waits until a sighting of the key gives another answer than that somebody else holds it.
    async fn wait(
        &self,
        key: &Key,
        reservation: &Reservation,
        first: Reserved,
        deadline: Instant,
    ) -> Result<Reserved, EngineError> {
        let mut last = first;
        let Some(mut waiter) = self.waiters.join(key) else {
            return Ok(last);
        };
        let mut outage: Option<(Instant, StoreError)> = None;
        loop {
            let sighted = tokio::select! {
                sighted = waiter.next() => sighted,
                () = sleep_until(deadline) => None,
            };
            let Sighting { record, now } = match (sighted, outage) {
                (Some(Ok(sighting)), _) => sighting,
                // A short outage is waited out; what was true before it may not be any more.
                (Some(Err(_)), Some((since, error))) if since.elapsed() > OUTAGE_MAX => return Err(error.into()),
                (Some(Err(error)), since) => {
                    outage = since.or(Some((Instant::now(), error)));
                    continue;
                }
                (None, Some((_, error))) => return Err(error.into()),
                (None, None) => return Ok(last),
            };
            outage = None;
            let answer = match lifecycle::reserve(key, reservation, record.as_deref(), now)? {
                Step::Answer(answer) => answer,
                Step::Write(write) => match waiter.turn() {
                    Some(_turn) => {
                        self.reserve_now(key, reservation, write, record.map(Arc::unwrap_or_clone).map(Box::new))
                            .await?
                    }
                    // Another waiter reserves it now.
                    None => continue,
                },
            };
            match answer {
                Reserved::InProgress(_) => last = answer,
                _ => return Ok(answer),
            }
        }
    }

    /// Writes `first`, on the record as it was seen; and where that does not take, loads and decides.
    async fn settle<A>(
        &self,
        urgency: Urgency,
        key: &Key,
        first: Option<(Write, Option<Box<Record>>)>,
        rule: impl Fn(Option<&Record>, Timestamp) -> Result<Step<A>, Refusal>,
    ) -> Result<Settled<A>, EngineError> {
        if let Some((write, seen)) = first
            && let Some(stamp) = self.write(&write).await?
        {
            return Ok(Settled::Written { write, seen, stamp });
        }
        Box::pin(self.decide(urgency, key, rule)).await
    }

    /// Loads, decides and writes, until something takes.
    ///
    /// Calls of one key that get in each other's way take turns from then on, so that many copies of one call, each of
    /// which makes the others go round, all come to an end.
    async fn decide<A>(
        &self,
        urgency: Urgency,
        key: &Key,
        rule: impl Fn(Option<&Record>, Timestamp) -> Result<Step<A>, Refusal>,
    ) -> Result<Settled<A>, EngineError> {
        let (mut turn, mut waited) = (None, false);
        for _ in 0..ROUNDS_MAX {
            let (record, now) = self.load(urgency, key).await?;
            let write = match rule(record.as_ref(), now)? {
                Step::Answer(answer) => return Ok(Settled::Answer(answer)),
                Step::Write(write) => write,
            };
            turn = turn.or_else(|| self.turns.take_now(urgency, key));
            if turn.is_some() {
                if let Some(stamp) = self.write(&write).await? {
                    return Ok(Settled::Written { write, seen: record.map(Box::new), stamp });
                }
                continue;
            }
            // What was loaded is old by the time that the turn comes. The first time, another look may be enough, and those who
            // only look need no turn.
            let came = self.turns.take(urgency, key).await?;
            turn = waited.then_some(came);
            waited = true;
        }
        Err(StoreError::Unavailable.into())
    }

    async fn write(&self, write: &Write) -> Result<Option<Stamp>, StoreError> {
        let mut results = self.store.write(vec![write.clone()]).await;
        results.pop().unwrap_or(Err(StoreError::Unavailable))
    }

    async fn load(&self, urgency: Urgency, key: &Key) -> Result<(Option<Record>, Timestamp), StoreError> {
        let Loaded { now, mut records } = self.store.load(vec![key.clone()], urgency).await?;
        Ok((records.pop().unwrap_or(Err(StoreError::Unavailable))?, now))
    }
}

fn acquired(reservation: &Reservation, write: &Write, seen: Option<Box<Record>>, stamp: &Stamp) -> Reserved {
    let record = write.apply(seen.as_deref(), stamp.now);
    Reserved::Acquired(Acquired {
        fence: stamp.fence,
        attempt: record.as_ref().map_or(1, |record| record.attempt),
        lock_ttl: reservation.lock_ttl,
        locked_until: stamp.locked_until,
        checkpoint: record.and_then(|record| record.checkpoint),
    })
}
