//! The cases that are written out.

use std::{collections::HashSet, sync::Arc, time::Duration};

use bytes::Bytes;
use futures_util::future::join_all;
use tokio::task::JoinSet;

use crate::{
    record::{BODY_BYTES_MAX, Fingerprint, Key, OnExpiry, Origin, Outcome, Owner, Record, Status, Token},
    store::{Purged, Store, StoreError},
    write::{Action, Condition, Extension, Finish, Renewed, Reservation, Stamp, Write},
};

type Shared = Arc<dyn Store>;

const DAY: Duration = Duration::from_secs(24 * 3600);

pub(super) fn key(value: &str) -> Key {
    Key::new("payments.charge", "ann", value).unwrap()
}

pub(super) fn token(name: &str) -> Token {
    Token::new(name).unwrap()
}

pub(super) fn reservation(name: &str) -> Reservation {
    Reservation {
        token: token(name),
        fingerprint: None,
        lock_ttl: DAY,
        retention: DAY,
        owner: None,
        on_expiry: OnExpiry::Retry,
        origin: None,
    }
}

/// A reservation whose lock is over at once.
fn lapsed(name: &str) -> Reservation {
    Reservation { lock_ttl: Duration::ZERO, ..reservation(name) }
}

/// A reservation that is over and expired at once.
fn expired(name: &str) -> Reservation {
    Reservation { retention: Duration::ZERO, ..lapsed(name) }
}

fn insert(key: &Key, reservation: Reservation) -> Write {
    Write { key: key.clone(), action: Action::Insert(reservation) }
}

fn reserve(key: &Key, seen: i64, name: &str, attempt: i32) -> Write {
    let renewed = Renewed { reservation: reservation(name), attempt, earlier_tokens: Default::default() };
    Write { key: key.clone(), action: Action::Reserve(Condition::Seen(seen), renewed) }
}

fn extend(key: &Key, condition: Condition) -> Write {
    let extension = Extension { lock_ttl: None, on_expiry: OnExpiry::Retry, checkpoint: None };
    Write { key: key.clone(), action: Action::Extend(condition, extension) }
}

fn finish(key: &Key, condition: Condition, code: i32) -> Write {
    let outcome = Some(Outcome { code, ..Outcome::default() });
    let finish = Finish { status: Status::Completed, resolved: false, outcome, retention: None, checkpoint: None };
    Write { key: key.clone(), action: Action::Finish(condition, finish) }
}

fn holder(name: &str) -> Condition {
    Condition::Holder(token(name))
}

async fn write(store: &Shared, write: Write) -> Option<Stamp> {
    store.write(vec![write]).await.pop().unwrap().unwrap()
}

async fn load(store: &Shared, key: &Key) -> Option<Record> {
    store.load(vec![key.clone()]).await.unwrap().records.pop().unwrap().unwrap()
}

async fn version(store: &Shared, key: &Key) -> i64 {
    load(store, key).await.unwrap().version
}

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
    let loaded = store.load(vec![key("a")]).await.unwrap();
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
    let mut both_sides_won = HashSet::new();
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
            both_sides_won.insert(takeover_won);
        }
    }
    assert!(!both_sides_won.is_empty());
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
        let code = load(&store, &key).await.unwrap().outcome.map(|outcome| outcome.code);
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
    assert_eq!(store.purge(Duration::ZERO, 10).await.unwrap().deleted, 1);
    let live = write(&store, insert(&key, reservation("holder"))).await.unwrap();
    assert!(live.version > loaded, "versions never repeat for a key");
    for stale in [reserve(&key, loaded, "u", 1), finish(&key, Condition::Seen(loaded), 1)] {
        assert_eq!(write(&store, stale).await, None);
    }
    assert_eq!(load(&store, &key).await.unwrap().token, token("holder"), "the live holder keeps its key");
}

pub(super) async fn an_insert_and_a_purge_leave_one_record_or_none(store: Shared) {
    for round in 0..50 {
        let key = key(&round.to_string());
        write(&store, insert(&key, expired("t"))).await.unwrap();
        let (inserted, purged) =
            tokio::join!(write(&store, insert(&key, reservation("u"))), store.purge(Duration::ZERO, 10));
        let record = load(&store, &key).await;
        match (inserted, purged.unwrap().deleted) {
            (Some(stamp), 1) => assert_eq!(record.unwrap().version, stamp.version),
            (None, 1) => assert_eq!(record, None),
            (None, 0) => assert_eq!(record.unwrap().token, token("t")),
            impossible => panic!("{impossible:?}"),
        }
        store.purge(Duration::ZERO, 10).await.unwrap();
    }
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
        store.purge(Duration::ZERO, 10).await.unwrap();
    }
    assert!(write(&store, insert(&key, reservation("x"))).await.unwrap().fence > last.fence);
}

