//! Faults of servers and of the way to them, and what must not come of them.

use std::{
    convert::Infallible,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, SystemTime},
};

use onceward::proto::{self, batch_operation::Operation, batch_result::Result as Answer, reserve_response::Outcome};
use onceward_client::{Client, Error, Failure, OnceError, Reservation, StoredResult};
use tokio::{
    runtime::Builder,
    task::JoinSet,
    time::{Instant, sleep, timeout},
};
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt};

use crate::{
    fake::{Call, Fake, granting},
    proxy::{Fault, Proxy, Way},
    support::{MILLISECOND, SECOND, acquired, completed, direct, eventually, key, server, within, world},
};

/// A fake that holds no call.
async fn fake(answering: impl Fn(&Operation, bool) -> Result<Answer, Status> + Send + Sync + 'static) -> Fake {
    let fake = Fake::start(answering).await;
    fake.let_go(100_000);
    fake
}

fn impatient(fake: &Fake) -> Client {
    Client::builder([fake.endpoint()]).timeout(300 * MILLISECOND).batch_calls_max(1).lazy().unwrap()
}

fn asked(fake: &Fake, verb: &str) -> usize {
    fake.calls().iter().filter(|call| matches!(call, Call::Single(other, _) if *other == verb)).count()
}

fn known(outcome: Outcome) -> Result<Answer, Status> {
    Ok(Answer::Reserve(proto::ReserveResponse { outcome: Some(outcome) }))
}

#[tokio::test]
async fn a_doubt_of_our_own_is_given_back_however_long_that_takes() {
    let (reserves, away) = (AtomicUsize::new(0), Arc::new(AtomicBool::new(true)));
    let is_away = away.clone();
    let fake = fake(move |operation, batched| match operation {
        Operation::Reserve(_) if reserves.fetch_add(1, Ordering::SeqCst) == 0 => Err(Status::unavailable("cut")),
        Operation::Reserve(_) => known(Outcome::InDoubt(proto::InDoubt::default())),
        Operation::Fail(_) if is_away.load(Ordering::SeqCst) => Err(Status::unavailable("away")),
        other => granting(other, batched),
    })
    .await;
    assert!(matches!(impatient(&fake).reserve(key("k")).hold().await, Err(Error::Unavailable(_))));
    // Far beyond the time that the caller had.
    let before = asked(&fake, "fail");
    eventually("it goes on", async || asked(&fake, "fail") > before + 2).await;
    away.store(false, Ordering::SeqCst);
    sleep(4 * SECOND).await;
    let after = asked(&fake, "fail");
    sleep(SECOND).await;
    assert_eq!(asked(&fake, "fail"), after);
}

#[tokio::test]
async fn a_reserve_that_may_have_been_done_is_given_back_whatever_the_last_answer_was() {
    let tries = AtomicUsize::new(0);
    let fake = fake(move |operation, batched| match operation {
        Operation::Reserve(_) => match tries.fetch_add(1, Ordering::SeqCst) {
            0 => Err(Status::unavailable("done, and the answer lost")),
            1 => Err(Status::unimplemented("no such path")),
            _ => granting(operation, batched),
        },
        other => granting(other, batched),
    })
    .await;
    assert!(matches!(impatient(&fake).reserve(key("k")).hold().await, Err(Error::Other(_))));
    eventually("it is given back", async || asked(&fake, "fail") == 1).await;
}

#[tokio::test]
async fn a_reserve_that_was_not_done_leaves_nothing_to_give_back() {
    let fake = fake(|operation, batched| match operation {
        Operation::Reserve(_) => {
            let details = ErrorDetails::with_error_info("OVERLOADED", "onceward", []);
            Err(Status::with_error_details(Code::ResourceExhausted, "overloaded", details))
        }
        other => granting(other, batched),
    })
    .await;
    let client = impatient(&fake);
    client.reserve(key("k")).await.unwrap_err();
    let calls = fake.calls().len();
    // Nothing goes on in the background.
    within(SECOND, client.close()).await;
    assert_eq!(fake.calls().len(), calls);

    let nobody = Client::builder(["http://127.0.0.1:1"]).timeout(200 * MILLISECOND).lazy().unwrap();
    nobody.reserve(key("k")).hold().await.unwrap_err();
    within(SECOND, nobody.close()).await;
}

