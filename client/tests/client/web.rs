//! [`Web`]: a web server whose handlers are made safe to retry, and requests to it.

use std::{net::SocketAddr, sync::Arc};

use axum::Router;
use bytes::Bytes;
use http::{HeaderMap, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper_util::rt::{TokioExecutor, TokioIo};
use onceward_client::http::HttpLayer;
use tokio::{
    net::{TcpListener, TcpStream},
    sync::Notify,
    task::JoinSet,
};

/// Which HTTP a request is sent by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    One,
    Two,
}

pub const VERSIONS: [Version; 2] = [Version::One, Version::Two];

pub struct Web {
    pub address: SocketAddr,
    _serving: JoinSet<()>,
}

/// An answer, read whole.
#[derive(Debug)]
pub struct Answer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: Bytes,
    pub trailers: Option<HeaderMap>,
}

impl Web {
    pub async fn start(router: Router) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut serving = JoinSet::new();
        serving.spawn(async move { axum::serve(listener, router).await.unwrap() });
        Self { address, _serving: serving }
    }

    /// One that somebody else has started.
    pub fn at(address: SocketAddr) -> Self {
        Self { address, _serving: JoinSet::new() }
    }

    /// Its handlers behind a layer.
    pub async fn layered(router: Router, layer: HttpLayer) -> Self {
        Self::start(router.layer(layer)).await
    }

    /// Sends a request on a connection of its own. An error is one of the connection or of the answer's body.
    pub async fn send(&self, version: Version, request: Request<Bytes>) -> Result<Answer, hyper::Error> {
        let stream = TokioIo::new(TcpStream::connect(self.address).await.unwrap());
        let (mut parts, body) = request.into_parts();
        let mut tasks = JoinSet::new();
        let response: Response<hyper::body::Incoming> = match version {
            Version::One => {
                parts.headers.insert("host", "web.test".parse().unwrap());
                let (mut sender, connection) = hyper::client::conn::http1::handshake(stream).await?;
                tasks.spawn(async move { drop(connection.await) });
                sender.send_request(Request::from_parts(parts, Full::new(body))).await?
            }
            Version::Two => {
                parts.uri = format!("http://web.test{}", parts.uri).parse().unwrap();
                let (mut sender, connection) =
                    hyper::client::conn::http2::handshake(TokioExecutor::new(), stream).await?;
                tasks.spawn(async move { drop(connection.await) });
                sender.send_request(Request::from_parts(parts, Full::new(body))).await?
            }
        };
        let (parts, body) = response.into_parts();
        let body = body.collect().await?;
        let trailers = body.trailers().cloned();
        Ok(Answer { status: parts.status, headers: parts.headers, body: body.to_bytes(), trailers })
    }

    /// POSTs a body under a key.
    pub async fn post(&self, version: Version, path: &str, key: &str, body: impl Into<Bytes>) -> Answer {
        self.send(version, post(path, key, body)).await.unwrap()
    }
}

pub fn post(path: &str, key: &str, body: impl Into<Bytes>) -> Request<Bytes> {
    Request::post(path).header("idempotency-key", key).body(body.into()).unwrap()
}

impl Answer {
    pub fn is_replay(&self) -> bool {
        self.headers.get("idempotent-replayed").is_some_and(|value| value == "true")
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|value| value.to_str().unwrap())
    }

    /// What follows `urn:onceward:problem:` in the type of a problem.
    pub fn problem(&self) -> String {
        assert_eq!(self.header("content-type"), Some("application/problem+json"), "{self:?}");
        let problem: serde_json::Value = serde_json::from_slice(&self.body).unwrap();
        assert_eq!(problem["status"], self.status.as_u16());
        problem["type"].as_str().unwrap().strip_prefix("urn:onceward:problem:").unwrap().to_owned()
    }
}

/// Holds a handler until it is let go, and tells that it has begun.
#[derive(Clone, Default)]
pub struct Gate {
    begun: Arc<Notify>,
    open: Arc<Notify>,
}

impl Gate {
    /// For the handler.
    pub async fn pass(&self) {
        self.begun.notify_one();
        self.open.notified().await;
    }

    /// Waits until a handler has begun.
    pub async fn begun(&self) {
        self.begun.notified().await;
    }

    pub fn open(&self) {
        self.open.notify_one();
    }
}
