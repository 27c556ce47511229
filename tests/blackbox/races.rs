//! Races, through two servers on one Postgres.

use onceward::proto::{ReserveRequest, reserve_response::Outcome};
use tonic::Code;

use crate::support::*;

async fn two_servers() -> ([Client; 2], impl Sized) {
    let database = Backend::Postgres.database().await;
    let servers = [Server::start(&database.url, &[]).await, Server::start(&database.url, &[]).await];
    ([servers[0].client().await, servers[1].client().await], (servers, database))
}

#[tokio::test(flavor = "multi_thread")]
async fn of_64_reserves_of_a_fresh_key_exactly_one_acquires() {
    let (clients, _servers) = two_servers().await;
    for _ in 0..200 {
        let key = fresh_key();
        let calls: Vec<_> = (0..64)
            .map(|n| {
                let (client, key) = (clients[n % 2].clone(), key.clone());
                tokio::spawn(async move { insist(|| client.reserve(reserve(&key, &n.to_string()))).await })
            })
            .collect();
        let mut acquired = 0;
        for call in calls {
            match call.await.unwrap().unwrap() {
                Outcome::Acquired(_) => acquired += 1,
                Outcome::InProgress(_) => {}
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(acquired, 1);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn of_64_takeovers_exactly_one_acquires() {
    let (clients, _servers) = two_servers().await;
    for _ in 0..50 {
        let key = fresh_key();
        let first = clients[0].acquire(lapsed(&key, "first")).await;
        let calls: Vec<_> = (0..64)
            .map(|n| {
                let (client, key) = (clients[n % 2].clone(), key.clone());
                tokio::spawn(async move { insist(|| client.reserve(reserve(&key, &n.to_string()))).await })
            })
            .collect();
        let mut acquired = Vec::new();
        for call in calls {
            match call.await.unwrap().unwrap() {
                Outcome::Acquired(holder) => acquired.push(holder),
                Outcome::InProgress(held) => assert_eq!(held.attempt, 2),
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(acquired.len(), 1);
        assert!(acquired[0].attempt == 2 && acquired[0].fence > first.fence);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn at_the_end_of_a_lock_either_its_holder_completes_or_the_next_one_acquires() {
    let (clients, _servers) = two_servers().await;
    let mut completions = 0;
    for round in 0..1000 {
        let key = fresh_key();
        // Ends at about the time at which both arrive.
        let lock_ttl = std::time::Duration::from_micros(1 + round % 3000);
        clients[0].acquire(ReserveRequest { lock_ttl: Some(duration(lock_ttl)), ..reserve(&key, "a") }).await;
        let (completed_, reserved) = tokio::join!(
            insist(|| clients[0].complete(&key, "a", b"r")),
            insist(|| clients[1].reserve(reserve(&key, "b"))),
        );
        match (completed_, reserved.unwrap()) {
            (Ok(_), Outcome::Completed(finished)) => {
                assert_eq!(body(finished), "r");
                completions += 1;
            }
            (Ok(_), Outcome::InProgress(held)) => {
                assert_eq!(held.attempt, 1);
                completions += 1;
            }
            (Err(status), Outcome::Acquired(acquired)) => {
                assert_eq!((status.code(), acquired.attempt), (Code::Aborted, 2));
            }
            other => panic!("round {round}: {other:?}"),
        }
    }
    assert!(completions > 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_takeover_and_a_renewal_never_both_hold() {
    let (clients, _servers) = two_servers().await;
    for _ in 0..300 {
        let key = fresh_key();
        clients[0].acquire(lapsed(&key, "a")).await;
        let mut renewal = renew(&key, "a");
        renewal.lock_ttl = Some(duration(30 * SECOND));
        let (renewed, reserved) = tokio::join!(
            insist(|| clients[0].renew_with(renewal.clone())),
            insist(|| clients[1].reserve(reserve(&key, "b"))),
        );
        match (renewed, reserved.unwrap()) {
            (Ok(_), Outcome::InProgress(held)) => assert_eq!(held.attempt, 1),
            (Err(status), Outcome::Acquired(_)) => assert_eq!(status.code(), Code::Aborted),
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn resolvers_at_once_agree_on_one_outcome() {
    let (clients, _servers) = two_servers().await;
    for _ in 0..100 {
        let key = fresh_key();
        let fence = clients[0].acquire(hold(lapsed(&key, "a"))).await.fence;
        let (one, other, holder) = tokio::join!(
            insist(|| clients[0].resolve(&key, fence, resolve_complete(b"resolved"), false)),
            insist(|| clients[1].resolve(&key, fence, resolve_fail(false), false)),
            insist(|| clients[1].complete(&key, "a", b"late")),
        );
        let won = [one.is_ok(), other.is_ok(), holder.is_ok()];
        assert_eq!(won.iter().filter(|won| **won).count(), 1, "{won:?}");
    }
}
