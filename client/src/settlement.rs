//! [`Settlement`]: the outcome that a reservation gets.

use std::time::SystemTime;

use bytes::Bytes;
use tokio::sync::oneshot;

use crate::{error::Error, proto, result::StoredResult};

/// An operation that has got its outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Settled {
    /// Until when duplicates get it, by the store's clock.
    pub expires_at: SystemTime,
    /// Whether an earlier call, whose answer got lost, had done it.
    pub already: bool,
}

/// How a guard ends: with this outcome.
#[derive(Debug)]
pub(crate) struct Ending {
    pub(crate) settlement: Settlement,
    /// Who wants to know; nobody, if the guard was dropped.
    pub(crate) settled: Option<oneshot::Sender<Result<Settled, Error>>>,
}

/// The outcome of an operation, without key and token.
#[derive(Clone, Debug)]
pub(crate) enum Settlement {
    Complete(proto::CompleteRequest),
    Fail(proto::FailRequest),
}

impl Settlement {
    /// Takes away what is too large, and says so.
    pub(crate) fn make_fit(&mut self) -> Result<(), String> {
        if self.result().is_none_or(|result| result.fits()) {
            return Ok(());
        }
        self.leave_mark();
        Err("it is too large".into())
    }

    pub(crate) fn leave_mark(&mut self) {
        if let Some(result) = self.result() {
            *result = StoredResult::unstored(result.code, "refused").into();
        }
        if let Self::Fail(request) = self {
            request.checkpoint = None;
        }
    }

    /// Whether there was a retention to forget, which may be out of range.
    pub(crate) fn forget_retention(&mut self) -> bool {
        match self {
            Self::Complete(request) => request.retention.take().is_some(),
            Self::Fail(_) => false,
        }
    }

    fn result(&mut self) -> Option<&mut proto::Result> {
        match self {
            Self::Complete(request) => request.result.as_mut(),
            Self::Fail(request) => request.result.as_mut(),
        }
    }

    /// Nothing was done.
    pub(crate) fn release(checkpoint: Option<Bytes>) -> Self {
        Self::Fail(proto::FailRequest { retryable: true, checkpoint, ..proto::FailRequest::default() })
    }
}
