//! The closed loop: every caller does the next turn as soon as it has the answer to the last one.

use std::{
    fmt,
    io::{IsTerminal, Write},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use hdrhistogram::Histogram;
use tokio::task::JoinSet;

use crate::{Failure, workload::Callers};

/// What came of a load.
pub struct Measured {
    operations: u64,
    elapsed: Duration,
    /// Of a turn, in microseconds.
    latency: Histogram<u64>,
}

/// Lets the callers run for `duration`; what is under way then is waited for and not counted.
pub async fn measure(callers: Callers, duration: Duration, progress: bool) -> Result<Measured, Failure> {
    let counted = Arc::new(AtomicU64::new(0));
    let began = Instant::now();
    let end = began + duration;
    let mut running = JoinSet::new();
    for mut caller in callers {
        let counted = counted.clone();
        running.spawn(async move {
            let mut latency = histogram()?;
            loop {
                let start = Instant::now();
                let operations = caller.turn().await?;
                if Instant::now() > end {
                    return Ok::<_, Failure>(latency);
                }
                counted.fetch_add(operations, Ordering::Relaxed);
                latency.record(start.elapsed().as_micros() as u64)?;
            }
        });
    }
    let ticker = tokio::spawn(show_progress(counted.clone(), began, progress && std::io::stderr().is_terminal()));
    let mut latency = histogram()?;
    while let Some(caller) = running.join_next().await {
        latency.add(caller??)?;
    }
    ticker.abort();
    Ok(Measured { operations: counted.load(Ordering::Relaxed), elapsed: duration, latency })
}

fn histogram() -> Result<Histogram<u64>, Failure> {
    Ok(Histogram::new(3)?)
}

async fn show_progress(counted: Arc<AtomicU64>, began: Instant, shown: bool) {
    let mut ticks = tokio::time::interval(Duration::from_secs(1));
    let mut last = 0;
    loop {
        ticks.tick().await;
        let count = counted.load(Ordering::Relaxed);
        if shown {
            eprint!("\r{:4.0} s  {:>8}/s  {count:>10} in all ", began.elapsed().as_secs_f64(), count - last);
            let _ = std::io::stderr().flush();
        }
        last = count;
    }
}

/// The figures of a load.
#[derive(Clone, Copy, Debug)]
pub struct Report {
    pub operations: u64,
    pub per_second: f64,
    pub p50_ms: f64,
    pub p99_ms: f64,
    pub p999_ms: f64,
}

impl Report {
    pub fn of(measured: &Measured) -> Self {
        let latency = |quantile| measured.latency.value_at_quantile(quantile) as f64 / 1e3;
        Self {
            operations: measured.operations,
            per_second: measured.operations as f64 / measured.elapsed.as_secs_f64(),
            p50_ms: latency(0.5),
            p99_ms: latency(0.99),
            p999_ms: latency(0.999),
        }
    }

    pub fn json(&self) -> serde_json::Value {
        serde_json::json!({
            "operations": self.operations,
            "per_second": self.per_second,
            "p50_ms": self.p50_ms,
            "p99_ms": self.p99_ms,
            "p999_ms": self.p999_ms,
        })
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:>8.0}/s   p50 {:>7.2} ms   p99 {:>7.2} ms   p99.9 {:>7.2} ms",
            self.per_second, self.p50_ms, self.p99_ms, self.p999_ms
        )
    }
}
