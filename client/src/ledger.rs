//! [`Ledger`]: effects in the caller's own Postgres, exactly once.
//!
//! A reservation alone cannot promise that: a process may stop after its effect and before it says so, and after the lock
//! somebody else acts again. Here a receipt is committed *with* the effect, in one transaction, and whoever comes later
//! finds it. The receipt is inserted first, so that a rival that acts at the same time waits, and then finds it too. So
//! there is one effect for a key with expired locks, with crashes at any point, and with several holders at once.
//!
//! ```no_run
//! use onceward_client::{Client, Key, ledger::{Entry, Ledger}};
//! use sqlx::PgPool;
//!
//! # async fn example(client: Client, pool: PgPool) -> Result<(), Box<dyn std::error::Error>> {
//! let ledger = Ledger::new(client.clone(), pool);
//! ledger.migrate().await?;
//!
//! match ledger.open(client.reserve(Key::new("orders.place", "request-17"))).await? {
//!     Entry::Open(mut effect) => {
//!         sqlx::query("INSERT INTO orders (id, cents) VALUES (17, 100)").execute(effect.connection()?).await?;
//!         effect.commit("placed as 17").await?;
//!     }
//!     Entry::Completed(result) => println!("placed before: {:?}", result.body),
//!     Entry::Failed(result) => println!("refused before: {:?}", result.body),
//!     Entry::InProgress(held) => println!("somebody is at it, come back in {:?}", held.retry_after),
//!     Entry::InDoubt(doubt) => println!("ask an operator about fence {}", doubt.fence),
//!     _ => {}
//! }
//! # Ok(())
//! # }
//! ```
//!
//! Every final outcome of a key in ledger mode is a receipt before the service hears of it. An operator's Resolve knows no
//! ledger: resolve such keys by [`Ledger::resolve`]. The transaction is the effect's: no COMMIT, ROLLBACK or nested `begin`
//! belongs among its statements.

mod aged;
mod effect;
mod receipt;

use std::time::{Duration, SystemTime};

use sqlx::{PgPool, Row};
use tokio::time::timeout;
use tracing::warn;

pub use self::effect::Effect;
use self::{
    aged::Aged,
    effect::fitting,
    receipt::{Inserted, Outcome, Receipt},
};
use crate::{
    client::Client,
    error::Error,
    guard::Guard,
    key::Key,
    proto::RecordStatus,
    reservation::{InDoubt, InProgress, Reservation},
    reserve::Reserve,
    resolve::Resolution,
    result::{StoredResult, time},
    settlement::Settled,
};

/// The statements that make the table of receipts, for migration tools of your own. They may be run again.
pub const MIGRATION: &str = include_str!("ledger/migration.sql");
/// When to come back where a rival's transaction does not end.
const RIVAL_RETRY_AFTER: Duration = Duration::from_secs(1);
/// How long an effect that is committed waits until the service knows; it goes on being told.
const COMPLETE_TIMEOUT: Duration = Duration::from_secs(10);

/// Effects in a Postgres, exactly once for each key.
#[derive(Clone, Debug)]
pub struct Ledger {
    client: Client,
    pool: PgPool,
}

/// What is known of a key.
#[derive(Debug)]
#[non_exhaustive]
pub enum Entry {
    /// It is yours: act on [`Effect::connection`], then commit.
    Open(Effect),
    /// The effect was committed before, with this result.
    Completed(StoredResult),
    /// The operation has failed for good.
    Failed(StoredResult),
    /// Somebody else is at it.
    InProgress(InProgress),
    /// Somebody was at it under a lock that is to be held, and has left no receipt.
    InDoubt(InDoubt),
}

