//! One HTTP/2 connection to the service, and nothing around it: the load is to cost as little as it can.

use std::task::{Context, Poll};

use futures_util::future::BoxFuture;
use http::{Request, Response, Uri};
use hyper::{body::Incoming, client::conn::http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use onceward::proto::idempotency_service_client::IdempotencyServiceClient;
use tokio::net::TcpStream;
use tonic::body::Body;

use crate::Failure;

pub type Client = IdempotencyServiceClient<Connection>;

/// Cloning gives another handle to the same connection.
#[derive(Clone)]
pub struct Connection(http2::SendRequest<Body>);

/// Connects to an endpoint such as `http://127.0.0.1:50051`.
pub async fn connect(endpoint: &str) -> Result<Client, Failure> {
    let origin: Uri = endpoint.parse()?;
    let address = origin.authority().ok_or("an endpoint has a host and a port")?.as_str();
    let stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    let (sender, connection) = http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await?;
    // It ends with the last handle.
    tokio::spawn(connection);
    Ok(Client::with_origin(Connection(sender), origin))
}

impl tower::Service<Request<Body>> for Connection {
    type Response = Response<Incoming>;
    type Error = hyper::Error;
    type Future = BoxFuture<'static, Result<Self::Response, Self::Error>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), hyper::Error>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        Box::pin(self.0.send_request(request))
    }
}