#[tokio::test]
async fn who_left_while_waiting_does_not_wait_on() {
    let world = world().await;
    let guard = acquired(world.client.reserve(key("k"))).await;
    for _ in 0..100 {
        assert!(timeout(5 * MILLISECOND, world.client.reserve(key("k")).wait(60 * SECOND)).await.is_err());
    }
    let observer = direct(&world.server);
    let waiting = tokio::spawn(acquired(observer.reserve(key("k")).wait(30 * SECOND)));
    sleep(SECOND).await;
    guard.release().await.unwrap();
    assert_eq!(within(5 * SECOND, waiting).await.unwrap().attempt(), 2);
}

#[tokio::test]
async fn who_waited_while_the_service_went_away_knows_that_somebody_is_at_it() {
    let world = world().await;
    let _guard = acquired(world.client.reserve(key("k"))).await;
    let waiting = Client::builder([world.proxy.endpoint()]).timeout(500 * MILLISECOND).lazy().unwrap();
    let waiting = tokio::spawn(waiting.reserve(key("k")).wait(SECOND).into_future());
    sleep(300 * MILLISECOND).await;
    world.proxy.both(Fault::Blackhole);
    let found = within(10 * SECOND, waiting).await.unwrap();
    assert!(matches!(found, Ok(Reservation::InProgress(_))), "{found:?}");
}

#[tokio::test]
async fn who_is_turned_away_does_not_ask_all_the_time() {
    let fake = fake(|operation, batched| match operation {
        Operation::Reserve(_) => known(Outcome::InProgress(proto::InProgress::default())),
        other => granting(other, batched),
    })
    .await;
    let client = Client::builder([fake.endpoint()]).lazy().unwrap();
    assert!(matches!(client.reserve(key("k")).wait(3 * SECOND).await.unwrap(), Reservation::InProgress(_)));
    assert!((3..12).contains(&fake.calls().len()), "{}", fake.calls().len());
}

#[tokio::test]
async fn no_work_begins_under_a_lease_that_is_lost() {
    let server = server();
    let proxy = Proxy::start(server.address()).await;
    let client = Client::builder([proxy.endpoint()]).lazy().unwrap();
    client.lookup(key("connected")).await.unwrap();
    // The answer to the Reserve comes late, and that to the Renew which follows later than the lock.
    proxy.fault(Way::Back, Fault::Delay(300 * MILLISECOND));
    let runs: Arc<Mutex<Vec<&str>>> = Arc::default();
    let slow = tokio::spawn({
        let runs = runs.clone();
        async move {
            let once = client.once(key("k")).lock_ttl(500 * MILLISECOND);
            once.run(async |lease| {
                assert!(!lease.is_lost());
                runs.lock().unwrap().push("slow");
                Ok::<_, Failure<Infallible>>("slow".to_owned())
            })
            .await
        }
    });
    sleep(100 * MILLISECOND).await;
    proxy.fault(Way::Back, Fault::Delay(700 * MILLISECOND));
    let other = direct(&server).once(key("k")).run(async |_| {
        runs.lock().unwrap().push("other");
        sleep(SECOND).await;
        Ok::<_, Failure<Infallible>>("other".to_owned())
    });
    let other = other.await.unwrap();
    proxy.fault(Way::Back, Fault::None);
    assert_eq!(within(10 * SECOND, slow).await.unwrap().unwrap().value, other.value);
    assert_eq!(runs.lock().unwrap().len(), 1);
}

