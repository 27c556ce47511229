//! Bodies of requests and of answers: large, broken, endless, encoded.

use std::convert::Infallible;

use axum::{Router, body::Body, response::Response};
use bytes::Bytes;
use futures_util::stream;
use http::{HeaderMap, HeaderName};
use http_body_util::StreamBody;
use hyper::body::Frame;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use crate::{
    handlers::{Runs, answering, echo, layer},
    support::{MILLISECOND, SECOND, within, world},
    web::{VERSIONS, Version, Web, post},
};

#[tokio::test]
async fn a_body_over_the_limit_and_a_bad_key_are_answered_and_not_reset() {
    let (world, runs) = (world().await, Runs::default());
    let web = Web::layered(echo(&runs), layer(&world.client)).await;
    for version in VERSIONS {
        let large = web.post(version, "/", "k", vec![b'x'; 10 << 20]).await;
        assert_eq!((large.status.as_u16(), large.problem().as_str()), (413, "body-too-large"));
        let malformed = web.post(version, "/", "", vec![b'x'; 10 << 20]).await;
        assert_eq!((malformed.status.as_u16(), malformed.problem().as_str()), (400, "key-malformed"));
    }
    // One that does not say its length, and breaks off: nothing is handled.
    let mut stream = TcpStream::connect(web.address).await.unwrap();
    stream
        .write_all(
            b"POST / HTTP/1.1\r\nhost: a\r\nidempotency-key: k\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n",
        )
        .await
        .unwrap();
    drop(stream);
    tokio::time::sleep(50 * MILLISECOND).await;
    assert_eq!(runs.so_far(), 0);
    assert!(web.post(Version::One, "/", "k", vec![b'x'; 2 << 20]).await.status.is_success());
}

