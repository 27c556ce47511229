//! [`Exchange`]: one request and its answer, made safe to retry. What HTTP and gRPC have in common.
//!
//! - The handler runs in a task of its own, to its end, whoever hangs up; and so does what stores its answer.
//! - The body of a request is read whole before its key is reserved: a request that never arrives holds nothing.
//! - The body of an answer is read as far as it may be stored. What is larger goes on to the first caller as it comes, and
//!   leaves a mark in place of the answer: later callers learn that it was done, and never see a part of it.

mod answer;
mod body;
mod header;
mod layer;

use std::{future::Future, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{
    HeaderMap, HeaderName, HeaderValue, Method, Request, Response,
    header::{CONTENT_TYPE, EXPECT},
    request, response,
};
use http_body::Body;
use http_body_util::Full;
use metrics::counter;
use tokio::time::timeout;
use tower_service::Service;
use tracing::{Instrument, error, warn};

use self::body::{BoxError, Read, Received};
pub use self::{
    body::AnswerBody,
    layer::{IdempotencyLayer, IdempotencyService},
};
use crate::{
    client::Client,
    error::Error,
    fingerprint::Fingerprint,
    guard::Guard,
    key::Key,
    reservation::{Reservation, winner},
    reserve::Reserve,
    result::{BODY_BYTES_MAX, Finished, StoredResult},
    settlement::Settled,
};

/// How many answers were not stored because their lease was lost.
const LEASES_LOST: &str = "onceward_client_leases_lost_total";
/// How many requests were handled without idempotency, because the service could not be reached.
const FAILED_OPEN: &str = "onceward_client_failed_open_total";

/// The header that carries the key, if nothing is said.
const KEY: HeaderName = HeaderName::from_static("idempotency-key");
/// The type of a stream that does not end.
const EVENTS: &[u8] = b"text/event-stream";
/// The header that marks a replay.
const REPLAYED: HeaderName = HeaderName::from_static("idempotent-replayed");

/// Whether, and how, an answer is kept for duplicates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// Duplicates get it.
    Store,
    /// Nothing has happened: the key is free for the next try.
    Release,
    /// Something may have happened: the key stays locked until its lock runs out, and then the expiry policy decides.
    Hold,
}

/// Why a request is not handled.
#[derive(Clone, Debug)]
pub(crate) enum Refusal {
    /// There is no key, and there must be one in this header.
    KeyMissing(HeaderName),
    /// The key cannot be used.
    KeyMalformed(&'static str),
    /// The body is larger than may be.
    BodyTooLarge,
    /// The body did not arrive whole, or is not what this layer is for.
    BodyUnusable(&'static str),
    /// Somebody else is at it.
    InProgress(Duration),
    /// The key is in use for another request.
    OtherRequest,
    /// Nobody knows whether it took effect.
    InDoubt,
    /// It was done, with this code, but its answer was not kept.
    NotKept(i32),
    /// It has failed for good, and nobody has left an answer.
    FailedBefore,
    /// Somebody else took over while the handler ran, and has no answer yet.
    LeaseLost,
    /// The service cannot be reached.
    Unavailable,
    /// The service does not take what this program asks for.
    Misconfigured,
}

/// What a protocol has of its own.
pub(crate) trait Protocol: Send + Sync + 'static {
    /// Whether requests of this method are to be idempotent.
    fn applies(&self, method: &Method) -> bool;

    /// How long the first message is, where a body consists of messages and as far as it can be told from its beginning.
    fn message_bytes(&self, begun: &[u8]) -> Option<usize>;

    /// Checks a body, and takes away what would make its answer useless for others.
    fn prepare(&self, request: &mut request::Parts, body: &Bytes) -> Result<(), Refusal>;

    /// What tells this request from another.
    fn fingerprint(&self, request: &request::Parts, body: &Bytes) -> Fingerprint;

    /// Whether an answer is to be stored. Of one that has `more`, a part has come, and the rest is to come, trailers among it.
    fn keep(&self, answer: &response::Parts, trailers: Option<&HeaderMap>, more: bool) -> Keep;

    /// The code that says how an answer went.
    fn code(&self, answer: &response::Parts, trailers: Option<&HeaderMap>) -> i32;

    /// Whether a stored result is an answer of this protocol; one that an operator has left need not be.
    fn shows(&self, result: &StoredResult, failed: bool) -> bool;

    /// A refusal as an answer.
    fn refuse(&self, refusal: &Refusal) -> Response<Full<Bytes>>;
}

/// How a protocol makes a body of what was read.
pub(crate) trait Rebody<B> {
    /// The body for the handler.
    fn rebody(body: Bytes) -> B;
}

/// On whose behalf a request is.
type Subject = dyn Fn(&request::Parts) -> Option<String> + Send + Sync;

/// How requests are made safe to retry.
#[derive(Clone)]
pub(crate) struct Options {
    pub(crate) client: Client,
    pub(crate) namespace: String,
    pub(crate) header: HeaderName,
    pub(crate) subject: Arc<Subject>,
    pub(crate) required: bool,
    pub(crate) wait: Duration,
    pub(crate) lock_ttl: Option<Duration>,
    pub(crate) retention: Option<Duration>,
    pub(crate) hold: bool,
    pub(crate) fail_open: bool,
    pub(crate) body_bytes_max: usize,
    pub(crate) complete_timeout: Duration,
}

impl Options {
    pub(crate) fn new(
        client: Client,
        namespace: impl Into<String>,
        subject: impl Fn(&request::Parts) -> Option<String> + Send + Sync + 'static,
    ) -> Self {
        Self {
            client,
            namespace: namespace.into(),
            header: KEY,
            subject: Arc::new(subject),
            required: false,
            wait: Duration::ZERO,
            lock_ttl: None,
            retention: None,
            hold: false,
            fail_open: false,
            body_bytes_max: 2 << 20,
            complete_timeout: Duration::from_secs(10),
        }
    }

