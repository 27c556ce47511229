//! Handlers that count how often they run, and a layer before them.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use axum::{Router, body::Body, extract::Request as AxumRequest, response::Response};
use http::{StatusCode, request::Parts};
use http_body_util::BodyExt;
use onceward_client::{Client, Lease, http::HttpLayer};

/// How often a handler has run.
#[derive(Clone, Default)]
pub struct Runs(Arc<AtomicUsize>);

impl Runs {
    pub fn count(&self) -> usize {
        self.0.fetch_add(1, Ordering::SeqCst) + 1
    }

    pub fn so_far(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }
}

/// On behalf of the user in a header, as an authenticating layer would put it among the extensions.
pub fn user(request: &Parts) -> Option<String> {
    let user = request.headers.get("x-user").map(|user| user.to_str().unwrap().to_owned());
    // `nobody` is one whom no layer has found.
    Some(user.unwrap_or_default()).filter(|user| user != "nobody")
}

pub fn layer(client: &Client) -> HttpLayer {
    HttpLayer::new(client.clone(), "tests", user)
}

/// Answers with how often it has run and what it was sent, on every path and method.
pub fn echo(runs: &Runs) -> Router {
    let runs = runs.clone();
    let handler = async move |request: AxumRequest| {
        let run = runs.count();
        let lease = request.extensions().get::<Lease>().map(Lease::attempt);
        let body = request.into_body().collect().await.unwrap().to_bytes();
        let mut response = Response::new(Body::from(format!("{run} {lease:?} {body:?}")));
        *response.status_mut() = StatusCode::CREATED;
        response
    };
    Router::new().fallback(handler)
}

/// Always answers this.
pub fn answering(runs: &Runs, answer: impl Fn(usize) -> Response + Clone + Send + Sync + 'static) -> Router {
    let runs = runs.clone();
    Router::new().fallback(async move || answer(runs.count()))
}

pub fn status(status: u16) -> Response {
    Response::builder().status(status).body(Body::from(format!("status {status}"))).unwrap()
}
