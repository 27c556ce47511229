//! [`Reserve`]: a key to reserve, and the task that then owns the reservation.

use std::{
    future::{Future, IntoFuture},
    pin::Pin,
    time::Duration,
};

use tokio::{
    sync::{mpsc, oneshot, watch},
    time::{Instant, sleep, timeout},
};
use uuid::Uuid;

use crate::{
    call::{Answered, Manner, Patience, Unanswered},
    client::Client,
    error::Error,
    fingerprint::Fingerprint,
    guard::Guard,
    keeper::Keeper,
    key::Key,
    lease::{Facts, Hold, Lease},
    proto::{self, reserve_response::Outcome},
    reservation::Reservation,
    result::granted,
};

/// The lock of a reservation whose answer does not say, which no service of ours gives.
const LOCK_TTL: Duration = Duration::from_secs(30);
/// The longest lock that there is.
const LOCK_TTL_MAX: Duration = Duration::from_secs(24 * 3600);

/// How long one call may be held by a server, of the 60 s that it allows: a server that falls silent costs no more.
const WAIT_MAX: Duration = Duration::from_secs(5);
/// The pause before waiting again where a server did not hold the call as long as it was asked to.
const WAIT_PAUSE_MIN: Duration = Duration::from_millis(50);
/// What it grows to.
const WAIT_PAUSE_MAX: Duration = Duration::from_secs(1);
/// The longest wait: a day, which is longer than any caller's patience.
const WAIT_IN_ALL_MAX: Duration = Duration::from_secs(24 * 3600);

/// A key to reserve, and how; await it.
///
/// ```no_run
/// use std::time::Duration;
/// use onceward_client::{Client, Fingerprint, Key, Reservation};
///
/// # async fn charge(fence: i64) -> String { unimplemented!() }
/// # async fn example(client: Client, body: &[u8]) -> Result<(), onceward_client::Error> {
/// let reservation = client
///     .reserve(Key::new("payments.charge", "order-17").subject("ann"))
///     .fingerprint(Fingerprint::of_bytes(body))
///     .wait(Duration::from_secs(5))
///     .await?;
/// match reservation {
///     Reservation::Acquired(guard) => {
///         let receipt = charge(guard.fence()).await;
///         guard.complete(receipt).await?;
///     }
///     Reservation::Completed(finished) => println!("charged before: {:?}", finished.result.body),
///     Reservation::Failed(finished) => println!("refused before: {:?}", finished.result.body),
///     Reservation::InProgress(held) => println!("somebody is at it, come back in {:?}", held.retry_after),
///     Reservation::InDoubt(doubt) => println!("ask an operator about fence {}", doubt.fence),
///     _ => {}
/// }
/// # Ok(())
/// # }
/// ```
///
/// # Cancel safety
///
/// Dropped, a task goes on until the service has answered, and gives the key back if it was acquired: nothing was done. It
/// does not go on waiting for somebody else.
#[derive(Clone, Debug)]
#[must_use = "a key is reserved when this is awaited"]
pub struct Reserve {
    client: Client,
    key: Key,
    request: proto::ReserveRequest,
    wait: Duration,
}

impl Client {
    /// Reserves a key, or says what is known of it.
    pub fn reserve(&self, key: Key) -> Reserve {
        Reserve::new(self.clone(), key)
    }
}

impl Reserve {
    fn new(client: Client, key: Key) -> Self {
        let request = proto::ReserveRequest {
            key: Some(key.clone().into()),
            owner: client.owner(),
            ..proto::ReserveRequest::default()
        };
        Self { client, key, request, wait: Duration::ZERO }
    }

    /// The hash of the request: the same key with another one is refused.
    pub fn fingerprint(mut self, fingerprint: Fingerprint) -> Self {
        self.request.fingerprint = Some(fingerprint.as_str().to_owned());
        self
    }

    /// How long the key is exclusive without a renewal: 100 ms to 24 h, 30 s by default. It is how long others wait if this
    /// process dies; a guard that lives is renewed however long it takes.
    pub fn lock_ttl(mut self, lock_ttl: Duration) -> Self {
        self.request.lock_ttl = duration(lock_ttl);
        self
    }