#[tokio::test]
async fn a_way_that_is_slower_than_the_lock_is_long_is_told() {
    let world = world().await;
    let client = world.client.clone();
    client.lookup(key("connected")).await.unwrap();
    let slow = Client::builder([world.proxy.endpoint()]).timeout(500 * MILLISECOND).lazy().unwrap();
    world.proxy.both(Fault::Delay(50 * MILLISECOND));
    let reserved = within(10 * SECOND, slow.reserve(key("k")).lock_ttl(20 * MILLISECOND).into_future()).await;
    assert!(matches!(reserved, Err(Error::Unavailable(_))), "{reserved:?}");
}

#[tokio::test]
async fn a_completion_does_not_give_up_for_anything_on_the_way() {
    for code in (1..=16).map(Code::from_i32) {
        let first = AtomicUsize::new(0);
        let fake = fake(move |operation, batched| match operation {
            Operation::Complete(_) if first.fetch_add(1, Ordering::SeqCst) == 0 => {
                Err(Status::new(code, "of an ingress"))
            }
            other => granting(other, batched),
        })
        .await;
        let client = Client::builder([fake.endpoint()]).batch_calls_max(1).lazy().unwrap();
        let guard = acquired(client.reserve(key("k"))).await;
        within(5 * SECOND, guard.complete("done")).await.unwrap_or_else(|error| panic!("{code:?}: {error}"));
    }
}

#[tokio::test]
async fn a_result_that_is_refused_leaves_a_mark_and_nobody_acts_again() {
    let world = world().await;
    let lock = 50 * MILLISECOND;
    let reserve = |name: &str| world.client.reserve(key(name)).lock_ttl(lock);
    let large = acquired(reserve("large")).await.complete(vec![0; (1 << 20) + 1]).await;
    assert!(matches!(large, Err(Error::NotKept(_))), "{large:?}");
    let odd = StoredResult::new("x").metadata("a\0b", "v");
    let odd_is_kept = acquired(reserve("odd")).await.complete(odd).await.is_ok();
    for retention in [Duration::from_nanos(1), Duration::MAX] {
        let guard = acquired(reserve(&format!("{retention:?}"))).await;
        let settled = guard.retention(retention).complete("x").await.unwrap();
        assert!(settled.expires_at > SystemTime::now() + 3600 * SECOND);
        assert_eq!(completed(reserve(&format!("{retention:?}"))).await, "x");
    }
    let checkpoint = acquired(reserve("checkpoint")).await.release_with_checkpoint(vec![0; 17 << 10]).await;
    assert!(matches!(checkpoint, Err(Error::NotKept(_))), "{checkpoint:?}");
    assert_eq!(acquired(reserve("checkpoint")).await.attempt(), 2);
    let both = acquired(reserve("both")).await.retention(Duration::MAX).complete(vec![0; (1 << 20) + 1]).await;
    assert!(matches!(both, Err(Error::NotKept(_))), "{both:?}");
    let permanent = world.client.once(key("permanent")).lock_ttl(lock);
    let permanent = permanent.run(async |_| Err::<(), _>(Failure::permanent("x".repeat((1 << 20) + 1)))).await;
    assert!(matches!(permanent, Err(OnceError::Permanent(_))));
    sleep(2 * lock).await;
    for (name, kept) in [("large", false), ("odd", odd_is_kept), ("both", false), ("permanent", false)] {
        let (Reservation::Completed(finished) | Reservation::Failed(finished)) = reserve(name).await.unwrap() else {
            panic!("{name} may be acted on again")
        };
        assert_eq!(finished.result.is_kept(), kept, "{name}");
    }
}

#[tokio::test]
async fn no_duration_is_too_long() {
    let server = server();
    let long = Client::builder([server.endpoint()]).timeout(Duration::MAX).attempt_timeout(Duration::MAX);
    let long = long.connect_timeout(Duration::MAX).keepalive(Duration::MAX, Duration::MAX).lazy().unwrap();
    acquired(long.reserve(key("k")).wait(Duration::MAX)).await.complete("x").await.unwrap();
    assert_eq!(completed(long.reserve(key("k")).wait(Duration::MAX)).await, "x");
    let disabled = server.builder().disabled(true).lazy().unwrap();
    acquired(disabled.reserve(key("k")).lock_ttl(Duration::MAX)).await.complete("x").await.unwrap();
    let away = Client::builder(["http://127.0.0.1:1"]).timeout(100 * MILLISECOND).lazy().unwrap();
    let unreached = away.reserve(key("k")).lock_ttl(Duration::MAX).await;
    assert!(matches!(unreached, Err(Error::Unavailable(_))), "{unreached:?}");
}