#[tokio::test]
async fn whoever_waits_to_be_told_to_go_on_is_refused_before_sending() {
    let world = world().await;
    let web = Web::layered(echo(&Runs::default()), layer(&world.client)).await;
    for (key, length, status) in [("k", 10 << 20, "413"), ("a, b", 100, "400")] {
        let mut stream = TcpStream::connect(web.address).await.unwrap();
        let head = format!(
            "POST / HTTP/1.1\r\nhost: a\r\nidempotency-key: {key}\r\nexpect: 100-continue\r\ncontent-length: {length}\r\n\r\n"
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        let mut read = Vec::new();
        within(5 * SECOND, async {
            while !read.ends_with(b"}") {
                assert_ne!(stream.read_buf(&mut read).await.unwrap(), 0);
            }
        })
        .await;
        let answer = String::from_utf8(read).unwrap();
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{answer}");
    }
}

#[tokio::test]
async fn an_answer_too_large_to_be_stored_reaches_the_first_caller_whole_and_nobody_acts_again() {
    let (world, runs) = (world().await, Runs::default());
    let router = answering(&runs, |_| {
        let chunks = (0..80).map(|n| Ok::<_, Infallible>(Bytes::from(vec![n; 64 << 10])));
        Response::builder().status(201).body(Body::from_stream(stream::iter(chunks))).unwrap()
    });
    let web = Web::layered(router, layer(&world.client)).await;
    for (n, version) in VERSIONS.into_iter().enumerate() {
        let key = format!("k{n}");
        let first = web.post(version, "/", &key, "").await;
        assert_eq!((first.status.as_u16(), first.body.len(), first.body[40 * (64 << 10)]), (201, 80 * (64 << 10), 40));
        let again = web.post(version, "/", &key, "").await;
        assert_eq!((again.status.as_u16(), again.problem().as_str()), (409, "answer-not-kept"));
        let problem: serde_json::Value = serde_json::from_slice(&again.body).unwrap();
        assert_eq!(problem["original_status"], 201);
        assert_eq!(again.header("retry-after"), None);
    }
    assert_eq!(runs.so_far(), 2);

    let many_headers = answering(&runs, |_| {
        (0..65)
            .fold(Response::builder(), |answer, n| answer.header(format!("x-{n}"), "v"))
            .body(Body::from("ok"))
            .unwrap()
    });
    let web = Web::layered(many_headers, layer(&world.client)).await;
    assert_eq!(web.post(Version::One, "/", "headers", "").await.body, "ok");
    assert_eq!(web.post(Version::One, "/", "headers", "").await.problem(), "answer-not-kept");
}

#[tokio::test]
async fn an_answer_that_fails_midway_is_never_stored() {
    let (world, runs) = (world().await, Runs::default());
    let router = answering(&runs, |_| {
        let chunks = (0..5).map(|n| if n < 4 { Ok(Bytes::from(vec![b'x'; 75 << 10])) } else { Err("broken") });
        Response::new(Body::from_stream(stream::iter(chunks)))
    });
    let web = Web::layered(router, layer(&world.client).lock_ttl(20 * SECOND)).await;
    for (n, version) in VERSIONS.into_iter().enumerate() {
        let key = format!("k{n}");
        assert!(web.send(version, post("/", &key, "")).await.is_err());
        assert_eq!(web.post(version, "/", &key, "").await.problem(), "in-progress");
    }
    assert_eq!(runs.so_far(), 2);
}

#[tokio::test]
async fn an_answer_that_is_shorter_than_it_says_is_never_stored() {
    let (world, runs) = (world().await, Runs::default());
    let router = answering(&runs, |_| {
        let chunks = [Ok::<_, Infallible>(Bytes::from(vec![b'x'; 60]))];
        Response::builder().header("content-length", "100").body(Body::from_stream(stream::iter(chunks))).unwrap()
    });
    let web = Web::layered(router, layer(&world.client).lock_ttl(20 * SECOND)).await;
    for (n, version) in VERSIONS.into_iter().enumerate() {
        let key = format!("k{n}");
        assert!(web.send(version, post("/", &key, "")).await.is_err(), "{version:?}");
        assert_eq!(web.post(version, "/", &key, "").await.problem(), "in-progress");
    }
    assert_eq!(runs.so_far(), 2);
}

#[tokio::test]
async fn an_endless_stream_begins_at_once_and_is_not_stored() {
    let (world, runs) = (world().await, Runs::default());
    let router = answering(&runs, |_| {
        let events = stream::unfold(0, async |n| {
            if n > 0 {
                std::future::pending::<()>().await;
            }
            Some((Ok::<_, Infallible>(Bytes::from("data: 1\n\n")), n + 1))
        });
        Response::builder().header("content-type", "Text/Event-Stream").body(Body::from_stream(events)).unwrap()
    });
    let web = Web::layered(router, layer(&world.client)).await;
    let mut stream = TcpStream::connect(web.address).await.unwrap();
    stream.write_all(b"POST / HTTP/1.1\r\nhost: a\r\nidempotency-key: k\r\ncontent-length: 0\r\n\r\n").await.unwrap();
    let mut read = Vec::new();
    within(5 * SECOND, async {
        while !read.ends_with(b"data: 1\n\n\r\n") {
            assert_ne!(stream.read_buf(&mut read).await.unwrap(), 0);
        }
    })
    .await;
    assert_eq!(web.post(Version::One, "/", "k", "").await.problem(), "answer-not-kept");
}

#[tokio::test]
async fn trailers_are_replayed() {
    let (world, runs) = (world().await, Runs::default());
    let router = answering(&runs, |_| {
        let trailers = HeaderMap::from_iter([(HeaderName::from_static("x-sum"), "7".parse().unwrap())]);
        let frames = [Frame::data(Bytes::from("body")), Frame::trailers(trailers)].map(Ok::<_, Infallible>);
        let body = Body::new(StreamBody::new(stream::iter(frames)));
        Response::builder().header("trailer", "x-sum").body(body).unwrap()
    });
    let web = Web::layered(router, layer(&world.client)).await;
    for (version, replay) in [(Version::Two, false), (Version::Two, true), (Version::One, true)] {
        let mut request = post("/", "k", "");
        request.headers_mut().insert("te", "trailers".parse().unwrap());
        let answer = web.send(version, request).await.unwrap();
        assert_eq!((answer.body.as_ref(), answer.is_replay()), (&b"body"[..], replay));
        assert_eq!(answer.trailers.unwrap()["x-sum"], "7");
    }
}

#[tokio::test]
async fn an_answer_is_readable_for_whoever_retries() {
    let (world, runs) = (world().await, Runs::default());
    let runs_of = runs.clone();
    // As a compressing layer inside would.
    let router = Router::new().fallback(async move |headers: HeaderMap| {
        runs_of.count();
        let encoding = headers.get("accept-encoding").map_or("identity", |_| "gzip");
        Response::builder().header("content-encoding", encoding).body(Body::from("body")).unwrap()
    });
    let web = Web::layered(router, layer(&world.client)).await;
    let mut first = post("/", "k", "");
    first.headers_mut().insert("accept-encoding", "gzip".parse().unwrap());
    for request in [first, post("/", "k", "")] {
        let answer = web.send(Version::One, request).await.unwrap();
        assert_eq!((answer.header("content-encoding"), answer.body.as_ref()), (Some("identity"), &b"body"[..]));
    }
}
