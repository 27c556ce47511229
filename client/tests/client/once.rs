//! The whole dance in one call.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use onceward_client::{Client, Failure, OnceError, Source, StoredResult, proto};
use serde::{Deserialize, Serialize};

use crate::{
    proxy::Fault,
    support::{MILLISECOND, SECOND, acquired, direct, eventually, is_free, key, within, world},
};

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Receipt {
    charge: String,
    cents: u64,
}

fn receipt() -> Receipt {
    Receipt { charge: "ch_17".into(), cents: 100 }
}

type Never = std::convert::Infallible;

#[tokio::test]
async fn the_work_runs_once_and_its_value_is_replayed_with_its_origin() {
    let world = world().await;
    let origin = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let fresh = world
        .client
        .once(key("k"))
        .traceparent(origin)
        .run(async |_| Ok::<_, Failure<Never>>(receipt()))
        .await
        .unwrap();
    assert_eq!((fresh.value, fresh.source), (receipt(), Source::Fresh));
    let again =
        world.client.once(key("k")).run(async |_| -> Result<Receipt, Failure<Never>> { panic!("it runs again") });
    let again = again.await.unwrap();
    assert_eq!((again.value, again.source), (receipt(), Source::Replayed { attempt: 1, origin: Some(origin.into()) }));
}

#[tokio::test]
async fn a_crowd_runs_the_work_once_and_everybody_gets_the_value() {
    let world = world().await;
    let runs = Arc::new(AtomicUsize::new(0));
    let crowd = (0..50).map(|_| {
        let (once, runs) = (world.client.once(key("k")), runs.clone());
        tokio::spawn(once.run(async move |_| {
            runs.fetch_add(1, Ordering::Relaxed);
            tokio::time::sleep(50 * MILLISECOND).await;
            Ok::<_, Failure<Never>>(7)
        }))
    });
    for one in crowd.collect::<Vec<_>>() {
        assert_eq!(within(10 * SECOND, one).await.unwrap().unwrap().value, 7);
    }
    assert_eq!(runs.load(Ordering::Relaxed), 1);
}

#[tokio::test]
async fn messages_are_replayed_too() {
    let world = world().await;
    let message = proto::Metadata { name: "n".into(), value: "v".into() };
    for _ in 0..2 {
        let (once, message) = (world.client.once(key("k")).message(), message.clone());
        let outcome = once.run(async |_| Ok::<_, Failure<Never>>(message.clone())).await.unwrap();
        assert_eq!(outcome.value, message);
    }
}

#[tokio::test]
async fn the_caller_says_what_an_error_means() {
    let world = world().await;
    let run = async |name: &str, failure: fn(String) -> Failure<String>| {
        world.client.once(key(name)).run(async |_| Err::<(), _>(failure("no money".into()))).await.unwrap_err()
    };
    assert!(matches!(run("retryable", Failure::Retryable).await, OnceError::Retryable(_)));
    assert!(is_free(&world.client, key("retryable")).await);

    assert!(matches!(run("permanent", Failure::permanent).await, OnceError::Permanent(_)));
    let OnceError::FailedBefore(finished) = run("permanent", |_| panic!("it runs again")).await else { panic!() };
    assert_eq!(finished.result, StoredResult::new("no money"));

    assert!(matches!(run("unknown", Failure::from).await, OnceError::Unknown(_)));
    assert!(!is_free(&world.client, key("unknown")).await);
}

#[tokio::test]
async fn a_value_that_cannot_be_kept_is_returned_and_the_work_never_runs_again() {
    let world = world().await;
    let large = "x".repeat(1 << 20);
    let outcome = world.client.once(key("large")).run(async |_| Ok::<_, Failure<Never>>(large.clone())).await.unwrap();
    assert_eq!(outcome.value, large);
    let again =
        world.client.once(key("large")).run(async |_| -> Result<String, Failure<Never>> { panic!("it runs again") });
    assert!(matches!(again.await, Err(OnceError::NotKept(_))));

    let no_json = || BTreeMap::from([(vec![1, 2], 3)]);
    let outcome = world.client.once(key("no JSON")).run(async |_| Ok::<_, Failure<Never>>(no_json())).await.unwrap();
    assert_eq!(outcome.value, no_json());
    let again =
        world.client.once(key("no JSON")).run(async |_| -> Result<u8, Failure<Never>> { panic!("it runs again") });
    assert!(matches!(again.await, Err(OnceError::NotKept(_))));
}

