//! What a guard keeps, and what it tells, whatever happens to it.

use std::{thread, time::Duration};

use onceward_client::{Error, Guard, Reservation, Resolution, testing::Server};
use tokio::{runtime::Builder, time::Instant};

use crate::{
    proxy::{Fault, Way},
    support::{MILLISECOND, SECOND, acquired, completed, direct, eventually, is_free, key, server, within, world},
};

#[tokio::test]
async fn a_guard_holds_its_key_for_longer_than_the_lock() {
    let world = world().await;
    let lock = 300 * MILLISECOND;
    let guard = acquired(world.client.reserve(key("k")).lock_ttl(lock)).await;
    let end = Instant::now() + 4 * lock;
    while Instant::now() < end {
        assert!(matches!(world.client.reserve(key("k")).await.unwrap(), Reservation::InProgress(_)));
        assert!(!guard.is_lost());
    }
    guard.complete("done").await.unwrap();
}

#[tokio::test]
async fn a_lease_outlives_missed_renewals_and_is_lost_no_later_than_its_lock() {
    let world = world().await;
    let lock = 1200 * MILLISECOND;
    // Half of the lock nothing passes, and then everything again.
    let guard = acquired(world.client.reserve(key("survives")).lock_ttl(lock)).await;
    world.proxy.both(Fault::Blackhole);
    tokio::time::sleep(lock / 2).await;
    world.proxy.both(Fault::None);
    tokio::time::sleep(lock).await;
    assert!(!guard.is_lost());
    guard.complete("done").await.unwrap();

    let before = Instant::now();
    let guard = acquired(world.client.reserve(key("lost")).lock_ttl(lock)).await;
    let after = Instant::now();
    world.proxy.both(Fault::Blackhole);
    within(lock + SECOND, guard.lost()).await;
    assert!(guard.is_lost());
    // Not before it can have ended, and not after its real end: nothing was renewed.
    assert!(before.elapsed() >= lock, "{:?}", before.elapsed());
    assert!(after.elapsed() <= lock + 50 * MILLISECOND, "{:?}", after.elapsed());
}

#[tokio::test]
async fn a_takeover_is_noticed_and_the_late_completion_is_refused() {
    let world = world().await;
    let observer = direct(&world.server);
    let guard = acquired(world.client.reserve(key("k")).lock_ttl(200 * MILLISECOND)).await;
    world.proxy.both(Fault::Blackhole);
    within(SECOND, guard.lost()).await;
    let second = match observer.reserve(key("k")).wait(5 * SECOND).await.unwrap() {
        Reservation::Acquired(second) => second,
        other => panic!("{other:?}"),
    };
    assert!(second.fence() > guard.fence() && second.attempt() == 2);
    world.proxy.both(Fault::None);
    assert!(matches!(within(10 * SECOND, guard.complete("first")).await, Err(Error::LeaseLost)));
    second.complete("second").await.unwrap();
    assert_eq!(completed(observer.reserve(key("k"))).await, "second");
}

#[tokio::test]
async fn a_holder_whose_key_was_resolved_learns_it() {
    let world = world().await;
    let guard = acquired(world.client.reserve(key("k")).lock_ttl(600 * MILLISECOND)).await;
    let resolve = |resolution| world.client.resolve(key("k"), guard.fence(), resolution, true);
    let refused = world.client.resolve(key("k"), guard.fence(), Resolution::Retry, false).await;
    assert!(matches!(refused, Err(Error::LockLive)), "{refused:?}");
    resolve(Resolution::Complete("by hand".into())).await.unwrap();
    // By the next renewal, and not only when the lock is over.
    within(400 * MILLISECOND, guard.lost()).await;
    assert!(matches!(guard.complete("by the holder").await, Err(Error::LeaseLost)));
    assert_eq!(completed(world.client.reserve(key("k"))).await, "by hand");
    assert!(matches!(world.client.resolve(key("k"), 1, Resolution::Retry, true).await, Err(Error::FenceMismatch)));
    assert!(matches!(world.client.resolve(key("none"), 1, Resolution::Retry, true).await, Err(Error::KeyNotFound)));
}

#[tokio::test]
async fn a_completion_after_the_lock_is_taken_if_nobody_took_over() {
    let world = world().await;
    let guard = acquired(world.client.reserve(key("k")).lock_ttl(100 * MILLISECOND)).await;
    world.proxy.both(Fault::Blackhole);
    within(SECOND, guard.lost()).await;
    world.proxy.both(Fault::None);
    within(10 * SECOND, guard.complete("late")).await.unwrap();
    assert_eq!(completed(world.client.reserve(key("k"))).await, "late");
}

