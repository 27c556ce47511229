//! [`Once`]: reserve, act, complete, in one call.

use std::{future::Future, marker::PhantomData, time::Duration};

use tracing::warn;

use crate::{
    client::Client,
    codec::{Codec, CodecError, Json, Prost},
    error::Error,
    fingerprint::Fingerprint,
    guard::Guard,
    key::Key,
    lease::Lease,
    reservation::{InDoubt, InProgress, Reservation, winner},
    reserve::Reserve,
    result::{Finished, StoredResult},
};

/// How long to wait for somebody else who is at it, if nothing is said.
const WAIT: Duration = Duration::from_secs(10);

/// An operation to be done once. See [`run`](Self::run).
#[derive(Debug)]
#[must_use = "nothing happens before `run`"]
pub struct Once<C = Json> {
    reserve: Reserve,
    cancel_on_loss: bool,
    codec: PhantomData<fn() -> C>,
}

/// What came of an operation.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Outcome<T> {
    /// What the work returned, now or before.
    pub value: T,
    /// Which of the two.
    pub source: Source,
}

/// Where a value comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Source {
    /// The work has run just now.
    Fresh,
    /// The work had run before.
    Replayed {
        /// The attempt that finished.
        attempt: i32,
        /// The W3C `traceparent` of the execution.
        origin: Option<String>,
    },
}

/// An error of the work, and what is known of the effect. An error that is passed on by `?` is [`Unknown`](Self::Unknown).
#[derive(Debug)]
pub enum Failure<E> {
    /// Nothing has happened: the next caller acts at once.
    Retryable(E),
    /// It cannot succeed: duplicates get this result. [`Failure::permanent`] makes it from the error's text.
    Permanent(E, StoredResult),
    /// It may have happened: the key stays locked until the lock runs out, and then the expiry policy decides.
    Unknown(E),
}

impl<E> Failure<E> {
    /// It cannot succeed: duplicates get the error's text.
    pub fn permanent(error: E) -> Self
    where
        E: std::fmt::Display,
    {
        let text = error.to_string();
        Self::Permanent(error, StoredResult::new(text))
    }
}

impl<E> From<E> for Failure<E> {
    fn from(error: E) -> Self {
        Self::Unknown(error)
    }
}

