//! [`Client`]: what everything starts from.

use std::{fmt, future::Future, sync::Arc, time::Duration};

use tokio::{
    runtime::Handle,
    sync::{OwnedSemaphorePermit, Semaphore},
    time::Instant,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    call::{Answered, Caller, Manner, Patience, Unanswered},
    error::Error,
    key::Key,
    proto,
    question::Question,
    servers::Lane,
};

/// How many reservations are given back at once. While the service is down, more than these are left to the lock's end, and
/// under HOLD are in doubt then.
const ABANDONED_MAX: usize = 1024;

/// The way to the service. Clones are the same client; one is enough for a process, since concurrent calls of one client go
/// together.
///
/// It belongs to the Tokio runtime that it was made in: calls work from any other, as long as that one lives.
#[derive(Clone)]
pub struct Client {
    shared: Arc<Shared>,
}

struct Shared {
    caller: Caller,
    runtime: Handle,
    tasks: TaskTracker,
    closed: CancellationToken,
    /// Room for reservations that nobody awaits any more and that are yet to be given back.
    abandoned: Arc<Semaphore>,
    timeout: Duration,
    attempt: Duration,
    owner: Option<String>,
}

impl Client {
    pub(crate) fn new(
        caller: Caller,
        runtime: Handle,
        timeout: Duration,
        attempt: Duration,
        owner: Option<String>,
    ) -> Self {
        let shared = Shared {
            caller,
            runtime,
            tasks: TaskTracker::new(),
            closed: CancellationToken::new(),
            abandoned: Arc::new(Semaphore::new(ABANDONED_MAX)),
            timeout,
            attempt,
            owner,
        };
        Self { shared: Arc::new(shared) }
    }

    /// Shows a record, if there is one.
    ///
    /// # Errors
    ///
    /// Everything but [`Error::KeyNotFound`].
    ///
    /// # Cancel safety
    ///
    /// Dropped, nothing has happened.
    pub async fn lookup(&self, key: Key) -> Result<Option<proto::Record>, Error> {
        match self.ask(proto::LookupRequest { key: Some(key.into()) }, self.prompt()).await {
            Ok(answered) => Ok(answered.answer.record),
            Err(Unanswered { error: Error::KeyNotFound, .. }) => Ok(None),
            Err(unanswered) => Err(unanswered.error),
        }
    }

    /// Waits until everything that was begun has ended: completions that are still on their way, and reservations that somebody
    /// holds. New ones are refused from now on. Bound it with a timeout where somebody may hold one for long.
    ///
    /// # Cancel safety
    ///
    /// Dropped, the client stays closed and what was begun goes on.
    pub async fn close(&self) {
        self.shared.closed.cancel();
        self.shared.tasks.close();
        self.shared.tasks.wait().await;
    }

    /// Whether the service answers.
    pub(crate) async fn reach(&self, end: Instant) -> Result<(), Error> {
        let nobody = Key::new("onceward", "reached");
        let manner = Manner { patience: Patience::Until(end), ..self.prompt() };
        match self.ask(proto::LookupRequest { key: Some(nobody.into()) }, manner).await {
            Ok(_) => Ok(()),
            // Who may not look at this key may well at others.
            Err(Unanswered { error: Error::KeyNotFound | Error::Denied(_), .. }) => Ok(()),
            Err(unanswered) => Err(unanswered.error),
        }
    }

    /// Asks the service.
    pub(crate) async fn ask<Q: Question>(
        &self,
        question: Q,
        manner: Manner,
    ) -> Result<Answered<Q::Answer>, Unanswered> {
        self.shared.caller.ask(question, manner).await
    }

    /// A call that is answered at once.
    pub(crate) fn prompt(&self) -> Manner {
        Manner {
            patience: Patience::Until(Instant::now() + self.shared.timeout),
            attempt: self.shared.attempt,
            lane: Lane::Prompt,
            stubborn: false,
        }
    }

    /// A call that is held by the server for so long.
    pub(crate) fn waiting(&self, wait: Duration) -> Manner {
        Manner {
            patience: Patience::Until(Instant::now() + wait + self.shared.timeout),
            attempt: wait + self.shared.attempt,
            lane: Lane::Waiting,
            stubborn: false,
        }
    }

    /// A call that goes on until it is answered.
    pub(crate) fn endless(&self) -> Manner {
        Manner { patience: Patience::Endless, stubborn: true, ..self.prompt() }
    }

    /// Runs a task that nobody's leaving ends; false if the client is closed.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) -> bool {
        // Counted before it is looked, so that a close either refuses it or waits for it.
        let _counted = self.shared.tasks.token();
        let open = !self.shared.closed.is_cancelled();
        if open {
            self.shared.tasks.spawn_on(task, &self.shared.runtime);
        }
        open
    }

    /// Runs a task that nobody's leaving ends, on the runtime that calls.
    #[cfg(any(feature = "_exchange", feature = "ledger"))]
    pub(crate) fn spawn_here<T: Send + 'static>(
        &self,
        task: impl Future<Output = T> + Send + 'static,
    ) -> tokio::task::JoinHandle<T> {
        self.shared.tasks.spawn(task)
    }

    /// Room to give back a reservation that nobody awaits any more.
    pub(crate) fn abandoned(&self) -> Option<OwnedSemaphorePermit> {
        self.shared.abandoned.clone().try_acquire_owned().ok()
    }

    pub(crate) fn runtime(&self) -> &Handle {
        &self.shared.runtime
    }

    pub(crate) fn owner(&self) -> Option<String> {
        self.shared.owner.clone()
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").finish_non_exhaustive()
    }
}
