//! Concurrent calls as Batches.

use std::sync::atomic::{AtomicUsize, Ordering};

use onceward::proto::{batch_operation::Operation, batch_result::Result as Answer};
use onceward_client::{Client, Error, Guard, Key};
use tokio::task::JoinHandle;
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt};

use crate::{
    fake::{Call, Fake, granting},
    support::{MILLISECOND, SECOND, acquired, completed, eventually, key, within, world_of},
};

const PLENTY: usize = 10_000;

fn client(fake: &Fake) -> Client {
    Client::builder([fake.endpoint()]).batches_in_flight(1).lazy().unwrap()
}

fn reserving(client: &Client, value: &str) -> JoinHandle<Guard> {
    tokio::spawn(acquired(client.reserve(key(value))))
}

async fn came(fake: &Fake, calls: usize) {
    eventually("the calls are there", async || fake.calls().len() >= calls).await;
}

/// One call on the way, and these behind it.
async fn behind_one(fake: &Fake, client: &Client, values: &[String]) -> Vec<JoinHandle<Guard>> {
    let before = fake.calls().len();
    let mut reserving_all = vec![reserving(client, "first")];
    came(fake, before + 1).await;
    reserving_all.extend(values.iter().map(|value| reserving(client, value)));
    // All of them are queued: each has had its turn.
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    reserving_all
}

fn values(count: usize) -> Vec<String> {
    (0..count).map(|n| format!("k{n}")).collect()
}

#[tokio::test]
async fn a_call_alone_goes_alone_and_those_behind_it_go_together() {
    let fake = Fake::start(granting).await;
    let client = client(&fake);
    let reserving = behind_one(&fake, &client, &values(100)).await;
    fake.let_go(PLENTY);
    for reserving in reserving {
        std::mem::forget(within(5 * SECOND, reserving).await.unwrap());
    }
    let expected = values(100).into_iter().map(|value| ("reserve", value)).collect();
    assert_eq!(fake.calls(), [Call::Single("reserve", "first".into()), Call::Batch(expected)]);
}

#[tokio::test]
async fn a_batch_has_no_more_calls_and_no_more_bytes_than_it_may() {
    let fake = Fake::start(granting).await;
    let client = Client::builder([fake.endpoint()]).batches_in_flight(1).batch_calls_max(30).lazy().unwrap();
    let reserving = behind_one(&fake, &client, &values(100)).await;
    fake.let_go(PLENTY);
    let mut guards = Vec::new();
    for reserving in reserving {
        guards.push(within(5 * SECOND, reserving).await.unwrap());
    }
    let sizes = |calls: &[Call]| -> Vec<usize> {
        calls.iter().map(|call| if let Call::Batch(items) = call { items.len() } else { 1 }).collect()
    };
    assert_eq!(sizes(&fake.calls()), [1, 30, 30, 30, 10]);

    // Results of 800 kB: three fit into a Batch.
    let before = fake.calls().len();
    let completing: Vec<_> =
        guards.into_iter().take(13).map(|guard| tokio::spawn(guard.complete(vec![7; 800_000]))).collect();
    for completing in completing {
        within(10 * SECOND, completing).await.unwrap().unwrap();
    }
    let sizes = sizes(&fake.calls()[before..]);
    assert!(sizes.iter().all(|size| *size <= 3) && sizes.iter().any(|size| *size > 1), "{sizes:?}");
}

#[tokio::test]
async fn it_can_be_turned_off() {
    let fake = Fake::start(granting).await;
    let client = Client::builder([fake.endpoint()]).batch_calls_max(1).lazy().unwrap();
    let reserving: Vec<_> = values(20).iter().map(|value| reserving(&client, value)).collect();
    // None waits for another.
    came(&fake, 20).await;
    fake.let_go(PLENTY);
    for reserving in reserving {
        std::mem::forget(within(5 * SECOND, reserving).await.unwrap());
    }
    assert!(fake.calls().iter().all(|call| matches!(call, Call::Single(..))));
}

