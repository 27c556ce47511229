//! The `Idempotency-Key` header, through real sockets, by HTTP/1.1 and HTTP/2.

use std::{sync::Arc, time::Duration};

use axum::{Router, body::Body, response::Response, routing::any};
use bytes::Bytes;
use http::{HeaderName, Method, Request, StatusCode};
use onceward_client::{Resolution, StoredResult, http::Keep};

use crate::{
    handlers::{Runs, answering, echo, layer, status},
    support::{MILLISECOND, SECOND, eventually, key, within, world},
    web::{Gate, VERSIONS, Version, Web, post},
};

#[tokio::test]
async fn a_request_that_is_sent_again_gets_the_answer_of_the_first() {
    let (world, runs) = (world().await, Runs::default());
    let router = answering(&runs, |run| {
        let answer = Response::builder().status(201).header("x-list", "1").header("location", "/orders/1");
        let answer =
            answer.header("set-cookie", "session=1").header("x-list", "2").header("content-type", "text/plain");
        answer.body(Body::from(vec![b'0' + run as u8, 0xff, 0])).unwrap()
    });
    let web = Web::layered(router, layer(&world.client)).await;
    for (n, version) in VERSIONS.into_iter().enumerate() {
        let key = format!("k{n}");
        let first = web.post(version, "/pay", &key, "100").await;
        assert!(!first.is_replay() && first.header("set-cookie").is_some());
        for version in VERSIONS {
            let again = web.post(version, "/pay", &key, "100").await;
            assert!(again.is_replay());
            assert_eq!((again.status, &again.body), (StatusCode::CREATED, &first.body));
            assert_eq!(again.headers.get_all("x-list").iter().collect::<Vec<_>>(), ["1", "2"]);
            assert_eq!(
                (again.header("location"), again.header("content-type")),
                (Some("/orders/1"), Some("text/plain"))
            );
            assert_eq!((again.header("set-cookie"), again.header("content-length")), (None, Some("3")));
            assert_eq!(again.headers.get_all("content-length").iter().count(), 1);
        }
    }
    assert_eq!(runs.so_far(), 2);
}

#[tokio::test]
async fn empty_and_falsy_answers_are_replayed_byte_for_byte() {
    let (world, runs) = (world().await, Runs::default());
    let web = Web::layered(
        Router::new().fallback({
            let runs = runs.clone();
            async move |body: Bytes| {
                runs.count();
                Response::builder().status(202).body(Body::from(body)).unwrap()
            }
        }),
        layer(&world.client),
    )
    .await;
    let bodies = [&b""[..], b"0", b"false", b"null", b"{\"bb\":1,\"a\":1.10,\"bb\":2}", b"\xff\xfe"];
    for (n, body) in bodies.iter().enumerate() {
        for replay in [false, true] {
            let answer = web.post(Version::One, "/", &n.to_string(), *body).await;
            assert_eq!((answer.status.as_u16(), answer.body.as_ref(), answer.is_replay()), (202, *body, replay));
        }
    }
    assert_eq!(runs.so_far(), bodies.len());
}

#[tokio::test]
async fn quoted_and_bare_are_one_key_and_what_is_no_key_is_refused() {
    let (world, runs) = (world().await, Runs::default());
    let web = Web::layered(echo(&runs), layer(&world.client)).await;
    assert!(!web.post(Version::One, "/", "k-1", "").await.is_replay());
    assert!(web.post(Version::One, "/", "\"k-1\"", "").await.is_replay());
    // Keys are compared byte for byte.
    assert!(!web.post(Version::One, "/", "K-1", "").await.is_replay());
    let long = "k".repeat(256);
    for version in VERSIONS {
        for malformed in ["", "\"\"", "K, K", "\"k-1", "\"k-1\";p=1", &long] {
            let answer = web.post(version, "/", malformed, "").await;
            assert_eq!((answer.status.as_u16(), answer.problem().as_str()), (400, "key-malformed"), "{malformed}");
        }
        for bytes in [&b"\xc3\xa9"[..], b"\xff"] {
            let mut request = post("/", "k", "");
            request.headers_mut().insert("idempotency-key", bytes.try_into().unwrap());
            assert_eq!(web.send(version, request).await.unwrap().problem(), "key-malformed");
        }
        let mut twice = post("/", "k", "");
        twice.headers_mut().append("Idempotency-Key", "k".parse().unwrap());
        assert_eq!(web.send(version, twice).await.unwrap().problem(), "key-malformed");
    }
    assert_eq!(runs.so_far(), 2);
}

