//! Nouns to proto.

use std::time::Duration;

use super::Limits;
use crate::{
    engine::{FinishedAnswer, RenewedAnswer},
    lifecycle::{Finished, Reserved},
    proto::{self, reserve_response::Outcome as Answer},
    record::{OnExpiry, Record, Status, StoredResult, Timestamp},
};

pub(in crate::grpc) fn reserve_response(reserved: Reserved, limits: &Limits) -> proto::ReserveResponse {
    let outcome = match reserved {
        Reserved::Acquired(acquired) => Answer::Acquired(proto::Acquired {
            fence: acquired.fence,
            attempt: acquired.attempt,
            lock_ttl: Some(duration(acquired.lock_ttl)),
            locked_until: Some(timestamp(acquired.locked_until)),
            checkpoint: acquired.checkpoint,
        }),
        Reserved::Completed(completed) => Answer::Completed(finished(completed)),
        Reserved::Failed(failed) => Answer::Failed(finished(failed)),
        Reserved::InProgress(held) => Answer::InProgress(proto::InProgress {
            locked_until: Some(timestamp(held.locked_until)),
            retry_after: Some(duration(held.left.min(limits.retry_after_max))),
            owner: held.owner.map(|owner| owner.as_str().into()),
            attempt: held.attempt,
        }),
        Reserved::InDoubt(record) => Answer::InDoubt(proto::InDoubt {
            fence: record.fence,
            owner: record.owner.map(|owner| owner.as_str().into()),
            attempt: record.attempt,
            locked_until: Some(timestamp(record.locked_until)),
            checkpoint: record.checkpoint,
            origin: record.origin.map(|origin| origin.as_str().into()),
        }),
    };
    proto::ReserveResponse { outcome: Some(outcome) }
}

pub(in crate::grpc) fn complete_response(answer: FinishedAnswer) -> proto::CompleteResponse {
    proto::CompleteResponse { expires_at: Some(timestamp(answer.expires_at)), already_completed: answer.already }
}

pub(in crate::grpc) fn fail_response(answer: FinishedAnswer) -> proto::FailResponse {
    proto::FailResponse { expires_at: Some(timestamp(answer.expires_at)), already_failed: answer.already }
}

pub(in crate::grpc) fn renew_response(answer: RenewedAnswer) -> proto::RenewResponse {
    proto::RenewResponse {
        lock_ttl: Some(duration(answer.lock_ttl)),
        locked_until: Some(timestamp(answer.locked_until)),
    }
}

/// A record as it stands at `now`, without its tokens.
pub(in crate::grpc) fn record(record: Record, now: Timestamp) -> proto::Record {
    let status = match record.status {
        Status::InProgress if record.is_in_doubt(now) => proto::RecordStatus::InDoubt,
        Status::InProgress => proto::RecordStatus::InProgress,
        Status::Completed => proto::RecordStatus::Completed,
        Status::Failed | Status::FailedRetryable => proto::RecordStatus::Failed,
    };
    let on_expiry = match record.on_expiry {
        OnExpiry::Retry => proto::OnExpiry::Retry,
        OnExpiry::Hold => proto::OnExpiry::Hold,
    };
    proto::Record {
        key: Some(proto::Key {
            namespace: record.key.namespace().into(),
            subject: record.key.subject().into(),
            value: record.key.value().into(),
        }),
        status: status.into(),
        attempt: record.attempt,
        fence: record.fence,
        owner: record.owner.map(|owner| owner.as_str().into()),
        on_expiry: on_expiry.into(),
        created_at: Some(timestamp(record.created_at)),
        locked_until: Some(timestamp(record.locked_until)),
        finished_at: record.finished_at.map(timestamp),
        expires_at: record.expires_at.map(timestamp),
        retryable: record.status == Status::FailedRetryable,
        resolved: record.resolved,
        fingerprint: record.fingerprint.map(|fingerprint| fingerprint.as_str().into()),
        checkpoint: record.checkpoint,
        result: record.result.map(result),
        origin: record.origin.map(|origin| origin.as_str().into()),
    }
}

fn finished(finished: Finished) -> proto::Finished {
    proto::Finished {
        result: Some(result(finished.result)),
        attempt: finished.attempt,
        finished_at: Some(timestamp(finished.finished_at)),
        expires_at: finished.expires_at.map(timestamp),
        origin: finished.origin.map(|origin| origin.as_str().into()),
    }
}

fn result(stored: StoredResult) -> proto::Result {
    let metadata = stored.metadata.into_iter().map(|(name, value)| proto::Metadata { name, value }).collect();
    proto::Result { code: stored.code, metadata, body: stored.body }
}

fn duration(duration: Duration) -> prost_types::Duration {
    // Every duration here was checked against a limit far below the end of the type.
    prost_types::Duration::try_from(duration).unwrap_or_default()
}

fn timestamp(timestamp: Timestamp) -> prost_types::Timestamp {
    let micros = i32::try_from(timestamp.0.rem_euclid(1_000_000)).unwrap_or_default();
    prost_types::Timestamp { seconds: timestamp.0.div_euclid(1_000_000), nanos: micros * 1000 }
}
