//! When a write takes, and that of rivals at most one does.

use std::{collections::HashSet, time::Duration};

use futures_util::future::join_all;

use super::vocabulary::*;
use crate::{
    record::Key,
    write::{Action, Condition, Stamp, Write},
};

/// Tries all at once, each from a task of its own, and counts those that took.
async fn race(store: &Shared, writes: impl IntoIterator<Item = Write>) -> Vec<Option<Stamp>> {
    let tasks = writes.into_iter().map(|each| {
        let store = store.clone();
        tokio::spawn(async move { write(&store, each).await })
    });
    join_all(tasks).await.into_iter().map(Result::unwrap).collect()
}

fn took(stamps: &[Option<Stamp>]) -> usize {
    stamps.iter().flatten().count()
}

pub(super) async fn an_insert_takes_where_there_is_no_record(store: Shared) {
    let write_ = insert(&key("a"), reservation("t"));
    let stamp = write(&store, write_.clone()).await.unwrap();
    let loaded = store.load(vec![key("a")], Urgency::Reservation).await.unwrap();
    assert_eq!(loaded.records, [Ok(write_.apply(None, stamp.now))]);
    assert!(loaded.now >= stamp.now, "one clock for everything");
    assert_eq!((stamp.fence, stamp.version), (stamp.now.0, stamp.now.0));
}

pub(super) async fn an_insert_never_replaces_a_record(store: Shared) {
    let lives = [reservation("t"), lapsed("t"), expired("t")];
    for (n, life) in lives.into_iter().enumerate() {
        let key = key(&n.to_string());
        write(&store, insert(&key, life)).await.unwrap();
        let before = load(&store, &key).await;
        assert_eq!(write(&store, insert(&key, reservation("other"))).await, None);
        assert_eq!(load(&store, &key).await, before);
        write(&store, finish(&key, holder("t"), 1)).await.unwrap();
        assert_eq!(write(&store, insert(&key, reservation("other"))).await, None, "nor a finished one");
    }
}

pub(super) async fn of_64_inserts_exactly_one_takes(store: Shared) {
    for round in 0..20 {
        let key = key(&round.to_string());
        let stamps = race(&store, (0..64).map(|n| insert(&key, reservation(&n.to_string())))).await;
        assert_eq!(took(&stamps), 1);
        let winner = stamps.iter().position(Option::is_some).unwrap();
        assert_eq!(load(&store, &key).await.unwrap().token, token(&winner.to_string()));
    }
}

pub(super) async fn a_holders_write_takes_only_for_the_token_in_progress(store: Shared) {
    let key = key("a");
    assert_eq!(write(&store, finish(&key, holder("t"), 1)).await, None, "there is none");
    write(&store, insert(&key, reservation("t"))).await.unwrap();
    assert_eq!(write(&store, finish(&key, holder("other"), 1)).await, None);
    assert_eq!(write(&store, extend(&key, holder("other"))).await, None);
    assert!(write(&store, extend(&key, holder("t"))).await.is_some());
    assert!(write(&store, finish(&key, holder("t"), 1)).await.is_some());
    let finished = load(&store, &key).await;
    assert_eq!(write(&store, finish(&key, holder("t"), 2)).await, None, "a finished record is not reopened");
    assert_eq!(write(&store, extend(&key, holder("t"))).await, None);
    assert_eq!(load(&store, &key).await, finished);
}

pub(super) async fn a_seen_write_takes_only_on_the_version_that_was_loaded(store: Shared) {
    let key = key("a");
    let first = write(&store, insert(&key, lapsed("t"))).await.unwrap().version;
    assert_eq!(write(&store, reserve(&key, first - 1, "u", 2)).await, None);
    assert_eq!(write(&store, reserve(&key, first + 1, "u", 2)).await, None);
    let second = write(&store, reserve(&key, first, "u", 2)).await.unwrap().version;
    assert!(second > first);
    for stale in
        [reserve(&key, first, "v", 2), extend(&key, Condition::Seen(first)), finish(&key, Condition::Seen(first), 1)]
    {
        assert_eq!(write(&store, stale).await, None);
    }
    assert!(write(&store, extend(&key, Condition::Seen(second))).await.unwrap().version > second);
}

pub(super) async fn of_64_takeovers_exactly_one_takes(store: Shared) {
    for round in 0..10 {
        let key = key(&round.to_string());
        let seen = write(&store, insert(&key, lapsed("t"))).await.unwrap().version;
        let stamps = race(&store, (0..64).map(|n| reserve(&key, seen, &n.to_string(), 2))).await;
        assert_eq!(took(&stamps), 1);
    }
}

