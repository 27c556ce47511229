//! Faults that users of other systems met, each impossible here.

use onceward::proto::{Key, ReserveRequest, Result as Stored, reserve_response::Outcome};
use rstest::rstest;
use tonic::Code;

use crate::support::*;

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn a_reserve_whose_answer_got_lost_is_sent_again_and_is_the_same(
    #[values(Backend::Sqlite, Backend::Postgres)] backend: Backend,
) {
    let (client, _server) = backend.client().await;
    for n in 0..50 {
        let key = fresh_key();
        // The call is dropped somewhere between its sending and its answer.
        let cut = std::time::Duration::from_micros(n * 50);
        let _ = tokio::time::timeout(cut, client.reserve(reserve(&key, "q1"))).await;
        let again = client.acquire(reserve(&key, "q1")).await;
        assert_eq!(again.attempt, 1);
        in_progress(client.reserve(reserve(&key, "q2")).await);
        client.complete(&key, "q1", b"r").await.unwrap();
    }
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn bytes_come_back_as_they_were_sent(#[values(Backend::Sqlite, Backend::Postgres)] backend: Backend) {
    let (client, _server) = backend.client().await;
    let bodies: [&[u8]; 8] =
        [b"", b"0", b"false", b"null", b"\0", b"{\"bb\":1,\"a\":1.10,\"bb\":2}", b"\xff\xfe", b"  \r\n"];
    for sent in bodies {
        let key = fresh_key();
        client.acquire(reserve(&key, "a")).await;
        client.complete(&key, "a", sent).await.unwrap();
        assert_eq!(body(completed(client.reserve(reserve(&key, "b")).await)), sent);
    }
    let key = fresh_key();
    client.acquire(reserve(&key, "a")).await;
    let mut unset = complete(&key, "a", b"");
    unset.result = None;
    client.complete_with(unset).await.unwrap();
    let replayed = completed(client.reserve(reserve(&key, "b")).await);
    assert_eq!(replayed.result, Some(Stored::default()), "an unset result is an empty one");
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn control_characters_are_refused_before_the_database(
    #[values(Backend::Sqlite, Backend::Postgres)] backend: Backend,
) {
    let (client, _server) = backend.client().await;
    for wrong in ["\0", "a\0b", "\u{1}", "a\nb", "\u{7f}", "\u{85}"] {
        let with = |namespace: &str, subject: &str, value: &str| Key {
            namespace: namespace.into(),
            subject: subject.into(),
            value: value.into(),
        };
        invalid(client.reserve(reserve(&with(wrong, "", "v"), "a")).await, &["key.namespace"]);
        invalid(client.reserve(reserve(&with("n", wrong, "v"), "a")).await, &["key.subject"]);
        invalid(client.reserve(reserve(&with("n", "", wrong), "a")).await, &["key.value"]);
        invalid(client.reserve(reserve(&key("k"), wrong)).await, &["token"]);
        let owned = ReserveRequest { owner: Some(wrong.into()), ..reserve(&key("k"), "a") };
        invalid(client.reserve(owned).await, &["owner"]);
        let printed = ReserveRequest { fingerprint: Some(wrong.into()), ..reserve(&key("k"), "a") };
        invalid(client.reserve(printed).await, &["fingerprint"]);
    }
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn keys_that_look_alike_are_different_keys(#[values(Backend::Sqlite, Backend::Postgres)] backend: Backend) {
    let (client, _server) = backend.client().await;
    let with = |subject: &str, value: &str| Key {
        namespace: "payments.charge".into(),
        subject: subject.into(),
        value: value.into(),
    };
    let keys = [
        with("", "Ord-1"),
        with("", "ord-1"),
        with("", "\u{e9}"),
        with("", "e\u{301}"),
        with("", "k"),
        with("", "k "),
        with("", " k"),
        with("a:b", "c"),
        with("a", "b:c"),
        with("ann", "k"),
        with("bob", "k"),
        Key { namespace: "Payments.charge".into(), ..with("", "k") },
    ];
    for (n, key) in keys.iter().enumerate() {
        let token = n.to_string();
        assert_eq!(client.acquire(reserve(key, &token)).await.attempt, 1);
        client.complete(key, &token, token.as_bytes()).await.unwrap();
    }
    for (n, key) in keys.iter().enumerate() {
        assert_eq!(body(completed(client.reserve(reserve(key, "x")).await)), n.to_string());
    }
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn renewals_and_their_end_are_told_apart(#[values(Backend::Sqlite, Backend::Postgres)] backend: Backend) {
    let (client, _server) = backend.client().await;
    let (renewed, settled, lost) = (fresh_key(), fresh_key(), fresh_key());
    for key in [&renewed, &settled] {
        client.acquire(reserve(key, "a")).await;
    }
    client.acquire(lapsed(&lost, "a")).await;
    client.acquire(reserve(&lost, "b")).await;
    client.complete(&settled, "a", b"r").await.unwrap();
    client.renew(&renewed, "a").await.unwrap();
    refused(client.renew(&settled, "a").await, Code::FailedPrecondition, "ALREADY_FINISHED");
    refused(client.renew(&lost, "a").await, Code::Aborted, "LEASE_LOST");
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn retention_counts_from_the_finish_and_locks_end_by_themselves(
    #[values(Backend::Sqlite, Backend::Postgres)] backend: Backend,
) {
    let (client, _server) = backend.client().await;
    // A caller that died with a long retention does not keep the next one out.
    let died = fresh_key();
    client.acquire(ReserveRequest { retention: Some(duration(86_400 * SECOND)), ..lapsed(&died, "a") }).await;
    assert_eq!(client.acquire(reserve(&died, "b")).await.attempt, 2);
    // A work that takes longer than its retention is not forgotten meanwhile.
    let long = fresh_key();
    let short_retention = ReserveRequest { retention: Some(duration(SECOND)), ..reserve(&long, "a") };
    client.acquire(short_retention).await;
    client.renew(&long, "a").await.unwrap();
    client.complete(&long, "a", b"r").await.unwrap();
    let record = client.lookup(&long).await.unwrap();
    assert_eq!(record.expires_at.unwrap().seconds - record.finished_at.unwrap().seconds, 1);
    // A late failure is kept for its own retention.
    let late = fresh_key();
    client.acquire(lapsed(&late, "a")).await;
    client.fail(&late, "a", false).await.unwrap();
    failed(client.reserve(reserve(&late, "b")).await);
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn an_abort_never_deletes_what_another_holds(#[values(Backend::Sqlite, Backend::Postgres)] backend: Backend) {
    let (client, _server) = backend.client().await;
    let key = fresh_key();
    client.acquire(lapsed(&key, "a")).await;
    client.acquire(reserve(&key, "b")).await;
    refused(client.fail(&key, "a", true).await, Code::Aborted, "LEASE_LOST");
    let held = client.reserve(reserve(&key, "c")).await.unwrap();
    assert!(matches!(held, Outcome::InProgress(held) if held.attempt == 2));
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn copies_of_one_call_all_have_its_outcome(#[values(Backend::Sqlite, Backend::Postgres)] backend: Backend) {
    let (client, _server) = backend.client().await;
    for first in [reserve(&fresh_key(), "a"), lapsed(&fresh_key(), "a")] {
        let key = first.key.clone().unwrap();
        let fence = client.acquire(first).await.fence;
        let copies = (0..64).map(|_| insist(|| client.reserve(reserve(&key, "a"))));
        for copy in futures_util::future::join_all(copies).await {
            let Outcome::Acquired(acquired) = copy.unwrap() else { panic!("it is the same reservation") };
            assert_eq!((acquired.fence, acquired.attempt), (fence, 1));
        }
        let heartbeats = futures_util::future::join_all((0..64).map(|_| insist(|| client.renew(&key, "a"))));
        let completions = futures_util::future::join_all((0..8).map(|_| insist(|| client.complete(&key, "a", b"r"))));
        let (renewed, completed_) = tokio::join!(heartbeats, completions);
        for renewal in renewed {
            match renewal {
                Ok(_) => {}
                settled => drop(refused(settled, Code::FailedPrecondition, "ALREADY_FINISHED")),
            }
        }
        let firsts = completed_.into_iter().filter(|answer| !answer.as_ref().unwrap().already_completed);
        assert_eq!(firsts.count(), 1);
    }
}
