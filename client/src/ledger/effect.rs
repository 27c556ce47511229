//! [`Effect`]: a transaction in which the receipt is already.

use sqlx::{
    Connection, PgConnection, Postgres, Transaction,
    postgres::{PgDatabaseError, PgSeverity},
};
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
    /// There until the effect ends.
    pub(super) transaction: Option<Transaction<'static, Postgres>>,
    /// There until the effect ends.
    pub(super) guard: Option<Guard>,
    pub(super) lease: Lease,
    pub(super) key: Key,
    pub(super) fingerprint: Option<String>,
}

impl Effect {
    /// The connection to act on, inside the transaction. Leave beginning and ending it to the effect, nested ones too: sqlx rolls
    /// the whole transaction back where a nested `begin` is given up or refused. Take it anew for each statement.
    ///
    /// # Errors
    ///
    /// [`LedgerError::TransactionEnded`] if that has happened: what is executed now would be no part of the effect.
    pub fn connection(&mut self) -> Result<&mut PgConnection, LedgerError> {
        match &mut self.transaction {
            Some(transaction) if transaction.is_in_transaction() => Ok(transaction),
            _ => Err(LedgerError::TransactionEnded),
        }
    }

    /// The lease. That it is lost endangers nothing here: whoever takes over waits for this transaction.
    pub fn lease(&self) -> &Lease {
        &self.lease
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
        let receipt = Receipt::new(Outcome::Completed, fitting(result.into())?);
        let (ledger, mut transaction, guard, key) = self.into_parts()?;
        let client = ledger.client.clone();
        let committing = async move {
            let fence = guard.fence();
            if !receipt.settle(&mut transaction, &key, fence).await? {
                // What was executed since may be there for good: nobody is to act before the lock runs out.
                drop(guard.seen());
                return Err(LedgerError::TransactionEnded);
            }
            // From here on nobody may think that nothing has happened.
            let guard = guard.seen();
            match transaction.commit().await {
                Ok(()) => {}
                Err(error) if is_rolled_back(&error) => {
                    // It is given back whether it is awaited or not.
                    drop(guard.release_on_drop());
                    return Err(LedgerError::Database(error));
                }
                Err(error) => return Err(LedgerError::CommitUnknown(error)),
            }
            ledger.tell(guard, &receipt).await;
            Ok(())
        };
        client.spawn_here(committing).await.unwrap_or_else(|_| Err(ended_early()))
    }

    /// Rolls the effect back and fails the key for good: duplicates get this result. Gives the outcome that counts, which is
    /// another one if somebody else has finished meanwhile.
    ///
    /// # Errors
    ///
    /// As [`commit`](Self::commit); [`Error::LeaseLost`] if somebody else is at it by now, who decides.
    ///
    /// # Cancel safety
    ///
    /// Dropped, it goes on.
    pub async fn fail(self, result: impl Into<StoredResult>) -> Result<Resolution, LedgerError> {
        let fingerprint = self.fingerprint.clone();
        let receipt = Receipt { fingerprint, ..Receipt::new(Outcome::Failed, fitting(result.into())?) };
        let (ledger, transaction, guard, key) = self.into_parts()?;
        let client = ledger.client.clone();
        let failing = async move {
            transaction.rollback().await?;
            match receipt.insert(&ledger.pool, &key, guard.fence()).await? {
                Inserted::Ours(transaction) => {
                    // The effect is rolled back: whatever comes of this COMMIT, the next attempt may look.
                    transaction.commit().await.map_err(LedgerError::CommitUnknown)?;
                    ledger.tell(guard, &receipt).await;
                    Ok(receipt.resolution())
                }
                Inserted::Theirs(theirs) => {
                    ledger.tell(guard, &theirs).await;
                    Ok(theirs.resolution())
                }
                // Who took over while it was rolled back decides.
                Inserted::Rival => Err(Error::LeaseLost.into()),
            }
        };
        client.spawn_here(failing).await.unwrap_or_else(|_| Err(ended_early()))
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
        let (ledger, transaction, guard, _) = self.into_parts()?;
        let releasing = async move {
            let rolled_back = transaction.rollback().await;
            let _ = timeout(COMPLETE_TIMEOUT, guard.release()).await;
            rolled_back.map_err(LedgerError::Database)
        };
        ledger.client.spawn_here(releasing).await.unwrap_or_else(|_| Err(ended_early()))
    }

    /// What it consists of, without dropping it.
    fn into_parts(mut self) -> Result<(Ledger, Transaction<'static, Postgres>, Guard, Key), LedgerError> {
        match (self.transaction.take(), self.guard.take()) {
            (Some(transaction), Some(guard)) => Ok((self.ledger.clone(), transaction, guard, self.key.clone())),
            _ => Err(LedgerError::TransactionEnded),
        }
    }
}

impl Drop for Effect {
    fn drop(&mut self) {
        // The connection goes back to its pool by a task, wherever it is dropped.
        let _inside = self.ledger.client.runtime().enter();
        drop(self.transaction.take());
    }
}

/// A task that was ended, by a panic or along with its runtime, says nothing of what it has done.
fn ended_early() -> LedgerError {
    LedgerError::CommitUnknown(sqlx::Error::WorkerCrashed)
}

/// A result that the service takes too.
pub(super) fn fitting(result: StoredResult) -> Result<StoredResult, Error> {
    Some(result)
        .filter(StoredResult::fits)
        .ok_or_else(|| Error::Invalid("the result is larger than the service takes".into()))
}

/// Whether a COMMIT was refused for certain: the server has said so, and goes on serving the session.
fn is_rolled_back(error: &sqlx::Error) -> bool {
    let Some(error) = error.as_database_error().and_then(|error| error.try_downcast_ref::<PgDatabaseError>()) else {
        return false;
    };
    let unknown = error.code().starts_with("08") || error.code() == "40003";
    matches!(error.severity(), PgSeverity::Error) && !unknown
}