pub(super) async fn a_purge_deletes_only_what_expired_before_the_grace(store: Shared) {
    write(&store, insert(&key("live"), reservation("t"))).await.unwrap();
    write(&store, insert(&key("lapsed"), lapsed("t"))).await.unwrap();
    write(&store, insert(&key("expired"), expired("t"))).await.unwrap();
    assert_eq!(store.purge(Duration::from_secs(3600), 10).await.unwrap(), Purged::default());
    assert_eq!(store.purge(Duration::ZERO, 10).await.unwrap(), Purged { deleted: 1, postponed: 0 });
    let left = store.load(vec![key("live"), key("lapsed"), key("expired")]).await.unwrap();
    let left: Vec<_> = left.records.into_iter().map(|record| record.unwrap().is_some()).collect();
    assert_eq!(left, [true, true, false]);
}

pub(super) async fn a_purge_is_limited_and_goes_on_where_it_left_off(store: Shared) {
    for n in 0..25 {
        write(&store, insert(&key(&n.to_string()), expired("t"))).await.unwrap();
    }
    for expected in [10, 10, 5, 0] {
        assert_eq!(store.purge(Duration::ZERO, 10).await.unwrap().deleted, expected);
    }
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
    assert_eq!(store.purge(Duration::ZERO, 10).await.unwrap(), Purged { deleted: 0, postponed: 3 });
    assert_eq!(store.purge(Duration::ZERO, 10).await.unwrap(), Purged::default(), "each is met once");
    let left = store.load(due).await.unwrap();
    assert!(left.records.into_iter().all(|record| record.unwrap().is_some()));
}

pub(super) async fn purges_at_once_delete_each_record_once(store: Shared) {
    let writes = (0..200).map(|n| insert(&key(&n.to_string()), expired("t"))).collect();
    assert!(store.write(writes).await.into_iter().all(|written| written.unwrap().is_some()));
    let mut sweepers = JoinSet::new();
    for _ in 0..4 {
        let store = store.clone();
        sweepers.spawn(async move {
            let mut deleted = 0;
            loop {
                match store.purge(Duration::ZERO, 20).await.unwrap().deleted {
                    0 => return deleted,
                    some => deleted += some,
                }
            }
        });
    }
    assert_eq!(sweepers.join_all().await.into_iter().sum::<u64>(), 200);
}

pub(super) async fn a_record_that_is_to_be_held_is_never_purged(store: Shared) {
    let held = Reservation { on_expiry: OnExpiry::Hold, ..expired("t") };
    let stamp = write(&store, insert(&key("a"), held)).await.unwrap();
    assert_eq!(stamp.expires_at, None);
    for _ in 0..3 {
        assert_eq!(store.purge(Duration::ZERO, 10).await.unwrap().deleted, 0);
    }
    assert!(load(&store, &key("a")).await.is_some());
}

pub(super) async fn writes_of_one_call_are_answered_in_order_and_apart(store: Shared) {
    assert!(store.write(Vec::new()).await.is_empty());
    for name in ["taken", "finishing", "extending", "lapsed"] {
        write(&store, insert(&key(name), lapsed("t"))).await.unwrap();
    }
    let lapsed_version = version(&store, &key("lapsed")).await;
    let writes = vec![
        insert(&key("taken"), reservation("u")),
        finish(&key("finishing"), holder("t"), 1),
        insert(&key("fresh 1"), reservation("t")),
        finish(&key("missing"), holder("t"), 1),
        reserve(&key("lapsed"), lapsed_version, "u", 2),
        extend(&key("extending"), holder("t")),
        insert(&key("fresh 2"), reservation("t")),
        extend(&key("missing too"), holder("t")),
    ];
    let took: Vec<_> = store.write(writes).await.into_iter().map(|written| written.unwrap().is_some()).collect();
    assert_eq!(took, [false, true, true, false, true, true, true, false]);
    assert_eq!(load(&store, &key("finishing")).await.unwrap().status, Status::Completed);
    assert_eq!(load(&store, &key("lapsed")).await.unwrap().token, token("u"));
}

pub(super) async fn a_load_answers_in_order_and_knows_what_is_not_there(store: Shared) {
    assert_eq!(store.load(Vec::new()).await.unwrap().records, []);
    for name in ["a", "b"] {
        write(&store, insert(&key(name), reservation(name))).await.unwrap();
    }
    let loaded = store.load(["b", "missing", "a", "b"].map(key).into()).await.unwrap();
    let tokens: Vec<_> = loaded.records.into_iter().map(|record| record.unwrap().map(|record| record.token)).collect();
    assert_eq!(tokens, [Some(token("b")), None, Some(token("a")), Some(token("b"))]);
    assert!(
        store.load(vec![key("missing")]).await.unwrap().now >= loaded.now,
        "the clock is told without a record too"
    );
}

