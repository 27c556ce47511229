//! [`Effect`]: a transaction in which the receipt is already.

use sqlx::{PgConnection, Postgres, Transaction};
use tokio::time::timeout;

use super::{
    COMPLETE_TIMEOUT, Ledger, LedgerError,
    receipt::{Inserted, Outcome, Receipt},
};
use crate::{error::Error, guard::Guard, key::Key, lease::Lease, resolve::Resolution, result::StoredResult};

/// An effect that is open: a transaction in which the receipt is already.
///
/// Dropped, the transaction is rolled back and the key is given back: nothing has happened.
#[derive(Debug)]
#[must_use = "an effect that is dropped is rolled back"]
pub struct Effect {
    pub(super) ledger: Ledger,
    pub(super) transaction: Transaction<'static, Postgres>,
    pub(super) guard: Guard,
    pub(super) key: Key,
    pub(super) fingerprint: Option<String>,
}

impl Effect {
    /// The connection to act on, inside the transaction. Leave beginning and ending it to the effect.
    pub fn connection(&mut self) -> &mut PgConnection {
        &mut self.transaction
    }

    /// The lease. That it is lost endangers nothing here: whoever takes over waits for this transaction.
    pub fn lease(&self) -> Lease {
        self.guard.lease()
    }

    /// Commits the effect with its receipt, and tells the service.
    ///
    /// # Errors
    ///
    /// [`LedgerError::Database`] if nothing was committed; [`LedgerError::CommitUnknown`] if nobody knows, and the next attempt
    /// finds out. Once it is committed it is a success, whether the service has heard of it or not.
    ///
    /// # Cancel safety
    ///
    /// Dropped, it goes on.
    pub async fn commit(self, result: impl Into<StoredResult>) -> Result<(), LedgerError> {
        let Self { ledger, mut transaction, guard, key, .. } = self;
        let receipt = Receipt::new(Outcome::Completed, fitting(result.into())?);
        let owner = ledger.clone();
        owner
            .owned(async move {
                receipt.settle(&mut transaction, &key).await?;
                // From here on nobody may think that nothing has happened.
                let guard = guard.seen();
                match transaction.commit().await {
                    Ok(()) => {}
                    Err(error) if is_rolled_back(&error) => {
                        let _ = timeout(COMPLETE_TIMEOUT, guard.release()).await;
                        return Err(LedgerError::Database(error));
                    }
                    Err(error) => return Err(LedgerError::CommitUnknown(error)),
                }
                ledger.tell(guard, &receipt).await;
                Ok(())
            })
            .await
    }

    /// Rolls the effect back and fails the key for good: duplicates get this result. Gives the outcome that counts, which is
    /// another one if somebody else has finished meanwhile.
    ///
    /// # Errors
    ///
    /// As [`commit`](Self::commit).
    ///
    /// # Cancel safety
    ///
    /// Dropped, it goes on.
    pub async fn fail(self, result: impl Into<StoredResult>) -> Result<Resolution, LedgerError> {
        let Self { ledger, transaction, guard, key, fingerprint } = self;
        let receipt = Receipt { fingerprint, ..Receipt::new(Outcome::Failed, fitting(result.into())?) };
        let owner = ledger.clone();
        owner
            .owned(async move {
                transaction.rollback().await?;
                let guard = match receipt.insert(&ledger.pool, &key, guard.fence()).await? {
                    Inserted::Ours(transaction) => {
                        let guard = guard.seen();
                        transaction.commit().await.map_err(LedgerError::CommitUnknown)?;
                        guard
                    }
                    Inserted::Theirs(theirs) => {
                        ledger.tell(guard, &theirs).await;
                        return Ok(theirs.resolution());
                    }
                };
                ledger.tell(guard, &receipt).await;
                Ok(receipt.resolution())
            })
            .await
    }

    /// Rolls the effect back and gives the key back: nothing has happened, and the next caller acts.
    ///
    /// # Errors
    ///
    /// [`LedgerError::Database`] if the connection broke, which rolls back too.
    ///
    /// # Cancel safety
    ///
    /// Dropped, it goes on.
    pub async fn release(self) -> Result<(), LedgerError> {
        let Self { ledger, transaction, guard, .. } = self;
        ledger
            .owned(async move {
                let rolled_back = transaction.rollback().await;
                let _ = timeout(COMPLETE_TIMEOUT, guard.release()).await;
                rolled_back.map_err(LedgerError::Database)
            })
            .await
    }
}

/// A result that the service takes too.
fn fitting(result: StoredResult) -> Result<StoredResult, Error> {
    Some(result)
        .filter(StoredResult::fits)
        .ok_or_else(|| Error::Invalid("the result is larger than the service takes".into()))
}

/// Whether a COMMIT was refused for certain: by a constraint that is checked last, or for the sake of another transaction.
fn is_rolled_back(error: &sqlx::Error) -> bool {
    let code = error.as_database_error().and_then(|error| error.code());
    code.is_some_and(|code| code.starts_with("23") || (code.starts_with("40") && code != "40003"))
}
