//! Every limit at its maximum, in text that nothing can compress, and one beyond; every kind of wrong duration.

use onceward::proto::{FailRequest, Key, Metadata, RenewRequest, ReserveRequest, Result as Stored};
use rstest::rstest;

use crate::support::*;

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn texts_at_their_longest_work_and_one_more_is_refused(
    #[values(Backend::Sqlite, Backend::Postgres)] backend: Backend,
) {
    let (client, _server) = backend.client().await;
    let longest = |namespace, subject, value| Key {
        namespace: incompressible(namespace),
        subject: incompressible(subject),
        value: incompressible(value),
    };
    let full = ReserveRequest {
        key: Some(longest(128, 255, 255)),
        token: incompressible(64),
        fingerprint: Some(format!("x:{}", "9".repeat(126))),
        owner: Some(incompressible(128)),
        ..Default::default()
    };
    client.acquire(full.clone()).await;
    let key = full.key.clone().unwrap();
    assert_eq!(client.lookup(&key).await.unwrap().key, full.key);
    client.complete(&key, &full.token, b"r").await.unwrap();
    for (key, field) in [
        (longest(129, 0, 1), "key.namespace"),
        (longest(0, 0, 1), "key.namespace"),
        (longest(1, 256, 1), "key.subject"),
        (longest(1, 0, 256), "key.value"),
        (longest(1, 0, 0), "key.value"),
    ] {
        invalid(client.reserve(reserve(&key, "a")).await, &[field]);
        invalid(client.complete(&key, "a", b"r").await, &[field]);
        invalid(client.fail(&key, "a", true).await, &[field]);
        invalid(client.renew(&key, "a").await, &[field]);
        invalid(client.lookup(&key).await, &[field]);
        invalid(client.resolve(&key, 1, resolve_fail(true), false).await, &[field]);
    }
    let beyond = [
        (ReserveRequest { token: incompressible(65), ..full.clone() }, "token"),
        (ReserveRequest { token: String::new(), ..full.clone() }, "token"),
        (ReserveRequest { fingerprint: Some(format!("x:{}", "9".repeat(127))), ..full.clone() }, "fingerprint"),
        (ReserveRequest { owner: Some(incompressible(129)), ..full.clone() }, "owner"),
        (ReserveRequest { owner: Some("a\u{7f}".into()), ..full.clone() }, "owner"),
    ];
    for (request, field) in beyond {
        invalid(client.reserve(request).await, &[field]);
    }
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn results_at_their_largest_work_and_one_more_is_refused(
    #[values(Backend::Sqlite, Backend::Postgres)] backend: Backend,
) {
    let (client, _server) = backend.client().await;
    let key = fresh_key();
    client.acquire(reserve(&key, "a")).await;
    let pair = |n: usize, bytes: usize| Metadata { name: format!("{n:02}"), value: incompressible(bytes - 2) };
    let pairs = |count: usize, bytes: usize| (0..count).map(|n| pair(n, bytes)).collect::<Vec<_>>();
    let largest = Stored { code: 201, metadata: pairs(64, 256), body: incompressible(1 << 20).into() };
    let with = |stored: &Stored| {
        let mut request = complete(&key, "a", b"");
        request.result = Some(stored.clone());
        request
    };
    let mut bytes = pairs(64, 256);
    bytes[0].name.push('x');
    for (stored, field) in [
        (Stored { body: incompressible((1 << 20) + 1).into(), ..largest.clone() }, "result.body"),
        (Stored { metadata: pairs(65, 2), ..largest.clone() }, "result.metadata"),
        (Stored { metadata: bytes, ..largest.clone() }, "result.metadata"),
    ] {
        invalid(client.complete_with(with(&stored)).await, &[field]);
    }
    client.complete_with(with(&largest)).await.unwrap();
    let replayed = completed(client.reserve(reserve(&key, "b")).await);
    assert_eq!(replayed.result, Some(largest));
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn checkpoints_at_their_largest_work_and_one_more_is_refused(
    #[values(Backend::Sqlite, Backend::Postgres)] backend: Backend,
) {
    let (client, _server) = backend.client().await;
    let key = fresh_key();
    client.acquire(reserve(&key, "a")).await;
    let saving = |length| RenewRequest { checkpoint: Some(incompressible(length).into()), ..renew(&key, "a") };
    invalid(client.renew_with(saving((16 << 10) + 1)).await, &["checkpoint"]);
    client.renew_with(saving(16 << 10)).await.unwrap();
    let failing = |length| FailRequest {
        key: Some(key.clone()),
        token: "a".into(),
        retryable: true,
        checkpoint: Some(incompressible(length).into()),
        ..Default::default()
    };
    invalid(client.fail_with(failing((16 << 10) + 1)).await, &["checkpoint"]);
    client.fail_with(failing(16 << 10)).await.unwrap();
    let next = client.acquire(reserve(&key, "b")).await;
    assert_eq!(next.checkpoint.unwrap(), incompressible(16 << 10));
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn a_field_that_does_not_belong_to_the_call_is_refused(
    #[values(Backend::Sqlite, Backend::Postgres)] backend: Backend,
) {
    let (client, _server) = backend.client().await;
    let key = fresh_key();
    client.acquire(reserve(&key, "a")).await;
    let failing = FailRequest { key: Some(key.clone()), token: "a".into(), ..Default::default() };
    let with_result = FailRequest { retryable: true, result: Some(Stored::default()), ..failing.clone() };
    invalid(client.fail_with(with_result).await, &["result"]);
    let with_checkpoint = FailRequest { checkpoint: Some("".into()), ..failing };
    invalid(client.fail_with(with_checkpoint).await, &["checkpoint"]);
    let resolution = onceward::proto::resolve_request::Resolution::Fail(onceward::proto::ResolveFail {
        retryable: true,
        result: Some(Stored::default()),
    });
    invalid(client.resolve(&key, 1, resolution, false).await, &["fail.result"]);
}

/// What no duration may be, whatever its range.
const MALFORMED: [(i64, i32); 9] = [
    (-1, 0),
    (0, -1),
    (1, -1),
    (-1, 1),
    (0, 1_000_000_000),
    (0, 2_000_000_000),
    (i64::MIN, 0),
    (i64::MAX, 0),
    (315_576_000_001, 0),
];

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn durations_are_in_their_range_or_refused(#[values(Backend::Sqlite, Backend::Postgres)] backend: Backend) {
    let database = backend.database().await;
    let server = Server::start(&database.url, &["--lock-ttl-min", "100ms", "--retention-min", "1s"]).await;
    let client = server.client().await;
    let proto = |(seconds, nanos)| Some(prost_types::Duration { seconds, nanos });
    let day = 24 * 3600;
    let out_of_range = [(0, 0), (0, 99_999_999), (day, 1), (10_000 * 365 * day, 0)];
    for wrong in MALFORMED.into_iter().chain(out_of_range).map(proto) {
        let key = fresh_key();
        let request = ReserveRequest { lock_ttl: wrong, ..reserve(&key, "a") };
        invalid(client.reserve(request).await, &["lock_ttl"]);
        invalid(client.renew_with(RenewRequest { lock_ttl: wrong, ..renew(&key, "a") }).await, &["lock_ttl"]);
    }
    for right in [(0, 100_000_000), (1, 500_000_000), (day, 0)].map(proto) {
        let key = fresh_key();
        let acquired = client.acquire(ReserveRequest { lock_ttl: right, ..reserve(&key, "a") }).await;
        assert_eq!(acquired.lock_ttl, right, "the one asked for, also below a second");
        let renewed = client.renew(&key, "a").await.unwrap();
        assert_eq!(renewed.lock_ttl, right);
    }
    let out_of_range = [(0, 0), (0, 999_999_999), (90 * day, 1)];
    for wrong in MALFORMED.into_iter().chain(out_of_range).map(proto) {
        let request = ReserveRequest { retention: wrong, ..reserve(&fresh_key(), "a") };
        invalid(client.reserve(request).await, &["retention"]);
        let mut request = complete(&fresh_key(), "a", b"r");
        request.retention = wrong;
        invalid(client.complete_with(request).await, &["retention"]);
    }
    for right in [(1, 0), (90 * day, 0)].map(proto) {
        let key = fresh_key();
        client.acquire(ReserveRequest { retention: right, ..reserve(&key, "a") }).await;
        let expires_at = client.complete(&key, "a", b"r").await.unwrap().expires_at.unwrap();
        let finished_at = client.lookup(&key).await.unwrap().finished_at.unwrap();
        assert_eq!(expires_at.seconds - finished_at.seconds, right.unwrap().seconds);
    }
    for wrong in MALFORMED.into_iter().chain([(60, 1)]).map(proto) {
        invalid(client.reserve(ReserveRequest { wait: wrong, ..reserve(&fresh_key(), "a") }).await, &["wait"]);
    }
    for right in [None, proto((0, 0)), proto((60, 0))] {
        client.acquire(ReserveRequest { wait: right, ..reserve(&fresh_key(), "a") }).await;
    }
}

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn a_malformed_traceparent_is_ignored_and_metadata_serves_instead(
    #[values(Backend::Sqlite, Backend::Postgres)] backend: Backend,
) {
    let (client, _server) = backend.client().await;
    let sent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let carried = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00";
    for (field, metadata, origin) in [
        (None, None, None),
        (Some(sent), Some(carried), Some(sent)),
        (Some("nonsense"), None, None),
        (Some("nonsense"), Some(carried), Some(carried)),
        (None, Some(carried), Some(carried)),
        (None, Some("nonsense"), None),
    ] {
        let key = fresh_key();
        let mut request =
            tonic::Request::new(ReserveRequest { traceparent: field.map(Into::into), ..reserve(&key, "a") });
        if let Some(metadata) = metadata {
            request.metadata_mut().insert("traceparent", metadata.parse().unwrap());
        }
        client.0.clone().reserve(request).await.unwrap();
        assert_eq!(client.lookup(&key).await.unwrap().origin.as_deref(), origin);
    }
}
