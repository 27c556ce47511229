//! The `Idempotency-Key` header for a service of HTTP. It brings a service of its own along, in memory.
//!
//! ```sh
//! cargo run -p onceward-client --features http,testing --example axum
//! curl -i http://127.0.0.1:8080/pay -H 'Idempotency-Key: order-17' -H 'X-User: ann' -d 100
//! curl -i http://127.0.0.1:8080/pay -H 'Idempotency-Key: order-17' -H 'X-User: ann' -d 100   # replayed
//! curl -i http://127.0.0.1:8080/pay -H 'Idempotency-Key: order-17' -H 'X-User: ann' -d 200   # 422
//! ```

use std::time::Duration;

use axum::{Extension, Router, http::StatusCode, routing::post};
use http::request::Parts;
use onceward_client::{Lease, http::HttpLayer, testing::Server};
use tokio::net::TcpListener;

async fn pay(lease: Option<Extension<Lease>>, cents: String) -> (StatusCode, String) {
    tokio::time::sleep(Duration::from_secs(2)).await;
    let fence = lease.map(|Extension(lease)| lease.fence());
    println!("charging {cents} cents under fence {fence:?}");
    (StatusCode::CREATED, format!("charged {cents} cents\n"))
}

/// On whose behalf: here a header says so, elsewhere it is whom an authenticating layer has found.
fn user(request: &Parts) -> Option<String> {
    Some(request.headers.get("x-user")?.to_str().ok()?.to_owned())
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let server = Server::start()?;
    let client = server.client()?;
    let routes =
        Router::new().route("/pay", post(pay)).layer(HttpLayer::new(client.clone(), "examples.axum", user).required());
    let listener = TcpListener::bind("127.0.0.1:8080").await?;
    println!("listening on http://{}", listener.local_addr()?);
    let stop = async {
        let _ = tokio::signal::ctrl_c().await;
    };
    axum::serve(listener, routes).with_graceful_shutdown(stop).await?;
    // What handlers have done is stored before the process ends.
    client.close().await;
    Ok(())
}
