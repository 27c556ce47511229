//! The nouns: what is stored under a key, and the parts it is made of.
//!
//! Everything here is valid by construction and knows nothing of storage or transport. Times are those of the store's
//! clock; nobody else's clock decides anything.

mod key;
mod text;
mod time;

use std::time::Duration;

use bytes::Bytes;

pub use self::{
    key::{KEY_TEXT_BYTES_MAX, Key, NAMESPACE_BYTES_MAX},
    text::{
        EarlierTokens, FINGERPRINT_LENGTH_MAX, Fingerprint, OWNER_LENGTH_MAX, Origin, Owner, TOKEN_LENGTH_MAX, Token,
    },
    time::{Timestamp, micros},
};

/// The largest checkpoint, in bytes.
pub const CHECKPOINT_BYTES_MAX: usize = 16 << 10;
/// The largest result body, in bytes.
pub const BODY_BYTES_MAX: usize = 1 << 20;
/// The most metadata pairs of a result.
pub const METADATA_PAIRS_MAX: usize = 64;
/// The most metadata of a result, names and values together, in bytes.
pub const METADATA_BYTES_MAX: usize = 16 << 10;

/// Why an input is refused: a phrase that follows the name of its field. Inputs are never echoed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0}")]
pub struct Invalid(pub &'static str);

/// What is stored under a key.
#[derive(Clone, PartialEq, Debug)]
pub struct Record {
    /// The key.
    pub key: Key,
    /// Who holds the record, or finished it.
    pub token: Token,
    /// Who held it before: a late copy of their Reserve must not start another attempt.
    pub earlier_tokens: EarlierTokens,
    /// The fencing token: grows with every reservation of the key, also across expiry and deletion.
    pub fence: i64,
    /// Grows with every write and never repeats for a key: the condition of an optimistic write.
    pub version: i64,
    /// 1 for the first reservation, one more for each takeover or retry.
    pub attempt: i32,
    /// Whether it is unfinished, and how it finished.
    pub status: Status,
    /// Whether a resolver finished it in place of the holder.
    pub resolved: bool,
    /// What it means when the lock runs out.
    pub on_expiry: OnExpiry,
    /// Who reserved, as the holder named itself.
    pub owner: Option<Owner>,
    /// The hash of the request.
    pub fingerprint: Option<Fingerprint>,
    /// The trace that reserved.
    pub origin: Option<Origin>,
    /// The lock that was granted at the reservation; a Renew without one of its own extends by it.
    pub lock_ttl: Duration,
    /// How long the record answers duplicates once it is finished.
    pub retention: Duration,
    /// When the record was made.
    pub created_at: Timestamp,
    /// The end of the lock.
    pub locked_until: Timestamp,
    /// When it finished.
    pub finished_at: Option<Timestamp>,
    /// When it stops to count; `None` is never (an unfinished one that is to be held).
    pub expires_at: Option<Timestamp>,
    /// What the next attempt receives.
    pub checkpoint: Option<Bytes>,
    /// The number of the stored checkpoint, where the holder numbers them.
    pub checkpoint_sequence: Option<i64>,
    /// What duplicates get, once it finished for good.
    pub result: Option<StoredResult>,
}

impl Record {
    /// About how many bytes of memory it takes.
    pub fn bytes(&self) -> usize {
        let checkpoint = self.checkpoint.as_ref().map_or(0, Bytes::len);
        let result = self.result.as_ref().map_or(0, StoredResult::bytes);
        let pairs = self.result.as_ref().map_or(0, |result| result.metadata.len());
        size_of::<Self>() + self.key.bytes() + checkpoint + result + pairs * size_of::<(String, String)>()
    }

    /// Whether its reservation is exclusive at `now`.
    pub fn is_live(&self, now: Timestamp) -> bool {
        self.status == Status::InProgress && now < self.locked_until
    }

    /// Whether it no longer counts at `now`, swept or not.
    pub fn is_expired(&self, now: Timestamp) -> bool {
        self.expires_at.is_some_and(|end| now >= end)
    }

    /// Whether its lock ran out and nobody may execute until it is resolved.
    pub fn is_in_doubt(&self, now: Timestamp) -> bool {
        self.status == Status::InProgress && self.on_expiry == OnExpiry::Hold && !self.is_live(now)
    }
}

/// Whether a record is unfinished, and how it finished. The numbers are the stored ones.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(i16)]
pub enum Status {
    /// Reserved and unfinished.
    InProgress = 1,
    /// Finished with a result.
    Completed = 2,
    /// Finished with a failure for good.
    Failed = 3,
    /// Finished with a failure that the next caller may try again.
    FailedRetryable = 4,
}

impl Status {
    /// The stored number.
    pub fn code(self) -> i16 {
        self as i16
    }

    /// The stored number read back.
    pub fn from_code(code: i16) -> Option<Self> {
        [Self::InProgress, Self::Completed, Self::Failed, Self::FailedRetryable]
            .into_iter()
            .find(|status| status.code() == code)
    }
}

/// What it means when a lock runs out. The numbers are the stored ones; the greater wins.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(i16)]
pub enum OnExpiry {
    /// The next caller takes over.
    #[default]
    Retry = 1,
    /// The outcome is in doubt: nobody executes until the holder finishes or the record is resolved.
    Hold = 2,
}

impl OnExpiry {
    /// The stored number.
    pub fn code(self) -> i16 {
        self as i16
    }

    /// The stored number read back.
    pub fn from_code(code: i16) -> Option<Self> {
        [Self::Retry, Self::Hold].into_iter().find(|on_expiry| on_expiry.code() == code)
    }

    /// Hold if either asks for it: once held, a record stays so.
    pub fn or(self, other: Self) -> Self {
        if self == Self::Hold { self } else { other }
    }
}

/// What a duplicate gets back.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct StoredResult {
    /// A number of the caller's own meaning.
    pub code: i32,
    /// Pairs of the caller's own meaning, in order; names may repeat.
    pub metadata: Vec<(String, String)>,
    /// Bytes of the caller's own meaning.
    pub body: Bytes,
}

impl StoredResult {
    /// How many bytes its parts have.
    pub fn bytes(&self) -> usize {
        let pairs = self.metadata.iter().map(|(name, value)| name.len() + value.len());
        self.body.len() + pairs.sum::<usize>()
    }
}