    fn reserve(&self, key: Key, fingerprint: Fingerprint, headers: &HeaderMap) -> Reserve {
        let mut reserve = self.client.reserve(key).fingerprint(fingerprint).wait(self.wait);
        if let Some(lock_ttl) = self.lock_ttl {
            reserve = reserve.lock_ttl(lock_ttl);
        }
        if let Some(retention) = self.retention {
            reserve = reserve.retention(retention);
        }
        if let Some(traceparent) = headers.get("traceparent").and_then(|value| value.to_str().ok())
            && !traceparent.is_empty()
        {
            reserve = reserve.traceparent(traceparent);
        }
        if self.hold { reserve.hold() } else { reserve }
    }
}

/// Makes one request and its answer safe to retry.
pub(crate) struct Exchange<P> {
    pub(crate) options: Options,
    pub(crate) protocol: P,
}

impl<P: Protocol> Exchange<P> {
    /// Handles a request that is to be idempotent, by a service that is ready.
    pub(crate) async fn handle<S, B, R>(
        self: Arc<Self>,
        mut inner: S,
        request: Request<B>,
    ) -> Result<Response<AnswerBody<R>>, S::Error>
    where
        P: Rebody<B>,
        S: Service<Request<B>, Response = Response<R>> + Send + 'static,
        S::Future: Send,
        S::Error: Send,
        B: Body + Send + 'static,
        R: Body<Data = Bytes> + Send + 'static,
        R::Error: Into<BoxError>,
    {
        let (mut parts, body) = request.into_parts();
        let key = match header::key(&parts.headers, &self.options.header) {
            Ok(Some(key)) => key,
            Ok(None) if self.options.required => {
                let refusal = Refusal::KeyMissing(self.options.header.clone());
                return Ok(self.refuse_unread(&refusal, &parts, body).await);
            }
            Ok(None) => return pass(inner, Request::from_parts(parts, body)).await,
            Err(why) => return Ok(self.refuse_unread(&Refusal::KeyMalformed(why), &parts, body).await),
        };
        if body.size_hint().lower() > self.options.body_bytes_max as u64 {
            return Ok(self.refuse_unread(&Refusal::BodyTooLarge, &parts, body).await);
        }
        let read = body::received(body, self.options.body_bytes_max, |begun| self.protocol.message_bytes(begun));
        let body = match read.await {
            Received::Whole(body) => body,
            Received::Several => return Ok(self.refused(&Refusal::BodyUnusable("only a unary call has a key"))),
            Received::TooLarge => return Ok(self.refused(&Refusal::BodyTooLarge)),
            Received::Broken => return Ok(self.refused(&Refusal::BodyUnusable("the body did not arrive whole"))),
        };
        if let Err(refusal) = self.protocol.prepare(&mut parts, &body) {
            return Ok(self.refused(&refusal));
        }
        // An empty one in its place would let everybody share everybody's answers.
        let Some(subject) = (self.options.subject)(&parts) else {
            error!("a request is refused: nobody has said on whose behalf it is");
            return Ok(self.refused(&Refusal::Misconfigured));
        };
        let key = Key::new(&self.options.namespace, key).subject(subject);
        let fingerprint = self.protocol.fingerprint(&parts, &body);
        let of = fingerprint.as_str().to_owned();
        let guard = match self.options.reserve(key, fingerprint, &parts.headers).await {
            Ok(Reservation::Acquired(guard)) => guard,
            Ok(other) => return Ok(self.known(other)),
            Err(error) => match refusal(&error) {
                // Not when it is closed, or denies us: that does not pass.
                Refusal::Unavailable if self.options.fail_open && matches!(error, Error::Unavailable(_)) => {
                    warn!(%error, "a request is handled although its key cannot be reserved: a retry would act again");
                    counter!(FAILED_OPEN).increment(1);
                    return pass(inner, Request::from_parts(parts, P::rebody(body))).await;
                }
                refusal => {
                    if matches!(refusal, Refusal::Unavailable | Refusal::Misconfigured) {
                        error!(%error, "a request is refused: its key cannot be reserved");
                    }
                    return Ok(self.refused(&refusal));
                }
            },
        };
        parts.extensions.insert(guard.lease());
        let work = inner.call(Request::from_parts(parts, P::rebody(body)));
        let exchange = self.clone();
        let act = async move { exchange.act(work, guard, of).await };
        match self.options.client.spawn_here(act.in_current_span()).await {
            Ok(answer) => answer,
            // As if it had happened here: the guard was dropped without a word, and the lock runs out.
            Err(ended) => match ended.try_into_panic() {
                Ok(panic) => std::panic::resume_unwind(panic),
                Err(_) => Ok(self.refused(&Refusal::Unavailable)),
            },
        }
    }

