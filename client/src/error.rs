//! [`Error`]: why a call has no answer. The only place that reads a gRPC status.

use std::time::Duration;

use tonic::{Code, ConnectError, Status};
use tonic_types::StatusExt;

/// The domain of the service's reasons.
pub(crate) const DOMAIN: &str = "onceward";

/// Why a call has no answer.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The key is in use for another request: a caller has used it twice.
    #[error("the key is in use for another request")]
    FingerprintMismatch,
    /// The reservation belongs to somebody else by now, or a resolver has finished it.
    #[error("the reservation belongs to somebody else by now")]
    LeaseLost,
    /// The reservation has finished otherwise than this call asks.
    #[error("the reservation has finished otherwise")]
    AlreadyFinished,
    /// There is no such record, or it has expired.
    #[error("there is no such record")]
    KeyNotFound,
    /// The reservation to resolve is not the current one.
    #[error("the reservation to resolve is not the current one")]
    FenceMismatch,
    /// The reservation to resolve still holds its lock.
    #[error("the reservation to resolve still holds its lock")]
    LockLive,
    /// A field of the call is malformed or out of range.
    #[error("the call is invalid: {0}")]
    Invalid(String),
    /// The service does not know us.
    #[error("the service does not know us: {0}")]
    Unauthenticated(String),
    /// The service does not let us.
    #[error("the service denies access: {0}")]
    Denied(String),
    /// The result was larger than the service takes, or malformed. A mark is stored in its place, so that nobody acts again.
    #[error("the result cannot be stored, and a mark is in its place: {0}")]
    NotKept(String),
    /// There was no answer in time. What was asked may have been done; asking again is safe.
    #[error("no answer in time, last: {0}")]
    Unavailable(String),
    /// The client was closed, or the runtime that it was made in is gone.
    #[error("the client is closed")]
    Closed,
    /// Something else, as the service said it.
    #[error("{0}")]
    Other(Box<Status>),
}

/// What a status asks for.
#[derive(Debug)]
pub(crate) enum Verdict {
    /// Asking again would not help.
    Final(Error),
    /// Ask again, with the same token.
    Again(Again),
}

/// How to ask again.
#[derive(Debug)]
pub(crate) struct Again {
    /// Not before this.
    pub(crate) after: Option<Duration>,
    /// Whether it may have been done.
    pub(crate) maybe_done: bool,
    /// In a call of its own.
    pub(crate) alone: bool,
}

impl Again {
    /// What a call without an answer asks for.
    pub(crate) fn unanswered() -> Self {
        Self { after: None, maybe_done: true, alone: false }
    }
}

/// Reads a status. What is not of the service itself is of something on the way to it: some of it passes for certain, and the
/// rest, such as an ingress that knows no such path, for those who must not give up.
pub(crate) fn verdict(status: &Status, stubborn: bool) -> Verdict {
    let reason = reason(status);
    if stubborn && reason.is_none() {
        return Verdict::Again(Again { alone: true, after: retry_after(status), ..Again::unanswered() });
    }
    let message = || status.message().to_owned();
    Verdict::Final(match (status.code(), reason.as_deref()) {
        (_, Some("FINGERPRINT_MISMATCH")) => Error::FingerprintMismatch,
        (_, Some("LEASE_LOST")) => Error::LeaseLost,
        (_, Some("ALREADY_FINISHED")) => Error::AlreadyFinished,
        (_, Some("KEY_NOT_FOUND")) => Error::KeyNotFound,
        (_, Some("FENCE_MISMATCH")) => Error::FenceMismatch,
        (_, Some("LOCK_LIVE")) => Error::LockLive,
        (Code::InvalidArgument, _) => Error::Invalid(invalid(status)),
        (Code::Unauthenticated, _) => Error::Unauthenticated(message()),
        (Code::PermissionDenied, _) => Error::Denied(message()),
        (_, Some("RESPONSE_TOO_LARGE")) => {
            return Verdict::Again(Again { after: Some(Duration::ZERO), alone: true, ..Again::unanswered() });
        }
        (Code::ResourceExhausted, Some(_)) => {
            return Verdict::Again(Again { after: retry_after(status), maybe_done: false, alone: false });
        }
        (Code::Unavailable | Code::DeadlineExceeded | Code::Cancelled, _)
        | (Code::Unknown | Code::Internal | Code::ResourceExhausted, None) => {
            let maybe_done = !is_unsent(status);
            return Verdict::Again(Again { after: retry_after(status), maybe_done, alone: false });
        }
        _ => Error::Other(Box::new(status.clone())),
    })
}

