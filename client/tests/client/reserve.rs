//! What a Reserve brings, whatever happens to it on the way.

use std::time::Duration;

use onceward_client::{Error, Fingerprint, Reservation, proto::RecordStatus};
use tokio::time::{Instant, timeout};

use crate::{
    proxy::{Fault, Way},
    support::{
        MILLISECOND, SECOND, acquired, completed, direct, eventually, is_free, is_known, is_unavailable, key, within,
        world, world_of,
    },
};

#[tokio::test]
async fn a_key_is_acquired_once_and_replayed_from_then_on() {
    let world = world().await;
    let guard = acquired(world.client.reserve(key("k"))).await;
    assert_eq!((guard.attempt(), guard.resume_from()), (1, None));
    assert!(matches!(world.client.reserve(key("k")).await.unwrap(), Reservation::InProgress(_)));
    guard.complete("done").await.unwrap();
    assert_eq!(completed(world.client.reserve(key("k"))).await, "done");
}

#[tokio::test]
async fn a_permanent_failure_is_replayed_and_a_released_key_is_free() {
    let world = world().await;
    acquired(world.client.reserve(key("refused"))).await.fail("no money").await.unwrap();
    let Reservation::Failed(finished) = world.client.reserve(key("refused")).await.unwrap() else { panic!() };
    assert_eq!(finished.result.body, "no money");

    acquired(world.client.reserve(key("free"))).await.release_with_checkpoint("page 7").await.unwrap();
    let guard = acquired(world.client.reserve(key("free"))).await;
    assert_eq!((guard.attempt(), guard.resume_from().unwrap().as_ref()), (2, &b"page 7"[..]));
}

#[tokio::test]
async fn the_same_key_with_another_fingerprint_is_refused() {
    let world = world().await;
    let reserve = |body: &str| world.client.reserve(key("k")).fingerprint(Fingerprint::of_bytes(body));
    let guard = acquired(reserve("a")).await;
    assert!(matches!(reserve("b").await, Err(Error::FingerprintMismatch)));
    guard.complete("done").await.unwrap();
    assert!(matches!(reserve("b").await, Err(Error::FingerprintMismatch)));
    assert_eq!(completed(reserve("a")).await, "done");
}

#[tokio::test]
async fn what_the_service_refuses_says_why() {
    let world = world().await;
    let error = world.client.reserve(key("")).await.unwrap_err();
    assert!(matches!(&error, Error::Invalid(why) if why.contains("key.value")), "{error}");
    let error = world.client.reserve(key("k")).lock_ttl(Duration::MAX).await.unwrap_err();
    assert!(matches!(&error, Error::Invalid(why) if why.contains("lock_ttl")), "{error}");
}

#[tokio::test]
async fn a_reserve_whose_answer_is_lost_is_the_same_reservation_when_sent_again() {
    let world = world().await;
    world.proxy.fault(Way::Back, Fault::Cut);
    let reserving = tokio::spawn(acquired(world.client.reserve(key("k"))));
    // It is held although nobody was told.
    let observer = direct(&world.server);
    eventually("the key is held", async || is_known(&observer, key("k")).await).await;
    world.proxy.fault(Way::Back, Fault::None);
    let guard = within(5 * SECOND, reserving).await.unwrap();
    assert!(!guard.is_lost());
    guard.complete("once").await.unwrap();
    assert_eq!(completed(observer.reserve(key("k"))).await, "once");
}

#[tokio::test]
async fn a_silent_connection_is_left_for_a_new_one() {
    let world = world_of(|builder| builder.attempt_timeout(200 * MILLISECOND)).await;
    acquired(world.client.reserve(key("first"))).await.complete("1").await.unwrap();
    world.proxy.both(Fault::Blackhole);
    let reserving = tokio::spawn(acquired(world.client.reserve(key("second"))));
    tokio::time::sleep(300 * MILLISECOND).await;
    world.proxy.both(Fault::None);
    within(3 * SECOND, reserving).await.unwrap().complete("2").await.unwrap();
}

#[tokio::test]
async fn a_call_ends_when_its_time_is_over() {
    let world = world_of(|builder| builder.timeout(300 * MILLISECOND)).await;
    world.proxy.both(Fault::Blackhole);
    let begun = Instant::now();
    assert!(is_unavailable(&world.client.reserve(key("k")).await));
    assert!(begun.elapsed() < SECOND, "{:?}", begun.elapsed());
}

#[tokio::test]
async fn a_reservation_that_nobody_awaits_any_more_is_given_back() {
    let world = world().await;
    world.proxy.fault(Way::Back, Fault::Blackhole);
    assert!(timeout(100 * MILLISECOND, world.client.reserve(key("k"))).await.is_err());
    let observer = direct(&world.server);
    eventually("the key is held", async || is_known(&observer, key("k")).await).await;
    world.proxy.fault(Way::Back, Fault::None);
    eventually("the key is free", async || is_free(&observer, key("k")).await).await;
}