    /// How long the finished record answers duplicates: 1 s to 90 days, 24 h by default.
    pub fn retention(mut self, retention: Duration) -> Self {
        self.request.retention = duration(retention);
        self
    }

    /// How long to wait while somebody else holds the key; not at all by default.
    pub fn wait(mut self, wait: Duration) -> Self {
        self.wait = wait.min(WAIT_IN_ALL_MAX);
        self
    }

    /// Who reserves, in place of the client's owner.
    pub fn owner(mut self, owner: impl Into<String>) -> Self {
        self.request.owner = Some(owner.into());
        self
    }

    /// When the lock runs out nobody takes over: the key is in doubt until it is resolved. For effects that must never be
    /// twice, at a provider that takes no key.
    pub fn hold(mut self) -> Self {
        self.request.on_expiry = Some(proto::OnExpiry::Hold.into());
        self
    }

    /// The W3C `traceparent` of this call, so that replays lead to the trace of the execution.
    pub fn traceparent(mut self, traceparent: impl Into<String>) -> Self {
        self.request.traceparent = Some(traceparent.into());
        self
    }

    pub(crate) fn key(&self) -> &Key {
        &self.key
    }

    pub(crate) fn fingerprint_text(&self) -> Option<String> {
        self.request.fingerprint.clone()
    }

    pub(crate) fn client(&self) -> &Client {
        &self.client
    }
}

impl IntoFuture for Reserve {
    type Output = Result<Reservation, Error>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move {
            let patience = self.client.waiting(self.wait).patience;
            loop {
                let (answer, answered) = oneshot::channel();
                if !self.client.spawn(own(self.clone(), answer)) {
                    return Err(Error::Closed);
                }
                match answered.await {
                    // It came too late to begin with. It is given back first, or the next Reserve might meet it.
                    Ok(Ok(Reservation::Acquired(guard))) if guard.is_lost() => {
                        drop(timeout(LOCK_TTL, guard.release()).await);
                        if matches!(patience, Patience::Until(end) if Instant::now() >= end) {
                            return Err(Error::Unavailable("the way is slower than the lock is long".into()));
                        }
                    }
                    Ok(Ok(Reservation::Acquired(guard))) => return Ok(Reservation::Acquired(guard.seen())),
                    Ok(answer) => return answer,
                    // The runtime that the client was made in is gone.
                    Err(_) => return Err(Error::Closed),
                }
            }
        })
    }
}

/// Who asked for a reservation.
type Asker = oneshot::Sender<Result<Reservation, Error>>;

/// Owns a reservation from its first Reserve to its end.
async fn own(reserve: Reserve, mut asker: Asker) {
    let mut unanswered = None;
    // What is needed to reserve takes room, and the task may live long.
    match Box::pin(reserve.acquire(&mut asker, &mut unanswered)).await {
        Ok(Found::Ours(keeper, guard)) => {
            // One that nobody receives is dropped unseen, which gives the key back.
            let _ = asker.send(Ok(Reservation::Acquired(guard)));
            keeper.run().await;
        }
        Ok(Found::Theirs(reservation)) => drop(asker.send(Ok(reservation))),
        Err(error) => drop(asker.send(Err(error))),
    }
    if let Some(request) = unanswered {
        Box::pin(reserve.give_back(request)).await;
    }
}

enum Found {
    Ours(Keeper, Guard),
    Theirs(Reservation),
}

/// What an answer means for the next step.
enum Next {
    Found(Found),
    /// Somebody else is at it, as a call says that was sent then.
    Held {
        by: proto::InProgress,
        sent_at: Instant,
    },
    /// The token names an attempt that is over. Nobody has acted under it: take another.
    Spent,
}

