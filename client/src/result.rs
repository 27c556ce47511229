//! [`StoredResult`]: what a duplicate gets back, and when it came about.

use std::time::{Duration, SystemTime};

use bytes::Bytes;

use crate::proto;

/// The name of the pair that marks a result whose value could not be kept, with the reason as its value.
const UNSTORED: &str = "onceward-unstored";

/// The largest body that the service takes.
pub(crate) const BODY_BYTES_MAX: usize = 1 << 20;
/// The most pairs that it takes.
const PAIRS_MAX: usize = 64;
/// The most bytes of their names and values.
const PAIRS_BYTES_MAX: usize = 16 << 10;

/// What a duplicate gets back: at most 1 MiB of body and 64 pairs of 16 KiB in all.
///
/// ```
/// use onceward_client::StoredResult;
///
/// let result = StoredResult::new("charged").code(201).metadata("charge", "ch_17");
/// assert_eq!(StoredResult::from("charged").body, "charged");
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoredResult {
    /// A number of the caller's own meaning, such as an HTTP status.
    pub code: i32,
    /// Pairs of the caller's own meaning, in order; names may repeat.
    pub metadata: Vec<(String, String)>,
    /// Returned byte for byte.
    pub body: Bytes,
}

impl StoredResult {
    /// A result with this body, code 0 and no metadata.
    pub fn new(body: impl Into<Bytes>) -> Self {
        Self { body: body.into(), ..Self::default() }
    }

    /// The same with this code.
    #[must_use]
    pub fn code(self, code: i32) -> Self {
        Self { code, ..self }
    }

    /// The same with one more pair.
    #[must_use]
    pub fn metadata(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.metadata.push((name.into(), value.into()));
        self
    }

    /// Whether the service takes it.
    pub(crate) fn fits(&self) -> bool {
        fits(&self.body, self.metadata.iter().map(|(name, value)| name.len() + value.len()))
    }

    /// A result in place of one that could not be kept: the operation has taken effect, and nobody may act again.
    pub(crate) fn unstored(code: i32, reason: &str) -> Self {
        Self::default().code(code).metadata(UNSTORED, reason)
    }

    /// Whether this is the result, and not a mark in place of one that could not be stored.
    pub fn is_kept(&self) -> bool {
        self.unstored_reason().is_none()
    }

    /// Why this stands in place of the real result, if it does.
    pub(crate) fn unstored_reason(&self) -> Option<&str> {
        self.metadata.iter().find(|(name, _)| name == UNSTORED).map(|(_, reason)| reason.as_str())
    }
}

impl proto::Result {
    /// Whether the service takes it.
    pub(crate) fn fits(&self) -> bool {
        fits(&self.body, self.metadata.iter().map(|pair| pair.name.len() + pair.value.len()))
    }
}

fn fits(body: &Bytes, pairs: impl ExactSizeIterator<Item = usize>) -> bool {
    body.len() <= BODY_BYTES_MAX && pairs.len() <= PAIRS_MAX && pairs.sum::<usize>() <= PAIRS_BYTES_MAX
}

impl<B: Into<Bytes>> From<B> for StoredResult {
    fn from(body: B) -> Self {
        Self::new(body)
    }
}

impl From<proto::Result> for StoredResult {
    fn from(result: proto::Result) -> Self {
        let metadata = result.metadata.into_iter().map(|pair| (pair.name, pair.value)).collect();
        Self { code: result.code, metadata, body: result.body }
    }
}

impl From<StoredResult> for proto::Result {
    fn from(result: StoredResult) -> Self {
        let metadata = result.metadata.into_iter().map(|(name, value)| proto::Metadata { name, value }).collect();
        Self { code: result.code, metadata, body: result.body }
    }
}

/// An operation that has finished.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Finished {
    /// The result that was stored.
    pub result: StoredResult,
    /// The attempt that finished.
    pub attempt: i32,
    /// When it finished, by the store's clock.
    pub finished_at: SystemTime,
    /// Until when this answer is given, by the store's clock.
    pub expires_at: SystemTime,
    /// The W3C `traceparent` of the execution that this result comes from.
    pub origin: Option<String>,
}

impl From<proto::Finished> for Finished {
    fn from(finished: proto::Finished) -> Self {
        Self {
            result: finished.result.unwrap_or_default().into(),
            attempt: finished.attempt,
            finished_at: time(finished.finished_at),
            expires_at: time(finished.expires_at),
            origin: finished.origin,
        }
    }
}

impl Finished {
    /// What a record says, if it is final.
    pub(crate) fn of_record(record: proto::Record) -> Option<Self> {
        Some(Self {
            result: record.result?.into(),
            attempt: record.attempt,
            finished_at: time(record.finished_at),
            expires_at: time(record.expires_at),
            origin: record.origin,
        })
    }
}

/// A time of the protocol; one that is missing or beyond all bounds is the epoch.
pub(crate) fn time(timestamp: Option<prost_types::Timestamp>) -> SystemTime {
    timestamp.and_then(|timestamp| timestamp.try_into().ok()).unwrap_or(SystemTime::UNIX_EPOCH)
}

/// A duration of the protocol.
pub(crate) fn granted(duration: Option<prost_types::Duration>) -> Option<Duration> {
    duration.and_then(|duration| duration.try_into().ok())
}