    /// Runs the handler and stores its answer.
    async fn act<R, E>(
        &self,
        work: impl Future<Output = Result<Response<R>, E>>,
        guard: Guard,
        fingerprint: String,
    ) -> Result<Response<AnswerBody<R>>, E>
    where
        R: Body<Data = Bytes> + Send + 'static,
        R::Error: Into<BoxError>,
    {
        // An error of the service itself says nothing of what was done: the guard is dropped without a word.
        let (parts, body) = work.await?.into_parts();
        let is_endless = |value: &HeaderValue| value.as_bytes().to_ascii_lowercase().starts_with(EVENTS);
        let read = match parts.headers.get(CONTENT_TYPE) {
            Some(value) if is_endless(value) => Read::endless(body),
            _ => {
                let read = Read::of(body, BODY_BYTES_MAX, |begun| self.protocol.message_bytes(begun));
                read.await.checked(&parts)
            }
        };
        let more = matches!(&read, Read::Longer { begun, .. } if !begun.is_empty());
        let keep = self.protocol.keep(&parts, read.trailers(), more);
        let code = self.protocol.code(&parts, read.trailers());
        let result = match (keep, &read) {
            // It failed midway, and nobody knows what it would have been.
            (_, Read::Broken { .. }) | (Keep::Hold, _) => {
                drop(guard);
                return Ok(Response::from_parts(parts, read.into_body()));
            }
            (Keep::Release, _) => {
                let released = timeout(self.options.complete_timeout, guard.release()).await;
                if let Ok(Err(error)) = released {
                    warn!(%error, "a key was not released");
                }
                return Ok(Response::from_parts(parts, read.into_body()));
            }
            (Keep::Store, Read::Whole { body, trailers }) => {
                answer::stored(code, &parts.headers, body, trailers.as_ref())
                    .unwrap_or_else(|| StoredResult::unstored(code, "headers too large"))
            }
            (Keep::Store, Read::Longer { .. }) => StoredResult::unstored(code, "too large"),
        };
        let key = guard.key().clone();
        let mut stored = Box::pin(guard.complete(result));
        match timeout(self.options.complete_timeout, &mut stored).await {
            Ok(stored) if is_overtaken(&stored) => return Ok(self.of_the_winner(key, &fingerprint).await),
            Ok(_) => {}
            Err(_) => {
                warn!("an answer goes out before it is stored");
                drop(self.options.client.spawn_here(async move { is_overtaken(&stored.await) }.in_current_span()));
            }
        }
        Ok(Response::from_parts(parts, read.into_body()))
    }