impl Reserve {
    /// Reserves until it is known whose the key is. A Reserve that may have been done without an answer is left in `unanswered`.
    async fn acquire(&self, asker: &mut Asker, unanswered: &mut Option<proto::ReserveRequest>) -> Result<Found, Error> {
        let end = Instant::now() + self.wait;
        let patience = self.client.waiting(self.wait).patience;
        let mut pause = WAIT_PAUSE_MIN;
        // Most keys are free: a call that need not be held goes together with others. Only who has met a holder waits.
        let mut holder: Option<proto::InProgress> = None;
        // One token for as long as nothing was done under it, so that a copy that comes late is the same reservation.
        let (mut token, mut repeated) = (fresh_token(), false);
        loop {
            let waits = holder.is_some();
            let (request, manner) = self.attempt(&token, if waits { end } else { Instant::now() });
            let asked = tokio::select! {
                biased;
                asked = self.client.ask(request.clone(), Manner { patience, ..manner }) => asked,
                // Nobody waits any more: neither does the service.
                () = asker.closed(), if waits => Err(Unanswered { error: Error::Closed, maybe_done: true }),
            };
            let next = match asked {
                Ok(answered) => {
                    repeated |= answered.repeated;
                    self.next(&token, answered, repeated, patience)
                        .await
                        .inspect_err(|_| *unanswered = Some(request))?
                }
                Err(Unanswered { error: Error::LeaseLost | Error::AlreadyFinished, .. }) => Next::Spent,
                Err(Unanswered { error, maybe_done }) => {
                    *unanswered = Some(request).filter(|_| maybe_done || repeated);
                    return match (error, holder) {
                        // It was somebody else's when it was last heard of.
                        (Error::Unavailable(_), Some(by)) => Ok(Found::Theirs(Reservation::InProgress(by.into()))),
                        (error, _) => Err(error),
                    };
                }
            };
            match next {
                Next::Found(found) => return Ok(found),
                Next::Spent => (token, repeated) = (fresh_token(), false),
                Next::Held { by, .. } if Instant::now() + pause >= end => {
                    return Ok(Found::Theirs(Reservation::InProgress(by.into())));
                }
                Next::Held { by, sent_at } => {
                    // A server that shuts down, or has too many who wait, answers before the wait is over.
                    if waits && sent_at.elapsed() < WAIT_MAX / 2 {
                        sleep(pause).await;
                        pause = (pause * 2).min(WAIT_PAUSE_MAX);
                    }
                    holder = Some(by);
                }
            }
        }
    }

    /// What an answer means; `repeated`, if the same may have been done before without an answer. An error leaves the reservation
    /// to be given back.
    async fn next(
        &self,
        token: &str,
        answered: Answered<proto::ReserveResponse>,
        repeated: bool,
        patience: Patience,
    ) -> Result<Next, Error> {
        let theirs = |reservation| Ok(Next::Found(Found::Theirs(reservation)));
        match answered.answer.outcome {
            Some(Outcome::Acquired(acquired)) => {
                match self.hold_on(token.to_owned(), acquired, answered.sent_at, patience).await {
                    Ok((keeper, guard)) => Ok(Next::Found(Found::Ours(keeper, guard))),
                    // Somebody else has it by now.
                    Err(Error::LeaseLost | Error::KeyNotFound) => Ok(Next::Spent),
                    Err(error) => Err(error),
                }
            }
            Some(Outcome::InDoubt(doubt)) => {
                let manner = Manner { patience, ..self.client.prompt() };
                if repeated && self.was_ours(token.to_owned(), manner).await? {
                    return Ok(Next::Spent);
                }
                theirs(Reservation::InDoubt(doubt.into()))
            }
            Some(Outcome::Completed(finished)) => theirs(Reservation::Completed(finished.into())),
            Some(Outcome::Failed(finished)) => theirs(Reservation::Failed(finished.into())),
            Some(Outcome::InProgress(by)) => Ok(Next::Held { by, sent_at: answered.sent_at }),
            None => Err(Error::Other(Box::new(tonic::Status::internal("an answer says nothing")))),
        }
    }

    /// A request that waits until then, or a part of that, and how to send it.
    fn attempt(&self, token: &str, end: Instant) -> (proto::ReserveRequest, Manner) {
        let mut request = proto::ReserveRequest { token: token.to_owned(), ..self.request.clone() };
        let wait = end.saturating_duration_since(Instant::now()).min(WAIT_MAX);
        if wait.is_zero() {
            return (request, self.client.prompt());
        }
        request.wait = duration(wait);
        (request, self.client.waiting(wait))
    }

