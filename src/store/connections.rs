//! [`Connections`]: a fixed number of database connections, each lent to one piece of work at a time.
//!
//! A pool that lends a connection to the caller's own future is unsafe here: a caller that leaves drops the future in the
//! middle of a statement, and the next borrower finds an open transaction. So the work is [`Unstoppable`]: it goes on
//! without its caller. Connections are held open between uses and not pinged: the statement itself tells whether the
//! database is there.
//!
//! What always holds:
//!
//! - a connection that failed, or that may be in the middle of something, is never lent again;
//! - once one connection fails, the idle ones of its time are thrown away with it, so that a restarted database costs one
//!   failed call and not one for each connection;
//! - where no more connections are to be had, those that there are serve all;
//! - while the database cannot be reached, one caller at a time tries, and all others fail at once (a half-open circuit
//!   breaker);
//! - the queue is bounded in length and in time, with room kept for completions.

#[cfg(test)]
mod tests;
mod unstoppable;

use std::{
    panic::AssertUnwindSafe,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use futures_util::{FutureExt, future::BoxFuture};
use tokio::{
    sync::{AcquireError, Notify, OwnedSemaphorePermit, Semaphore},
    time::timeout,
};
use tokio_util::task::TaskTracker;
use tracing::{debug, info, warn};

use self::unstoppable::Unstoppable;
use super::{StoreError, Urgency};

/// How many callers may wait for a connection before reservations are refused; completions may be twice as many.
const QUEUE_MAX: usize = 4096;
/// How long a caller waits for a connection before it is sent away: nothing was done for it.
const QUEUE_TIMEOUT: Duration = Duration::from_secs(5);

/// What became of a piece of work on a connection.
pub(super) enum Fault {
    /// The connection is as good as before; the work is answered with this error.
    Answer(StoreError),
    /// The connection is as good as before, but the database refused the work. The reason is for the log.
    Refused(String),
    /// The connection is not to be used again. The reason is for the log.
    Broken(String),
}

/// Makes a connection. A refusal is for the log, or for the person who starts the service.
pub(super) type Open<C> = Box<dyn Fn() -> BoxFuture<'static, Result<C, String>> + Send + Sync>;

/// A fixed number of connections. Cloning gives another handle to the same ones.
pub(super) struct Connections<C>(Arc<Inner<C>>);

struct Inner<C> {
    open: Open<C>,
    /// No piece of work takes longer: the database ends it earlier by its own timeout, if it can be reached at all.
    work_timeout: Duration,
    slots: Arc<Semaphore>,
    /// Reservations pass here first, as many at a time as there are slots: a completion never queues behind more.
    gate: Arc<Semaphore>,
    queued: AtomicUsize,
    idle: Mutex<Vec<(u64, C)>>,
    /// A connection has become idle.
    returned: Notify,
    /// Connections that work is done on now.
    lent: AtomicUsize,
    /// When a refusal was logged last, in seconds since `began`, so that a refusal for each call is not a line for each.
    complained: AtomicU64,
    began: Instant,
    /// Connections opened under an earlier number are not lent again.
    generation: AtomicU64,
    /// Whether the database could be reached when it was last tried. An outage is one line in the log, not one for each
    /// call.
    reachable: AtomicBool,
    /// Who tries, while it could not be reached.
    attempt: Semaphore,
    tasks: TaskTracker,
}

impl<C> Clone for Connections<C> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<C: Send + 'static> Connections<C> {
    /// `count` connections, each opened when it is first needed; `first` is open already.
    pub(super) fn new(count: usize, work_timeout: Duration, first: Option<C>, open: Open<C>) -> Self {
        Self(Arc::new(Inner {
            open,
            work_timeout,
            slots: Arc::new(Semaphore::new(count)),
            gate: Arc::new(Semaphore::new(count)),
            queued: AtomicUsize::new(0),
            idle: Mutex::new(first.map(|connection| (0, connection)).into_iter().collect()),
            returned: Notify::new(),
            lent: AtomicUsize::new(0),
            complained: AtomicU64::new(0),
            began: Instant::now(),
            generation: AtomicU64::new(0),
            reachable: AtomicBool::new(true),
            attempt: Semaphore::new(1),
            tasks: TaskTracker::new(),
        }))
    }

    /// Runs `work` on a connection.
    ///
    /// # Cancel safety
    ///
    /// Dropped while it waits for its turn, nothing is begun; later, the work goes on to its end. Kept and not polled, it keeps
    /// its connection.
    pub(super) async fn run<T, W>(&self, urgency: Urgency, work: W) -> Result<T, StoreError>
    where
        T: Send + 'static,
        W: for<'c> FnOnce(&'c mut C) -> BoxFuture<'c, Result<T, Fault>> + Send + 'static,
    {
        let slot = self.slot(urgency).await?;
        let inner = self.0.clone();
        let work = self.0.tasks.track_future(async move {
            let result = inner.work(work).await;
            drop(slot);
            result
        });
        // From here on `close` waits for it; one that came before may have found nothing to wait for.
        if self.is_closed() {
            return Err(StoreError::Unavailable);
        }
        // Whoever asked is not to end with it.
        Unstoppable::new(AssertUnwindSafe(work).catch_unwind()).await.unwrap_or(Err(StoreError::Unavailable))
    }

    /// Lets the work that has begun end, and closes the connections.
    ///
    /// # Cancel safety
    ///
    /// Dropped, nothing new is begun and what has begun goes on; it may be called again.
    pub(super) async fn close(&self) {
        self.0.slots.close();
        self.0.gate.close();
        self.0.tasks.close();
        self.0.tasks.wait().await;
        self.0.idle().clear();
    }

    async fn slot(&self, urgency: Urgency) -> Result<Slot, StoreError> {
        let (slots, gate) = (self.0.slots.clone(), self.0.gate.clone());
        let (room, late) = match urgency {
            Urgency::Reservation => (QUEUE_MAX, StoreError::Overloaded),
            Urgency::Completion => (2 * QUEUE_MAX, StoreError::Unavailable),
        };
        let _place = Place::take(&self.0.queued, room).ok_or(StoreError::Overloaded)?;
        let queue = timeout(QUEUE_TIMEOUT, async {
            let gate = match urgency {
                Urgency::Reservation => Some(gate.acquire_owned().await?),
                Urgency::Completion => None,
            };
            Ok::<_, AcquireError>(Slot { _gate: gate, _slot: slots.acquire_owned().await? })
        });
        queue.await.map_err(|_| late)?.map_err(|_| StoreError::Unavailable)
    }

    /// Whether [`close`](Self::close) was called.
    pub(super) fn is_closed(&self) -> bool {
        self.0.slots.is_closed()
    }
}

