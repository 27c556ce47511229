//! [`GrpcLayer`]: idempotency keys in the metadata of unary calls, as a tower layer for tonic.
//!
//! ```no_run
//! use http::request::Parts;
//! use onceward_client::{Client, grpc::GrpcLayer};
//! use tonic::transport::Server;
//!
//! # async fn example(client: Client, routes: tonic::service::Routes) -> Result<(), tonic::transport::Error> {
//! // What an authenticating layer has found out.
//! # #[derive(Clone)] struct User { id: String }
//! let user = |call: &Parts| call.extensions.get::<User>().map(|user| user.id.clone());
//! Server::builder()
//!     .layer(GrpcLayer::new(client, "payments.grpc", user))
//!     .add_routes(routes)
//!     .serve(([127, 0, 0, 1], 50052).into())
//!     .await
//! # }
//! ```

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Response, StatusCode, header::CONTENT_TYPE, request, response};
use http_body_util::Full;
use tonic::{Code, Status, server::NamedService};
use tonic_types::{ErrorDetails, StatusExt};

pub use crate::exchange::{AnswerBody, IdempotencyLayer, IdempotencyService, Keep};
use crate::{
    client::Client,
    error::DOMAIN,
    exchange::{Options, Protocol, Rebody, Refusal},
    fingerprint::{Fingerprint, framed},
    result::StoredResult,
};

/// Serves the metadata `idempotency-key` of unary calls: a call that is sent again gets the answer of the first, message and
/// metadata and trailers, and its handler runs once.
///
/// | what a call meets | status |
/// |---|---|
/// | a key that is new | the handler's; its [`Lease`](crate::Lease) is among the request's extensions |
/// | a key that has an answer | that answer, with the metadata `idempotent-replayed: true` |
/// | somebody else at it | ABORTED with `RetryInfo`; or it waits |
/// | a key that was used for another call | FAILED_PRECONDITION |
/// | a key whose outcome nobody knows ([`hold`](Self::hold)) | ABORTED without `RetryInfo` |
/// | a key whose answer was too large to be stored | FAILED_PRECONDITION |
/// | a malformed key, several, none where one is required, or more than one message in the request | INVALID_ARGUMENT |
/// | a message over the limit | RESOURCE_EXHAUSTED |
/// | the service cannot be reached | UNAVAILABLE with `RetryInfo`; or it is handled all the same ([`fail_open`](Self::fail_open)) |
///
/// Each has a `google.rpc.ErrorInfo` of the domain `onceward`. Two calls are the same if method and message are, byte for byte,
/// as they are sent: compressed in the same way, or not. Answers of keyed calls are not compressed inside of this layer.
///
/// The handler runs to its end even if its caller leaves. Which answers are stored is said by [`keep`](Self::keep). A
/// streaming call is none that can be sent again: without a key it passes. One whose *answer* streams looks like a unary one
/// until its second message: let nobody send a key with it. Where health or reflection are on the same server, put the layer
/// around the services that need it: `add_service(layer.layer(service))`.
pub type GrpcLayer = IdempotencyLayer<Grpc>;

/// What gRPC has of its own.
#[derive(Clone)]
pub struct Grpc {
    keep: Arc<dyn Fn(Code) -> Keep + Send + Sync>,
}

impl GrpcLayer {
    /// Keys are of this namespace, such as `payments.grpc`, and of the subject that a call is on behalf of: the authenticated
    /// caller, so that one caller's key never meets another's. A call without a subject is refused; only where all callers may
    /// see each other's answers it is an empty one.
    pub fn new(
        client: Client,
        namespace: impl Into<String>,
        subject: impl Fn(&request::Parts) -> Option<String> + Send + Sync + 'static,
    ) -> Self {
        Self { options: Options::new(client, namespace, subject), protocol: Grpc { keep: Arc::new(keep) } }
    }

    /// Which answers are stored, by their code. By default UNAVAILABLE, RESOURCE_EXHAUSTED, ABORTED, UNAUTHENTICATED and
    /// UNIMPLEMENTED release the key, since nothing happened (a handler that passes on the UNAVAILABLE of another service says
    /// so too: let it say UNKNOWN where the other may have acted); UNKNOWN, INTERNAL, DEADLINE_EXCEEDED, CANCELLED and
    /// DATA_LOSS, like a panic, leave it to the lock's end, since something may have happened; OK and all others are stored.
    pub fn keep(mut self, keep: impl Fn(Code) -> Keep + Send + Sync + 'static) -> Self {
        self.protocol.keep = Arc::new(keep);
        self
    }
}

/// Which answers are stored, if nothing is said.
fn keep(code: Code) -> Keep {
    match code {
        Code::Unavailable | Code::ResourceExhausted | Code::Aborted | Code::Unauthenticated | Code::Unimplemented => {
            Keep::Release
        }
        Code::Unknown | Code::Internal | Code::DeadlineExceeded | Code::Cancelled | Code::DataLoss => Keep::Hold,
        _ => Keep::Store,
    }
}

/// How a call went; nothing if its answer does not say.
fn code(answer: &response::Parts, trailers: Option<&HeaderMap>) -> Option<Code> {
    let status =
        trailers.and_then(|trailers| trailers.get("grpc-status")).or_else(|| answer.headers.get("grpc-status"));
    status.map(|status| Code::from_bytes(status.as_bytes())).filter(|_| answer.status == StatusCode::OK)
}

