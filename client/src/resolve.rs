//! [`Resolution`]: how an operation ended whose holder cannot say so.

use crate::{
    client::Client,
    error::Error,
    key::Key,
    proto::{self, resolve_request},
    result::StoredResult,
};

/// How an operation ended whose holder cannot say so: for operators, and for jobs that ask the provider what became of it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Resolution {
    /// It took effect, with this result.
    Complete(StoredResult),
    /// It failed for good, with this result.
    Fail(StoredResult),
    /// It took no effect: the next caller acts.
    Retry,
}

impl Client {
    /// Finishes a reservation in place of its holder: the one of this fence, as [`lookup`](Self::lookup) or a doubt showed it.
    ///
    /// While its lock is live it is refused, unless `force` asserts that the holder is dead: from then on only the fence
    /// protects. A key whose effects are in a ledger is resolved by the ledger, which knows what has happened.
    ///
    /// # Errors
    ///
    /// [`Error::LockLive`], [`Error::FenceMismatch`], [`Error::AlreadyFinished`] or [`Error::KeyNotFound`] say what is in the way.
    ///
    /// # Cancel safety
    ///
    /// Dropped, it may have been done; it may be asked again.
    pub async fn resolve(&self, key: Key, fence: i64, resolution: Resolution, force: bool) -> Result<(), Error> {
        let complete = |result: StoredResult| proto::ResolveComplete { result: Some(result.into()) };
        let fail =
            |retryable, result: Option<StoredResult>| proto::ResolveFail { retryable, result: result.map(Into::into) };
        let resolution = match resolution {
            Resolution::Complete(result) => resolve_request::Resolution::Complete(complete(result)),
            Resolution::Fail(result) => resolve_request::Resolution::Fail(fail(false, Some(result))),
            Resolution::Retry => resolve_request::Resolution::Fail(fail(true, None)),
        };
        let request = proto::ResolveRequest {
            key: Some(key.into()),
            fence,
            resolution: Some(resolution),
            force: force.then_some(true),
        };
        self.ask(request, self.prompt()).await?;
        Ok(())
    }
}