impl<C: Send + 'static> Inner<C> {
    async fn work<T, W>(&self, work: W) -> Result<T, StoreError>
    where
        W: for<'c> FnOnce(&'c mut C) -> BoxFuture<'c, Result<T, Fault>>,
    {
        let _attempt = if self.reachable.load(Ordering::Relaxed) {
            None
        } else {
            Some(self.attempt.try_acquire().map_err(|_| StoreError::Unavailable)?)
        };
        let (generation, mut connection) = self.connection().await?;
        let _lent = Lent::count(&self.lent);
        let done = match timeout(self.work_timeout, work(&mut connection)).await {
            Ok(done) => done,
            Err(_) => {
                self.give_up(generation);
                return Err(self.unreachable("no answer in time"));
            }
        };
        if let Err(Fault::Broken(reason)) = &done {
            self.complain("a database connection is given up", reason);
            self.give_up(generation);
            return Err(StoreError::Unavailable);
        }
        self.put_back(generation, connection);
        done.map_err(|fault| match fault {
            Fault::Answer(error) => error,
            Fault::Refused(reason) | Fault::Broken(reason) => {
                self.complain("the database refuses a statement", &reason);
                StoreError::Refused
            }
        })
    }

    /// An idle connection, else a new one, else, where no more are to be had, one that becomes idle; with its generation.
    async fn connection(&self) -> Result<(u64, C), StoreError> {
        if let Some(idle) = self.take_idle() {
            return Ok(idle);
        }
        // Before it is opened: what fails meanwhile may be what it was opened to.
        let generation = self.generation.load(Ordering::Acquire);
        let reason = match timeout(self.work_timeout, (self.open)()).await {
            Ok(Ok(connection)) => return Ok((generation, connection)),
            Ok(Err(reason)) => reason,
            Err(_) => "connecting took too long".into(),
        };
        if self.lent.load(Ordering::Relaxed) == 0 && self.idle().is_empty() {
            return Err(self.unreachable(&reason));
        }
        self.complain("no further database connection is to be had", &reason);
        let idle = async {
            loop {
                if let Some(idle) = self.take_idle() {
                    return idle;
                }
                self.returned.notified().await;
            }
        };
        timeout(QUEUE_TIMEOUT, idle).await.map_err(|_| StoreError::Unavailable)
    }

    /// An idle connection of the current generation; those of earlier ones are thrown away.
    fn take_idle(&self) -> Option<(u64, C)> {
        let mut idle = self.idle();
        let generation = self.generation.load(Ordering::Acquire);
        idle.retain(|(born, _)| *born == generation);
        idle.pop()
    }

    fn put_back(&self, generation: u64, connection: C) {
        if !self.reachable.swap(true, Ordering::Relaxed) {
            info!("the database is reachable again");
        }
        self.idle().push((generation, connection));
        self.returned.notify_one();
    }

    /// Nobody gets a connection of this generation any more.
    fn give_up(&self, generation: u64) {
        let next = generation.wrapping_add(1);
        let _ = self.generation.compare_exchange(generation, next, Ordering::AcqRel, Ordering::Acquire);
    }

    fn unreachable(&self, reason: &str) -> StoreError {
        if self.reachable.swap(false, Ordering::Relaxed) {
            warn!(reason, "the database cannot be reached");
        } else {
            debug!(reason, "the database still cannot be reached");
        }
        StoreError::Unavailable
    }

    /// Logs what is wrong, once a second at the most.
    fn complain(&self, what: &'static str, reason: &str) {
        let now = self.began.elapsed().as_secs() + 1;
        if self.complained.swap(now, Ordering::Relaxed) < now {
            warn!(reason, "{what}");
        } else {
            debug!(reason, "{what}");
        }
    }

    fn idle(&self) -> std::sync::MutexGuard<'_, Vec<(u64, C)>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A connection that work is done on, until dropped.
struct Lent<'a>(&'a AtomicUsize);

impl<'a> Lent<'a> {
    fn count(lent: &'a AtomicUsize) -> Self {
        lent.fetch_add(1, Ordering::Relaxed);
        Self(lent)
    }
}

impl Drop for Lent<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The right to use a connection, given back on drop.
struct Slot {
    _gate: Option<OwnedSemaphorePermit>,
    _slot: OwnedSemaphorePermit,
}

/// A place in a bounded queue, given back on drop.
struct Place<'a>(&'a AtomicUsize);

impl<'a> Place<'a> {
    fn take(queued: &'a AtomicUsize, room: usize) -> Option<Self> {
        queued
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |count| (count < room).then_some(count + 1))
            .ok()
            .map(|_| Self(queued))
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
