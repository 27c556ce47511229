//! [`IdempotencyLayer`]: what the layers of HTTP and of gRPC have in common.

use std::{
    fmt,
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderName, Request, Response};
use http_body::Body;
use tower_layer::Layer;
use tower_service::Service;
use tracing::warn;

use super::{AnswerBody, Exchange, Options, Protocol, Rebody, body::BoxError, pass};

/// Makes the requests of a service safe to retry: a request that is sent again gets the answer of the first, and its handler
/// runs once. As [`HttpLayer`](crate::http::HttpLayer) for HTTP, as [`GrpcLayer`](crate::grpc::GrpcLayer) for gRPC.
#[derive(Clone)]
#[must_use = "a layer does nothing before it is layered"]
pub struct IdempotencyLayer<P> {
    pub(crate) options: Options,
    pub(crate) protocol: P,
}

impl<P> IdempotencyLayer<P> {
    /// The header that carries the key, in place of `Idempotency-Key`.
    pub fn header(mut self, header: HeaderName) -> Self {
        self.options.header = header;
        self
    }

    /// Refuses requests without a key. Otherwise they pass and are not idempotent.
    pub fn required(mut self) -> Self {
        self.options.required = true;
        self
    }

    /// How long others wait if this process dies, 30 s by default; while it lives the lock is renewed.
    pub fn lock_ttl(mut self, lock_ttl: Duration) -> Self {
        self.options.lock_ttl = Some(lock_ttl);
        self
    }

    /// How long answers are replayed, 24 h by default.
    pub fn retention(mut self, retention: Duration) -> Self {
        self.options.retention = Some(retention);
        self
    }

    /// How long a request waits for another with its key, before it is told that one is in progress; not at all by default.
    pub fn wait(mut self, wait: Duration) -> Self {
        self.options.wait = wait;
        self
    }

    /// When a lock runs out nobody takes over: the key is in doubt until it is resolved.
    pub fn hold(mut self) -> Self {
        self.options.hold = true;
        self
    }

    /// Handles requests although the service cannot be reached. A retry then acts again: a bad choice for payments. Such a request
    /// has no [`Lease`](crate::Lease) among its extensions, nor has one without a key.
    pub fn fail_open(mut self) -> Self {
        warn!(namespace = %self.options.namespace, "requests are handled without idempotency while the service is away");
        self.options.fail_open = true;
        self
    }

    /// The largest body of a keyed request, 2 MiB by default.
    pub fn body_bytes_max(mut self, bytes: usize) -> Self {
        self.options.body_bytes_max = bytes;
        self
    }

    /// How long an answer waits until it is stored, 10 s by default. Then it goes out, and is stored when it can be.
    pub fn complete_timeout(mut self, timeout: Duration) -> Self {
        self.options.complete_timeout = timeout;
        self
    }
}

impl<S, P: Protocol + Clone> Layer<S> for IdempotencyLayer<P> {
    type Service = IdempotencyService<S, P>;

    fn layer(&self, inner: S) -> Self::Service {
        let exchange = Exchange { options: self.options.clone(), protocol: self.protocol.clone() };
        IdempotencyService { inner, exchange: Arc::new(exchange) }
    }
}

/// A service whose requests are safe to retry; made by an [`IdempotencyLayer`].
pub struct IdempotencyService<S, P> {
    inner: S,
    exchange: Arc<Exchange<P>>,
}

impl<S, P, B, R> Service<Request<B>> for IdempotencyService<S, P>
where
    S: Service<Request<B>, Response = Response<R>> + Clone + Send + 'static,
    S::Future: Send,
    S::Error: Send,
    P: Protocol + Rebody<B>,
    B: Body + Send + 'static,
    B::Data: Send,
    B::Error: Send,
    R: Body<Data = Bytes> + Send + 'static,
    R::Error: Into<BoxError>,
{
    type Response = Response<AnswerBody<R>>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, S::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        // The one that is ready, which its clone need not be.
        let clone = self.inner.clone();
        let inner = std::mem::replace(&mut self.inner, clone);
        if self.exchange.protocol.applies(request.method()) {
            Box::pin(self.exchange.clone().handle(inner, request))
        } else {
            Box::pin(pass(inner, request))
        }
    }
}

impl<S: Clone, P> Clone for IdempotencyService<S, P> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), exchange: self.exchange.clone() }
    }
}

impl<P> fmt::Debug for IdempotencyLayer<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IdempotencyLayer").field("namespace", &self.options.namespace).finish_non_exhaustive()
    }
}

impl<S, P> fmt::Debug for IdempotencyService<S, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IdempotencyService").finish_non_exhaustive()
    }
}