#[tokio::test]
async fn checkpoints_that_are_given_up_do_not_starve_the_lease() {
    let world = world().await;
    let guard = acquired(world.client.reserve(key("k")).lock_ttl(SECOND)).await;
    world.proxy.fault(Way::There, Fault::Delay(60 * MILLISECOND));
    let mut lease = guard.lease();
    let end = Instant::now() + 2 * SECOND;
    while Instant::now() < end {
        let _ = timeout(30 * MILLISECOND, lease.checkpoint("x")).await;
        assert!(!guard.is_lost());
    }
}

#[tokio::test]
async fn checkpoints_that_are_refused_do_not_starve_the_lease() {
    let world = world().await;
    let guard = acquired(world.client.reserve(key("k")).lock_ttl(600 * MILLISECOND)).await;
    let saving: JoinSet<()> = (0..3)
        .map(|_| {
            let mut lease = guard.lease();
            async move {
                loop {
                    let refused = lease.checkpoint(vec![0; 17 << 10]).await;
                    assert!(matches!(refused, Err(Error::Invalid(_))), "{refused:?}");
                    sleep(20 * MILLISECOND).await;
                }
            }
        })
        .collect();
    sleep(2 * SECOND).await;
    assert!(!guard.is_lost());
    drop(saving);
    guard.complete("done").await.unwrap();
}

#[test]
fn a_client_outlives_other_runtimes_that_it_was_used_from() {
    let server = server();
    let home = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let (proxy, client) = home.block_on(async {
        let proxy = Proxy::start(server.address()).await;
        let builder = Client::builder([proxy.endpoint()]).attempt_timeout(200 * MILLISECOND).timeout(500 * MILLISECOND);
        (proxy, builder.batch_calls_max(1).lazy().unwrap())
    });
    let elsewhere = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    elsewhere.block_on(client.lookup(key("k"))).unwrap();
    proxy.both(Fault::Blackhole);
    assert!(elsewhere.block_on(client.lookup(key("k"))).is_err());
    drop(elsewhere);
    proxy.cut_all();
    proxy.both(Fault::None);
    home.block_on(async { acquired(client.reserve(key("k"))).await.complete("1").await.unwrap() });
}

#[tokio::test]
async fn a_checkpoint_after_the_loss_is_saved_or_says_why_and_what_is_lost_stays_lost() {
    let world = world().await;
    let mut guard = acquired(world.client.reserve(key("k")).lock_ttl(300 * MILLISECOND)).await;
    world.proxy.both(Fault::Blackhole);
    within(SECOND, guard.lost()).await;
    world.proxy.both(Fault::None);
    within(5 * SECOND, guard.checkpoint("1")).await.unwrap();
    assert!(guard.is_lost());
    let other = acquired(direct(&world.server).reserve(key("k")).wait(5 * SECOND)).await;
    assert_eq!(other.resume_from().unwrap(), "1");
    assert!(matches!(within(5 * SECOND, guard.checkpoint("2")).await, Err(Error::LeaseLost)));
}

#[test]
fn the_loss_is_told_although_the_clients_runtime_rests() {
    let server = server();
    let home = Builder::new_current_thread().enable_all().build().unwrap();
    let guard = home.block_on(async { acquired(direct(&server).reserve(key("k")).lock_ttl(200 * MILLISECOND)).await });
    let elsewhere = Builder::new_current_thread().enable_all().build().unwrap();
    elsewhere.block_on(within(SECOND, guard.lost()));
}
