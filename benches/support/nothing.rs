//! A store that does nothing: what is left is the way to it.

use std::time::Duration;

use async_trait::async_trait;
use onceward::{
    record::{Key, Timestamp},
    store::{Loaded, Purged, Store, StoreError, Urgency},
    write::{Stamp, Write},
};

/// Every write takes, and nothing is kept.
pub(crate) struct Nothing;

#[async_trait]
impl Store for Nothing {
    async fn write(&self, writes: Vec<Write>) -> Vec<Result<Option<Stamp>, StoreError>> {
        let stamp = Stamp {
            now: Timestamp(1),
            fence: 1,
            version: 1,
            lock_ttl: Duration::from_secs(30),
            locked_until: Timestamp(30_000_001),
            expires_at: Some(Timestamp(86_430_000_001)),
        };
        writes.iter().map(|_| Ok(Some(stamp))).collect()
    }

    async fn load(&self, keys: Vec<Key>, _: Urgency) -> Result<Loaded, StoreError> {
        Ok(Loaded { now: Timestamp(1), records: keys.iter().map(|_| Ok(None)).collect() })
    }

    async fn purge(&self, _: Timestamp, _: Duration, _: u32) -> Result<Purged, StoreError> {
        Ok(Purged::default())
    }

    async fn check(&self) -> Result<(), StoreError> {
        Ok(())
    }

    async fn close(&self) {}
}
