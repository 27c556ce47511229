//! Random writes, each held against what it means.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use proptest::{prelude::*, strategy::ValueTree, test_runner::TestRunner};

use super::vocabulary::{key, reservation, token};
use crate::{
    record::{EarlierTokens, Fingerprint, OnExpiry, Owner, Record, Status, StoredResult},
    store::{Store, Urgency},
    write::{Action, Checkpoint, Condition, Extension, Finish, NextReservation, Reservation, Write},
};

/// An action whose condition is yet to be filled in: by the version that is stored, or not.
fn actions() -> impl Strategy<Value = Action> {
    prop_oneof![
        1 => reservations().prop_map(Action::Insert),
        2 => (conditions(), reservations(), 1..4, 0..18_usize).prop_map(|(condition, reservation, attempt, earlier)| {
            let earlier_tokens =
                (0..earlier).fold(EarlierTokens::default(), |tokens, n| tokens.with(&token(&n.to_string())));
            Action::Reserve(condition, NextReservation { reservation, attempt, earlier_tokens })
        }),
        3 => (conditions(), prop::option::of(durations()), on_expiry(), prop::option::of((bytes(), sequences())))
            .prop_map(|(condition, lock_ttl, on_expiry, checkpoint)| {
                let checkpoint = checkpoint.map(|(bytes, sequence)| Checkpoint { bytes, sequence });
                Action::Extend(condition, Extension { lock_ttl, on_expiry, checkpoint })
            }),
        2 => (conditions(), statuses(), any::<bool>(), prop::option::of(durations()), prop::option::of(bytes()), bytes())
            .prop_map(|(condition, status, resolved, retention, checkpoint, body)| {
                let result = StoredResult { code: 3, metadata: vec![("n".into(), "v".into())], body };
                let result = (status != Status::FailedRetryable).then_some(result);
                Action::Finish(condition, Finish { status, resolved, result, retention, checkpoint })
            }),
    ]
}

/// `Seen` counts from the stored version here.
fn conditions() -> impl Strategy<Value = Condition> {
    prop_oneof![
        3 => Just(Condition::Seen(0)),
        1 => Just(Condition::Seen(-1)),
        2 => (0..2_u8).prop_map(|n| Condition::Holder(token(&n.to_string()))),
    ]
}

fn reservations() -> impl Strategy<Value = Reservation> {
    (0..2_u8, durations(), durations(), on_expiry(), any::<bool>()).prop_map(
        |(n, lock_ttl, retention, on_expiry, full)| Reservation {
            lock_ttl,
            retention,
            on_expiry,
            owner: full.then(|| Owner::new("owner").unwrap()),
            fingerprint: full.then(|| Fingerprint::new("x:01").unwrap()),
            ..reservation(&n.to_string())
        },
    )
}

fn durations() -> impl Strategy<Value = Duration> {
    prop_oneof![Just(0), Just(1), 0..1_000_000_u64, Just(90 * 24 * 3600 * 1_000_000_u64)]
        .prop_map(Duration::from_micros)
}

fn on_expiry() -> impl Strategy<Value = OnExpiry> {
    prop_oneof![3 => Just(OnExpiry::Retry), 1 => Just(OnExpiry::Hold)]
}

fn statuses() -> impl Strategy<Value = Status> {
    prop_oneof![Just(Status::Completed), Just(Status::Failed), Just(Status::FailedRetryable)]
}

fn bytes() -> impl Strategy<Value = Bytes> {
    prop_oneof![Just(Bytes::new()), Just(Bytes::from_static(b"\0\xff")), Just(Bytes::from_static(b"text"))]
}

fn sequences() -> impl Strategy<Value = Option<i64>> {
    prop::option::of(prop_oneof![Just(i64::MIN), -1..3_i64, Just(i64::MAX)])
}

fn on_version(condition: Condition, stored: Option<&Record>) -> Condition {
    match condition {
        Condition::Seen(offset) => Condition::Seen(stored.map_or(0, |record| record.version) + offset),
        holder @ Condition::Holder(_) => holder,
    }
}

pub(super) async fn every_write_does_what_it_means(store: Arc<dyn Store>) {
    let mut runner = TestRunner::deterministic();
    let strategy = actions();
    let (mut taken, mut refused) = (0, 0);
    for round in 0..600 {
        let key = key(&(round / 20).to_string());
        let load =
            async || store.load(vec![key.clone()], Urgency::Reservation).await.unwrap().records.pop().unwrap().unwrap();
        let before = load().await;
        let action = match strategy.new_tree(&mut runner).unwrap().current() {
            Action::Insert(reservation) => Action::Insert(reservation),
            Action::Reserve(condition, next) => Action::Reserve(on_version(condition, before.as_ref()), next),
            Action::Extend(condition, next) => Action::Extend(on_version(condition, before.as_ref()), next),
            Action::Finish(condition, next) => Action::Finish(on_version(condition, before.as_ref()), next),
        };
        let write = Write { key: key.clone(), action };
        let written = store.write(vec![write.clone()]).await.pop().unwrap().unwrap();
        let after = load().await;
        match written {
            None => {
                refused += 1;
                let now = store.load(vec![key.clone()], Urgency::Reservation).await.unwrap().now;
                assert_eq!(write.apply(before.as_ref(), now), None, "{write:?} on {before:?}");
                assert_eq!(after, before);
            }
            Some(stamp) => {
                taken += 1;
                let meant = write.apply(before.as_ref(), stamp.now).expect("it was not allowed");
                assert_eq!(after.as_ref(), Some(&meant), "{write:?} on {before:?}");
                let told = (stamp.fence, stamp.version, stamp.lock_ttl, stamp.locked_until, stamp.expires_at);
                assert_eq!(told, (meant.fence, meant.version, meant.lock_ttl, meant.locked_until, meant.expires_at));
            }
        }
    }
    assert!(taken > 100 && refused > 100, "{taken} taken, {refused} refused");
}