/// Why there is no entry, or no effect.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LedgerError {
    /// The service did not do its part, or would not take the result. Nothing has happened; but by a resolution, a receipt may
    /// be there: ask again.
    #[error(transparent)]
    Service(#[from] Error),
    /// The database refused. Nothing has happened, and the key of an effect is free again.
    #[error("the database refused: {0}")]
    Database(#[from] sqlx::Error),
    /// The connection broke while the effect was being committed. The next attempt finds out whether it was.
    #[error("nobody knows whether the effect was committed: {0}")]
    CommitUnknown(sqlx::Error),
    /// The transaction was ended underneath the effect: by a COMMIT or ROLLBACK among its statements, or by a nested `begin` that
    /// was given up or refused, with which sqlx rolls everything back. What was executed after that is not part of the effect.
    #[error("the transaction was ended underneath the effect")]
    TransactionEnded,
}

impl Ledger {
    /// Effects in the database of this pool.
    pub fn new(client: Client, pool: PgPool) -> Self {
        Self { client, pool }
    }

    /// The client, to reserve with.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// Makes the table of receipts, if there is none. Several may do so at once.
    ///
    /// # Errors
    ///
    /// The database refused.
    ///
    /// # Cancel safety
    ///
    /// Dropped, it goes on.
    pub async fn migrate(&self) -> Result<(), sqlx::Error> {
        let pool = self.pool.clone();
        self.owned(async move {
            // To make what is there would wait for every effect that is open, and keep all others waiting behind it.
            if sqlx::query(include_str!("ledger/made.sql")).fetch_one(&pool).await?.try_get("made")? {
                return Ok(());
            }
            let mut transaction = pool.begin().await?;
            // Two who make one table at once would get in each other's way.
            let alone =
                "SELECT pg_advisory_xact_lock(hashtext('onceward_receipt')), set_config('lock_timeout', '5s', true)";
            sqlx::query(alone).execute(&mut *transaction).await?;
            sqlx::raw_sql(MIGRATION).execute(&mut *transaction).await?;
            transaction.commit().await
        })
        .await
    }

    /// Reserves a key and opens a transaction for its effect; or says what is known of it.
    ///
    /// A rival's transaction for the same key is waited for 5 seconds; then the key is in progress.
    ///
    /// # Errors
    ///
    /// The service or the database did not do its part; nothing has happened.
    ///
    /// # Cancel safety
    ///
    /// Dropped, nothing has happened, and the key is given back.
    pub async fn open(&self, reserve: Reserve) -> Result<Entry, LedgerError> {
        let (key, fingerprint) = (reserve.key().clone(), reserve.fingerprint_text());
        match reserve.await {
            Ok(Reservation::Acquired(guard)) => self.begin(guard, key, fingerprint).await,
            Ok(Reservation::Completed(finished)) => Ok(Entry::Completed(finished.result)),
            Ok(Reservation::Failed(finished)) => Ok(Entry::Failed(finished.result)),
            // Its holder may have committed the effect and not come to say so.
            Ok(Reservation::InProgress(held)) => match self.answer(&key, fingerprint.as_deref()).await? {
                Some(receipt) => Ok(receipt.entry()),
                None => Ok(Entry::InProgress(held)),
            },
            Ok(Reservation::InDoubt(doubt)) => self.settle_doubt(key, fingerprint, doubt).await,
            // Another request may have had the key since the record of ours expired. The receipt knows whose it is.
            Err(Error::FingerprintMismatch) => {
                let receipt = Receipt::find(&self.pool, &key).await?;
                let ours = receipt.filter(|receipt| receipt.fingerprint == fingerprint);
                ours.map(Receipt::entry).ok_or(Error::FingerprintMismatch.into())
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Finishes a reservation in place of its holder, in agreement with the ledger: where there is a receipt, it says how the
    /// operation ended, whatever `resolution` says. Gives the outcome that counts; nothing, if the next caller is to act.
    ///
    /// # Errors
    ///
    /// As [`Client::resolve`], and what the database refused.
    ///
    /// # Cancel safety
    ///
    /// Dropped, it goes on.
    pub async fn resolve(
        &self,
        key: Key,
        fence: i64,
        resolution: Resolution,
        force: bool,
    ) -> Result<Option<Resolution>, LedgerError> {
        let (client, pool) = (self.client.clone(), self.pool.clone());
        let (resolution, new) = match resolution {
            Resolution::Complete(result) => {
                let result = fitting(result)?;
                (Resolution::Complete(result.clone()), Some(Receipt::new(Outcome::Completed, result)))
            }
            Resolution::Fail(result) => {
                let result = fitting(result)?;
                (Resolution::Fail(result.clone()), Some(Receipt::new(Outcome::Failed, result)))
            }
            Resolution::Retry => (Resolution::Retry, None),
        };
        self.owned(async move {
            // A resolution that would be refused must not become a receipt, and must not wait for a holder that lives.
            let fingerprint = may_be_resolved(&client, &key, fence, force, None).await?;
            // Also where nothing is to be kept: a rival's transaction may be open, and is waited for.
            let inserted = new.clone().unwrap_or_else(|| Receipt::new(Outcome::Failed, StoredResult::default()));
            let inserted = Receipt { fingerprint, ..inserted };
            let counts = match inserted.insert(&pool, &key, fence).await? {
                Inserted::Ours(transaction) => {
                    // Once more, since something may have happened while it was waited.
                    may_be_resolved(&client, &key, fence, force, Some(&resolution)).await?;
                    if new.is_some() {
                        transaction.commit().await.map_err(LedgerError::CommitUnknown)?;
                    } else {
                        transaction.rollback().await?;
                    }
                    resolution
                }
                Inserted::Theirs(receipt) if receipt.may_answer(inserted.fingerprint.as_deref()) => {
                    receipt.resolution()
                }
                // It is of an earlier request with this key: that of the record has left nothing.
                Inserted::Theirs(_) if new.is_none() => resolution,
                Inserted::Theirs(_) => return Err(Error::FingerprintMismatch.into()),
                Inserted::Rival => return Err(Error::LockLive.into()),
            };
            client.resolve(key, fence, counts.clone(), force).await?;
            Ok(Some(counts).filter(|counts| *counts != Resolution::Retry))
        })
        .await
    }

    /// Deletes receipts that no retry can ask for any more: those that are older than twice the longest retention that any of
    /// your keys has, and whose keys are not unfinished in the service. Gives their number.
    ///
    /// # Errors
    ///
    /// The database or the service did not do its part; some may be deleted.
    ///
    /// # Cancel safety
    ///
    /// Dropped, it ends after the batch that it is at.
    pub async fn purge(&self, longest_retention: Duration) -> Result<u64, LedgerError> {
        let age = longest_retention.as_secs_f64() * 2.0;
        let (mut deleted, mut last) = (0, Aged::first());
        loop {
            let pool = self.pool.clone();
            let batch: Vec<Aged> = self.owned(async move { Aged::after(&pool, age, &last).await }).await?;
            let Some(end) = batch.last().cloned() else { return Ok(deleted) };
            last = end;
            // Together, so that they go as Batches.
            let looked = batch.into_iter().map(|aged| {
                let client = self.client.clone();
                self.client.spawn_here(async move {
                    let record = match client.lookup(aged.key.clone()).await {
                        // It is another service's, which purges its own.
                        Err(Error::Denied(_)) => return Ok(None),
                        looked => looked?,
                    };
                    let unfinished = record.is_some_and(|record| {
                        matches!(record.status(), RecordStatus::InProgress | RecordStatus::InDoubt)
                    });
                    Ok::<_, Error>(Some(aged).filter(|_| !unfinished))
                })
            });
            let mut over = Vec::new();
            for looked in looked.collect::<Vec<_>>() {
                over.extend(looked.await.unwrap_or(Err(Error::Closed))?);
            }
            let pool = self.pool.clone();
            deleted += self.owned(async move { Aged::delete(&pool, &over).await }).await?;
        }
    }

    /// Inserts the receipt, or completes the key by the one that there is.
    async fn begin(&self, guard: Guard, key: Key, fingerprint: Option<String>) -> Result<Entry, LedgerError> {
        // Until it is committed nothing has happened, whoever drops it.
        let guard = guard.release_on_drop();
        let receipt =
            Receipt { fingerprint: fingerprint.clone(), ..Receipt::new(Outcome::Completed, StoredResult::default()) };
        let (pool, of, fence) = (self.pool.clone(), key.clone(), guard.fence());
        match self.owned(async move { receipt.insert(&pool, &of, fence).await }).await? {
            Inserted::Ours(transaction) => Ok(Entry::Open(Effect {
                ledger: self.clone(),
                transaction: Some(transaction),
                lease: guard.lease(),
                guard: Some(guard),
                key,
                fingerprint,
            })),
            Inserted::Theirs(receipt) => {
                if !receipt.may_answer(fingerprint.as_deref()) {
                    // It is given back whether it is awaited or not.
                    drop(guard);
                    return Err(Error::FingerprintMismatch.into());
                }
                self.tell(guard, &receipt).await;
                Ok(receipt.entry())
            }
            Inserted::Rival => Ok(Entry::InProgress(InProgress {
                retry_after: RIVAL_RETRY_AFTER,
                locked_until: SystemTime::now() + RIVAL_RETRY_AFTER,
                owner: None,
                attempt: guard.attempt(),
            })),
        }
    }

    /// The receipt of a key, if it answers a request of this fingerprint.
    async fn answer(&self, key: &Key, fingerprint: Option<&str>) -> Result<Option<Receipt>, LedgerError> {
        let receipt = Receipt::find(&self.pool, key).await?;
        Ok(receipt.filter(|receipt| receipt.may_answer(fingerprint)))
    }

    /// A doubt is none where there is a receipt.
    async fn settle_doubt(&self, key: Key, fingerprint: Option<String>, doubt: InDoubt) -> Result<Entry, LedgerError> {
        let Some(receipt) = Receipt::find(&self.pool, &key).await? else { return Ok(Entry::InDoubt(doubt)) };
        if !receipt.may_answer(fingerprint.as_deref()) {
            // It is of an earlier request with this key; that of the doubt has left nothing.
            return Ok(Entry::InDoubt(doubt));
        }
        if let Err(error) = self.client.resolve(key, doubt.fence, receipt.resolution(), false).await {
            warn!(%error, "the service was not told what the ledger says");
        }
        Ok(receipt.entry())
    }

    /// Tells the service what the ledger says. If it does not listen, the next attempt tells it.
    async fn tell(&self, guard: Guard, receipt: &Receipt) {
        let told = match receipt.outcome {
            Outcome::Completed => timeout(COMPLETE_TIMEOUT, guard.complete(receipt.result.clone())).await,
            Outcome::Failed => timeout(COMPLETE_TIMEOUT, guard.fail(receipt.result.clone())).await,
        };
        match told {
            // Whoever took over finds the receipt as we did.
            Ok(Ok(Settled { .. }) | Err(Error::LeaseLost)) => {}
            Ok(Err(error)) => warn!(%error, "the service was not told what the ledger says"),
            Err(_) => warn!("the service is told later what the ledger says"),
        }
    }

    /// Runs database work in a task of its own: a future that is dropped in the middle of a BEGIN leaves its connection in a
    /// transaction (sqlx 0.8.4 to 0.9.0).
    async fn owned<T: Send + 'static, E: From<sqlx::Error> + Send + 'static>(
        &self,
        work: impl Future<Output = Result<T, E>> + Send + 'static,
    ) -> Result<T, E> {
        self.client.spawn_here(work).await.unwrap_or_else(|_| Err(sqlx::Error::WorkerCrashed.into()))
    }
}

/// Whether a reservation may be finished in place of its holder, and in this way, as far as can be seen; gives the record's
/// fingerprint.
async fn may_be_resolved(
    client: &Client,
    key: &Key,
    fence: i64,
    force: bool,
    resolution: Option<&Resolution>,
) -> Result<Option<String>, Error> {
    let record = client.lookup(key.clone()).await?.ok_or(Error::KeyNotFound)?;
    if record.fence != fence {
        return Err(Error::FenceMismatch);
    }
    let live = record.status() == RecordStatus::InProgress && time(record.locked_until) > SystemTime::now();
    if live && !force {
        return Err(Error::LockLive);
    }
    let finished = matches!(record.status(), RecordStatus::Completed | RecordStatus::Failed);
    let in_this_way = |resolution: &Resolution| {
        record.resolved
            && match resolution {
                Resolution::Complete(_) => record.status() == RecordStatus::Completed,
                Resolution::Fail(_) => record.status() == RecordStatus::Failed && !record.retryable,
                Resolution::Retry => record.status() == RecordStatus::Failed && record.retryable,
            }
    };
    if finished && resolution.is_some_and(|resolution| !in_this_way(resolution)) {
        return Err(Error::AlreadyFinished);
    }
    Ok(record.fingerprint)
}