/// Why there is no value.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OnceError<E> {
    /// The work has run just now, and nothing has happened.
    #[error("the work failed and may be tried again: {0}")]
    Retryable(E),
    /// The work has run just now, and cannot succeed.
    #[error("the work failed: {0}")]
    Permanent(E),
    /// The work has run just now, and it may have happened.
    #[error("the work failed and may have had its effect: {0}")]
    Unknown(E),
    /// The work had run before, and cannot succeed.
    #[error("the work failed before: {}", String::from_utf8_lossy(&.0.result.body))]
    FailedBefore(Box<Finished>),
    /// The work had run before, but its value was too large to be kept, or could not be written.
    #[error("the work was done before, and its value was not kept")]
    NotKept(Box<Finished>),
    /// Somebody else is at it.
    #[error("somebody else is at it, ask again in {:?}", .0.retry_after)]
    InProgress(InProgress),
    /// Somebody was at it, and nobody knows whether it took effect.
    #[error("nobody knows whether it took effect: attempt {} is in doubt", .0.attempt)]
    InDoubt(InDoubt),
    /// The lease was lost while the work ran, and somebody else may have acted.
    #[error("the lease was lost while the work ran")]
    LeaseLost,
    /// The stored value cannot be read.
    #[error(transparent)]
    Codec(#[from] CodecError),
    /// The service did not do its part. If the work has run, its effect has happened all the same.
    #[error(transparent)]
    Service(#[from] Error),
}

impl Client {
    /// Reserves a key, acts, and completes the key with the result; or gets the result of whoever did so before.
    pub fn once(&self, key: Key) -> Once<Json> {
        Once::new(self.reserve(key))
    }
}

impl Once<Json> {
    fn new(reserve: Reserve) -> Self {
        Self { reserve: reserve.wait(WAIT), cancel_on_loss: false, codec: PhantomData }
    }
}

impl<C> Once<C> {
    /// The hash of the request: the same key with another one is refused.
    pub fn fingerprint(self, fingerprint: Fingerprint) -> Self {
        self.with(|reserve| reserve.fingerprint(fingerprint))
    }

    /// How long others wait if this process dies, 30 s by default; a process that lives renews the lock however long the work
    /// takes.
    pub fn lock_ttl(self, lock_ttl: Duration) -> Self {
        self.with(|reserve| reserve.lock_ttl(lock_ttl))
    }

    /// How long duplicates get the value: 1 s to 90 days, 24 h by default.
    pub fn retention(self, retention: Duration) -> Self {
        self.with(|reserve| reserve.retention(retention))
    }

    /// How long to wait for somebody else who is at it: 10 s by default.
    pub fn wait(self, wait: Duration) -> Self {
        self.with(|reserve| reserve.wait(wait))
    }

    /// When the lock runs out nobody takes over: the key is in doubt until it is resolved.
    pub fn hold(self) -> Self {
        self.with(Reserve::hold)
    }

    /// Who reserves, in place of the client's owner.
    pub fn owner(self, owner: impl Into<String>) -> Self {
        self.with(|reserve| reserve.owner(owner))
    }

    /// The W3C `traceparent` of this call.
    pub fn traceparent(self, traceparent: impl Into<String>) -> Self {
        self.with(|reserve| reserve.traceparent(traceparent))
    }

    /// Drops the work when its lease is lost, and ends with [`OnceError::LeaseLost`]. Otherwise it runs to its end, and may look
    /// at [`Lease::lost`] itself.
    pub fn cancel_on_loss(self) -> Self {
        Self { cancel_on_loss: true, ..self }
    }

    /// Values are messages of protocol buffers, in place of JSON.
    pub fn message(self) -> Once<Prost> {
        self.codec()
    }

    /// Values are written and read in this way.
    pub fn codec<D>(self) -> Once<D> {
        Once { reserve: self.reserve, cancel_on_loss: self.cancel_on_loss, codec: PhantomData }
    }

    /// Runs the work unless it was done before, and gives its value, or that of before.
    ///
    /// ```
    /// use onceward_client::{Failure, Key};
    ///
    /// # #[tokio::main] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let client = onceward_client::Client::builder(["http://127.0.0.1:50051"]).disabled(true).lazy()?;
    /// let outcome = client
    ///     .once(Key::new("numbers.parse", "request-17"))
    ///     .run(async |_lease| "42".parse::<u32>().map_err(Failure::permanent))
    ///     .await?;
    /// assert_eq!(outcome.value, 42);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// A value that is too large to be kept (1 MiB), or that cannot be written, is returned all the same; duplicates get
    /// [`OnceError::NotKept`], since the work must not run again.
    ///
    /// # Errors
    ///
    /// What the work said, what is known of the key, or what the service could not do.
    ///
    /// # Cancel safety
    ///
    /// Dropped, the work is dropped too, and the key stays locked until its lock runs out, since the work may have had its
    /// effect. Dropped before or after the work runs, it leaves nothing half done.
    pub async fn run<T, E, F>(self, work: impl FnOnce(Lease) -> F) -> Result<Outcome<T>, OnceError<E>>
    where
        C: Codec<T>,
        F: Future<Output = Result<T, Failure<E>>>,
    {
        match self.reserve.clone().await? {
            Reservation::Acquired(guard) => self.act(guard, work).await,
            other => told::<C, T, E>(other),
        }
    }

    async fn act<T, E, F>(self, guard: Guard, work: impl FnOnce(Lease) -> F) -> Result<Outcome<T>, OnceError<E>>
    where
        C: Codec<T>,
        F: Future<Output = Result<T, Failure<E>>>,
    {
        let lost = guard.lost();
        let work = work(guard.lease());
        let done = tokio::select! {
            biased;
            () = lost, if self.cancel_on_loss => return Err(OnceError::LeaseLost),
            done = work => done,
        };
        let settled = match done {
            Ok(value) => {
                let result = kept(C::encode(&value));
                return match guard.complete(result).await {
                    Ok(_) | Err(Error::NotKept(_)) => Ok(Outcome { value, source: Source::Fresh }),
                    Err(Error::LeaseLost) => self.of_the_winner().await,
                    Err(error) => Err(error.into()),
                };
            }
            Err(Failure::Retryable(error)) => (guard.release().await, OnceError::Retryable(error)),
            Err(Failure::Permanent(error, result)) => (guard.fail(result).await, OnceError::Permanent(error)),
            // The guard is dropped without a word.
            Err(Failure::Unknown(error)) => return Err(OnceError::Unknown(error)),
        };
        match settled {
            (Err(Error::LeaseLost), _) => self.of_the_winner().await,
            (Err(Error::NotKept(_)), told) => Err(told),
            // What the work said counts more than that the service was not told.
            (Err(error), told) => {
                warn!(%error, "the failure of an operation was not taken");
                Err(told)
            }
            (Ok(_), told) => Err(told),
        }
    }

    /// Somebody else took over while the work ran: if they have finished, theirs is the value that everybody else gets.
    async fn of_the_winner<T, E>(&self) -> Result<Outcome<T>, OnceError<E>>
    where
        C: Codec<T>,
    {
        let (client, key) = (self.reserve.client(), self.reserve.key().clone());
        let fingerprint = self.reserve.fingerprint_text();
        match winner(client, key, fingerprint.as_deref()).await? {
            Some(reservation) => told::<C, T, E>(reservation),
            None => Err(OnceError::LeaseLost),
        }
    }

    fn with(self, change: impl FnOnce(Reserve) -> Reserve) -> Self {
        Self { reserve: change(self.reserve), ..self }
    }
}

/// What is stored of a value; a mark in its place if it cannot be.
fn kept(encoded: Result<Vec<u8>, CodecError>) -> StoredResult {
    match encoded {
        Ok(body) => Some(StoredResult::new(body))
            .filter(StoredResult::fits)
            .unwrap_or_else(|| StoredResult::unstored(0, "too large")),
        Err(error) => {
            warn!(%error, "the value of an operation cannot be kept");
            StoredResult::unstored(0, "not encodable")
        }
    }
}

/// What is known of a key that is not ours.
fn told<C: Codec<T>, T, E>(reservation: Reservation) -> Result<Outcome<T>, OnceError<E>> {
    match reservation {
        Reservation::Completed(finished) => replayed::<C, T, E>(finished),
        Reservation::Failed(finished) => Err(OnceError::FailedBefore(finished.into())),
        Reservation::InProgress(held) => Err(OnceError::InProgress(held)),
        Reservation::InDoubt(doubt) => Err(OnceError::InDoubt(doubt)),
        Reservation::Acquired(_) => Err(OnceError::LeaseLost),
    }
}

fn replayed<C: Codec<T>, T, E>(finished: Finished) -> Result<Outcome<T>, OnceError<E>> {
    if !finished.result.is_kept() {
        return Err(OnceError::NotKept(finished.into()));
    }
    let value = C::decode(&finished.result.body)?;
    Ok(Outcome { value, source: Source::Replayed { attempt: finished.attempt, origin: finished.origin } })
}