#[tokio::test]
async fn the_same_key_for_another_request_is_refused() {
    let (world, runs) = (world().await, Runs::default());
    let web = Web::layered(echo(&runs), layer(&world.client)).await;
    web.post(Version::One, "/pay?to=ann&a=&b=c", "k", "100").await;
    let patch = Request::patch("/pay?to=ann&a=&b=c").header("idempotency-key", "k").body(Bytes::from("100")).unwrap();
    let others = [
        post("/pay?to=bob&a=&b=c", "k", "100"),
        post("/pay?to=ann&a=&b=", "k", "c100"),
        post("/pay?to=ann&a=&b=c", "k", "1000"),
        post("/pay?to=ann&a=b&c=", "k", "100"),
        post("/pay", "k", "?to=ann&a=&b=c100"),
        post("/other?to=ann&a=&b=c", "k", "100"),
        patch,
    ];
    for other in others {
        let described = format!("{other:?}");
        let answer = web.send(Version::One, other).await.unwrap();
        assert_eq!((answer.status.as_u16(), answer.problem().as_str()), (422, "key-reused"), "{described}");
    }
    assert!(web.post(Version::One, "/pay?to=ann&a=&b=c", "k", "100").await.is_replay());
    assert_eq!(runs.so_far(), 1);
}

#[tokio::test]
async fn one_users_key_never_meets_anothers() {
    let (world, runs) = (world().await, Runs::default());
    let web = Web::layered(echo(&runs), layer(&world.client)).await;
    let by = |user: &str| {
        let mut request = post("/", "k", "");
        request.headers_mut().insert("x-user", user.parse().unwrap());
        request
    };
    for user in ["ann", "bob"] {
        assert!(!web.send(Version::One, by(user)).await.unwrap().is_replay());
        assert!(web.send(Version::One, by(user)).await.unwrap().is_replay());
    }
    assert_eq!(runs.so_far(), 2);
    let refused = web.send(Version::One, by("nobody")).await.unwrap();
    assert_eq!((refused.status.as_u16(), refused.problem().as_str()), (500, "misconfigured"));
    assert_eq!(runs.so_far(), 2);
}

#[tokio::test]
async fn safe_methods_pass_and_a_key_may_be_required() {
    let (world, runs) = (world().await, Runs::default());
    let web = Web::layered(echo(&runs), layer(&world.client).required()).await;
    for method in [Method::GET, Method::HEAD, Method::OPTIONS, Method::PUT, Method::DELETE] {
        for _ in 0..2 {
            let request = Request::builder().method(&method).uri("/").header("idempotency-key", "k");
            let answer = web.send(Version::One, request.body(Bytes::new()).unwrap()).await.unwrap();
            assert!(answer.status == 201 && !answer.is_replay());
        }
    }
    assert_eq!(runs.so_far(), 10);
    assert!(world.client.lookup(key("k")).await.unwrap().is_none());
    let without = Request::post("/").body(Bytes::from("100")).unwrap();
    let answer = web.send(Version::One, without.clone()).await.unwrap();
    assert_eq!((answer.status.as_u16(), answer.problem().as_str()), (400, "key-missing"));

    let optional = Web::layered(echo(&runs), layer(&world.client)).await;
    assert_eq!(optional.send(Version::One, without).await.unwrap().body, "11 None b\"100\"");
}

#[tokio::test]
async fn header_and_methods_can_be_chosen() {
    let (world, runs) = (world().await, Runs::default());
    let layer = layer(&world.client).header(HeaderName::from_static("x-request-id")).methods([Method::PUT]);
    let web = Web::layered(echo(&runs), layer).await;
    let put = || Request::put("/").header("X-Request-Id", "k").body(Bytes::new()).unwrap();
    assert!(!web.send(Version::Two, put()).await.unwrap().is_replay());
    assert!(web.send(Version::Two, put()).await.unwrap().is_replay());
    assert!(!web.post(Version::Two, "/", "k", "").await.is_replay());
}

