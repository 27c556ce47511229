//! What the rules cost: nothing that matters. A rule that shows up here has grown a loop.

#![allow(missing_docs, clippy::unwrap_used, reason = "a bench")]

use std::{hint::black_box, time::Duration};

use criterion::{Criterion, criterion_group, criterion_main};
use onceward::{
    lifecycle,
    record::{Key, OnExpiry, Record, Status, StoredResult, Timestamp, Token},
    write::{Finish, Reservation, Write},
};

fn reservation(token: &str) -> Reservation {
    Reservation {
        token: Token::new(token).unwrap(),
        fingerprint: None,
        lock_ttl: Duration::from_secs(30),
        retention: Duration::from_secs(86400),
        owner: None,
        on_expiry: OnExpiry::Retry,
        origin: None,
    }
}

fn completion() -> Finish {
    let result = Some(StoredResult { code: 200, metadata: Vec::new(), body: vec![b'r'; 256].into() });
    Finish { status: Status::Completed, resolved: false, result, retention: None, checkpoint: None }
}

fn rules(criterion: &mut Criterion) {
    let (key, now) = (Key::new("payments.charge", "ann", "order-1").unwrap(), Timestamp(1_000_000));
    let (holder, rival) = (reservation("holder"), reservation("rival"));
    let held = |write: Write| -> Record { write.apply(None, now).unwrap() };
    let live = held(lifecycle::insert(&key, &holder));
    let completed = lifecycle::finish_as_holder(&key, &holder.token, &completion()).apply(Some(&live), now).unwrap();
    let late = live.locked_until;

    let mut group = criterion.benchmark_group("rules");
    group.bench_function("a key", |b| b.iter(|| Key::new(black_box("payments.charge"), "ann", "order-1")));
    group.bench_function("reserve: fresh", |b| b.iter(|| lifecycle::insert(black_box(&key), &holder)));
    for (name, record, now) in [("in progress", &live, now), ("takeover", &live, late), ("completed", &completed, now)]
    {
        group.bench_function(format!("reserve: {name}"), |b| {
            b.iter(|| lifecycle::reserve(&key, &rival, black_box(Some(record)), now));
        });
    }
    let finish = completion();
    group.bench_function("complete: again", |b| {
        b.iter(|| lifecycle::finish(&key, &holder.token, &finish, black_box(Some(&completed)), now));
    });
    group.finish();
}

criterion_group!(benches, rules);
criterion_main!(benches);
