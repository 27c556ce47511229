//! [`Guard`]: a reservation in the caller's hands.

use std::{future::Future, time::Duration};

use bytes::Bytes;
use tokio::sync::oneshot;

use crate::{
    error::Error,
    key::Key,
    lease::Lease,
    proto,
    result::StoredResult,
    settlement::{Ending, Settled, Settlement},
};

/// A reservation in the caller's hands: the key is theirs to act on. It has a [`Lease`] and ends it.
///
/// Dropped without a word, as by a panic or a future that is cancelled, it is not renewed any more and the lock runs out:
/// the effect may have been, and to release the key at once would invite a second execution. Where nothing can have
/// happened, [`release_on_drop`](Self::release_on_drop) or [`release`](Self::release) is the better choice.
///
/// It may be dropped anywhere: outside of a runtime, after the runtime has shut down, while a panic unwinds.
#[derive(Debug)]
#[must_use = "a guard that is dropped keeps its key locked until the lock runs out"]
pub struct Guard {
    lease: Lease,
    ending: Option<oneshot::Sender<Ending>>,
    retention: Option<prost_types::Duration>,
    release_on_drop: bool,
}

impl Guard {
    /// A guard that nobody has seen yet gives its key back when it is dropped.
    pub(crate) fn unseen(lease: Lease, ending: oneshot::Sender<Ending>) -> Self {
        Self { lease, ending: Some(ending), retention: None, release_on_drop: true }
    }

    /// Whoever asked for it has it.
    pub(crate) fn seen(mut self) -> Self {
        self.release_on_drop = false;
        self
    }

    /// The lease, to hand to those who act.
    pub fn lease(&self) -> Lease {
        self.lease.clone()
    }

    /// The key that is reserved.
    pub fn key(&self) -> &Key {
        self.lease.key()
    }

    /// The fencing token: see [`Lease::fence`].
    pub fn fence(&self) -> i64 {
        self.lease.fence()
    }

    /// 1 for the first reservation of the record, one more for each takeover or retry.
    pub fn attempt(&self) -> i32 {
        self.lease.attempt()
    }

    /// What an earlier attempt saved as its last checkpoint: where to resume.
    pub fn resume_from(&self) -> Option<&Bytes> {
        self.lease.resume_from()
    }

    /// Saves where the next attempt may resume: see [`Lease::checkpoint`].
    ///
    /// # Errors
    ///
    /// As [`Lease::checkpoint`].
    ///
    /// # Cancel safety
    ///
    /// As [`Lease::checkpoint`].
    pub async fn checkpoint(&mut self, bytes: impl Into<Bytes>) -> Result<(), Error> {
        self.lease.checkpoint(bytes).await
    }

    /// Whether somebody else may act by now.
    pub fn is_lost(&self) -> bool {
        self.lease.is_lost()
    }

    /// Ends when the lease is lost: see [`Lease::lost`].
    ///
    /// # Cancel safety
    ///
    /// Dropped, nothing has happened.
    pub fn lost(&self) -> impl Future<Output = ()> + Send + 'static {
        self.lease.lost()
    }

    /// How long the completed record answers duplicates, in place of what was reserved: 1 s to 90 days. One out of range is as if
    /// nothing had been said.
    pub fn retention(mut self, retention: Duration) -> Self {
        self.retention = prost_types::Duration::try_from(retention).ok();
        self
    }

    /// Gives the key back when the guard is dropped without a word, so that the next caller acts at once. Only for work that
    /// has no effect unless it is completed.
    pub fn release_on_drop(mut self) -> Self {
        self.release_on_drop = true;
        self
    }

    /// Completes the key: duplicates get this result from now on.
    ///
    /// It is sent until it is answered, past the end of the lock too, and even if the future is dropped at once. As long as
    /// nobody else has reserved the key it is taken however late.
    ///
    /// # Errors
    ///
    /// [`Error::LeaseLost`] if somebody else has acted, or may be acting: look for their result. [`Error::NotKept`] if the result
    /// is larger than the service takes: the key is completed, and duplicates get a mark in place of the result
    /// ([`StoredResult::is_kept`]).
    ///
    /// # Cancel safety
    ///
    /// Dropped, it goes on being sent.
    pub fn complete(
        mut self,
        result: impl Into<StoredResult>,
    ) -> impl Future<Output = Result<Settled, Error>> + Send + 'static {
        let request = proto::CompleteRequest {
            result: Some(result.into().into()),
            retention: self.retention.take(),
            ..proto::CompleteRequest::default()
        };
        self.settle(Settlement::Complete(request))
    }

    /// Fails the key for good: duplicates get this result from now on.
    ///
    /// # Errors
    ///
    /// As [`complete`](Self::complete).
    ///
    /// # Cancel safety
    ///
    /// Dropped, it goes on being sent.
    pub fn fail(
        self,
        result: impl Into<StoredResult>,
    ) -> impl Future<Output = Result<Settled, Error>> + Send + 'static {
        let request = proto::FailRequest { result: Some(result.into().into()), ..proto::FailRequest::default() };
        self.settle(Settlement::Fail(request))
    }

    /// Gives the key back: nothing was done, and the next caller acts at once. A checkpoint that was saved is kept for it.
    ///
    /// # Errors
    ///
    /// As [`complete`](Self::complete).
    ///
    /// # Cancel safety
    ///
    /// Dropped, it goes on being sent.
    pub fn release(self) -> impl Future<Output = Result<Settled, Error>> + Send + 'static {
        self.settle(Settlement::release(None))
    }

    /// Gives the key back, with where the next caller may resume: at most 16 KiB.
    ///
    /// # Errors
    ///
    /// As [`complete`](Self::complete); [`Error::NotKept`] says that it was given back without the checkpoint, which was too
    /// large.
    ///
    /// # Cancel safety
    ///
    /// Dropped, it goes on being sent.
    pub fn release_with_checkpoint(
        self,
        checkpoint: impl Into<Bytes>,
    ) -> impl Future<Output = Result<Settled, Error>> + Send + 'static {
        self.settle(Settlement::release(Some(checkpoint.into())))
    }

    /// Hands the outcome over before anything is awaited.
    fn settle(mut self, settlement: Settlement) -> impl Future<Output = Result<Settled, Error>> + Send + 'static {
        let (settled, was_settled) = oneshot::channel();
        if let Some(ending) = self.ending.take() {
            let _ = ending.send(Ending { settlement, settled: Some(settled) });
        }
        // Whoever keeps it is gone only along with its runtime.
        async { was_settled.await.unwrap_or(Err(Error::Closed)) }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if let Some(ending) = self.ending.take().filter(|_| self.release_on_drop) {
            let _ = ending.send(Ending { settlement: Settlement::release(None), settled: None });
        }
    }
}
