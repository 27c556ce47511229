//! Refusals as problems of RFC 9457, whose `type` never changes.

use bytes::Bytes;
use http::{HeaderValue, Response, StatusCode, header};
use http_body_util::Full;
use serde_json::{Map, Value};

use crate::exchange::Refusal;

/// What the types of problems begin with.
const TYPE: &str = "urn:onceward:problem:";

/// A refusal as an answer.
pub(super) fn response(refusal: &Refusal, in_progress: StatusCode) -> Response<Full<Bytes>> {
    let (status, kind, title) = match refusal {
        Refusal::KeyMissing(_) => (StatusCode::BAD_REQUEST, "key-missing", "The request needs an idempotency key"),
        Refusal::KeyMalformed(_) => (StatusCode::BAD_REQUEST, "key-malformed", "The idempotency key is malformed"),
        Refusal::BodyUnusable(_) => (StatusCode::BAD_REQUEST, "body-unusable", "The body cannot be used"),
        Refusal::BodyTooLarge => (StatusCode::PAYLOAD_TOO_LARGE, "body-too-large", "The body is too large"),
        Refusal::OtherRequest => {
            (StatusCode::UNPROCESSABLE_ENTITY, "key-reused", "The idempotency key was used for another request")
        }
        Refusal::InProgress(_) => (in_progress, "in-progress", "A request with this idempotency key is in progress"),
        Refusal::InDoubt => {
            (StatusCode::CONFLICT, "in-doubt", "The outcome of the request with this idempotency key is unknown")
        }
        Refusal::NotKept(_) => {
            (StatusCode::CONFLICT, "answer-not-kept", "The request was handled, but its answer was not kept")
        }
        Refusal::FailedBefore => {
            (StatusCode::CONFLICT, "failed", "The request with this idempotency key has failed for good")
        }
        Refusal::LeaseLost => {
            (StatusCode::CONFLICT, "lease-lost", "Another request with this idempotency key has taken over")
        }
        Refusal::Unavailable => {
            (StatusCode::SERVICE_UNAVAILABLE, "unavailable", "Idempotency keys cannot be checked at present")
        }
        Refusal::Misconfigured => {
            (StatusCode::INTERNAL_SERVER_ERROR, "misconfigured", "Idempotency keys cannot be checked")
        }
    };
    let more = match refusal {
        Refusal::KeyMissing(header) => Some(("detail", Value::from(format!("send one in the header {header}")))),
        Refusal::KeyMalformed(why) | Refusal::BodyUnusable(why) => Some(("detail", Value::from(*why))),
        Refusal::NotKept(status) => Some(("original_status", Value::from(*status))),
        _ => None,
    };
    let problem =
        [("type", format!("{TYPE}{kind}").into()), ("title", title.into()), ("status", status.as_u16().into())];
    let problem: Map<String, Value> =
        problem.into_iter().chain(more).map(|(name, value)| (name.to_owned(), value)).collect();
    let mut response = Response::new(Full::new(Bytes::from(Value::from(problem).to_string())));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
    match refusal {
        Refusal::InProgress(after) => {
            let seconds = after.as_millis().div_ceil(1000).clamp(1, u64::MAX.into());
            headers.insert(header::RETRY_AFTER, HeaderValue::from(u64::try_from(seconds).unwrap_or(u64::MAX)));
        }
        Refusal::Unavailable | Refusal::LeaseLost => {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(1));
        }
        _ => {}
    }
    response
}
