//! [`Keeper`]: holds a reservation until its guard ends it.
//!
//! One task owns a reservation from its Reserve to its end: it renews the lock, saves checkpoints and sends the last word. So
//! what a guard has begun goes on whoever leaves, and the guard itself is no more than ends of channels, which may be
//! dropped anywhere.
//!
//! The lease is counted from the *sending* of the last call that was answered, by the lock that was granted, on the monotonic
//! clock: it ends here before it ends there.

use std::{future::pending, pin::Pin, time::Duration};

use bytes::Bytes;
use tokio::{
    sync::{mpsc, oneshot, watch},
    time::{Instant, sleep_until},
};
use tracing::warn;

use crate::{
    call::{Answered, Manner, Patience, Unanswered},
    client::Client,
    error::Error,
    lease::{Checkpoint, Hold},
    proto,
    result::{granted, time},
    settlement::{Ending, Settled, Settlement},
};

/// Holds one reservation.
pub(crate) struct Keeper {
    pub(crate) client: Client,
    pub(crate) key: proto::Key,
    pub(crate) token: String,
    pub(crate) lock_ttl: Duration,
    /// When the call was sent from which the lease counts.
    pub(crate) since: Instant,
    pub(crate) hold: watch::Sender<Hold>,
    pub(crate) checkpoints: mpsc::Receiver<Checkpoint>,
    pub(crate) ending: oneshot::Receiver<Ending>,
}

type RenewAnswer = Result<Answered<proto::RenewResponse>, Unanswered>;

/// A Renew under way.
struct Renewal {
    answer: Pin<Box<dyn Future<Output = RenewAnswer> + Send>>,
    saved: Option<oneshot::Sender<Result<(), Error>>>,
}

impl Keeper {
    /// Holds the reservation until its guard has an outcome, and sends that; or until the guard is gone, and lets the lock run
    /// out: the effect may have been.
    pub(crate) async fn run(mut self) {
        let Some(Ending { settlement, settled }) = self.held().await else {
            self.hold.send_replace(Hold::Lost);
            return;
        };
        // Nothing is saved any more, and nobody waits for it until the outcome is taken.
        self.checkpoints.close();
        while self.checkpoints.try_recv().is_ok() {}
        let outcome = Box::pin(self.settle(settlement)).await;
        self.hold.send_replace(match outcome {
            Ok(_) | Err(Error::AlreadyFinished | Error::NotKept(_)) => Hold::Settled,
            Err(_) => Hold::Lost,
        });
        let unheard = match settled {
            Some(settled) => settled.send(outcome).err(),
            None => Some(outcome),
        };
        if let Some(Err(error)) = unheard {
            warn!(key = ?self.key, %error, "the outcome of an operation was not taken, and nobody awaits it");
        }
    }

    async fn held(&mut self) -> Option<Ending> {
        let mut renewal: Option<Renewal> = None;
        let (mut sequence, mut failed_at) = (0, None);
        loop {
            let live = matches!(*self.hold.borrow(), Hold::Until(_));
            let idle = renewal.is_none();
            let planned = self.since + self.lock_ttl / 3;
            let renewed_at = failed_at.map_or(planned, |failed_at| planned.max(failed_at + self.lock_ttl / 12));
            tokio::select! {
                biased;
                ending = &mut self.ending => return ending.ok(),
                answer = answer(&mut renewal) => {
                    let renewal = renewal.take();
                    match (&answer, renewal.as_ref().is_some_and(|renewal| renewal.saved.is_some())) {
                        (Ok(_), _) => failed_at = None,
                        (Err(_), false) => failed_at = Some(Instant::now()),
                        // What is wrong with a checkpoint must not put off the renewal of the lock.
                        (Err(_), true) => {}
                    }
                    self.renewed(renewal, answer);
                }
                () = sleep_until(renewed_at), if live && idle => {
                    self.notice_lateness(renewed_at);
                    renewal = Some(self.renewal(None));
                }
                // One after the other: a Renew under way is not given up for the next, or a slow way would save nothing.
                Some(checkpoint) = self.checkpoints.recv(), if idle => {
                    sequence += 1;
                    renewal = Some(self.renewal(Some((checkpoint, sequence))));
                }
                () = sleep_until(self.since + self.lock_ttl), if live => {
                    warn!(key = ?self.key, "a lease is lost: it could not be renewed in time");
                    self.hold.send_replace(Hold::Lost);
                }
            }
        }
    }

    /// Renews once, before anybody is told of the lease.
    pub(crate) async fn renew(&mut self, patience: Patience) -> Result<(), Error> {
        let manner = Manner { patience, ..self.client.prompt() };
        let answered = self.client.ask(self.request(None, None), manner).await?;
        self.extend(&answered);
        Ok(())
    }

