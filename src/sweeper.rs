//! The sweeper: deletes records that have expired, in limited batches, at an interval.
//!
//! Expiry never waits for it: a record that has expired counts no more, swept or not. Deleted records keep a grace, so
//! that a step of the database's clock by less than that cannot lower a fence.

use std::{sync::Arc, time::Duration};

use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::{
    store::{Purged, Store, StoreError},
    telemetry,
};

/// How many records one statement deletes at the most, so that it never holds locks for long.
const BATCH_RECORDS_MAX: u32 = 1000;

/// When to sweep, and what.
#[derive(Clone, Copy, Debug)]
pub struct SweepOptions {
    /// From the end of one pass to the start of the next.
    pub interval: Duration,
    /// How long after its expiry a record is kept.
    pub grace: Duration,
}

/// Sweeps at the interval until `shutdown`.
///
/// # Cancel safety
///
/// A batch that has begun goes on to its end.
pub async fn run(store: Arc<dyn Store>, options: SweepOptions, shutdown: CancellationToken) {
    let mut ticks = interval(options.interval);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = shutdown.cancelled() => return,
            _ = ticks.tick() => {}
        }
        let swept = tokio::select! {
            () = shutdown.cancelled() => return,
            swept = pass(&*store, options.grace) => swept,
        };
        match swept {
            Ok(Purged { deleted: 0, .. }) => {}
            Ok(Purged { deleted, postponed }) => info!(deleted, postponed, "expired records swept"),
            Err(error) => warn!(%error, "sweep given up until the next interval"),
        }
    }
}

/// Deletes all that is due now.
///
/// # Cancel safety
///
/// A batch that has begun goes on to its end.
pub async fn pass(store: &dyn Store, grace: Duration) -> Result<Purged, StoreError> {
    let mut total = Purged::default();
    loop {
        let purged = store.purge(grace, BATCH_RECORDS_MAX).await?;
        telemetry::swept(&purged);
        total.deleted += purged.deleted;
        total.postponed += purged.postponed;
        if purged.met() < u64::from(BATCH_RECORDS_MAX) {
            return Ok(total);
        }
    }
}
