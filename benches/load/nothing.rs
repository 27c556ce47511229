//! The service on a store that does nothing: what the way to the database costs by itself.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use async_trait::async_trait;
use clap::Parser;
use onceward::{
    config,
    record::{Key, Timestamp},
    server::{self, Listeners},
    store::{Loaded, Purged, Store, StoreError, Urgency},
    write::{Stamp, Write},
};

use crate::Failure;

/// Every write takes, and nothing is kept.
pub struct Nothing;

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

pub async fn serve(listen: SocketAddr, admin_listen: SocketAddr) -> Result<(), Failure> {
    onceward::telemetry::start_logging();
    let options = config::Command::try_parse_from(["onceward"])?.serve.validate()?;
    let listeners = Listeners::bind(listen, admin_listen).await?;
    server::run(listeners, Arc::new(Nothing), options, std::future::pending()).await?;
    Ok(())
}