#[tokio::test]
async fn a_reservation_that_was_answered_too_late_is_given_back() {
    let world = world_of(|builder| builder.timeout(200 * MILLISECOND)).await;
    world.proxy.fault(Way::Back, Fault::Blackhole);
    assert!(is_unavailable(&world.client.reserve(key("k")).await));
    let observer = direct(&world.server);
    eventually("the key is held", async || is_known(&observer, key("k")).await).await;
    world.proxy.fault(Way::Back, Fault::None);
    eventually("the key is free", async || is_free(&observer, key("k")).await).await;
}

#[tokio::test]
async fn a_doubt_about_our_own_unanswered_reserve_is_no_doubt() {
    let world = world().await;
    world.proxy.fault(Way::Back, Fault::Cut);
    let reserve = world.client.reserve(key("k")).hold().lock_ttl(50 * MILLISECOND);
    let reserving = tokio::spawn(acquired(reserve));
    let observer = direct(&world.server);
    eventually("it is in doubt", async || {
        observer.lookup(key("k")).await.unwrap().is_some_and(|record| record.status() == RecordStatus::InDoubt)
    })
    .await;
    world.proxy.fault(Way::Back, Fault::None);
    let guard = within(10 * SECOND, reserving).await.unwrap();
    assert_eq!(guard.attempt(), 2);
    guard.complete("once").await.unwrap();
}

#[tokio::test]
async fn a_doubt_about_somebody_else_is_told() {
    let world = world().await;
    drop(acquired(world.client.reserve(key("k")).hold().lock_ttl(100 * MILLISECOND)).await);
    eventually("it is in doubt", async || {
        matches!(world.client.reserve(key("k")).await.unwrap(), Reservation::InDoubt(doubt) if doubt.attempt >= 1)
    })
    .await;
}

#[tokio::test]
async fn who_waits_gets_the_result_when_it_is_there_or_the_key_when_it_is_free() {
    let world = world().await;
    for (value, complete) in [("completed", true), ("released", false)] {
        let guard = acquired(world.client.reserve(key(value))).await;
        let waiting = tokio::spawn(world.client.reserve(key(value)).wait(20 * SECOND).into_future());
        tokio::time::sleep(50 * MILLISECOND).await;
        assert!(!waiting.is_finished());
        if complete {
            guard.complete("done").await.unwrap();
            assert!(matches!(within(5 * SECOND, waiting).await.unwrap().unwrap(), Reservation::Completed(_)));
        } else {
            guard.release().await.unwrap();
            let Reservation::Acquired(guard) = within(5 * SECOND, waiting).await.unwrap().unwrap() else { panic!() };
            guard.complete("done").await.unwrap();
        }
    }
}

#[tokio::test]
async fn a_lease_that_was_waited_for_longer_than_its_lock_is_live() {
    let world = world().await;
    let lock = 300 * MILLISECOND;
    let guard = acquired(world.client.reserve(key("k"))).await;
    let waiting = tokio::spawn(acquired(world.client.reserve(key("k")).lock_ttl(lock).wait(20 * SECOND)));
    tokio::time::sleep(2 * lock).await;
    guard.release().await.unwrap();
    let guard = within(5 * SECOND, waiting).await.unwrap();
    assert!(!guard.is_lost());
    guard.complete("done").await.unwrap();
}

#[tokio::test]
async fn a_crowd_that_leaves_harms_nobody_who_stays() {
    let world = world().await;
    let held = acquired(world.client.reserve(key("held"))).await;
    let waiting = tokio::spawn(completed(world.client.reserve(key("held")).wait(30 * SECOND)));
    let leaving = (0..1500).map(|n| {
        let reserve = world.client.reserve(key(&format!("k{n}")));
        tokio::spawn(timeout(Duration::from_micros(n), reserve.into_future()))
    });
    for left in leaving.collect::<Vec<_>>() {
        drop(left.await.unwrap());
    }
    world.proxy.cut_all();
    held.complete("still here").await.unwrap();
    assert_eq!(within(10 * SECOND, waiting).await.unwrap(), "still here");
    // Nothing of the crowd is left behind but what was acquired and dropped.
    acquired(world.client.reserve(key("after"))).await.complete("1").await.unwrap();
}

#[tokio::test]
async fn a_closed_client_ends_what_was_begun_and_begins_nothing() {
    let world = world().await;
    let guard = acquired(world.client.reserve(key("k"))).await;
    let closing = {
        let client = world.client.clone();
        tokio::spawn(async move { client.close().await })
    };
    eventually("nothing new is begun", async || matches!(world.client.reserve(key("other")).await, Err(Error::Closed)))
        .await;
    assert!(!closing.is_finished());
    drop(guard.complete("done"));
    within(5 * SECOND, closing).await.unwrap();
    assert_eq!(completed(direct(&world.server).reserve(key("k"))).await, "done");
}
