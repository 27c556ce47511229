//! Every metric name, and how the process logs.
//!
//! Metrics are counted with the [`metrics`] facade: without a recorder they cost next to nothing.

use std::{io::IsTerminal, sync::OnceLock, time::Duration};

use metrics::{counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram};
use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder, PrometheusHandle};
use tokio::time::interval;
use tokio_util::sync::CancellationToken;
use tonic::Code;
use tracing_subscriber::EnvFilter;

use crate::store::Purged;

/// RPCs answered, by `method` and `code`, the name of the status.
const CALLS: &str = "onceward_calls_total";
/// From the arrival of a request to its answer, in seconds, by `method`.
const CALL_SECONDS: &str = "onceward_call_duration_seconds";
/// RPCs that are being served.
const CALLS_IN_FLIGHT: &str = "onceward_calls_in_flight";
/// Reserves answered, by `outcome`: what the caller was told of the key.
const RESERVED: &str = "onceward_reserve_outcomes_total";
/// Errors answered, by `reason`; items of a Batch count singly.
const ERRORS: &str = "onceward_errors_total";
/// Reserves that wait for a key.
const WAITERS: &str = "onceward_waiters";
/// Records deleted after their expiry.
const SWEPT: &str = "onceward_swept_records_total";
/// Records that the sweeper met and that live longer.
const POSTPONED: &str = "onceward_postponed_records_total";
/// Writes of one batch, which share a commit.
const BATCH_WRITES: &str = "onceward_batch_writes";
/// From the start of a batch of writes to its answers, in seconds.
const BATCH_SECONDS: &str = "onceward_batch_duration_seconds";
/// Looks at finished records that the cache had, and those that it had not, by `found`.
const CACHE_LOOKS: &str = "onceward_cache_looks_total";
/// 1 while the store takes writes, else 0.
const STORE_UP: &str = "onceward_store_up";

/// Upper bounds of the buckets of durations, in seconds.
const BUCKETS: [f64; 12] = [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0, 60.0];
/// Upper bounds of the buckets of counts of writes.
const BATCH_BUCKETS: [f64; 9] = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0];

/// Starts logging to the standard error; `RUST_LOG` chooses what, from `info` up by default.
pub fn start_logging() {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info,sqlx=warn"));
    // A second start in the same process is no fault: the first one stands.
    let _ = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr)
        .try_init();
}

/// The process's metrics, as Prometheus reads them.
///
/// There is one recorder for a process, however many servers run in it.
pub fn recorder() -> Result<PrometheusHandle, BuildError> {
    static RECORDER: OnceLock<PrometheusHandle> = OnceLock::new();
    if let Some(handle) = RECORDER.get() {
        return Ok(handle.clone());
    }
    let recorder = PrometheusBuilder::new()
        .set_buckets(&BUCKETS)?
        .set_buckets_for_metric(Matcher::Full(BATCH_WRITES.into()), &BATCH_BUCKETS)?
        .build_recorder();
    let handle = RECORDER.get_or_init(|| recorder.handle()).clone();
    if metrics::set_global_recorder(recorder).is_ok() {
        describe();
    }
    Ok(handle)
}

/// Keeps the recorder's histograms from growing, until `shutdown`.
///
/// # Cancel safety
///
/// May be dropped at any time.
pub async fn upkeep(recorder: PrometheusHandle, shutdown: CancellationToken) {
    let mut ticks = interval(Duration::from_secs(5));
    loop {
        tokio::select! {
            () = shutdown.cancelled() => return,
            _ = ticks.tick() => recorder.run_upkeep(),
        }
    }
}

fn describe() {
    describe_counter!(CALLS, "RPCs answered, by method and status code");
    describe_histogram!(CALL_SECONDS, "From the arrival of a request to its answer, by method");
    describe_gauge!(CALLS_IN_FLIGHT, "RPCs that are being served");
    describe_counter!(RESERVED, "Reserves answered, by what the caller was told of the key");
    describe_counter!(ERRORS, "Errors answered, by reason; items of a Batch count singly");
    describe_gauge!(WAITERS, "Reserves that wait for a key");
    describe_counter!(SWEPT, "Records deleted after their expiry");
    describe_counter!(POSTPONED, "Records that the sweeper met and that live longer");
    describe_histogram!(BATCH_WRITES, "Writes of one batch, which share a commit");
    describe_histogram!(BATCH_SECONDS, "From the start of a batch of writes to its answers");
    describe_counter!(CACHE_LOOKS, "Looks at records, by whether the cache had them");
    describe_gauge!(STORE_UP, "1 while the store takes writes, else 0");
}

/// A call was answered.
pub fn call_answered(method: &'static str, code: Code, duration: Duration) {
    counter!(CALLS, "method" => method, "code" => code_name(code)).increment(1);
    histogram!(CALL_SECONDS, "method" => method).record(duration);
}

/// A call has begun (+1) or ended (−1).
pub fn calls_in_flight_changed(by: f64) {
    gauge!(CALLS_IN_FLIGHT).increment(by);
}

/// A Reserve was answered.
pub fn reserved(outcome: &'static str) {
    counter!(RESERVED, "outcome" => outcome).increment(1);
}

/// A call, or an item of a Batch, was answered with an error.
pub fn refused(reason: &'static str) {
    counter!(ERRORS, "reason" => reason).increment(1);
}

/// A Reserve has begun to wait (+1) or ended waiting (−1).
pub fn waiters_changed(by: f64) {
    gauge!(WAITERS).increment(by);
}

/// The sweeper has done a batch.
pub fn swept(purged: &Purged) {
    counter!(SWEPT).increment(purged.deleted);
    counter!(POSTPONED).increment(purged.postponed);
}

/// A batch of so many writes was answered.
pub fn batch_written(count: usize, duration: Duration) {
    histogram!(BATCH_WRITES).record(count as f64);
    histogram!(BATCH_SECONDS).record(duration);
}

/// A record was asked for, and the cache had it or not.
pub fn cache_looked(found: bool) {
    counter!(CACHE_LOOKS, "found" => if found { "true" } else { "false" }).increment(1);
}

/// The store takes writes, or does not.
pub fn store_up(up: bool) {
    gauge!(STORE_UP).set(if up { 1.0 } else { 0.0 });
}

/// The name that the gRPC specification gives a code.
fn code_name(code: Code) -> &'static str {
    match code {
        Code::Ok => "OK",
        Code::Cancelled => "CANCELLED",
        Code::Unknown => "UNKNOWN",
        Code::InvalidArgument => "INVALID_ARGUMENT",
        Code::DeadlineExceeded => "DEADLINE_EXCEEDED",
        Code::NotFound => "NOT_FOUND",
        Code::AlreadyExists => "ALREADY_EXISTS",
        Code::PermissionDenied => "PERMISSION_DENIED",
        Code::ResourceExhausted => "RESOURCE_EXHAUSTED",
        Code::FailedPrecondition => "FAILED_PRECONDITION",
        Code::Aborted => "ABORTED",
        Code::OutOfRange => "OUT_OF_RANGE",
        Code::Unimplemented => "UNIMPLEMENTED",
        Code::Internal => "INTERNAL",
        Code::Unavailable => "UNAVAILABLE",
        Code::DataLoss => "DATA_LOSS",
        Code::Unauthenticated => "UNAUTHENTICATED",
    }
}
