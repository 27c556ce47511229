//! Proto to nouns, and back. The only place that checks inputs: whatever passes it is valid everywhere behind it.
//!
//! A request is checked whole, so that its caller learns of all faults at once. Faults name fields and never echo inputs.

mod check;
mod respond;

use std::time::Duration;

use bytes::Bytes;

pub use self::check::Bounds;
use self::check::Check;
pub(super) use self::respond::{complete_response, fail_response, record, renew_response, reserve_response};
use super::status::CallError;
use crate::{
    proto,
    record::{Fingerprint, Key, OnExpiry, Origin, Owner, Status, StoredResult, Token},
    write::{Checkpoint, Extension, Finish, Reservation},
};

/// What a request may ask for.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Locks.
    pub lock_ttl: Bounds,
    /// Retentions.
    pub retention: Bounds,
    /// The longest wait.
    pub wait_max: Duration,
    /// The longest time after which a caller that found a key held is told to come back.
    pub retry_after_max: Duration,
}

/// An error of a single field.
pub(super) fn violation(field: &str, description: impl Into<String>) -> CallError {
    let mut check = Check::default();
    check.violation(field, description);
    check.into_error()
}

pub(super) fn reserve(
    request: proto::ReserveRequest,
    limits: &Limits,
    origin: Option<&Origin>,
) -> Result<(Key, Reservation, Duration), CallError> {
    let mut check = Check::default();
    let key = check.key(request.key);
    let token = check.field("token", Token::new(&request.token));
    let fingerprint = check.optional("fingerprint", request.fingerprint, Fingerprint::new);
    let lock_ttl = check.duration("lock_ttl", request.lock_ttl, limits.lock_ttl.min, limits.lock_ttl.max);
    let retention = check.duration("retention", request.retention, limits.retention.min, limits.retention.max);
    let wait = check.duration("wait", request.wait, Duration::ZERO, limits.wait_max);
    let owner = check.optional("owner", request.owner, Owner::new);
    let on_expiry = check.on_expiry("on_expiry", request.on_expiry);
    if request.traceparent.as_deref() == Some("") {
        check.violation("traceparent", "must not be empty");
    }
    let traceparent = request.traceparent.as_deref().and_then(Origin::parse);
    check.finish(key, token, |key, token| {
        let reservation = Reservation {
            token,
            fingerprint,
            lock_ttl: lock_ttl.unwrap_or(limits.lock_ttl.default),
            retention: retention.unwrap_or(limits.retention.default),
            owner,
            on_expiry,
            origin: traceparent.or_else(|| origin.cloned()),
        };
        (key, reservation, wait.unwrap_or_default())
    })
}

pub(super) fn complete(request: proto::CompleteRequest, limits: &Limits) -> Result<(Key, Token, Finish), CallError> {
    let mut check = Check::default();
    let key = check.key(request.key);
    let token = check.field("token", Token::new(&request.token));
    let result = check.result("result", request.result);
    let retention = check.duration("retention", request.retention, limits.retention.min, limits.retention.max);
    check.finish(key, token, |key, token| (key, token, ending(Status::Completed, Some(result), retention, None)))
}

pub(super) fn fail(request: proto::FailRequest) -> Result<(Key, Token, Finish), CallError> {
    let mut check = Check::default();
    let key = check.key(request.key);
    let token = check.field("token", Token::new(&request.token));
    let (status, result) = failure(&mut check, "result", request.retryable, request.result);
    if !request.retryable && request.checkpoint.is_some() {
        check.violation("checkpoint", "belongs to a retryable failure only");
    }
    let checkpoint = check.checkpoint("checkpoint", request.checkpoint);
    check.finish(key, token, |key, token| (key, token, ending(status, result, None, checkpoint)))
}

pub(super) fn renew(request: proto::RenewRequest, limits: &Limits) -> Result<(Key, Token, Extension), CallError> {
    let mut check = Check::default();
    let key = check.key(request.key);
    let token = check.field("token", Token::new(&request.token));
    let lock_ttl = check.duration("lock_ttl", request.lock_ttl, limits.lock_ttl.min, limits.lock_ttl.max);
    let checkpoint = check.checkpoint("checkpoint", request.checkpoint);
    let sequence = request.checkpoint_sequence;
    check.finish(key, token, |key, token| {
        let checkpoint = checkpoint.map(|bytes| Checkpoint { bytes, sequence });
        (key, token, Extension { lock_ttl, on_expiry: OnExpiry::Retry, checkpoint })
    })
}

pub(super) fn lookup(request: proto::LookupRequest) -> Result<Key, CallError> {
    let mut check = Check::default();
    let key = check.key(request.key);
    check.finish(key, Some(()), |key, ()| key)
}

pub(super) fn resolve(request: proto::ResolveRequest) -> Result<(Key, i64, bool, Finish), CallError> {
    use proto::resolve_request::Resolution;
    let mut check = Check::default();
    let key = check.key(request.key);
    let resolution = match request.resolution {
        Some(Resolution::Complete(complete)) => {
            Some((Status::Completed, Some(check.result("complete.result", complete.result))))
        }
        Some(Resolution::Fail(fail)) => Some(failure(&mut check, "fail.result", fail.retryable, fail.result)),
        None => {
            check.violation("resolution", "must be set");
            None
        }
    };
    let force = request.force.unwrap_or(false);
    check.finish(key, resolution, |key, (status, result)| {
        (key, request.fence, force, Finish { resolved: true, ..ending(status, result, None, None) })
    })
}

/// A permanent failure has a result, a retryable one has none.
fn failure(
    check: &mut Check,
    field: &str,
    retryable: bool,
    result: Option<proto::Result>,
) -> (Status, Option<StoredResult>) {
    if !retryable {
        return (Status::Failed, Some(check.result(field, result)));
    }
    if result.is_some() {
        check.violation(field, "belongs to a permanent failure only");
    }
    (Status::FailedRetryable, None)
}

fn ending(
    status: Status,
    result: Option<StoredResult>,
    retention: Option<Duration>,
    checkpoint: Option<Bytes>,
) -> Finish {
    Finish { status, resolved: false, result, retention, checkpoint }
}