#[tokio::test]
async fn while_one_is_in_progress_others_are_told_or_wait() {
    let (world, gate) = (world().await, Gate::default());
    let router = || {
        let gate = gate.clone();
        Router::new().fallback(async move || {
            gate.pass().await;
            "done"
        })
    };
    let told = Arc::new(Web::layered(router(), layer(&world.client)).await);
    let early = Web::layered(router(), layer(&world.client).too_early()).await;
    let waiting = Web::layered(router(), layer(&world.client).wait(20 * SECOND)).await;
    let first = tokio::spawn({
        let told = told.clone();
        async move { told.post(Version::One, "/", "k", "").await }
    });
    gate.begun().await;
    let answer = told.post(Version::One, "/", "k", "").await;
    assert_eq!(
        (answer.status.as_u16(), answer.problem().as_str(), answer.header("retry-after")),
        (409, "in-progress", Some("1"))
    );
    let answer = early.post(Version::One, "/", "k", "").await;
    assert_eq!((answer.status.as_u16(), answer.problem().as_str()), (425, "in-progress"));
    let waits = tokio::spawn(async move { waiting.post(Version::One, "/", "k", "").await });
    tokio::time::sleep(100 * MILLISECOND).await;
    assert!(!waits.is_finished());
    gate.open();
    assert_eq!(within(5 * SECOND, first).await.unwrap().body, "done");
    let waited = within(5 * SECOND, waits).await.unwrap();
    assert!(waited.is_replay() && waited.body == "done");
}

#[tokio::test]
async fn what_an_answer_means_for_its_key_is_said_by_its_status() {
    let (world, runs) = (world().await, Runs::default());
    let runs_of = runs.clone();
    let router = Router::new().route(
        "/{status}",
        any(async move |axum::extract::Path(code): axum::extract::Path<u16>| {
            runs_of.count();
            status(code)
        }),
    );
    let web = Web::layered(router, layer(&world.client)).await;
    for (code, next, ran) in [
        (200, "replay", 1),
        (204, "replay", 1),
        (301, "replay", 1),
        (400, "replay", 1),
        (404, "replay", 1),
        (422, "replay", 1),
        (408, "again", 2),
        (425, "again", 2),
        (429, "again", 2),
        (503, "again", 2),
        (500, "held", 1),
        (502, "held", 1),
        (504, "held", 1),
    ] {
        let (before, path, key) = (runs.so_far(), format!("/{code}"), format!("k{code}"));
        let first = web.post(Version::One, &path, &key, "").await;
        assert_eq!((first.status.as_u16(), first.is_replay()), (code, false));
        let second = web.post(Version::One, &path, &key, "").await;
        match next {
            "replay" => assert!(second.is_replay() && second.status == code, "{code}"),
            "again" => assert!(!second.is_replay() && second.status == code, "{code}"),
            _ => assert_eq!(second.problem(), "in-progress", "{code}"),
        }
        assert_eq!(runs.so_far() - before, ran, "{code}");
    }
    let all = layer(&world.client).keep(|_| Keep::Store);
    let web = Web::layered(answering(&runs, |_| status(500)), all).await;
    web.post(Version::One, "/", "all", "").await;
    assert!(web.post(Version::One, "/", "all", "").await.is_replay());
}

#[tokio::test]
async fn a_panic_leaves_the_key_to_the_end_of_its_lock() {
    let (world, runs) = (world().await, Runs::default());
    let runs_of = runs.clone();
    let router = Router::new().fallback(async move || -> &'static str {
        match runs_of.count() {
            1 => panic!("on purpose"),
            _ => "second",
        }
    });
    let web = Web::layered(router, layer(&world.client).lock_ttl(300 * MILLISECOND)).await;
    assert!(web.send(Version::One, post("/", "k", "")).await.is_err());
    assert_eq!(web.post(Version::One, "/", "k", "").await.problem(), "in-progress");
    eventually("the lock runs out", async || web.post(Version::One, "/", "k", "").await.body == "second").await;
    assert_eq!(runs.so_far(), 2);
}