#[tokio::test]
async fn a_value_that_cannot_be_read_is_an_error_and_not_a_second_run() {
    let world = world().await;
    acquired(world.client.reserve(key("k"))).await.complete("no JSON").await.unwrap();
    let once = world.client.once(key("k")).run(async |_| -> Result<u8, Failure<Never>> { panic!("it runs again") });
    assert!(matches!(once.await, Err(OnceError::Codec(_))));
}

#[tokio::test]
async fn who_is_held_up_learns_why() {
    let world = world().await;
    let once = |name: &str| world.client.once(key(name)).wait(50 * MILLISECOND);
    let held = acquired(world.client.reserve(key("held")).owner("pod-7")).await;
    let Err(OnceError::InProgress(progress)) = once("held").run(async |_| Ok::<_, Failure<Never>>(1)).await else {
        panic!()
    };
    assert_eq!(progress.owner.as_deref(), Some("pod-7"));
    drop(held);

    drop(acquired(world.client.reserve(key("doubt")).hold().lock_ttl(50 * MILLISECOND)).await);
    eventually("it is in doubt", async || {
        matches!(once("doubt").run(async |_| Ok::<_, Failure<Never>>(1)).await, Err(OnceError::InDoubt(_)))
    })
    .await;
}

#[tokio::test]
async fn the_work_is_told_and_by_option_cancelled_when_its_lease_is_lost() {
    let world = world().await;
    let once = |name: &str| world.client.once(key(name)).lock_ttl(200 * MILLISECOND);
    let lost = |world: &crate::support::World| world.proxy.both(Fault::Blackhole);
    let told = once("told").run(async |lease| {
        lost(&world);
        lease.lost().await;
        world.proxy.both(Fault::None);
        Ok::<_, Failure<Never>>(1)
    });
    // Nobody took over, so it counts.
    assert_eq!(within(10 * SECOND, told).await.unwrap().value, 1);

    let cancelled = once("cancelled").cancel_on_loss().run(async |_| {
        lost(&world);
        std::future::pending::<Result<u8, Failure<Never>>>().await
    });
    assert!(matches!(within(5 * SECOND, cancelled).await, Err(OnceError::LeaseLost)));
}

#[tokio::test]
async fn who_was_overtaken_returns_the_value_that_everybody_else_gets() {
    let world = world().await;
    let observer = direct(&world.server);
    let once = world.client.once(key("k")).lock_ttl(200 * MILLISECOND);
    let overtaken = once.run(async |lease| {
        world.proxy.both(Fault::Blackhole);
        lease.lost().await;
        let second = observer.once(key("k")).run(async |_| Ok::<_, Failure<Never>>("second".to_owned())).await.unwrap();
        assert_eq!((second.value.as_str(), second.source), ("second", Source::Fresh));
        world.proxy.both(Fault::None);
        Ok::<_, Failure<Never>>("first".to_owned())
    });
    let outcome = within(10 * SECOND, overtaken).await.unwrap();
    assert_eq!((outcome.value.as_str(), outcome.source), ("second", Source::Replayed { attempt: 2, origin: None }));
}

#[tokio::test]
async fn a_disabled_client_acts_each_time_and_asks_nobody() {
    let client = Client::builder(["http://127.0.0.1:1"]).disabled(true).connect().await.unwrap();
    for n in 1..=2 {
        let outcome =
            client.once(key("k")).run(async |lease| Ok::<_, Failure<Never>>((n, lease.attempt()))).await.unwrap();
        assert_eq!((outcome.value, outcome.source), ((n, 1), Source::Fresh));
    }
}
