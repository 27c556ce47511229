//! What group commit costs by itself: concurrent writes through it, on a store that does nothing.

#![allow(missing_docs, clippy::unwrap_used, reason = "a bench")]

#[path = "support/nothing.rs"]
mod support;

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use futures_util::future::join_all;
use onceward::{
    lifecycle,
    record::{Key, OnExpiry, Token},
    store::{Store, grouped::Grouped},
    write::{Reservation, Write},
};

use self::support::Nothing;

fn write(n: usize) -> Write {
    let reservation = Reservation {
        token: Token::new("token").unwrap(),
        fingerprint: None,
        lock_ttl: Duration::from_secs(30),
        retention: Duration::from_secs(86400),
        owner: None,
        on_expiry: OnExpiry::Retry,
        origin: None,
    };
    lifecycle::insert(&Key::new("payments.charge", "ann", &n.to_string()).unwrap(), &reservation)
}

fn batcher(criterion: &mut Criterion) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let mut group = criterion.benchmark_group("batcher");
    for callers in [1, 64, 256] {
        group.throughput(Throughput::Elements(callers as u64));
        group.bench_function(BenchmarkId::new("writes at once", callers), |b| {
            b.to_async(&runtime).iter_custom(|rounds| async move {
                let store = Arc::new(Grouped::new(Arc::new(Nothing), 1));
                let writes: Vec<Write> = (0..callers).map(write).collect();
                let began = Instant::now();
                for _ in 0..rounds {
                    let calls = writes.iter().map(|write| store.write(vec![write.clone()]));
                    assert!(join_all(calls).await.iter().all(|results| results.iter().all(Result::is_ok)));
                }
                let took = began.elapsed();
                store.close().await;
                took
            });
        });
    }
    group.finish();
}

criterion_group!(benches, batcher);
criterion_main!(benches);
