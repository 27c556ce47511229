//! [`HttpLayer`]: the `Idempotency-Key` header for services of HTTP, as a tower layer.
//!
//! It follows the IETF's draft on the header (draft-ietf-httpapi-idempotency-key-header) and tells problems as RFC 9457 has
//! it.
//!
//! ```no_run
//! use axum::{Extension, Router, routing::post};
//! use http::request::Parts;
//! use onceward_client::{Client, Lease, http::HttpLayer};
//!
//! # #[derive(Clone)] struct User { id: String }
//! async fn pay(Extension(lease): Extension<Lease>, body: String) -> String {
//!     // The fence goes along, so that a stale execution is rejected downstream.
//!     format!("paid {body} under fence {}", lease.fence())
//! }
//!
//! # fn example(client: Client) -> Router {
//! let user = |request: &Parts| request.extensions.get::<User>().map(|user| user.id.clone());
//! Router::new().route("/pay", post(pay)).layer(HttpLayer::new(client, "payments.http", user).required())
//! # }
//! ```

mod problem;

use std::{collections::HashSet, sync::Arc};

use bytes::Bytes;
use http::{HeaderMap, Method, Response, StatusCode, request, response};
use http_body_util::Full;

pub use crate::exchange::{AnswerBody, IdempotencyLayer, IdempotencyService, Keep};
use crate::{
    client::Client,
    exchange::{Options, Protocol, Rebody, Refusal},
    fingerprint::{Fingerprint, framed},
    result::StoredResult,
};

/// Serves a header like `Idempotency-Key`: a request that is sent again gets the answer of the first, and its handler runs
/// once.
///
/// | what a request meets | answer |
/// |---|---|
/// | a key that is new | the handler's; its [`Lease`](crate::Lease) is among the request's extensions |
/// | a key that has an answer | that answer, with `Idempotent-Replayed: true` |
/// | somebody else at it | 409 with `Retry-After`; or 425; or it waits |
/// | a key that was used for another request | 422 |
/// | a key whose outcome nobody knows ([`hold`](Self::hold)) | 409 of a type of its own, without `Retry-After` |
/// | a key whose answer was too large to be stored | 409 of a type of its own, with the status of that answer |
/// | a key that failed for good, as an operator found | 409 of a type of its own |
/// | a takeover, while the handler ran, that has no answer yet | 409 with `Retry-After` |
/// | a malformed key, several, or none where one is required | 400 |
/// | a body over the limit | 413 |
/// | the service cannot be reached | 503; or it is handled all the same ([`fail_open`](Self::fail_open)) |
/// | a service that does not take the namespace, the subject or the token | 500 |
///
/// Two requests are the same if method, path, query and body are, byte for byte. The key itself may be bare or a quoted string
/// (RFC 9651) without parameters. The body of a keyed request is read whole before the handler; it loses its trailers, and
/// its `Accept-Encoding`: compress outside of this layer, so that each caller gets what it can read. Authenticate outside of
/// it too: what a handler answers is what every retry gets, 401 and 403 among it.
///
/// The handler runs in a task of its own, to its end even if its caller hangs up. An answer that takes longer than 10 s to be
/// read, or is a stream of events, goes out as it comes and is not kept. Which answers are stored is said by [`keep`](Self::keep).
pub type HttpLayer = IdempotencyLayer<Http>;

/// What HTTP has of its own.
#[derive(Clone)]
pub struct Http {
    methods: HashSet<Method>,
    in_progress: StatusCode,
    path: Arc<dyn Fn(&request::Parts) -> String + Send + Sync>,
    keep: Arc<dyn Fn(StatusCode) -> Keep + Send + Sync>,
}

