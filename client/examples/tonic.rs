//! Idempotency keys for a service of gRPC: here tonic's health service, whose answers are replayed. It brings a service of
//! its own along, in memory.
//!
//! ```sh
//! cargo run -p onceward-client --features grpc,testing --example tonic
//! ```

use http::request::Parts;
use onceward_client::{grpc::GrpcLayer, testing::Server as Onceward};
use tokio::net::TcpListener;
use tonic::{
    Request,
    transport::{Endpoint, Server, server::TcpIncoming},
};
use tonic_health::pb::{HealthCheckRequest, health_client::HealthClient};

/// On whose behalf: whom an authenticating layer has found.
fn caller(_: &Parts) -> Option<String> {
    Some("ann".into())
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let onceward = Onceward::start()?;
    let layer = GrpcLayer::new(onceward.client()?, "examples.tonic", caller);
    let (reporter, health) = tonic_health::server::health_reporter();
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    let serving = Server::builder().layer(layer).add_service(health);
    let serving = tokio::spawn(serving.serve_with_incoming(TcpIncoming::from(listener)));

    let mut client = HealthClient::new(Endpoint::from_shared(format!("http://{address}"))?.connect().await?);
    for key in ["k-1", "k-1", "k-2"] {
        let mut request = Request::new(HealthCheckRequest::default());
        request.metadata_mut().insert("idempotency-key", key.parse()?);
        let response = client.check(request).await?;
        let replayed = response.metadata().get("idempotent-replayed").is_some();
        println!("{key}: status {}, replayed: {replayed}", response.get_ref().status);
        // A new key gets a new answer; a known one, that of before.
        reporter.set_service_status("", tonic_health::ServingStatus::NotServing).await;
    }
    serving.abort();
    Ok(())
}