pub(super) async fn every_text_and_byte_comes_back_as_it_was_stored(store: Shared) {
    let bodies: [&[u8]; 7] =
        [b"", b"0", b"false", b"null", b"\0\xff\0", b"{\"bb\":1,\"a\":1.10,\"bb\":2}", b"\xc3\x28"];
    for (n, body) in bodies.into_iter().enumerate() {
        let key = Key::new("a-Z.0_/9", "e\u{301} \u{1f600}", &format!("{n} '\"\\%_--")).unwrap();
        let first = Reservation {
            fingerprint: Some(Fingerprint::new("sha256-v1:0123456789abcdef").unwrap()),
            owner: Some(Owner::new("pod/7 '~").unwrap()),
            origin: Origin::parse("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
            ..reservation(" t'~")
        };
        let inserted = insert(&key, first);
        let stamp = write(&store, inserted.clone()).await.unwrap();
        let record = inserted.apply(None, stamp.now).unwrap();
        let pair = |name: &str, value: &str| (name.to_owned(), value.to_owned());
        let outcome = Outcome {
            code: i32::MIN,
            metadata: vec![pair("b", "\0\u{1}\u{ff}"), pair("a", ""), pair("b", "\u{10ffff}"), pair("", "x")],
            body: Bytes::from_static(body),
        };
        let ended = Finish {
            status: Status::Failed,
            resolved: false,
            outcome: Some(outcome),
            retention: Some(Duration::from_micros(1_234_567)),
            checkpoint: Some(Bytes::from_static(b"\0\xff")),
        };
        let ended = Write { key: key.clone(), action: Action::Finish(holder(" t'~"), ended) };
        let stamp = write(&store, ended.clone()).await.unwrap();
        assert_eq!(load(&store, &key).await, ended.apply(Some(&record), stamp.now));
    }
}

/// Text that no database can compress, so that limits of index rows count in full.
fn incompressible(length: usize) -> String {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    std::iter::repeat_with(|| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        char::from(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._"[(state % 64) as usize])
    })
    .take(length)
    .collect()
}

pub(super) async fn keys_at_their_longest_are_stored(store: Shared) {
    let [namespace, subject, value] = [128, 255, 255].map(incompressible);
    let key = Key::new(&namespace, &subject, &value).unwrap();
    let longest = Reservation {
        fingerprint: Some(Fingerprint::new(&format!("x:{}", "9".repeat(126))).unwrap()),
        owner: Some(Owner::new(&incompressible(128)).unwrap()),
        ..reservation(&incompressible(64))
    };
    assert!(write(&store, insert(&key, longest)).await.is_some());
    assert_eq!(load(&store, &key).await.unwrap().key, key);
}

pub(super) async fn the_largest_result_is_stored(store: Shared) {
    let key = key("a");
    write(&store, insert(&key, reservation("t"))).await.unwrap();
    let body: Vec<u8> = incompressible(BODY_BYTES_MAX).into_bytes();
    let mut end = finish(&key, holder("t"), 1);
    if let Action::Finish(_, finish) = &mut end.action {
        let metadata = (0..64).map(|n| (format!("{n:02}"), "\u{1}".repeat(254))).collect();
        finish.outcome = Some(Outcome { code: i32::MAX, metadata, body: body.into() });
    }
    let stamp = write(&store, end.clone()).await.unwrap();
    let record = load(&store, &key).await.unwrap();
    let Action::Finish(_, finish) = end.action else { unreachable!() };
    assert_eq!((record.outcome, record.finished_at), (finish.outcome, Some(stamp.now)));
}

pub(super) async fn callers_that_leave_leave_nothing_half_done(store: Shared) {
    for n in 0..100_u64 {
        let call = store.write(vec![insert(&key(&n.to_string()), reservation("t"))]);
        // Some leave before they are begun, some in the middle.
        let _ = tokio::time::timeout(Duration::from_micros(n * 20), call).await;
    }
    for n in 0..100 {
        let key = key(&n.to_string());
        let again = write(&store, insert(&key, reservation("t"))).await;
        assert_eq!(load(&store, &key).await.unwrap().token, token("t"), "{again:?}");
        assert!(write(&store, finish(&key, holder("t"), 1)).await.is_some(), "and the record is whole");
    }
}

pub(super) async fn a_store_that_is_closed_refuses(store: Shared) {
    write(&store, insert(&key("a"), reservation("t"))).await.unwrap();
    store.close().await;
    let refused = store.write(vec![finish(&key("a"), holder("t"), 1)]).await;
    assert_eq!(refused, [Err(StoreError::Unavailable)]);
    assert!(store.load(vec![key("a")]).await.is_err());
    assert!(store.check().await.is_err());
}

pub(super) async fn a_check_answers_while_every_connection_is_busy(store: Shared) {
    let busy: Vec<_> = (0..200)
        .map(|n| {
            let store = store.clone();
            tokio::spawn(async move { write(&store, insert(&key(&n.to_string()), reservation("t"))).await })
        })
        .collect();
    assert_eq!(store.check().await, Ok(()));
    join_all(busy).await;
}