#[tokio::test]
async fn a_completion_goes_on_when_its_future_is_dropped_and_until_the_service_is_back() {
    let world = world().await;
    let guard = acquired(world.client.reserve(key("k"))).await;
    let address = world.server.address();
    // On a file, since memory would be gone with the server.
    drop(guard);
    let folder = std::env::temp_dir().join(format!("onceward-client-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let url = format!("--database-url=sqlite:{}", folder.join("restart.db").display());
    world.server.kill();
    let server = Server::on(address, &[&url]).unwrap();
    let guard = acquired(world.client.reserve(key("restart"))).await;
    server.kill();
    world.proxy.cut_all();
    drop(guard.complete("kept"));
    tokio::time::sleep(500 * MILLISECOND).await;
    let server = Server::on(address, &[&url]).unwrap();
    let observer = direct(&server);
    eventually("the result is there", async || {
        matches!(observer.reserve(key("restart")).await.unwrap(), Reservation::Completed(finished) if finished.result.body == "kept")
    })
    .await;
    std::fs::remove_dir_all(folder).unwrap();
}

#[tokio::test]
async fn a_completion_whose_answer_is_lost_is_completed_once() {
    let world = world().await;
    let guard = acquired(world.client.reserve(key("k"))).await;
    world.proxy.fault(Way::Back, Fault::Cut);
    let completing = tokio::spawn(guard.complete("once"));
    let observer = direct(&world.server);
    eventually("it is completed", async || {
        matches!(observer.reserve(key("k")).await.unwrap(), Reservation::Completed(_))
    })
    .await;
    world.proxy.fault(Way::Back, Fault::None);
    let settled = within(5 * SECOND, completing).await.unwrap().unwrap();
    assert!(settled.already);
}

#[tokio::test]
async fn a_dropped_guard_lets_the_lock_run_out_and_gives_the_key_back_only_if_asked_to() {
    let world = world().await;
    drop(acquired(world.client.reserve(key("silent"))).await);
    tokio::time::sleep(100 * MILLISECOND).await;
    assert!(!is_free(&world.client, key("silent")).await);

    drop(acquired(world.client.reserve(key("released"))).await.release_on_drop());
    eventually("the key is free", async || is_free(&world.client, key("released")).await).await;

    let short = world.client.reserve(key("short")).lock_ttl(100 * MILLISECOND);
    drop(acquired(short).await);
    eventually("the lock runs out", async || is_free(&world.client, key("short")).await).await;
}

#[tokio::test]
async fn a_panic_lets_the_lock_run_out() {
    let world = world().await;
    let guard = acquired(world.client.reserve(key("k")).lock_ttl(200 * MILLISECOND)).await;
    let lost = guard.lost();
    let panicked = tokio::spawn(async move {
        let _guard: Guard = guard;
        panic!("on purpose");
    });
    assert!(panicked.await.unwrap_err().is_panic());
    within(SECOND, lost).await;
    assert!(!is_free(&world.client, key("k")).await);
    eventually("the lock runs out", async || is_free(&world.client, key("k")).await).await;
}

#[test]
fn a_guard_may_be_dropped_in_any_thread_and_after_its_runtime() {
    let server = server();
    for release in [false, true] {
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let name = format!("dropped {release}");
        let guards = runtime.block_on(async {
            let client = direct(&server);
            let mut guards = Vec::new();
            for n in 0..3 {
                let guard = acquired(client.reserve(key(&format!("{name} {n}"))).lock_ttl(300 * MILLISECOND)).await;
                guards.push(if release { guard.release_on_drop() } else { guard });
            }
            guards
        });
        let [in_a_thread, unwinding, after_the_runtime] = <[Guard; 3]>::try_from(guards).unwrap();
        thread::spawn(move || drop(in_a_thread)).join().unwrap();
        assert!(
            thread::spawn(move || {
                let _guard = unwinding;
                panic!("on purpose");
            })
            .join()
            .is_err()
        );
        drop(runtime);
        assert!(after_the_runtime.is_lost());
        let lost = after_the_runtime.lost();
        let completing = after_the_runtime.complete("too late");
        let elsewhere = Builder::new_current_thread().enable_all().build().unwrap();
        elsewhere.block_on(async {
            within(SECOND, lost).await;
            assert!(matches!(completing.await, Err(Error::Closed)));
            let client = direct(&server);
            eventually("the locks run out", async || is_free(&client, key(&format!("{name} 2"))).await).await;
        });
    }
}

#[test]
fn a_handler_that_blocks_its_only_thread_finds_its_lease_lost() {
    let server = server();
    let runtime = Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let client = direct(&server);
        let guard = acquired(client.reserve(key("k")).lock_ttl(200 * MILLISECOND)).await;
        // Somebody else, who has a thread of their own, takes over meanwhile.
        let address = server.endpoint();
        let other = thread::spawn(move || {
            let runtime = Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let client = onceward_client::Client::builder([address]).lazy().unwrap();
                let guard = acquired(client.reserve(key("k")).wait(5 * SECOND)).await;
                guard.complete("by the other").await.unwrap();
            });
        });
        other.join().unwrap();
        assert!(guard.is_lost());
        assert!(matches!(guard.complete("by the blocked").await, Err(Error::LeaseLost)));
        assert_eq!(completed(client.reserve(key("k"))).await, "by the other");
    });
}

