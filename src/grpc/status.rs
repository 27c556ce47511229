//! Errors as gRPC statuses. The only place that makes one.
//!
//! Each status carries a `google.rpc.ErrorInfo` with the domain [`DOMAIN`] and a reason, and where it helps a `RetryInfo` or
//! a `BadRequest`. Nothing of the database and nothing of an input leaks into a message.

use std::time::Duration;

use prost::Message;
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, FieldViolation, StatusExt};

use crate::{engine::EngineError, lifecycle::Refusal, store::StoreError};

/// The domain of every reason.
const DOMAIN: &str = "onceward";
/// When to come back after an overload or an outage.
const RETRY_DELAY: Duration = Duration::from_millis(500);
/// When to come back after a locked row: its holder's transaction is short, or it is none of ours.
const LOCKED_RETRY_DELAY: Duration = Duration::from_millis(100);

/// Why a call has no answer.
#[derive(Clone, Debug)]
pub(super) enum CallError {
    /// Fields are malformed, out of range, or do not belong to the call.
    Invalid(Vec<FieldViolation>),
    /// The message cannot be read.
    Undecodable,
    /// The message is larger than any valid one.
    RequestTooLarge,
    /// The answer does not fit any more; items of a Batch only.
    ResponseTooLarge,
    /// The verb has no outcome.
    Engine(EngineError),
    /// An earlier item of the same key in the same Batch ended unavailable.
    AfterUnavailable,
    /// The call's deadline passed.
    DeadlineExceeded,
    /// The server is shutting down.
    ShuttingDown,
}

impl From<EngineError> for CallError {
    fn from(error: EngineError) -> Self {
        Self::Engine(error)
    }
}

impl CallError {
    /// Whether the outcome is unknown and the call is to be repeated.
    pub(super) fn is_unavailable(&self) -> bool {
        self.parts().0 == Code::Unavailable
    }

    /// The reason, as the caller and the metrics know it.
    pub(super) fn reason(&self) -> &'static str {
        self.parts().1
    }

    /// As a message: what a Batch answers for one item.
    pub(super) fn into_message(self) -> tonic_types::Status {
        let status = Status::from(self);
        // The details of a status are its message, encoded.
        tonic_types::Status::decode(status.details()).unwrap_or_else(|_| tonic_types::Status {
            code: status.code().into(),
            message: status.message().into(),
            details: Vec::new(),
        })
    }

    fn parts(&self) -> (Code, &'static str, String, Option<Duration>) {
        let text = |error: &dyn std::fmt::Display| error.to_string();
        match self {
            Self::Invalid(_) => (Code::InvalidArgument, "INVALID_REQUEST", "the request is invalid".into(), None),
            Self::Undecodable => {
                (Code::InvalidArgument, "INVALID_REQUEST", "the request cannot be decoded".into(), None)
            }
            Self::RequestTooLarge => {
                (Code::InvalidArgument, "INVALID_REQUEST", "the request is too large".into(), None)
            }
            Self::ResponseTooLarge => {
                let message = "the answer does not fit into the batch's: repeat the operation singly";
                (Code::OutOfRange, "RESPONSE_TOO_LARGE", message.into(), None)
            }
            Self::Engine(EngineError::Refused(refusal)) => {
                let (code, reason) = match refusal {
                    Refusal::FingerprintMismatch => (Code::FailedPrecondition, "FINGERPRINT_MISMATCH"),
                    Refusal::AlreadyFinished => (Code::FailedPrecondition, "ALREADY_FINISHED"),
                    Refusal::FenceMismatch => (Code::FailedPrecondition, "FENCE_MISMATCH"),
                    Refusal::LockLive => (Code::FailedPrecondition, "LOCK_LIVE"),
                    Refusal::LeaseLost => (Code::Aborted, "LEASE_LOST"),
                    Refusal::KeyNotFound => (Code::NotFound, "KEY_NOT_FOUND"),
                };
                (code, reason, text(refusal), None)
            }
            Self::Engine(EngineError::Store(error)) => {
                let (code, reason, retry) = match error {
                    StoreError::Unavailable | StoreError::Refused => {
                        (Code::Unavailable, "STORE_UNAVAILABLE", Some(RETRY_DELAY))
                    }
                    StoreError::Locked => (Code::Unavailable, "STORE_UNAVAILABLE", Some(LOCKED_RETRY_DELAY)),
                    StoreError::Overloaded => (Code::ResourceExhausted, "OVERLOADED", Some(RETRY_DELAY)),
                    StoreError::KeyCollision => (Code::Internal, "KEY_COLLISION", None),
                };
                (code, reason, text(error), retry)
            }
            Self::AfterUnavailable => {
                let message = "an earlier operation of this key is unavailable, so this one was not tried";
                (Code::Unavailable, "STORE_UNAVAILABLE", message.into(), Some(RETRY_DELAY))
            }
            Self::DeadlineExceeded => {
                (Code::DeadlineExceeded, "DEADLINE_EXCEEDED", "the deadline has passed".into(), None)
            }
            Self::ShuttingDown => {
                (Code::Unavailable, "STORE_UNAVAILABLE", "the server is shutting down".into(), Some(RETRY_DELAY))
            }
        }
    }
}

impl From<CallError> for Status {
    fn from(error: CallError) -> Self {
        let (code, reason, message, retry) = error.parts();
        let mut details = ErrorDetails::with_error_info(reason, DOMAIN, []);
        if let Some(delay) = retry {
            details.set_retry_info(Some(delay));
        }
        if let CallError::Invalid(violations) = error {
            details.set_bad_request(violations);
        }
        Status::with_error_details(code, message, details)
    }
}
