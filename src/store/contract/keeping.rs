//! What is stored comes back, from calls of any size, whoever leaves meanwhile.

use std::time::Duration;

use bytes::Bytes;
use onceward_testing::incompressible;

use super::vocabulary::*;
use crate::{
    record::{BODY_BYTES_MAX, Fingerprint, Key, Origin, Owner, Status, StoredResult},
    store::StoreError,
    write::{Action, Finish, Reservation, Write},
};

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
        let result = StoredResult {
            code: i32::MIN,
            metadata: vec![pair("b", "\0\u{1}\u{ff}"), pair("a", ""), pair("b", "\u{10ffff}"), pair("", "x")],
            body: Bytes::from_static(body),
        };
        let ended = Finish {
            status: Status::Failed,
            resolved: false,
            result: Some(result),
            retention: Some(Duration::from_micros(1_234_567)),
            checkpoint: Some(Bytes::from_static(b"\0\xff")),
        };
        let ended = Write { key: key.clone(), action: Action::Finish(holder(" t'~"), ended) };
        let stamp = write(&store, ended.clone()).await.unwrap();
        assert_eq!(load(&store, &key).await, ended.apply(Some(&record), stamp.now));
    }
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
        finish.result = Some(StoredResult { code: i32::MAX, metadata, body: body.into() });
    }
    let stamp = write(&store, end.clone()).await.unwrap();
    let record = load(&store, &key).await.unwrap();
    let Action::Finish(_, finish) = end.action else { unreachable!() };
    assert_eq!((record.result, record.finished_at), (finish.result, Some(stamp.now)));
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
    assert_eq!(store.load(Vec::new(), Urgency::Reservation).await.unwrap().records, []);
    for name in ["a", "b"] {
        write(&store, insert(&key(name), reservation(name))).await.unwrap();
    }
    let loaded = store.load(["b", "missing", "a", "b"].map(key).into(), Urgency::Reservation).await.unwrap();
    let tokens: Vec<_> = loaded.records.into_iter().map(|record| record.unwrap().map(|record| record.token)).collect();
    assert_eq!(tokens, [Some(token("b")), None, Some(token("a")), Some(token("b"))]);
    assert!(
        store.load(vec![key("missing")], Urgency::Reservation).await.unwrap().now >= loaded.now,
        "the clock is told without a record too"
    );
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
    assert!(store.load(vec![key("a")], Urgency::Reservation).await.is_err());
    assert!(store.check().await.is_err());
}

pub(super) async fn a_check_answers_until_the_store_is_closed(store: Shared) {
    assert_eq!(store.check().await, Ok(()));
    store.close().await;
    assert_eq!(store.check().await, Err(StoreError::Unavailable));
}
