//! Faults at random, and what holds whatever they are.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use onceward_client::{Client, Failure, Reservation, Source, proto::RecordStatus};
use tokio::{
    task::JoinSet,
    time::{Instant, sleep, timeout},
};

use crate::{
    proxy::{Fault, Proxy, Way},
    support::{MILLISECOND, SECOND, direct, key, server, within},
};

/// Each key's values, as callers got them, and whether they were fresh.
type Values = HashMap<u64, Vec<(u64, bool)>>;

/// Faults at random on the ways of several clients.
async fn disturb(proxies: Arc<Vec<Proxy>>) {
    let mut state = 88_172_645_463_325_252_u64;
    loop {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        let proxy = &proxies[(state % 4) as usize];
        let way = if state & 16 == 0 { Way::There } else { Way::Back };
        match (state >> 8) % 6 {
            0 => proxy.fault(way, Fault::Delay(Duration::from_millis((state >> 20) % 200))),
            1 => proxy.fault(way, Fault::Blackhole),
            2 => proxy.cut_all(),
            3 => proxy.fault(way, Fault::Cut),
            _ => proxy.both(Fault::None),
        }
        sleep(Duration::from_millis((state >> 32) % 40)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whatever_happens_on_the_way_each_key_has_one_value_and_nobody_leaves_a_doubt() {
    let server = server();
    let (mut proxies, mut clients) = (Vec::new(), Vec::new());
    for _ in 0..4 {
        let proxy = Proxy::start(server.address()).await;
        let builder = Client::builder([proxy.endpoint()]).attempt_timeout(150 * MILLISECOND).timeout(2 * SECOND);
        clients.push(builder.lazy().unwrap());
        proxies.push(proxy);
    }
    let proxies = Arc::new(proxies);
    let disturbing = tokio::spawn(disturb(proxies.clone()));
    let values: Arc<Mutex<Values>> = Arc::default();
    let ids = Arc::new(AtomicUsize::new(0));
    let end = Instant::now() + 5 * SECOND;
    let mut workers = JoinSet::new();
    for worker in 0..24_u64 {
        let client = clients[(worker % 4) as usize].clone();
        let (values, ids) = (values.clone(), ids.clone());
        workers.spawn(async move {
            for n in 0.. {
                if Instant::now() > end {
                    return;
                }
                let (number, id) = (n / 2 * 100 + worker / 8, ids.fetch_add(1, Ordering::SeqCst) as u64);
                // Those that may not be acted on twice are completed by whoever gets them.
                let held = client.reserve(key(&format!("held {id}"))).hold().lock_ttl(150 * MILLISECOND);
                if let Ok(Ok(Reservation::Acquired(guard))) = timeout(Duration::from_millis(id % 97), held).await {
                    tokio::spawn(guard.complete("x"));
                }
                let once = client.once(key(&number.to_string())).lock_ttl(300 * MILLISECOND).wait(SECOND);
                let run = once.run(async |mut lease| {
                    sleep(Duration::from_millis(id % 50)).await;
                    if id.is_multiple_of(3) {
                        let _ = lease.checkpoint("x").await;
                    }
                    if id.is_multiple_of(7) { Err(Failure::Retryable("again")) } else { Ok(id) }
                });
                let patience = if id.is_multiple_of(5) { Duration::from_millis(id % 100) } else { 60 * SECOND };
                if let Ok(Ok(outcome)) = timeout(patience, run).await {
                    let fresh = outcome.source == Source::Fresh;
                    values.lock().unwrap().entry(number).or_default().push((outcome.value, fresh));
                }
            }
        });
    }
    within(120 * SECOND, workers.join_all()).await;
    disturbing.abort();
    proxies.iter().for_each(|proxy| proxy.both(Fault::None));
    for client in &clients {
        within(30 * SECOND, client.close()).await;
    }
    for (number, values) in values.lock().unwrap().iter() {
        assert!(values.iter().all(|(value, _)| *value == values[0].0), "{number}: {values:?}");
        assert!(values.iter().filter(|(_, fresh)| *fresh).count() <= 1, "{number}: {values:?}");
    }
    let observer = direct(&server);
    for id in 0..ids.load(Ordering::SeqCst) {
        if let Some(record) = observer.lookup(key(&format!("held {id}"))).await.unwrap() {
            assert_ne!(record.status(), RecordStatus::InDoubt, "{record:?}");
        }
    }
}
