//! The sweeper: deletes records that have expired, in limited batches, at an interval.
//!
//! Expiry never waits for it: a record that has expired counts no more, swept or not. Deleted records keep a grace, so
//! that a step of the database's clock by less than that cannot lower a fence.

use std::{sync::Arc, time::Duration};

use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::{
    record::Timestamp,
    store::{Purged, Store, StoreError},
    telemetry,
};

/// How many records one batch looks at: at the least unless it fails, and at the most. A pass begins with the least.
const BATCH_RECORDS: (u32, u32) = (100, 5000);
/// How long a batch is to take: it holds locks and occupies the store meanwhile. Large results take longer to delete, so
/// batches grow and shrink to it.
const BATCH_DURATION: Duration = Duration::from_millis(50);

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
    loop {
        let swept = tokio::select! {
            () = shutdown.cancelled() => return,
            swept = pass(&*store, options.grace) => swept,
        };
        match swept {
            Ok(Purged { deleted: 0, .. }) => {}
            Ok(Purged { deleted, postponed, .. }) => info!(deleted, postponed, "expired records swept"),
            Err(error) => warn!(%error, "sweep given up until the next interval"),
        }
        tokio::select! {
            () = shutdown.cancelled() => return,
            () = sleep(options.interval) => {}
        }
    }
}

/// Deletes all that is due now.
///
/// # Cancel safety
///
/// A batch that has begun goes on to its end.
pub async fn pass(store: &dyn Store, grace: Duration) -> Result<Purged, StoreError> {
    let (least, most) = BATCH_RECORDS;
    let (mut total, mut limit, mut after) = (Purged::default(), least, Timestamp(0));
    loop {
        let began = Instant::now();
        match store.purge(after, grace, limit).await {
            Ok(purged) => {
                telemetry::swept(&purged);
                total.met += purged.met;
                total.deleted += purged.deleted;
                total.postponed += purged.postponed;
                match purged.last {
                    Some(last) if purged.met >= u64::from(limit) => after = last,
                    _ => return Ok(total),
                }
                let slow = began.elapsed() > BATCH_DURATION;
                limit = if slow { (limit / 2).max(least.min(limit)) } else { limit.saturating_mul(2).min(most) };
            }
            // Perhaps it took too long; a single record is never too much.
            Err(_) if limit > 1 => limit = limit.div_ceil(4),
            Err(error) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::{
        record::Key,
        store::{Loaded, Urgency},
        write::{Stamp, Write},
    };

    /// A store of records each of which takes this long to delete; a batch that takes over five seconds fails.
    struct Slow {
        left: Mutex<u64>,
        each: Duration,
    }

    #[async_trait::async_trait]
    impl Store for Slow {
        async fn purge(&self, after: Timestamp, _: Duration, limit: u32) -> Result<Purged, StoreError> {
            let deleted = (*self.left.lock().unwrap()).min(limit.into());
            let duration = self.each * deleted as u32;
            tokio::time::sleep(duration.min(Duration::from_secs(5))).await;
            if duration > Duration::from_secs(5) {
                return Err(StoreError::Unavailable);
            }
            *self.left.lock().unwrap() -= deleted;
            let last = Some(Timestamp(after.0 + deleted as i64));
            Ok(Purged { met: deleted, deleted, postponed: 0, last })
        }

        async fn write(&self, _: Vec<Write>) -> Vec<Result<Option<Stamp>, StoreError>> {
            unreachable!()
        }

        async fn load(&self, _: Vec<Key>, _: Urgency) -> Result<Loaded, StoreError> {
            unreachable!()
        }

        async fn check(&self) -> Result<(), StoreError> {
            unreachable!()
        }

        async fn close(&self) {}
    }

    #[tokio::test(start_paused = true)]
    async fn a_pass_ends_however_long_records_take() {
        for millis in [0, 1, 70, 4000] {
            let store = Slow { left: Mutex::new(500), each: Duration::from_millis(millis) };
            assert_eq!(pass(&store, Duration::ZERO).await.unwrap().deleted, 500);
        }
        let store = Slow { left: Mutex::new(500), each: Duration::from_secs(6) };
        assert_eq!(pass(&store, Duration::ZERO).await, Err(StoreError::Unavailable));
    }
}
