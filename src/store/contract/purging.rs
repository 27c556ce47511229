//! What a purge deletes, and what it leaves.

use std::time::Duration;

use tokio::task::JoinSet;

use super::vocabulary::*;
use crate::{
    record::{OnExpiry, Timestamp},
    store::Purged,
    write::{Action, Reservation},
};

pub(super) async fn a_purge_deletes_only_what_expired_before_the_grace(store: Shared) {
    write(&store, insert(&key("live"), reservation("t"))).await.unwrap();
    write(&store, insert(&key("lapsed"), lapsed("t"))).await.unwrap();
    write(&store, insert(&key("expired"), expired("t"))).await.unwrap();
    assert_eq!(purge(&store, Duration::from_secs(3600), 10).await, (0, 0));
    assert_eq!(purge(&store, Duration::ZERO, 10).await, (1, 0));
    let left = store.load(vec![key("live"), key("lapsed"), key("expired")], Urgency::Reservation).await.unwrap();
    let left: Vec<_> = left.records.into_iter().map(|record| record.unwrap().is_some()).collect();
    assert_eq!(left, [true, true, false]);
}

pub(super) async fn a_purge_is_limited_and_goes_on_where_it_left_off(store: Shared) {
    for n in 0..25 {
        write(&store, insert(&key(&n.to_string()), expired("t"))).await.unwrap();
    }
    let mut after = Timestamp(0);
    for expected in [10, 10, 5] {
        let purged = store.purge(after, Duration::ZERO, 10).await.unwrap();
        assert_eq!((purged.met, purged.deleted), (expected, expected));
        assert!(purged.last > Some(after));
        after = purged.last.unwrap();
    }
    assert_eq!(store.purge(after, Duration::ZERO, 10).await.unwrap(), Purged::default());
    // What lies before is not looked at again.
    write(&store, insert(&key("again"), expired("t"))).await.unwrap();
    let later = store.load(vec![key("again")], Urgency::Reservation).await.unwrap().now;
    assert_eq!(store.purge(later, Duration::ZERO, 10).await.unwrap(), Purged::default());
    assert_eq!(store.purge(after, Duration::ZERO, 10).await.unwrap().deleted, 1);
}

pub(super) async fn a_purge_never_deletes_what_was_renewed_or_reserved_anew(store: Shared) {
    let due: Vec<_> = ["renewed", "completed", "reserved"].map(key).into();
    for key in &due {
        write(&store, insert(key, expired("t"))).await.unwrap();
    }
    let mut renewal = extend(&due[0], holder("t"));
    if let Action::Extend(_, extension) = &mut renewal.action {
        extension.lock_ttl = Some(DAY);
    }
    write(&store, renewal).await.unwrap();
    let mut completion = finish(&due[1], holder("t"), 1);
    if let Action::Finish(_, finish) = &mut completion.action {
        finish.retention = Some(DAY);
    }
    write(&store, completion).await.unwrap();
    write(&store, reserve(&due[2], version(&store, &due[2]).await, "u", 1)).await.unwrap();
    assert_eq!(purge(&store, Duration::ZERO, 10).await, (0, 3));
    assert_eq!(purge(&store, Duration::ZERO, 10).await, (0, 0), "each is met once");
    let left = store.load(due, Urgency::Reservation).await.unwrap();
    assert!(left.records.into_iter().all(|record| record.unwrap().is_some()));
}

pub(super) async fn purges_at_once_delete_each_record_once(store: Shared) {
    let writes = (0..200).map(|n| insert(&key(&n.to_string()), expired("t"))).collect();
    assert!(store.write(writes).await.into_iter().all(|written| written.unwrap().is_some()));
    let mut sweepers = JoinSet::new();
    for _ in 0..4 {
        let store = store.clone();
        sweepers.spawn(async move { crate::sweeper::pass(&*store, Duration::ZERO).await.unwrap().deleted });
    }
    assert_eq!(sweepers.join_all().await.into_iter().sum::<u64>(), 200);
}

pub(super) async fn a_record_that_is_to_be_held_is_never_purged(store: Shared) {
    let held = Reservation { on_expiry: OnExpiry::Hold, ..expired("t") };
    let stamp = write(&store, insert(&key("a"), held)).await.unwrap();
    assert_eq!(stamp.expires_at, None);
    for _ in 0..3 {
        assert_eq!(purge(&store, Duration::ZERO, 10).await.0, 0);
    }
    assert!(load(&store, &key("a")).await.is_some());
}

pub(super) async fn an_insert_and_a_purge_leave_one_record_or_none(store: Shared) {
    for round in 0..50 {
        let key = key(&round.to_string());
        write(&store, insert(&key, expired("t"))).await.unwrap();
        let (inserted, purged) =
            tokio::join!(write(&store, insert(&key, reservation("u"))), purge(&store, Duration::ZERO, 10));
        let record = load(&store, &key).await;
        match (inserted, purged.0) {
            (Some(stamp), 1) => assert_eq!(record.unwrap().version, stamp.version),
            (None, 1) => assert_eq!(record, None),
            (None, 0) => assert_eq!(record.unwrap().token, token("t")),
            impossible => panic!("{impossible:?}"),
        }
        purge(&store, Duration::ZERO, 10).await;
    }
}

pub(super) async fn a_record_that_finished_early_is_deleted_once_it_is_due(store: Shared) {
    write(&store, insert(&key("a"), lapsed("t"))).await.unwrap();
    let mut completion = finish(&key("a"), holder("t"), 1);
    if let Action::Finish(_, finish) = &mut completion.action {
        finish.retention = Some(Duration::ZERO);
    }
    let stamp = write(&store, completion).await.unwrap();
    assert_eq!(stamp.expires_at, Some(stamp.now), "it counts no more");
    // It would have lived for a day, and that is when it is looked at.
    assert_eq!(purge(&store, Duration::ZERO, 10).await, (0, 0));
}