#[tokio::test]
async fn checkpoints_count_in_the_order_in_which_they_were_saved() {
    let world = world().await;
    let mut guard = acquired(world.client.reserve(key("k")).lock_ttl(500 * MILLISECOND)).await;
    guard.checkpoint("1").await.unwrap();
    world.proxy.fault(Way::There, Fault::Delay(50 * MILLISECOND));
    // The one that is given up may come late, but never over the one that follows.
    let _ = tokio::time::timeout(10 * MILLISECOND, guard.checkpoint("2")).await;
    guard.checkpoint("3").await.unwrap();
    world.proxy.fault(Way::There, Fault::None);
    assert!(matches!(guard.checkpoint(vec![0; 17 << 10]).await, Err(Error::Invalid(_))));
    assert!(!guard.is_lost());
    guard.release().await.unwrap();
    let mut guard = acquired(world.client.reserve(key("k"))).await;
    assert_eq!(guard.resume_from().unwrap(), "3");
    guard.checkpoint("").await.unwrap();
    let mut lease = guard.lease();
    guard.release().await.unwrap();
    assert!(matches!(lease.checkpoint("4").await, Err(Error::AlreadyFinished)));
    assert_eq!(acquired(world.client.reserve(key("k"))).await.resume_from(), None);
}

#[tokio::test]
async fn checkpoints_of_several_hands_are_all_answered_and_none_waits_for_a_completion() {
    let world = world().await;
    let guard = acquired(world.client.reserve(key("k"))).await;
    world.proxy.fault(Way::There, Fault::Delay(20 * MILLISECOND));
    let saving: Vec<_> = (0..10)
        .map(|n| {
            let mut lease = guard.lease();
            tokio::spawn(async move { lease.checkpoint(n.to_string()).await })
        })
        .collect();
    for saving in saving {
        within(5 * SECOND, saving).await.unwrap().unwrap();
    }
    world.proxy.both(Fault::Blackhole);
    let mut lease = guard.lease();
    let completing = tokio::spawn(guard.complete("done"));
    tokio::task::yield_now().await;
    assert!(matches!(within(SECOND, lease.checkpoint("late")).await, Err(Error::AlreadyFinished)));
    world.proxy.both(Fault::None);
    within(10 * SECOND, completing).await.unwrap().unwrap();
}

#[tokio::test]
async fn a_lease_that_was_completed_is_never_lost() {
    let world = world().await;
    let guard = acquired(world.client.reserve(key("k")).lock_ttl(50 * MILLISECOND)).await;
    let (lease, lost) = (guard.lease(), guard.lost());
    guard.complete("done").await.unwrap();
    assert!(tokio::time::timeout(150 * MILLISECOND, lost).await.is_err());
    assert!(!lease.is_lost());
}

#[tokio::test]
async fn a_result_is_returned_byte_for_byte_with_its_own_retention() {
    let world = world().await;
    for (n, body) in
        [&b""[..], b"0", b"false", b"null", b"{\"bb\":1,\"a\":1.10,\"bb\":2}", b"\xff\x00\xfe"].iter().enumerate()
    {
        let k = key(&n.to_string());
        let guard = acquired(world.client.reserve(k.clone())).await.retention(Duration::from_secs(3600));
        let result = onceward_client::StoredResult::new(*body).code(n as i32).metadata("a", "1").metadata("a", "ÿ");
        guard.complete(result.clone()).await.unwrap();
        let Reservation::Completed(finished) = world.client.reserve(k).await.unwrap() else { panic!() };
        assert_eq!(finished.result, result);
        let kept = finished.expires_at.duration_since(finished.finished_at).unwrap();
        assert_eq!(kept.as_secs(), 3600);
    }
}
