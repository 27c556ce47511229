//! [`Cached`]: finished records in memory, so that a storm of duplicates of a finished key costs the database nothing.
//!
//! Only records that are completed or have failed for good are kept, and only once a load has shown them: nothing changes
//! such a record until it expires, which is what makes a cache safe here. The rules are still applied to it, fingerprint
//! and all; a cache answers loads, never calls.
//!
//! What always holds:
//!
//! - a record is not served past its expiry by the store's clock: that clock is taken to be what the load told, and to have gone
//!   on since *before* the load was sent, so it is never behind the true one (as long as both clocks run alike);
//! - nor for longer than [`AGE_MAX`] after it was loaded, in case that somebody sets the store's clock or deletes rows by
//!   hand;
//! - a write that cannot take on a record that is kept is not tried: it is answered as *not taken*, and its caller looks;
//! - the memory is bounded.

#[cfg(test)]
mod tests;

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use moka::sync::Cache;
use tokio::time::Instant;

use super::{Loaded, Purged, Store, StoreError, Urgency};
use crate::{
    record::{Key, Record, Status, Timestamp},
    telemetry,
    write::{Action, Condition, Stamp, Write},
};

/// The longest time that a record is served without being loaded again.
pub const AGE_MAX: Duration = Duration::from_secs(60);

/// From how many bytes on a record is large.
const LARGE: usize = 64 << 10;

/// A store whose finished records are kept in memory for a while.
pub struct Cached {
    store: Arc<dyn Store>,
    records: Cache<Key, Arc<Kept>>,
}

/// A finished record, and what the store's clock was.
struct Kept {
    record: Record,
    now: Timestamp,
    /// From before the load was sent.
    asked: Instant,
}

impl Kept {
    /// The store's clock, or a little ahead of it.
    fn now(&self) -> Timestamp {
        self.now.after(self.asked.elapsed())
    }
}

impl Cached {
    /// `store`, with finished records of about `bytes` in all kept in memory.
    pub fn new(store: Arc<dyn Store>, bytes: u64) -> Self {
        let records = Cache::builder()
            .max_capacity(bytes)
            .weigher(|_, kept: &Arc<Kept>| kept.record.bytes().try_into().unwrap_or(u32::MAX))
            .time_to_live(AGE_MAX)
            .build();
        Self { store, records }
    }

    /// What is kept of a key and counts, with the clock by which it does: by one that is read later it may have expired, and
    /// whoever took that for the store's would replace it.
    fn kept(&self, key: &Key) -> Option<(Timestamp, Arc<Kept>)> {
        let kept = self.records.get(key)?;
        let now = kept.now();
        (kept.asked.elapsed() < AGE_MAX && !kept.record.is_expired(now)).then_some((now, kept))
    }

    /// Whether the write is known not to take: nothing changes a finished record that counts.
    fn cannot_take(&self, write: &Write) -> bool {
        !names_a_version(write) && self.kept(&write.key).is_some()
    }

    /// Keeps what is finished of what was loaded.
    fn keep(&self, keys: &[Key], loaded: &Loaded, asked: Instant) {
        for (key, record) in keys.iter().zip(&loaded.records) {
            if let Ok(Some(record)) = record
                && matches!(record.status, Status::Completed | Status::Failed)
                && !record.is_expired(loaded.now)
            {
                let kept = Kept { record: record.clone(), now: loaded.now, asked };
                self.records.insert(key.clone(), Arc::new(kept));
                // The cache looks at its bound now and then only, which is not enough for large ones.
                if record.bytes() > LARGE {
                    self.records.run_pending_tasks();
                }
            }
        }
    }
}

#[async_trait]
impl Store for Cached {
    async fn write(&self, mut writes: Vec<Write>) -> Vec<Result<Option<Stamp>, StoreError>> {
        if !writes.iter().any(|write| names_a_version(write) || self.cannot_take(write)) {
            return self.store.write(writes).await;
        }
        let known: Vec<bool> = writes.iter().map(|write| self.cannot_take(write)).collect();
        let mut unknown = known.iter().map(|known| !known);
        writes.retain(|_| unknown.next().unwrap_or(true));
        let versioned: Vec<Option<Key>> =
            writes.iter().map(|write| names_a_version(write).then(|| write.key.clone())).collect();
        let written = if writes.is_empty() { Vec::new() } else { self.store.write(writes).await };
        // The rules change no finished record that counts; whoever does it all the same in this process is seen.
        for key in versioned.iter().flatten() {
            self.records.invalidate(key);
        }
        let mut written = written.into_iter();
        let result = |known| if known { Ok(None) } else { written.next().unwrap_or(Err(StoreError::Unavailable)) };
        known.into_iter().map(result).collect()
    }

    fn is_locked(&self, key: &Key) -> bool {
        self.store.is_locked(key)
    }

    async fn load(&self, keys: Vec<Key>, urgency: Urgency) -> Result<Loaded, StoreError> {
        let kept: Vec<Option<(Timestamp, Arc<Kept>)>> = keys.iter().map(|key| self.kept(key)).collect();
        kept.iter().for_each(|kept| telemetry::cache_looked(kept.is_some()));
        let missing: Vec<Key> =
            keys.iter().zip(&kept).filter(|(_, kept)| kept.is_none()).map(|(key, _)| key.clone()).collect();
        if missing.is_empty() {
            // Each is ahead of the true clock or right, so the earliest is the best; by it, none of them has expired.
            let now = kept.iter().flatten().map(|(now, _)| *now).min().unwrap_or(Timestamp(0));
            let records = kept.into_iter().flatten().map(|(_, kept)| Ok(Some(kept.record.clone()))).collect();
            return Ok(Loaded { now, records });
        }
        let asked = Instant::now();
        let loaded = self.store.load(missing.clone(), urgency).await?;
        self.keep(&missing, &loaded, asked);
        let mut found = loaded.records.into_iter();
        let record = |kept: Option<(Timestamp, Arc<Kept>)>| match kept {
            Some((_, kept)) => Ok(Some(kept.record.clone())),
            None => found.next().unwrap_or(Err(StoreError::Unavailable)),
        };
        Ok(Loaded { now: loaded.now, records: kept.into_iter().map(record).collect() })
    }

    async fn purge(&self, after: Timestamp, grace: Duration, limit: u32) -> Result<Purged, StoreError> {
        self.store.purge(after, grace, limit).await
    }

    async fn check(&self) -> Result<(), StoreError> {
        self.store.check().await
    }

    async fn close(&self) {
        self.records.invalidate_all();
        self.store.close().await;
    }
}

/// Whether the write is of a record that was loaded, be it finished or not.
fn names_a_version(write: &Write) -> bool {
    match &write.action {
        Action::Insert(_) => false,
        Action::Reserve(condition, _) | Action::Extend(condition, _) | Action::Finish(condition, _) => {
            matches!(condition, Condition::Seen(_))
        }
    }
}
