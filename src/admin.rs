//! What operators ask over plain HTTP: `/healthz`, `/readyz` and `/metrics`.

use axum::{Router, http::StatusCode, routing::get};
use metrics_exporter_prometheus::PrometheusHandle;
use tokio::sync::watch;

/// The routes. `ready` is whether the server is to get calls.
pub fn routes(ready: watch::Receiver<bool>, recorder: PrometheusHandle) -> Router {
    Router::new()
        .route("/healthz", get(|| async { "the process is alive\n" }))
        .route("/readyz", get(move || readiness(*ready.borrow())))
        .route("/metrics", get(move || async move { recorder.render() }))
}

async fn readiness(ready: bool) -> (StatusCode, &'static str) {
    if ready {
        (StatusCode::OK, "ready\n")
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "not ready: the store takes no writes, or the server shuts down\n")
    }
}