    /// A guard for what was acquired, and who keeps it.
    async fn hold_on(
        &self,
        token: String,
        acquired: proto::Acquired,
        sent_at: Instant,
        patience: Patience,
    ) -> Result<(Keeper, Guard), Error> {
        let lock_ttl = granted(acquired.lock_ttl).unwrap_or(LOCK_TTL).min(LOCK_TTL_MAX);
        let (hold, held) = watch::channel(Hold::Until(sent_at + lock_ttl));
        let (save, checkpoints) = mpsc::channel(1);
        let (end, ending) = oneshot::channel();
        let key = proto::Key::from(self.key.clone());
        let mut keeper =
            Keeper { client: self.client.clone(), key, token, lock_ttl, since: sent_at, hold, checkpoints, ending };
        // By our clock a good part of the lock is over, or all of it, although it was granted a moment ago. On a way that takes
        // longer than a third of the lock it is enough that the lease is live.
        let mut live = sent_at.elapsed() <= lock_ttl / 3;
        while !live {
            keeper.renew(patience).await?;
            live = keeper.since.elapsed() < keeper.lock_ttl;
        }
        let facts = Facts {
            key: self.key.clone(),
            fence: acquired.fence,
            attempt: acquired.attempt,
            resume_from: acquired.checkpoint,
        };
        let lease = Lease::new(facts, held, save, self.client.runtime().clone());
        Ok((keeper, Guard::unseen(lease, end)))
    }

    /// Whether a doubt is about our own Reserve, whose answer got lost until its lock was over. Nothing was done under its
    /// token, so it is given back. One that is somebody else's is left as it is.
    async fn was_ours(&self, token: String, manner: Manner) -> Result<bool, Error> {
        let request = proto::FailRequest {
            key: Some(self.key.clone().into()),
            token,
            retryable: true,
            ..proto::FailRequest::default()
        };
        match self.client.ask(request, manner).await {
            Ok(_) => Ok(true),
            Err(Unanswered { error: Error::LeaseLost | Error::KeyNotFound | Error::AlreadyFinished, .. }) => Ok(false),
            Err(unanswered) => Err(unanswered.error),
        }
    }

    /// Finds out what became of a Reserve that nobody answered and nobody awaits, and gives the key back if it was acquired.
    /// It is asked again with the same token: copies of it that come late do nothing after that.
    async fn give_back(&self, mut request: proto::ReserveRequest) {
        let Some(_room) = self.client.abandoned() else { return };
        request.wait = None;
        // A lock that is to be held does not just run out: it would be in doubt.
        let lock_ttl = granted(request.lock_ttl).unwrap_or(LOCK_TTL).min(LOCK_TTL_MAX);
        let patience =
            if request.on_expiry.is_some() { Patience::Endless } else { Patience::Until(Instant::now() + lock_ttl) };
        let manner = Manner { patience, ..self.client.prompt() };
        let token = request.token.clone();
        let outcome = self.client.ask(request, manner).await.ok().and_then(|answered| answered.answer.outcome);
        if let Some(Outcome::Acquired(_) | Outcome::InDoubt(_)) = outcome {
            let _ = self.was_ours(token, manner).await;
        }
    }
}

/// A name for one execution, which nobody else has.
fn fresh_token() -> String {
    Uuid::new_v4().simple().to_string()
}

/// A duration of the protocol; one beyond all bounds is the longest, which the service refuses.
fn duration(duration: Duration) -> Option<prost_types::Duration> {
    const LONGEST: prost_types::Duration = prost_types::Duration { seconds: i64::MAX, nanos: 0 };
    Some(duration.try_into().unwrap_or(LONGEST))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_reservation_takes_little_room() {
        let client = Client::builder(["http://127.0.0.1:1"]).lazy().unwrap();
        let (answer, _answered) = oneshot::channel();
        let task = own(client.reserve(Key::new("tests", "k")), answer);
        assert!(size_of_val(&task) < 2500, "{} bytes", size_of_val(&task));
    }
}