#[tokio::test]
async fn an_outcome_that_nobody_knows_is_told_without_a_time_to_retry() {
    let (world, runs) = (world().await, Runs::default());
    let web =
        Web::layered(answering(&runs, |_| status(500)), layer(&world.client).hold().lock_ttl(50 * MILLISECOND)).await;
    web.post(Version::One, "/", "k", "").await;
    eventually("it is in doubt", async || {
        let answer = web.post(Version::One, "/", "k", "").await;
        assert_eq!(answer.status, 409);
        answer.problem() == "in-doubt" && answer.header("retry-after").is_none()
    })
    .await;
    assert_eq!(runs.so_far(), 1);
}

#[tokio::test]
async fn a_handler_runs_to_its_end_although_its_caller_hangs_up() {
    let (world, runs, gate) = (world().await, Runs::default(), Gate::default());
    let (runs_of, gate_of) = (runs.clone(), gate.clone());
    let router = Router::new().fallback(async move || {
        runs_of.count();
        gate_of.pass().await;
        "done"
    });
    let web = Arc::new(Web::layered(router, layer(&world.client)).await);
    for (n, version) in VERSIONS.into_iter().enumerate() {
        let key = format!("k{n}");
        let leaving = tokio::spawn({
            let (web, key) = (web.clone(), key.clone());
            async move { web.post(version, "/", &key, "").await }
        });
        gate.begun().await;
        leaving.abort();
        assert!(leaving.await.unwrap_err().is_cancelled());
        tokio::time::sleep(50 * MILLISECOND).await;
        gate.open();
        eventually("the answer is stored", async || {
            let answer = web.post(version, "/", &key, "").await;
            answer.is_replay() && answer.body == "done"
        })
        .await;
        assert_eq!(runs.so_far(), n + 1);
    }
}

#[tokio::test]
async fn a_crowd_of_the_same_request_is_handled_once() {
    let (world, runs) = (world().await, Runs::default());
    let runs_of = runs.clone();
    let router = Router::new().fallback(async move || {
        runs_of.count();
        tokio::time::sleep(Duration::from_millis(50)).await;
        "done"
    });
    let web = Arc::new(Web::layered(router, layer(&world.client).wait(10 * SECOND)).await);
    let crowd = (0..50).map(|n| {
        let web = web.clone();
        tokio::spawn(async move { web.post(VERSIONS[n % 2], "/", "k", "100").await })
    });
    for one in crowd.collect::<Vec<_>>() {
        let answer = within(20 * SECOND, one).await.unwrap();
        assert_eq!((answer.status.as_u16(), answer.body.as_ref()), (200, &b"done"[..]));
    }
    assert_eq!(runs.so_far(), 1);
}

#[tokio::test]
async fn a_nested_router_may_give_the_path_as_it_was_sent() {
    let (world, runs) = (world().await, Runs::default());
    let path = |request: &http::request::Parts| {
        let original = request.extensions.get::<axum::extract::OriginalUri>();
        original.map_or_else(|| request.uri.path().to_owned(), |original| original.path().to_owned())
    };
    let nested = || echo(&runs).layer(layer(&world.client).path(path));
    let web = Web::start(Router::new().nest("/charges", nested()).nest("/refunds", nested())).await;
    assert_eq!(web.post(Version::One, "/charges/1", "k", "100").await.status, 201);
    assert_eq!(web.post(Version::One, "/refunds/1", "k", "100").await.problem(), "key-reused");
    assert!(web.post(Version::One, "/charges/1", "k", "100").await.is_replay());
}

#[tokio::test]
async fn what_an_operator_has_found_is_never_told_as_a_success_that_it_was_not() {
    let (world, runs) = (world().await, Runs::default());
    let web = Web::layered(answering(&runs, |_| status(500)), layer(&world.client).hold()).await;
    let resolved = async |name: &str, resolution: Resolution| {
        web.post(Version::One, "/", name, "").await;
        let fence = world.client.lookup(key(name)).await.unwrap().unwrap().fence;
        world.client.resolve(key(name), fence, resolution, true).await.unwrap();
        web.post(Version::One, "/", name, "").await
    };
    assert_eq!(resolved("failed", Resolution::Fail(StoredResult::default())).await.problem(), "failed");
    let refused = resolved("refused", Resolution::Fail(StoredResult::new("no money").code(402))).await;
    assert_eq!((refused.status.as_u16(), refused.body.as_ref()), (402, &b"no money"[..]));
    assert_eq!(resolved("done", Resolution::Complete(StoredResult::new("by hand"))).await.status, 200);
    assert_eq!(runs.so_far(), 3);
}