/// Races a takeover against `rival` many times: never both, and the record is the winner's.
async fn takeover_against(store: &Shared, rival: impl Fn(&Key, i64) -> Write) {
    let mut winners = HashSet::new();
    for round in 0..100 {
        let key = key(&round.to_string());
        let seen = write(store, insert(&key, lapsed("t"))).await.unwrap().version;
        let mut writes = vec![reserve(&key, seen, "u", 2), rival(&key, seen)];
        // Whoever is spawned first has an edge.
        if round % 2 == 0 {
            writes.reverse();
        }
        let stamps = race(store, writes).await;
        let record = load(store, &key).await.unwrap();
        // "Not taken" means unknown: a store may refuse both, and both would ask again.
        assert!(took(&stamps) <= 1, "two writes took under one version");
        if let Some(place) = stamps.iter().position(Option::is_some) {
            let takeover_won = (place == 0) != (round % 2 == 0);
            assert_eq!(record.token == token("u"), takeover_won);
            winners.insert(takeover_won);
        }
    }
    assert!(!winners.is_empty());
}

pub(super) async fn a_takeover_and_a_completion_never_both_take(store: Shared) {
    takeover_against(&store, |key, _| finish(key, holder("t"), 1)).await;
}

pub(super) async fn a_takeover_and_a_renewal_never_both_take(store: Shared) {
    takeover_against(&store, |key, _| extend(key, holder("t"))).await;
}

pub(super) async fn a_resolution_and_a_completion_never_both_take(store: Shared) {
    for round in 0..100 {
        let key = key(&round.to_string());
        let seen = write(&store, insert(&key, lapsed("t"))).await.unwrap().version;
        let stamps = race(&store, [finish(&key, Condition::Seen(seen), 1), finish(&key, holder("t"), 2)]).await;
        assert!(took(&stamps) <= 1);
        let code = load(&store, &key).await.unwrap().result.map(|result| result.code);
        let winner = stamps.iter().position(Option::is_some).map(|place| place as i32 + 1);
        assert_eq!(code, winner);
    }
}

pub(super) async fn replacements_of_an_expired_record_never_both_take(store: Shared) {
    for round in 0..50 {
        let key = key(&round.to_string());
        let seen = write(&store, insert(&key, expired("t"))).await.unwrap().version;
        let stamps = race(&store, (0..4).map(|n| reserve(&key, seen, &n.to_string(), 1))).await;
        assert_eq!(took(&stamps), 1);
    }
}

pub(super) async fn a_record_that_was_purged_and_inserted_again_is_not_the_one_that_was_loaded(store: Shared) {
    let key = key("a");
    let loaded = write(&store, insert(&key, expired("t"))).await.unwrap().version;
    assert_eq!(purge(&store, Duration::ZERO, 10).await.0, 1);
    let live = write(&store, insert(&key, reservation("holder"))).await.unwrap();
    assert!(live.version > loaded, "versions never repeat for a key");
    for stale in [reserve(&key, loaded, "u", 1), finish(&key, Condition::Seen(loaded), 1)] {
        assert_eq!(write(&store, stale).await, None);
    }
    assert_eq!(load(&store, &key).await.unwrap().token, token("holder"), "the live holder keeps its key");
}

pub(super) async fn fences_grow_across_takeover_replacement_and_deletion(store: Shared) {
    let key = key("a");
    let mut last = write(&store, insert(&key, expired("t"))).await.unwrap();
    for (name, attempt) in [("u", 2), ("v", 3), ("w", 1)] {
        let next = write(&store, reserve(&key, last.version, name, attempt)).await.unwrap();
        assert!(next.fence > last.fence);
        last = next;
    }
    let mut end = finish(&key, holder("w"), 1);
    if let Action::Finish(_, finish) = &mut end.action {
        finish.retention = Some(Duration::ZERO);
    }
    assert_eq!(write(&store, end).await.unwrap().fence, last.fence, "the end of a reservation has its fence");
    while load(&store, &key).await.is_some() {
        // It was due at its insert already, so it is met, postponed to its expiry, and met again.
        purge(&store, Duration::ZERO, 10).await;
    }
    assert!(write(&store, insert(&key, reservation("x"))).await.unwrap().fence > last.fence);
}
