//! A store for tests whose clock can be paused: what writes mean, on a map.

use std::{
    collections::HashMap,
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use tokio::time::Instant;

use super::{Loaded, Purged, Store, StoreError, Urgency};
use crate::{
    record::{Key, Record, Timestamp},
    write::{Stamp, Write},
};

pub(crate) struct Memory {
    began: Instant,
    records: Mutex<HashMap<Key, Record>>,
    /// How often it was looked at.
    pub(crate) loads: AtomicUsize,
    /// Whether it refuses to answer.
    pub(crate) down: AtomicBool,
}

impl Memory {
    pub(crate) fn new() -> Self {
        Self {
            began: Instant::now(),
            records: Mutex::default(),
            loads: AtomicUsize::new(0),
            down: AtomicBool::new(false),
        }
    }

    /// A second after the epoch, and from there as tokio's clock goes.
    fn now(&self) -> Timestamp {
        Timestamp(1_000_000).after(self.began.elapsed())
    }

    fn up(&self) -> Result<(), StoreError> {
        if self.down.load(Ordering::Relaxed) { Err(StoreError::Unavailable) } else { Ok(()) }
    }
}

#[async_trait]
impl Store for Memory {
    async fn write(&self, writes: Vec<Write>) -> Vec<Result<Option<Stamp>, StoreError>> {
        let mut records = self.records.lock().unwrap();
        let now = self.now();
        let each = |write: Write| {
            self.up()?;
            let Some(record) = write.apply(records.get(&write.key), now) else { return Ok(None) };
            let Record { fence, version, lock_ttl, locked_until, expires_at, .. } = record;
            records.insert(write.key, record);
            Ok(Some(Stamp { now, fence, version, lock_ttl, locked_until, expires_at }))
        };
        writes.into_iter().map(each).collect()
    }

    async fn load(&self, keys: Vec<Key>, _: Urgency) -> Result<Loaded, StoreError> {
        self.up()?;
        self.loads.fetch_add(1, Ordering::Relaxed);
        let records = self.records.lock().unwrap();
        Ok(Loaded { now: self.now(), records: keys.iter().map(|key| Ok(records.get(key).cloned())).collect() })
    }

    async fn purge(&self, _: Timestamp, grace: Duration, _: u32) -> Result<Purged, StoreError> {
        let mut records = self.records.lock().unwrap();
        let (now, before) = (self.now(), records.len());
        records.retain(|_, record| record.expires_at.is_none_or(|end| now < end.after(grace)));
        let deleted = (before - records.len()) as u64;
        Ok(Purged { met: deleted, deleted, ..Purged::default() })
    }

    async fn check(&self) -> Result<(), StoreError> {
        self.up()
    }

    async fn close(&self) {
        self.down.store(true, Ordering::Relaxed);
    }
}