impl Protocol for Grpc {
    fn applies(&self, _: &Method) -> bool {
        true
    }

    fn message_bytes(&self, begun: &[u8]) -> Option<usize> {
        // Each message has a flag and its length before it.
        let (&[_, length @ ..], _) = begun.split_first_chunk::<5>()?;
        usize::try_from(u32::from_be_bytes(length)).ok()?.checked_add(5)
    }

    fn prepare(&self, call: &mut request::Parts, body: &Bytes) -> Result<(), Refusal> {
        // The answer is for others too, who may not read what this one reads.
        call.headers.remove("grpc-accept-encoding");
        if !call.headers.get(CONTENT_TYPE).is_some_and(is_grpc) {
            return Err(Refusal::BodyUnusable("only a call of gRPC has an idempotency key here"));
        }
        if self.message_bytes(body) != Some(body.len()) {
            return Err(Refusal::BodyUnusable("only a unary call has an idempotency key"));
        }
        Ok(())
    }

    fn fingerprint(&self, call: &request::Parts, body: &Bytes) -> Fingerprint {
        let parts = [call.uri.path().as_bytes(), body];
        Fingerprint::new("grpc-sha256-v1", parts.into_iter().fold(sha2::Digest::new(), framed))
    }

    fn keep(&self, answer: &response::Parts, trailers: Option<&HeaderMap>, more: bool) -> Keep {
        match code(answer, trailers) {
            Some(code) => (self.keep)(code),
            // The status of a large message comes behind it. What has a message has succeeded.
            None if more && answer.status == StatusCode::OK => Keep::Store,
            None => Keep::Hold,
        }
    }

    fn code(&self, answer: &response::Parts, trailers: Option<&HeaderMap>) -> i32 {
        code(answer, trailers).unwrap_or(Code::Ok).into()
    }

    fn shows(&self, result: &StoredResult, _: bool) -> bool {
        result.metadata.iter().any(|(name, _)| name.trim_start_matches("trailer:") == "grpc-status")
    }

    fn refuse(&self, refusal: &Refusal) -> Response<Full<Bytes>> {
        status(refusal).into_http()
    }
}

/// Not that of a browser, which has its status in the body: whoever translates it stands outside of this layer.
fn is_grpc(content_type: &HeaderValue) -> bool {
    let content_type = content_type.as_bytes().to_ascii_lowercase();
    content_type
        .strip_prefix(b"application/grpc")
        .is_some_and(|rest| matches!(rest.first(), None | Some(b'+' | b';' | b' ')))
}

/// A refusal as a status.
fn status(refusal: &Refusal) -> Status {
    let (code, reason, message, retry_after) = match refusal {
        Refusal::KeyMissing(_) => (Code::InvalidArgument, "KEY_MISSING", "the call needs an idempotency key", None),
        Refusal::KeyMalformed(why) => (Code::InvalidArgument, "KEY_MALFORMED", *why, None),
        Refusal::BodyUnusable(why) => (Code::InvalidArgument, "BODY_UNUSABLE", *why, None),
        Refusal::BodyTooLarge => (Code::ResourceExhausted, "BODY_TOO_LARGE", "the message is too large", None),
        Refusal::OtherRequest => {
            (Code::FailedPrecondition, "KEY_REUSED", "the idempotency key was used for another call", None)
        }
        Refusal::InProgress(after) => {
            (Code::Aborted, "IN_PROGRESS", "a call with this idempotency key is in progress", Some(*after))
        }
        Refusal::InDoubt => {
            (Code::Aborted, "IN_DOUBT", "the outcome of the call with this idempotency key is unknown", None)
        }
        Refusal::NotKept(_) => {
            (Code::FailedPrecondition, "ANSWER_NOT_KEPT", "the call was handled, but its answer was not kept", None)
        }
        Refusal::FailedBefore => {
            (Code::FailedPrecondition, "FAILED", "the call with this idempotency key has failed for good", None)
        }
        Refusal::LeaseLost => {
            let message = "another call with this idempotency key has taken over";
            (Code::Aborted, "LEASE_LOST", message, Some(Duration::from_secs(1)))
        }
        Refusal::Unavailable => {
            let message = "idempotency keys cannot be checked at present";
            (Code::Unavailable, "UNAVAILABLE", message, Some(Duration::from_secs(1)))
        }
        Refusal::Misconfigured => (Code::Internal, "MISCONFIGURED", "idempotency keys cannot be checked", None),
    };
    let mut details = ErrorDetails::new();
    let original =
        if let Refusal::NotKept(code) = refusal { vec![("original_code".into(), code.to_string())] } else { vec![] };
    details.set_error_info(reason, DOMAIN, original.into_iter().collect::<std::collections::HashMap<_, _>>());
    if let Some(after) = retry_after {
        details.set_retry_info(Some(after));
    }
    let message = match refusal {
        Refusal::KeyMissing(header) => format!("{message} in its metadata {header}"),
        _ => message.to_owned(),
    };
    Status::with_error_details(code, message, details)
}

impl Rebody<tonic::body::Body> for Grpc {
    fn rebody(body: Bytes) -> tonic::body::Body {
        tonic::body::Body::new(Full::new(body))
    }
}

impl<S: NamedService> NamedService for IdempotencyService<S, Grpc> {
    const NAME: &'static str = S::NAME;
}
