//! [`Reservation`]: what is known of a key.

use std::time::{Duration, SystemTime};

use bytes::Bytes;

use crate::{
    client::Client,
    error::Error,
    guard::Guard,
    key::Key,
    proto::{self, RecordStatus},
    result::{Finished, granted, time},
};

/// What is known of a key.
#[derive(Debug)]
#[non_exhaustive]
pub enum Reservation {
    /// It is yours: act, then complete or fail the guard.
    Acquired(Guard),
    /// The operation has completed.
    Completed(Finished),
    /// The operation has failed for good.
    Failed(Finished),
    /// Somebody else is at it.
    InProgress(InProgress),
    /// Somebody was at it until the lock ran out, and nobody knows whether it took effect.
    InDoubt(InDoubt),
}

/// Somebody else is at it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct InProgress {
    /// When to ask again.
    pub retry_after: Duration,
    /// The end of the lock by the store's clock, if it is not renewed.
    pub locked_until: SystemTime,
    /// Who holds it.
    pub owner: Option<String>,
    /// The attempt that runs.
    pub attempt: i32,
}

/// The outcome of the operation is unknown until it is resolved.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct InDoubt {
    /// The fence of the reservation in doubt, as Resolve wants it.
    pub fence: i64,
    /// Who held it.
    pub owner: Option<String>,
    /// The attempt in doubt.
    pub attempt: i32,
    /// When its lock ran out, by the store's clock.
    pub locked_until: SystemTime,
    /// What the holder saved last.
    pub checkpoint: Option<Bytes>,
    /// The W3C `traceparent` of the execution in doubt.
    pub origin: Option<String>,
}

impl From<proto::InProgress> for InProgress {
    fn from(held: proto::InProgress) -> Self {
        Self {
            retry_after: granted(held.retry_after).unwrap_or_default(),
            locked_until: time(held.locked_until),
            owner: held.owner,
            attempt: held.attempt,
        }
    }
}

impl From<proto::InDoubt> for InDoubt {
    fn from(doubt: proto::InDoubt) -> Self {
        Self {
            fence: doubt.fence,
            owner: doubt.owner,
            attempt: doubt.attempt,
            locked_until: time(doubt.locked_until),
            checkpoint: doubt.checkpoint,
            origin: doubt.origin,
        }
    }
}

/// How an operation ended whose lease was lost to somebody else; nothing, as long as they have not finished, or if the record is
/// of another request by now, which has come since that of this fingerprint expired.
pub(crate) async fn winner(client: &Client, key: Key, fingerprint: Option<&str>) -> Result<Option<Reservation>, Error> {
    let Some(record) = client.lookup(key).await? else { return Ok(None) };
    if let (Some(theirs), Some(ours)) = (record.fingerprint.as_deref(), fingerprint)
        && theirs != ours
    {
        return Ok(None);
    }
    Ok(match (record.status(), Finished::of_record(record)) {
        (RecordStatus::Completed, Some(finished)) => Some(Reservation::Completed(finished)),
        (RecordStatus::Failed, Some(finished)) => Some(Reservation::Failed(finished)),
        _ => None,
    })
}