    /// Somebody else took over while the handler ran: everybody gets the same answer.
    async fn of_the_winner<R>(&self, key: Key, fingerprint: &str) -> Response<AnswerBody<R>> {
        match winner(&self.options.client, key, Some(fingerprint)).await {
            Ok(Some(reservation)) => self.known(reservation),
            Ok(None) | Err(_) => self.refused(&Refusal::LeaseLost),
        }
    }

    /// What is known of a key that is not ours.
    fn known<R>(&self, reservation: Reservation) -> Response<AnswerBody<R>> {
        match reservation {
            Reservation::Completed(finished) => self.replayed(finished, false),
            Reservation::Failed(finished) => self.replayed(finished, true),
            Reservation::InProgress(held) => self.refused(&Refusal::InProgress(held.retry_after)),
            Reservation::InDoubt(_) => self.refused(&Refusal::InDoubt),
            Reservation::Acquired(_) => self.refused(&Refusal::Unavailable),
        }
    }

    fn replayed<R>(&self, finished: Finished, failed: bool) -> Response<AnswerBody<R>> {
        let shown = self.protocol.shows(&finished.result, failed);
        if !finished.result.is_kept() || (!shown && !failed) {
            return self.refused(&Refusal::NotKept(finished.result.code));
        }
        if !shown {
            return self.refused(&Refusal::FailedBefore);
        }
        let mut response = answer::replayed(finished.result);
        response.headers_mut().insert(REPLAYED, HeaderValue::from_static("true"));
        response
    }

    fn refused<R>(&self, refusal: &Refusal) -> Response<AnswerBody<R>> {
        self.protocol.refuse(refusal).map(AnswerBody::full)
    }

    /// Whoever is still sending would get a reset in place of the answer.
    async fn refuse_unread<B: Body, R>(
        &self,
        refusal: &Refusal,
        request: &request::Parts,
        body: B,
    ) -> Response<AnswerBody<R>> {
        // One that waits to be told to go on is not sending yet.
        if !request.headers.contains_key(EXPECT) {
            body::drain(body).await;
        }
        self.refused(refusal)
    }
}

/// Whether somebody else took over while the handler ran. That is counted, and an answer that is not stored is told in the
/// log: by the time that it is known nobody may await it.
fn is_overtaken(stored: &Result<Settled, Error>) -> bool {
    match stored {
        Ok(_) => false,
        Err(Error::LeaseLost) => {
            counter!(LEASES_LOST).increment(1);
            true
        }
        Err(error) => {
            error!(%error, "an answer was not stored");
            false
        }
    }
}

/// Handles a request as if nothing stood before the service.
async fn pass<S, B, R>(mut inner: S, request: Request<B>) -> Result<Response<AnswerBody<R>>, S::Error>
where
    S: Service<Request<B>, Response = Response<R>>,
{
    inner.call(request).await.map(|answer| answer.map(AnswerBody::inner))
}

fn refusal(error: &Error) -> Refusal {
    match error {
        Error::FingerprintMismatch => Refusal::OtherRequest,
        Error::Unavailable(_) | Error::Closed => Refusal::Unavailable,
        _ => Refusal::Misconfigured,
    }
}
