//! Health and metrics over HTTP.

use crate::support::*;

#[tokio::test(flavor = "multi_thread")]
async fn health_readiness_and_metrics_are_served() {
    let (client, (server, _database)) = Backend::Sqlite.client().await;
    client.acquire(reserve(&fresh_key(), "a")).await;
    client.lookup(&fresh_key()).await.unwrap_err();
    assert_eq!(server.get("/healthz").await.0, 200);
    assert_eq!(server.get("/readyz").await.0, 200);
    let (status, metrics) = server.get("/metrics").await;
    assert_eq!(status, 200);
    for name in [
        "onceward_calls_total{method=\"Reserve\",code=\"OK\"}",
        "onceward_call_duration_seconds_bucket{method=\"Reserve\"",
        "onceward_reserve_outcomes_total{outcome=\"acquired\"}",
        "onceward_calls_in_flight",
        "onceward_store_up 1",
        "onceward_errors_total{reason=\"KEY_NOT_FOUND\"}",
    ] {
        assert!(metrics.contains(name), "{name} is missing from\n{metrics}");
    }
    assert_eq!(server.get("/nothing").await.0, 404);
}