/// Whether the connection or the server as a whole is at fault, so that another server may do better.
pub(crate) fn is_of_the_way(status: &Status) -> bool {
    matches!(status.code(), Code::Unavailable | Code::Cancelled | Code::Unknown | Code::Internal)
        && (status.code() == Code::Unavailable || reason(status).is_none())
}

/// Whether nobody answered, as far as the code says: not the service, which says so in a form of its own.
pub(crate) fn is_of_silence(status: &Status) -> bool {
    matches!(status.code(), Code::Cancelled | Code::DeadlineExceeded) && reason(status).is_none()
}

/// Whether there was no connection to send it on.
fn is_unsent(status: &Status) -> bool {
    let mut source = std::error::Error::source(status);
    while let Some(error) = source {
        if error.is::<ConnectError>() {
            return true;
        }
        source = error.source();
    }
    false
}

fn reason(status: &Status) -> Option<String> {
    status.get_details_error_info().filter(|info| info.domain == DOMAIN).map(|info| info.reason)
}

fn retry_after(status: &Status) -> Option<Duration> {
    status.get_details_retry_info().and_then(|info| info.retry_delay)
}

/// The message, and each field with what is wrong with it.
fn invalid(status: &Status) -> String {
    let violations = status.get_details_bad_request().map(|request| request.field_violations).unwrap_or_default();
    let fields = violations.iter().map(|violation| format!("; {}: {}", violation.field, violation.description));
    std::iter::once(status.message().to_owned()).chain(fields).collect()
}

#[cfg(test)]
mod tests {
    use tonic_types::ErrorDetails;

    use super::*;

    fn of_the_service(code: Code, reason: &str) -> Status {
        let mut details = ErrorDetails::with_error_info(reason, DOMAIN, []);
        details.set_retry_info(Some(Duration::from_millis(70)));
        Status::with_error_details(code, "said", details)
    }

    #[test]
    fn what_passes_is_asked_again_when_the_service_says() {
        for (code, reason, maybe_done, alone) in [
            (Code::Unavailable, "STORE_UNAVAILABLE", true, false),
            (Code::ResourceExhausted, "OVERLOADED", false, false),
            (Code::OutOfRange, "RESPONSE_TOO_LARGE", true, true),
            (Code::DeadlineExceeded, "DEADLINE_EXCEEDED", true, false),
        ] {
            let Verdict::Again(again) = verdict(&of_the_service(code, reason), false) else {
                panic!("{reason} is final")
            };
            let after = Duration::from_millis(if alone { 0 } else { 70 });
            assert_eq!((again.after, again.maybe_done, again.alone), (Some(after), maybe_done, alone), "{reason}");
        }
    }

    #[test]
    fn whatever_a_broken_connection_says_is_asked_again() {
        for code in [Code::Unavailable, Code::Cancelled, Code::Unknown, Code::Internal, Code::DeadlineExceeded] {
            let verdict = verdict(&Status::new(code, "h2 protocol error"), false);
            assert!(
                matches!(verdict, Verdict::Again(Again { after: None, maybe_done: true, alone: false })),
                "{code:?}"
            );
        }
    }

    #[test]
    fn who_must_not_give_up_asks_again_whatever_is_on_the_way() {
        for code in (1..=16).map(Code::from_i32) {
            let verdict = verdict(&Status::new(code, "no such path"), true);
            assert!(matches!(verdict, Verdict::Again(Again { alone: true, maybe_done: true, .. })), "{code:?}");
        }
        let decided = verdict(&of_the_service(Code::Aborted, "LEASE_LOST"), true);
        assert!(matches!(decided, Verdict::Final(Error::LeaseLost)));
    }

    #[test]
    fn what_the_service_decided_is_final() {
        for (code, reason) in [
            (Code::FailedPrecondition, "FINGERPRINT_MISMATCH"),
            (Code::Aborted, "LEASE_LOST"),
            (Code::NotFound, "KEY_NOT_FOUND"),
            (Code::Internal, "KEY_COLLISION"),
            (Code::InvalidArgument, "INVALID_REQUEST"),
        ] {
            assert!(matches!(verdict(&of_the_service(code, reason), false), Verdict::Final(_)), "{reason}");
        }
        assert!(matches!(verdict(&Status::new(Code::Unimplemented, ""), false), Verdict::Final(Error::Other(_))));
    }

    #[test]
    fn an_invalid_call_says_which_field() {
        let mut details = ErrorDetails::with_error_info("INVALID_REQUEST", DOMAIN, []);
        details.add_bad_request_violation("key.value", "must not be empty");
        let status = Status::with_error_details(Code::InvalidArgument, "the request is invalid", details);
        let Verdict::Final(error) = verdict(&status, false) else { panic!("it is final") };
        assert_eq!(error.to_string(), "the call is invalid: the request is invalid; key.value: must not be empty");
    }
}