#[tokio::test]
async fn completions_go_before_reservations_and_who_left_is_not_sent() {
    let fake = Fake::start(granting).await;
    let client = Client::builder([fake.endpoint()]).batches_in_flight(1).batch_calls_max(2).lazy().unwrap();
    fake.let_go(1);
    let guard = within(5 * SECOND, reserving(&client, "held")).await.unwrap();
    let mut all = behind_one(&fake, &client, &values(3)).await;
    let completing = tokio::spawn(guard.complete("done"));
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    fake.let_go(PLENTY);
    within(5 * SECOND, completing).await.unwrap().unwrap();
    for reserving in all.drain(..) {
        std::mem::forget(within(5 * SECOND, reserving).await.unwrap());
    }
    let Some(Call::Batch(items)) = fake.calls().get(2).cloned() else { panic!("{:?}", fake.calls()) };
    assert_eq!(items[1], ("complete", "held".into()));

    // A lookup that nobody awaits any more leaves nothing in the queue.
    let fake = Fake::start(granting).await;
    let client = self::client(&fake);
    let first = behind_one(&fake, &client, &[]).await;
    let looking = {
        let client = client.clone();
        tokio::spawn(async move { client.lookup(key("left")).await })
    };
    tokio::task::yield_now().await;
    looking.abort();
    assert!(looking.await.unwrap_err().is_cancelled());
    let second = reserving(&client, "second");
    fake.let_go(PLENTY);
    for reserving in first.into_iter().chain([second]) {
        std::mem::forget(within(5 * SECOND, reserving).await.unwrap());
    }
    assert_eq!(fake.calls(), ["first", "second"].map(|value| Call::Single("reserve", value.into())));
}

#[tokio::test]
async fn one_that_fails_harms_none_of_its_neighbours() {
    let fake = Fake::start(|operation, batched| {
        let Operation::Reserve(request) = operation else { return granting(operation, batched) };
        match request.key.as_ref().unwrap().value.as_str() {
            "k1" => {
                let details = ErrorDetails::with_error_info("FINGERPRINT_MISMATCH", "onceward", []);
                Err(Status::with_error_details(Code::FailedPrecondition, "mismatch", details))
            }
            _ => granting(operation, batched),
        }
    })
    .await;
    let client = client(&fake);
    let first = reserving(&client, "first");
    came(&fake, 1).await;
    let all: Vec<_> = values(3).iter().map(|value| tokio::spawn(client.reserve(key(value)).into_future())).collect();
    tokio::task::yield_now().await;
    fake.let_go(PLENTY);
    std::mem::forget(within(5 * SECOND, first).await.unwrap());
    for (n, reserving) in all.into_iter().enumerate() {
        let reserved = within(5 * SECOND, reserving).await.unwrap();
        assert_eq!(matches!(reserved, Err(Error::FingerprintMismatch)), n == 1, "{n}: {reserved:?}");
    }
}

#[tokio::test]
async fn an_answer_that_did_not_fit_is_asked_for_singly_with_the_same_token() {
    static SEEN: AtomicUsize = AtomicUsize::new(0);
    let fake = Fake::start(|operation, batched| {
        if batched && SEEN.fetch_add(1, Ordering::Relaxed) == 1 {
            let details = ErrorDetails::with_error_info("RESPONSE_TOO_LARGE", "onceward", []);
            return Err(Status::with_error_details(Code::OutOfRange, "too large", details));
        }
        granting(operation, batched)
    })
    .await;
    let client = client(&fake);
    let reserving = behind_one(&fake, &client, &values(3)).await;
    fake.let_go(PLENTY);
    for reserving in reserving {
        std::mem::forget(within(5 * SECOND, reserving).await.unwrap());
    }
    let last = fake.calls().pop().unwrap();
    assert_eq!(last, Call::Single("reserve", "k1".into()));
}

