//! Answers without a service, for local work: every key is fresh, nothing is kept.

use std::time::{Duration, SystemTime};

use crate::{
    error::Error,
    proto::{
        Acquired, CompleteResponse, FailResponse, RenewResponse, ReserveResponse, batch_operation::Operation,
        batch_result::Result as Answer, reserve_response::Outcome,
    },
    question::Question,
};

/// The lock of a reservation that asks for none.
const LOCK_TTL: Duration = Duration::from_secs(30);

/// Grants what is asked.
pub(crate) fn answer<Q: Question>(question: Q) -> Result<Q::Answer, Error> {
    let now = SystemTime::now();
    let lock_ttl = prost_types::Duration::try_from(LOCK_TTL).ok();
    let answer = match question.operation() {
        Operation::Reserve(request) => Answer::Reserve(ReserveResponse {
            outcome: Some(Outcome::Acquired(Acquired {
                fence: now.duration_since(SystemTime::UNIX_EPOCH).map_or(1, |age| age.as_micros() as i64),
                attempt: 1,
                lock_ttl: request.lock_ttl.or(lock_ttl),
                locked_until: None,
                checkpoint: None,
            })),
        }),
        Operation::Renew(request) => {
            Answer::Renew(RenewResponse { lock_ttl: request.lock_ttl.or(lock_ttl), locked_until: None })
        }
        Operation::Complete(_) => {
            Answer::Complete(CompleteResponse { expires_at: Some(now.into()), already_completed: false })
        }
        Operation::Fail(_) => Answer::Fail(FailResponse { expires_at: Some(now.into()), already_failed: false }),
        Operation::Lookup(_) | Operation::Resolve(_) => return Err(Error::KeyNotFound),
    };
    Q::answer(answer).ok_or(Error::KeyNotFound)
}
