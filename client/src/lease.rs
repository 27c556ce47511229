//! [`Lease`]: the right to act, as those who act see it.

use std::{
    future::{Future, pending},
    sync::Arc,
};

use bytes::Bytes;
use tokio::{
    runtime::Handle,
    sync::{mpsc, oneshot, watch},
    time::{Instant, sleep_until},
};

use crate::{error::Error, key::Key};

/// What is known of a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hold {
    /// It is exclusive until then, and probably longer.
    Until(Instant),
    /// Somebody else may act.
    Lost,
    /// It has been completed or failed.
    Settled,
}

impl Hold {
    fn is_lost(self) -> bool {
        match self {
            Self::Until(end) => Instant::now() >= end,
            Self::Lost => true,
            Self::Settled => false,
        }
    }
}

/// Bytes for the next attempt, and whom to tell when they are saved.
pub(crate) struct Checkpoint {
    pub(crate) bytes: Bytes,
    pub(crate) saved: oneshot::Sender<Result<(), Error>>,
}

/// The right to act, as those who act see it. It is renewed in the background for as long as its [`Guard`](crate::Guard)
/// lives.
///
/// That it is lost is told by the process' own monotonic clock, no later than its real end; so it is told too where a
/// handler has blocked the runtime and nothing could be renewed.
#[derive(Clone, Debug)]
pub struct Lease {
    facts: Arc<Facts>,
    hold: watch::Receiver<Hold>,
    checkpoints: mpsc::Sender<Checkpoint>,
    /// For timers of those who are outside of every runtime.
    runtime: Handle,
}

/// What does not change.
#[derive(Debug)]
pub(crate) struct Facts {
    pub(crate) key: Key,
    pub(crate) fence: i64,
    pub(crate) attempt: i32,
    pub(crate) resume_from: Option<Bytes>,
}

impl std::fmt::Debug for Checkpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Checkpoint({} bytes)", self.bytes.len())
    }
}

impl Lease {
    pub(crate) fn new(
        facts: Facts,
        hold: watch::Receiver<Hold>,
        checkpoints: mpsc::Sender<Checkpoint>,
        runtime: Handle,
    ) -> Self {
        Self { facts: Arc::new(facts), hold, checkpoints, runtime }
    }

    /// The key that is reserved.
    pub fn key(&self) -> &Key {
        &self.facts.key
    }

    /// The fencing token: grows with every new reservation of the key. Hand it downstream, where one that is lower than the
    /// highest seen is to be rejected.
    pub fn fence(&self) -> i64 {
        self.facts.fence
    }

    /// 1 for the first reservation of the record, one more for each takeover or retry.
    pub fn attempt(&self) -> i32 {
        self.facts.attempt
    }

    /// What an earlier attempt saved as its last checkpoint: where to resume.
    pub fn resume_from(&self) -> Option<&Bytes> {
        self.facts.resume_from.as_ref()
    }

    /// Saves where the next attempt may resume if this one does not finish: at most 16 KiB, empty to forget what was saved.
    /// The lock is extended along with it. Of several, the one that was called last counts.
    ///
    /// # Errors
    ///
    /// [`Error::LeaseLost`] if somebody else may act by now, [`Error::Invalid`] if it is too large.
    ///
    /// # Cancel safety
    ///
    /// Dropped before it was first polled, nothing has happened; later, it may be saved or not.
    pub async fn checkpoint(&mut self, bytes: impl Into<Bytes>) -> Result<(), Error> {
        let (saved, was_saved) = oneshot::channel();
        let checkpoint = Checkpoint { bytes: bytes.into(), saved };
        let sent = self.checkpoints.send(checkpoint).await;
        let lost = || if self.is_lost() { Error::LeaseLost } else { Error::AlreadyFinished };
        sent.map_err(|_| lost())?;
        was_saved.await.unwrap_or_else(|_| Err(lost()))
    }

    /// Whether somebody else may act by now: stop, or go on only where [`fence`](Self::fence) protects what you do.
    pub fn is_lost(&self) -> bool {
        self.hold.borrow().is_lost() || (self.hold.has_changed().is_err() && *self.hold.borrow() != Hold::Settled)
    }

    /// Ends when the lease is lost; never, if it is completed or failed before.
    ///
    /// # Cancel safety
    ///
    /// Dropped, nothing has happened.
    pub fn lost(&self) -> impl Future<Output = ()> + Send + 'static {
        let (mut hold, runtime) = (self.hold.clone(), self.runtime.clone());
        async move {
            loop {
                let now = *hold.borrow_and_update();
                let end = match now {
                    Hold::Until(end) => end,
                    Hold::Lost => return,
                    Hold::Settled => pending().await,
                };
                let end_comes = {
                    // Where it is awaited, if that is a runtime: the other one may be blocked.
                    let runtime = Handle::try_current().unwrap_or_else(|_| runtime.clone());
                    let _inside = runtime.enter();
                    sleep_until(end)
                };
                tokio::select! {
                    biased;
                    // Whoever kept it is gone, as is the runtime perhaps.
                    changed = hold.changed() => if changed.is_err() && *hold.borrow() != Hold::Settled { return },
                    () = end_comes => if hold.borrow().is_lost() { return },
                }
            }
        }
    }
}