#[tokio::test]
async fn several_are_on_the_way_at_once_and_no_more_than_may_be() {
    let fake = Fake::start(granting).await;
    let client = Client::builder([fake.endpoint()]).batches_in_flight(3).lazy().unwrap();
    let mut all = Vec::new();
    for n in 1..=3 {
        all.push(reserving(&client, &n.to_string()));
        came(&fake, n).await;
    }
    all.extend(values(5).iter().map(|value| reserving(&client, value)));
    tokio::time::sleep(50 * MILLISECOND).await;
    assert_eq!(fake.calls().len(), 3);
    fake.let_go(PLENTY);
    for reserving in all {
        std::mem::forget(within(5 * SECOND, reserving).await.unwrap());
    }
    assert!(matches!(fake.calls()[..], [Call::Single(..), Call::Single(..), Call::Single(..), Call::Batch(_)]));
}

#[tokio::test]
async fn an_overloaded_service_is_asked_again_when_it_says() {
    static SEEN: AtomicUsize = AtomicUsize::new(0);
    let fake = Fake::start(|operation, batched| {
        if SEEN.fetch_add(1, Ordering::Relaxed) == 0 {
            let mut details = ErrorDetails::with_error_info("OVERLOADED", "onceward", []);
            details.set_retry_info(Some(300 * MILLISECOND));
            return Err(Status::with_error_details(Code::ResourceExhausted, "overloaded", details));
        }
        granting(operation, batched)
    })
    .await;
    fake.let_go(PLENTY);
    let begun = tokio::time::Instant::now();
    std::mem::forget(within(5 * SECOND, reserving(&client(&fake), "k")).await.unwrap());
    assert!(begun.elapsed() >= 300 * MILLISECOND, "{:?}", begun.elapsed());
    assert_eq!(fake.calls().len(), 2);
}

#[tokio::test]
async fn a_completion_does_not_queue_behind_those_who_wait() {
    let world = world_of(|builder| builder.batches_in_flight(1)).await;
    let guard = acquired(world.client.reserve(key("held"))).await;
    let waiting: Vec<_> =
        (0..500).map(|_| tokio::spawn(completed(world.client.reserve(key("held")).wait(30 * SECOND)))).collect();
    tokio::time::sleep(300 * MILLISECOND).await;
    let other = acquired(world.client.reserve(key("other"))).await;
    within(SECOND, other.complete("1")).await.unwrap();
    within(SECOND, guard.complete("2")).await.unwrap();
    for waiting in waiting {
        assert_eq!(within(5 * SECOND, waiting).await.unwrap(), "2");
    }
}

#[tokio::test]
async fn large_results_that_come_together_are_all_replayed() {
    let world = world_of(|builder| builder.batches_in_flight(1)).await;
    for n in 0..8 {
        let guard = acquired(world.client.reserve(key(&n.to_string()))).await;
        guard.complete(vec![n; 1 << 20]).await.unwrap();
    }
    let replays: Vec<_> =
        (0..8).map(|n| tokio::spawn(world.client.reserve(key(&n.to_string())).into_future())).collect();
    for (n, replay) in replays.into_iter().enumerate() {
        let onceward_client::Reservation::Completed(finished) = within(20 * SECOND, replay).await.unwrap().unwrap()
        else {
            panic!()
        };
        assert_eq!(finished.result.body, vec![n as u8; 1 << 20]);
    }
}

#[tokio::test]
async fn the_token_is_sent_and_never_shown() {
    let fake = Fake::start(|operation, batched| match operation {
        Operation::Lookup(_) => Ok(Answer::Lookup(Default::default())),
        _ => granting(operation, batched),
    })
    .await;
    fake.let_go(PLENTY);
    let builder = Client::builder([fake.endpoint()]).bearer_token("open sesame");
    let client = builder.connect().await.unwrap();
    client.lookup(Key::new("tests", "k")).await.unwrap();
    assert!(fake.authorizations().iter().all(|sent| sent.as_deref() == Some("Bearer open sesame")));
    assert!(!format!("{client:?}").contains("sesame"));
}