impl HttpLayer {
    /// Keys are of this namespace, such as `payments.http`, and of the subject that a request is on behalf of: the
    /// authenticated user, so that one user's key never meets another's. A request without a subject is refused; only where all
    /// callers may see each other's answers it is an empty one.
    pub fn new(
        client: Client,
        namespace: impl Into<String>,
        subject: impl Fn(&request::Parts) -> Option<String> + Send + Sync + 'static,
    ) -> Self {
        let protocol = Http {
            methods: HashSet::from([Method::POST, Method::PATCH]),
            in_progress: StatusCode::CONFLICT,
            path: Arc::new(|request| request.uri.path().to_owned()),
            keep: Arc::new(keep),
        };
        Self { options: Options::new(client, namespace, subject), protocol }
    }

    /// The methods whose requests are made safe to retry, in place of POST and PATCH. All others pass, key or not.
    pub fn methods(mut self, methods: impl IntoIterator<Item = Method>) -> Self {
        self.protocol.methods = methods.into_iter().collect();
        self
    }

    /// What the path of a request is, where its URI does not say: a router that nests another takes the beginning of the path
    /// away, and then the same key would meet itself at `/charges` and at `/refunds`. Layer the outermost router, or give the
    /// path as it was sent: in axum, `OriginalUri` among the extensions.
    pub fn path(mut self, path: impl Fn(&request::Parts) -> String + Send + Sync + 'static) -> Self {
        self.protocol.path = Arc::new(path);
        self
    }

    /// Answers 425 Too Early in place of 409 while another request is in progress.
    pub fn too_early(mut self) -> Self {
        self.protocol.in_progress = StatusCode::TOO_EARLY;
        self
    }

    /// Which answers are stored, by their status. By default 408, 425, 429 and 503 release the key: they say that nothing has
    /// happened. A timeout inside of this layer that answers so says it wrongly, as does a handler that passes on the 503 of
    /// another service: put timeouts outside, or let them answer 504. All others of 2xx to 4xx are stored; other 5xx, like a
    /// panic, leave the key to the lock's end, since something may have happened.
    pub fn keep(mut self, keep: impl Fn(StatusCode) -> Keep + Send + Sync + 'static) -> Self {
        self.protocol.keep = Arc::new(keep);
        self
    }
}

/// Which answers are stored, if nothing is said.
fn keep(status: StatusCode) -> Keep {
    match status.as_u16() {
        408 | 425 | 429 | 503 => Keep::Release,
        200..=499 => Keep::Store,
        _ => Keep::Hold,
    }
}

impl Protocol for Http {
    fn applies(&self, method: &Method) -> bool {
        self.methods.contains(method)
    }

    fn message_bytes(&self, _: &[u8]) -> Option<usize> {
        None
    }

    fn prepare(&self, request: &mut request::Parts, _: &Bytes) -> Result<(), Refusal> {
        // The answer is for others too, who may not read what this one reads.
        request.headers.remove(http::header::ACCEPT_ENCODING);
        Ok(())
    }

    fn fingerprint(&self, request: &request::Parts, body: &Bytes) -> Fingerprint {
        let query = request.uri.query().map_or(String::new(), |query| format!("?{query}"));
        let path = (self.path)(request);
        let parts = [request.method.as_str().as_bytes(), path.as_bytes(), query.as_bytes(), body];
        Fingerprint::new("http-sha256-v1", parts.into_iter().fold(sha2::Digest::new(), framed))
    }

    fn keep(&self, answer: &response::Parts, _: Option<&HeaderMap>, _: bool) -> Keep {
        (self.keep)(answer.status)
    }

    fn code(&self, answer: &response::Parts, _: Option<&HeaderMap>) -> i32 {
        answer.status.as_u16().into()
    }

    fn shows(&self, result: &StoredResult, failed: bool) -> bool {
        // An operator who says that it took effect need not say how it was answered.
        !failed || (200..600).contains(&result.code)
    }

    fn refuse(&self, refusal: &Refusal) -> Response<Full<Bytes>> {
        problem::response(refusal, self.in_progress)
    }
}

impl<B: From<Bytes>> Rebody<B> for Http {
    fn rebody(body: Bytes) -> B {
        B::from(body)
    }
}
