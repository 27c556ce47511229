//! [`Caller`]: one call until it is answered.
//!
//! Whatever passes is asked again with the same token, after a pause that grows and is drawn by lot; so a lost answer is
//! never taken for an outcome.

use std::{sync::Arc, time::Duration};

use backon::{BackoffBuilder, ExponentialBuilder};
use tokio::time::{Instant, sleep, timeout};
use tonic::Status;

use crate::{
    coalescer::Coalescer,
    error::{Again, Error, Verdict, verdict},
    offline,
    proto::{batch_operation::Operation, batch_result::Result as Answer},
    question::Question,
    servers::{Lane, Servers},
};

/// The pause before the first repetition.
const PAUSE_MIN: Duration = Duration::from_millis(20);
/// The longest pause, if the service asks for no longer one.
const PAUSE_MAX: Duration = Duration::from_secs(2);

/// For how long to ask.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Patience {
    /// Until an answer.
    Endless,
    /// Until then; `attempt` bounds each try.
    Until(Instant),
}

/// How to ask.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Manner {
    pub(crate) patience: Patience,
    /// How long each try may take.
    pub(crate) attempt: Duration,
    /// Which way it goes.
    pub(crate) lane: Lane,
    /// Whether to go on where something on the way refuses, whatever it says: the effect has been, or a lock runs out.
    pub(crate) stubborn: bool,
}

/// An answer.
#[derive(Debug)]
pub(crate) struct Answered<A> {
    pub(crate) answer: A,
    /// When the call that was answered was sent.
    pub(crate) sent_at: Instant,
    /// Whether an earlier try may have been done although nobody answered it.
    pub(crate) repeated: bool,
}

/// Why there is no answer.
#[derive(Debug)]
pub(crate) struct Unanswered {
    pub(crate) error: Error,
    /// Whether it may have been done.
    pub(crate) maybe_done: bool,
}

impl From<Unanswered> for Error {
    fn from(unanswered: Unanswered) -> Self {
        unanswered.error
    }
}

/// Asks the service.
pub(crate) struct Caller {
    /// None asks nobody: everything is granted.
    pub(crate) way: Option<Way>,
}

/// How calls reach the service.
pub(crate) struct Way {
    pub(crate) servers: Arc<Servers>,
    /// None if each call is to go by itself.
    pub(crate) coalescer: Option<Coalescer>,
    /// How long a try by way of the coalescer may take.
    pub(crate) attempt: Duration,
}

impl Caller {
    /// Asks until there is an answer or the patience is over.
    ///
    /// # Errors
    ///
    /// What the service decided; [`Error::Unavailable`] when the patience is over; [`Error::Closed`].
    ///
    /// # Cancel safety
    ///
    /// Dropped, the question is not repeated, and it may have been done.
    pub(crate) async fn ask<Q: Question>(
        &self,
        question: Q,
        manner: Manner,
    ) -> Result<Answered<Q::Answer>, Unanswered> {
        let (mut repeated, mut alone) = (false, false);
        let unanswered = |error, maybe_done| Unanswered { error, maybe_done };
        let Some(way) = &self.way else {
            let answer = offline::answer(question).map_err(|error| unanswered(error, false))?;
            return Ok(Answered { answer, sent_at: Instant::now(), repeated });
        };
        let mut pauses = ExponentialBuilder::default()
            .with_min_delay(PAUSE_MIN)
            .with_max_delay(PAUSE_MAX)
            .with_jitter()
            .without_max_times()
            .build();
        loop {
            let sent_at = Instant::now();
            let attempt = match manner.patience {
                Patience::Endless => manner.attempt,
                Patience::Until(end) => manner.attempt.min(end.saturating_duration_since(sent_at)),
            };
            let operation = Box::new(question.clone().operation());
            let answer = way.call(operation, manner.lane, attempt, alone).await;
            let status = match answer.ok_or(unanswered(Error::Closed, true))? {
                Ok(answer) => {
                    let other = || unanswered(other("the answer is of another call"), true);
                    return Ok(Answered { answer: Q::answer(answer).ok_or_else(other)?, sent_at, repeated });
                }
                Err(status) => status,
            };
            let again = match verdict(&status, manner.stubborn) {
                Verdict::Final(error) => return Err(unanswered(error, repeated)),
                Verdict::Again(again) => again,
            };
            repeated |= again.maybe_done;
            alone |= again.alone;
            let pause = pause(&again, pauses.next());
            if let Patience::Until(end) = manner.patience
                && Instant::now() + pause >= end
            {
                return Err(unanswered(Error::Unavailable(status.message().to_owned()), repeated));
            }
            sleep(pause).await;
        }
    }
}

impl Way {
    async fn call(
        &self,
        operation: Box<Operation>,
        lane: Lane,
        attempt: Duration,
        alone: bool,
    ) -> Option<Result<Answer, Status>> {
        match &self.coalescer {
            // A try that has less time than a Batch may take must not hang on one.
            Some(coalescer) if lane == Lane::Prompt && !alone && attempt >= self.attempt => {
                let answer = timeout(attempt, coalescer.call(operation)).await;
                answer.unwrap_or_else(|_| Some(Err(Status::deadline_exceeded("no answer in time"))))
            }
            // The way of each verb is large, and few calls go it: most tasks that hold a reservation never need the room.
            _ => Some(Box::pin(self.servers.call(lane, *operation, attempt)).await),
        }
    }
}

/// What the service asks for, and some more so that not everybody comes back at once.
fn pause(again: &Again, backoff: Option<Duration>) -> Duration {
    match again.after {
        Some(Duration::ZERO) => Duration::ZERO,
        after => after.unwrap_or_default() + backoff.unwrap_or(PAUSE_MAX),
    }
}

fn other(message: &'static str) -> Error {
    Error::Other(Box::new(Status::internal(message)))
}
