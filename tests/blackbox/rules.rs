//! Every row of the rule tables, through a real socket.

use onceward::proto::{FailRequest, RecordStatus, RenewRequest, ReserveRequest, reserve_response::Outcome};
use rstest::rstest;
use tonic::Code;

use crate::support::*;

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn a_fresh_key_is_acquired(#[values(Backend::Sqlite, Backend::Postgres)] backend: Backend) {
    let (client, _server) = backend.client().await;
    let key = fresh_key();
    let acquired = client.acquire(reserve(&key, "a")).await;
    assert_eq!((acquired.attempt, acquired.checkpoint), (1, None));
    assert_eq!(acquired.lock_ttl, Some(duration(30 * SECOND)), "the default lock");
    let record = client.lookup(&key).await.unwrap();
    assert_eq!((record.status(), record.fence), (RecordStatus::InProgress, acquired.fence));
    assert_eq!(record.locked_until, acquired.locked_until);
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn an_expired_record_counts_no_more(#[values(Backend::Sqlite, Backend::Postgres)] backend: Backend) {
    let (client, _server) = backend.client().await;
    let retention = Some(duration(MICROSECOND));
    let key = fresh_key();
    let first = client.acquire(ReserveRequest { retention, ..reserve(&key, "a") }).await;
    client.complete(&key, "a", b"old").await.unwrap();
    let second = client.acquire(reserve(&key, "b")).await;
    assert_eq!((second.attempt, second.checkpoint), (1, None));
    assert!(second.fence > first.fence);
    let abandoned = fresh_key();
    client.acquire(ReserveRequest { retention, ..lapsed(&abandoned, "a") }).await;
    assert_eq!(client.acquire(reserve(&abandoned, "b")).await.attempt, 1);
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn another_fingerprint_is_refused_in_every_state(#[values(Backend::Sqlite, Backend::Postgres)] backend: Backend) {
    let (client, _server) = backend.client().await;
    let printed = |request: ReserveRequest, print: &str| ReserveRequest { fingerprint: Some(print.into()), ..request };
    let mismatch = async |key| {
        let refused_ = client.reserve(printed(reserve(key, "b"), "sha256-v1:bb")).await;
        refused(refused_, Code::FailedPrecondition, "FINGERPRINT_MISMATCH");
    };
    let live = fresh_key();
    client.acquire(printed(reserve(&live, "a"), "sha256-v1:aa")).await;
    mismatch(&live).await;
    in_progress(client.reserve(printed(reserve(&live, "b"), "sha256-v2:bb")).await);
    client.complete(&live, "a", b"r").await.unwrap();
    mismatch(&live).await;
    completed(client.reserve(printed(reserve(&live, "b"), "sha256-v1:aa")).await);
    completed(client.reserve(reserve(&live, "b")).await);
    let retryable = fresh_key();
    client.acquire(printed(reserve(&retryable, "a"), "sha256-v1:aa")).await;
    client.fail(&retryable, "a", true).await.unwrap();
    mismatch(&retryable).await;
    let over = fresh_key();
    client.acquire(printed(lapsed(&over, "a"), "sha256-v1:aa")).await;
    mismatch(&over).await;
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn the_same_token_is_the_same_reservation(#[values(Backend::Sqlite, Backend::Postgres)] backend: Backend) {
    let (client, _server) = backend.client().await;
    for first in [reserve(&fresh_key(), "a"), lapsed(&fresh_key(), "a")] {
        let key = first.key.clone().unwrap();
        let acquired = client.acquire(first).await;
        let again = client.acquire(reserve(&key, "a")).await;
        assert_eq!((again.fence, again.attempt), (acquired.fence, acquired.attempt));
        in_progress(client.reserve(reserve(&key, "b")).await);
    }
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn a_live_lock_is_in_progress(#[values(Backend::Sqlite, Backend::Postgres)] backend: Backend) {
    let (client, _server) = backend.client().await;
    let key = fresh_key();
    let owned = ReserveRequest { owner: Some("pod-7".into()), ..reserve(&key, "a") };
    let acquired = client.acquire(owned).await;
    let held = in_progress(client.reserve(reserve(&key, "b")).await);
    assert_eq!(held.locked_until, acquired.locked_until);
    assert_eq!((held.owner.as_deref(), held.attempt), (Some("pod-7"), 1));
    assert_eq!(held.retry_after, Some(duration(SECOND)), "at most the configured maximum");
    let short = fresh_key();
    client.acquire(ReserveRequest { lock_ttl: Some(duration(SECOND / 2)), ..reserve(&short, "a") }).await;
    let held = in_progress(client.reserve(reserve(&short, "b")).await);
    assert!(held.retry_after.unwrap().seconds == 0, "what is left of the lock");
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn a_lock_that_ran_out_under_hold_is_in_doubt(#[values(Backend::Sqlite, Backend::Postgres)] backend: Backend) {
    let (client, _server) = backend.client().await;
    let key = fresh_key();
    let owned = ReserveRequest { owner: Some("pod-7".into()), ..hold(lapsed(&key, "a")) };
    let acquired = client.acquire(owned).await;
    for token in ["a", "b"] {
        let doubt = in_doubt(client.reserve(reserve(&key, token)).await);
        assert_eq!((doubt.fence, doubt.attempt), (acquired.fence, 1));
        assert_eq!(doubt.owner.as_deref(), Some("pod-7"));
    }
    let record = client.lookup(&key).await.unwrap();
    assert_eq!((record.status(), record.expires_at), (RecordStatus::InDoubt, None));
    let lock_ttl = Some(duration(SECOND));
    client.renew_with(RenewRequest { lock_ttl, ..renew(&key, "a") }).await.unwrap();
    in_progress(client.reserve(reserve(&key, "b")).await);
    let asked = fresh_key();
    client.acquire(lapsed(&asked, "a")).await;
    in_doubt(client.reserve(hold(reserve(&asked, "b"))).await);
    client.complete(&asked, "a", b"late").await.unwrap();
    assert_eq!(body(completed(client.reserve(reserve(&asked, "b")).await)), "late");
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn a_late_copy_of_an_earlier_reserve_starts_nothing(
    #[values(Backend::Sqlite, Backend::Postgres)] backend: Backend,
) {
    let (client, _server) = backend.client().await;
    let key = fresh_key();
    client.acquire(lapsed(&key, "a")).await;
    client.acquire(lapsed(&key, "b")).await;
    refused(client.reserve(reserve(&key, "a")).await, Code::Aborted, "LEASE_LOST");
    client.fail(&key, "b", true).await.unwrap();
    refused(client.reserve(reserve(&key, "a")).await, Code::Aborted, "LEASE_LOST");
    refused(client.reserve(reserve(&key, "b")).await, Code::FailedPrecondition, "ALREADY_FINISHED");
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn a_takeover_has_the_next_attempt_and_the_checkpoint(
    #[values(Backend::Sqlite, Backend::Postgres)] backend: Backend,
) {
    let (client, _server) = backend.client().await;
    let key = fresh_key();
    let first = client.acquire(lapsed(&key, "a")).await;
    let mut saving = renew(&key, "a");
    saving.lock_ttl = Some(duration(MICROSECOND));
    saving.checkpoint = Some("page 3".into());
    client.renew_with(saving).await.unwrap();
    let second = client.acquire(reserve(&key, "b")).await;
    assert_eq!((second.attempt, second.checkpoint.as_deref()), (2, Some(&b"page 3"[..])));
    assert!(second.fence > first.fence);
    refused(client.complete(&key, "a", b"late").await, Code::Aborted, "LEASE_LOST");
    refused(client.renew(&key, "a").await, Code::Aborted, "LEASE_LOST");
    client.complete(&key, "b", b"won").await.unwrap();
    refused(client.complete(&key, "a", b"late").await, Code::Aborted, "LEASE_LOST");
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn a_final_result_is_replayed(#[values(Backend::Sqlite, Backend::Postgres)] backend: Backend) {
    let (client, _server) = backend.client().await;
    let origin = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let traced = |key| ReserveRequest { traceparent: Some(origin.into()), ..reserve(key, "a") };
    let (key, broken) = (fresh_key(), fresh_key());
    client.acquire(traced(&key)).await;
    let answer = client.complete(&key, "a", b"receipt").await.unwrap();
    for token in ["a", "b"] {
        let finished = completed(client.reserve(reserve(&key, token)).await);
        assert_eq!((finished.origin.as_deref(), finished.attempt), (Some(origin), 1));
        assert_eq!(finished.expires_at, answer.expires_at);
        assert_eq!(body(finished), "receipt");
    }
    client.acquire(traced(&broken)).await;
    let failure = FailRequest {
        key: Some(broken.clone()),
        token: "a".into(),
        result: Some(result(b"declined")),
        ..Default::default()
    };
    client.fail_with(failure).await.unwrap();
    assert_eq!(body(failed(client.reserve(reserve(&broken, "b")).await)), "declined");
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn a_retryable_failure_frees_the_key_at_once(#[values(Backend::Sqlite, Backend::Postgres)] backend: Backend) {
    let (client, _server) = backend.client().await;
    let key = fresh_key();
    client.acquire(reserve(&key, "a")).await;
    let failure = FailRequest {
        key: Some(key.clone()),
        token: "a".into(),
        retryable: true,
        checkpoint: Some("so far".into()),
        ..Default::default()
    };
    client.fail_with(failure).await.unwrap();
    let record = client.lookup(&key).await.unwrap();
    assert_eq!((record.status(), record.retryable, record.result), (RecordStatus::Failed, true, None));
    let second = client.acquire(reserve(&key, "b")).await;
    assert_eq!((second.attempt, second.checkpoint.as_deref()), (2, Some(&b"so far"[..])));
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_there_is_not_found(#[values(Backend::Sqlite, Backend::Postgres)] backend: Backend) {
    let (client, _server) = backend.client().await;
    let expired = fresh_key();
    client.acquire(reserve(&expired, "a")).await;
    let mut ending = complete(&expired, "a", b"r");
    ending.retention = Some(duration(MICROSECOND));
    client.complete_with(ending).await.unwrap();
    for key in [fresh_key(), expired] {
        refused(client.complete(&key, "a", b"r").await, Code::NotFound, "KEY_NOT_FOUND");
        refused(client.fail(&key, "a", false).await, Code::NotFound, "KEY_NOT_FOUND");
        refused(client.fail(&key, "a", true).await, Code::NotFound, "KEY_NOT_FOUND");
        refused(client.renew(&key, "a").await, Code::NotFound, "KEY_NOT_FOUND");
        refused(client.lookup(&key).await, Code::NotFound, "KEY_NOT_FOUND");
        let resolved = client.resolve(&key, 1, resolve_complete(b""), true).await;
        refused(resolved, Code::NotFound, "KEY_NOT_FOUND");
    }
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn the_holder_may_be_late(#[values(Backend::Sqlite, Backend::Postgres)] backend: Backend) {
    let (client, _server) = backend.client().await;
    for retention in [MICROSECOND, 60 * SECOND] {
        let late = |key| ReserveRequest { retention: Some(duration(retention)), ..lapsed(key, "a") };
        let keys = [fresh_key(), fresh_key(), fresh_key()];
        for key in &keys {
            client.acquire(late(key)).await;
        }
        client.renew(&keys[0], "a").await.unwrap();
        assert!(!client.complete(&keys[0], "a", b"r").await.unwrap().already_completed);
        assert!(!client.complete(&keys[1], "a", b"r").await.unwrap().already_completed);
        assert!(!client.fail(&keys[2], "a", true).await.unwrap().already_failed);
    }
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn the_same_end_again_is_done_and_another_is_refused(
    #[values(Backend::Sqlite, Backend::Postgres)] backend: Backend,
) {
    let (client, _server) = backend.client().await;
    let already_finished = "ALREADY_FINISHED";
    let key = fresh_key();
    client.acquire(reserve(&key, "a")).await;
    let first = client.complete(&key, "a", b"r").await.unwrap();
    for other in [&b"r"[..], b"other"] {
        let again = client.complete(&key, "a", other).await.unwrap();
        assert!(again.already_completed);
        assert_eq!(again.expires_at, first.expires_at);
    }
    assert_eq!(body(completed(client.reserve(reserve(&key, "b")).await)), "r", "the first result stands");
    refused(client.fail(&key, "a", false).await, Code::FailedPrecondition, already_finished);
    refused(client.fail(&key, "a", true).await, Code::FailedPrecondition, already_finished);
    refused(client.renew(&key, "a").await, Code::FailedPrecondition, already_finished);
    for retryable in [true, false] {
        let key = fresh_key();
        client.acquire(reserve(&key, "a")).await;
        assert!(!client.fail(&key, "a", retryable).await.unwrap().already_failed);
        assert!(client.fail(&key, "a", retryable).await.unwrap().already_failed);
        refused(client.fail(&key, "a", !retryable).await, Code::FailedPrecondition, already_finished);
        refused(client.complete(&key, "a", b"r").await, Code::FailedPrecondition, already_finished);
        refused(client.renew(&key, "a").await, Code::FailedPrecondition, already_finished);
    }
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn what_another_holds_is_lost(#[values(Backend::Sqlite, Backend::Postgres)] backend: Backend) {
    let (client, _server) = backend.client().await;
    let key = fresh_key();
    client.acquire(reserve(&key, "a")).await;
    for _ in 0..2 {
        refused(client.complete(&key, "b", b"r").await, Code::Aborted, "LEASE_LOST");
        refused(client.fail(&key, "b", true).await, Code::Aborted, "LEASE_LOST");
        refused(client.renew(&key, "b").await, Code::Aborted, "LEASE_LOST");
        client.complete(&key, "a", b"r").await.unwrap();
    }
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn renewals_never_shorten_and_checkpoints_are_ordered(
    #[values(Backend::Sqlite, Backend::Postgres)] backend: Backend,
) {
    let (client, _server) = backend.client().await;
    let key = fresh_key();
    let acquired = client.acquire(reserve(&key, "a")).await;
    let save = async |checkpoint: &'static str, sequence| {
        let mut request = renew(&key, "a");
        request.lock_ttl = Some(duration(SECOND));
        request.checkpoint = Some(checkpoint.into());
        request.checkpoint_sequence = sequence;
        let renewed = client.renew_with(request).await.unwrap();
        assert_eq!(renewed.lock_ttl, Some(duration(SECOND)));
        assert_eq!(renewed.locked_until, acquired.locked_until);
        client.lookup(&key).await.unwrap().checkpoint
    };
    assert_eq!(save("two", Some(2)).await.as_deref(), Some(&b"two"[..]));
    assert_eq!(save("one", Some(1)).await.as_deref(), Some(&b"two"[..]), "an older one is ignored");
    assert_eq!(save("two again", Some(2)).await.as_deref(), Some(&b"two again"[..]));
    assert_eq!(save("", None).await, None, "an empty one clears");
    let by_default = client.renew(&key, "a").await.unwrap();
    assert_eq!(by_default.lock_ttl, Some(duration(30 * SECOND)), "as granted at the reservation");
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn a_doubt_is_resolved_by_its_fence(#[values(Backend::Sqlite, Backend::Postgres)] backend: Backend) {
    let (client, _server) = backend.client().await;
    let key = fresh_key();
    let fence = client.acquire(hold(lapsed(&key, "a"))).await.fence;
    let wrong = client.resolve(&key, fence + 1, resolve_complete(b"done"), true).await;
    refused(wrong, Code::FailedPrecondition, "FENCE_MISMATCH");
    let record = client.resolve(&key, fence, resolve_complete(b"done"), false).await.unwrap();
    assert_eq!((record.status(), record.resolved), (RecordStatus::Completed, true));
    assert_eq!(client.lookup(&key).await.unwrap(), record);
    assert_eq!(client.resolve(&key, fence, resolve_complete(b"other"), false).await.unwrap(), record);
    for otherwise in [resolve_fail(true), resolve_fail(false)] {
        let refused_ = client.resolve(&key, fence, otherwise, true).await;
        refused(refused_, Code::FailedPrecondition, "ALREADY_FINISHED");
    }
    refused(client.complete(&key, "a", b"late").await, Code::Aborted, "LEASE_LOST");
    refused(client.fail(&key, "a", true).await, Code::Aborted, "LEASE_LOST");
    refused(client.renew(&key, "a").await, Code::Aborted, "LEASE_LOST");
    assert_eq!(body(completed(client.reserve(reserve(&key, "a")).await)), "done");
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn a_live_lock_is_resolved_by_force_only(#[values(Backend::Sqlite, Backend::Postgres)] backend: Backend) {
    let (client, _server) = backend.client().await;
    let key = fresh_key();
    let fence = client.acquire(reserve(&key, "a")).await.fence;
    let refused_ = client.resolve(&key, fence, resolve_fail(true), false).await;
    refused(refused_, Code::FailedPrecondition, "LOCK_LIVE");
    let record = client.resolve(&key, fence, resolve_fail(true), true).await.unwrap();
    assert_eq!((record.status(), record.retryable, record.resolved), (RecordStatus::Failed, true, true));
    refused(client.reserve(reserve(&key, "a")).await, Code::FailedPrecondition, "ALREADY_FINISHED");
    refused(client.fail(&key, "a", true).await, Code::Aborted, "LEASE_LOST");
    let next = client.reserve(reserve(&key, "b")).await.unwrap();
    assert!(matches!(next, Outcome::Acquired(next) if next.attempt == 2 && next.fence > fence));
    let record = client.lookup(&key).await.unwrap();
    assert!(!record.resolved, "a new attempt starts anew");
    client.complete(&key, "b", b"r").await.unwrap();
    let refused_ = client.resolve(&key, record.fence, resolve_complete(b"r"), true).await;
    refused(refused_, Code::FailedPrecondition, "ALREADY_FINISHED");
}
