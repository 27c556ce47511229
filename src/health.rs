//! Whether this server is to get calls: it follows the store, and ends with the drain.
//!
//! One task asks the store at an interval, on a connection of the store's own, and everybody who wants to know gets the
//! last answer: a probe costs the store nothing, and a busy store does not fail it.

use std::{sync::Arc, time::Duration};

use tokio::{
    sync::watch,
    time::{MissedTickBehavior, interval, timeout},
};
use tokio_util::sync::CancellationToken;
use tonic_health::{ServingStatus, server::HealthReporter};

use crate::{store::Store, telemetry};

/// How often the store is asked.
const INTERVAL: Duration = Duration::from_millis(500);
/// How long it may take to answer.
const TIMEOUT: Duration = Duration::from_secs(2);
/// The names that the gRPC health service answers for; the empty one is the server as a whole.
const SERVICES: [&str; 2] = ["", "onceward.v1.IdempotencyService"];

/// Keeps the health up to date until `shutdown`, and says not serving then.
///
/// # Cancel safety
///
/// Dropped, the last answer stands.
pub async fn follow(
    store: Arc<dyn Store>,
    reporter: HealthReporter,
    ready: watch::Sender<bool>,
    shutdown: CancellationToken,
) {
    let mut ticks = interval(INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let up = tokio::select! {
            () = shutdown.cancelled() => break,
            up = async {
                ticks.tick().await;
                matches!(timeout(TIMEOUT, store.check()).await, Ok(Ok(())))
            } => up,
        };
        telemetry::store_up(up);
        // Those who watch are told of changes only.
        if up != *ready.borrow() {
            report(&reporter, &ready, up).await;
        }
    }
    report(&reporter, &ready, false).await;
}

/// Tells everybody who asks.
///
/// # Cancel safety
///
/// Dropped, some may have been told.
pub async fn report(reporter: &HealthReporter, ready: &watch::Sender<bool>, up: bool) {
    let status = if up { ServingStatus::Serving } else { ServingStatus::NotServing };
    for service in SERVICES {
        reporter.set_service_status(service, status).await;
    }
    ready.send_replace(up);
}