    fn renewal(&self, checkpoint: Option<(Checkpoint, i64)>) -> Renewal {
        let (request, saved) = match checkpoint {
            Some((checkpoint, sequence)) => {
                (self.request(Some(checkpoint.bytes), Some(sequence)), Some(checkpoint.saved))
            }
            None => (self.request(None, None), None),
        };
        let prompt = self.client.prompt();
        let manner = match *self.hold.borrow() {
            Hold::Until(end) if Instant::now() < end => Manner {
                patience: Patience::Until(end),
                // A try that hangs leaves time for others before the lock ends.
                attempt: prompt.attempt.min(self.lock_ttl / 4),
                stubborn: true,
                ..prompt
            },
            // It is too late for the lock, but a checkpoint may still be saved.
            Hold::Until(_) | Hold::Lost | Hold::Settled => prompt,
        };
        let client = self.client.clone();
        Renewal { answer: Box::pin(async move { client.ask(request, manner).await }), saved }
    }

    fn request(&self, checkpoint: Option<Bytes>, checkpoint_sequence: Option<i64>) -> proto::RenewRequest {
        proto::RenewRequest {
            key: Some(self.key.clone()),
            token: self.token.clone(),
            lock_ttl: None,
            checkpoint,
            checkpoint_sequence,
        }
    }

    fn extend(&mut self, answered: &Answered<proto::RenewResponse>) {
        self.since = answered.sent_at;
        self.lock_ttl = granted(answered.answer.lock_ttl).unwrap_or(self.lock_ttl);
        // Lost is lost: those who were told may have stopped.
        let end = self.since + self.lock_ttl;
        self.hold.send_if_modified(|hold| match hold {
            Hold::Until(until) => {
                *until = end;
                true
            }
            Hold::Lost | Hold::Settled => false,
        });
    }

    fn renewed(&mut self, renewal: Option<Renewal>, answer: RenewAnswer) {
        let saved = match answer {
            Ok(answered) => {
                self.extend(&answered);
                Ok(())
            }
            Err(Unanswered { error, .. }) => {
                match error {
                    Error::LeaseLost | Error::KeyNotFound => {
                        warn!(key = ?self.key, %error, "a lease is lost");
                        self.hold.send_replace(Hold::Lost);
                    }
                    Error::AlreadyFinished => drop(self.hold.send_replace(Hold::Settled)),
                    // It is tried again; the end of the lock tells when it is too late.
                    _ => {}
                }
                Err(error)
            }
        };
        if let Some(waiting) = renewal.and_then(|renewal| renewal.saved) {
            let _ = waiting.send(saved);
        }
    }

    /// Sends an outcome until it is answered. A result that the service would not take leaves a mark in its place, since nobody
    /// may act again; a checkpoint is left out.
    async fn settle(&self, mut settlement: Settlement) -> Result<Settled, Error> {
        let mut kept = settlement.make_fit();
        loop {
            match (self.send(&settlement).await, &kept) {
                (Err(Error::Invalid(_)), _) if settlement.forget_retention() => {}
                (Err(Error::Invalid(refused)), Ok(())) => {
                    settlement.leave_mark();
                    kept = Err(refused);
                }
                (Ok(_), Err(refused)) => return Err(Error::NotKept(refused.clone())),
                (outcome, _) => return outcome,
            }
        }
    }

    async fn send(&self, settlement: &Settlement) -> Result<Settled, Error> {
        let (key, token) = (Some(self.key.clone()), self.token.clone());
        let manner = self.client.endless();
        match settlement.clone() {
            Settlement::Complete(request) => {
                let request = proto::CompleteRequest { key, token, ..request };
                let answer = self.client.ask(request, manner).await?.answer;
                Ok(Settled { expires_at: time(answer.expires_at), already: answer.already_completed })
            }
            Settlement::Fail(request) => {
                let request = proto::FailRequest { key, token, ..request };
                let answer = self.client.ask(request, manner).await?.answer;
                Ok(Settled { expires_at: time(answer.expires_at), already: answer.already_failed })
            }
        }
    }

    /// A runtime whose threads are blocked renews nothing, and nobody would know why.
    fn notice_lateness(&self, planned: Instant) {
        let late = planned.elapsed();
        if late > self.lock_ttl / 3 {
            warn!(key = ?self.key, ?late, "a lease is renewed late: something blocks the runtime (see spawn_blocking)");
        }
    }
}

/// What a Renew under way is answered; for ever, if none is.
async fn answer(renewal: &mut Option<Renewal>) -> RenewAnswer {
    match renewal {
        Some(renewal) => renewal.answer.as_mut().await,
        None => pending().await,
    }
}
