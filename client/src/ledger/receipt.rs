//! [`Receipt`]: what was committed with an effect.

use std::time::Duration;

use sqlx::{Connection, PgConnection, PgPool, Postgres, Row, Transaction, error::ErrorKind};

use super::Entry;
use crate::{key::Key, resolve::Resolution, result::StoredResult};

/// How often a receipt that was purged in the very moment is looked for.
const ROUNDS: usize = 3;

/// For how long a rival's transaction is waited for.
const RIVAL_PATIENCE: Duration = Duration::from_secs(5);
/// What a statement ends with that has waited for its whole `lock_timeout`.
const LOCK_NOT_AVAILABLE: &str = "55P03";

/// How an operation ended for good.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    Completed,
    Failed,
}

impl Outcome {
    fn code(self) -> i16 {
        match self {
            Self::Completed => 1,
            Self::Failed => 2,
        }
    }
}

/// A receipt that was to be inserted.
pub(super) enum Inserted {
    /// It is, in this transaction.
    Ours(Transaction<'static, Postgres>),
    /// There is one.
    Theirs(Receipt),
    /// A rival's transaction is open, and has not ended while it was waited for.
    Rival,
}

/// What was committed with an effect.
#[derive(Clone, Debug)]
pub(super) struct Receipt {
    pub(super) fingerprint: Option<String>,
    pub(super) outcome: Outcome,
    pub(super) result: StoredResult,
}

impl Receipt {
    pub(super) fn new(outcome: Outcome, result: StoredResult) -> Self {
        Self { fingerprint: None, outcome, result }
    }

    /// The receipt of a key, if one is committed.
    pub(super) async fn find(pool: &PgPool, key: &Key) -> Result<Option<Self>, sqlx::Error> {
        let query =
            sqlx::query(include_str!("find.sql")).bind(key.namespace()).bind(key.subject_text()).bind(key.value());
        let Some(row) = query.fetch_optional(pool).await? else { return Ok(None) };
        let outcome = match row.try_get::<i16, _>("outcome")? {
            1 => Outcome::Completed,
            _ => Outcome::Failed,
        };
        let metadata: &str = row.try_get("result_metadata")?;
        let metadata = serde_json::from_str(metadata).map_err(|error| sqlx::Error::Decode(error.into()))?;
        let body: Vec<u8> = row.try_get("result_body")?;
        let result = StoredResult { code: row.try_get("result_code")?, metadata, body: body.into() };
        Ok(Some(Self { fingerprint: row.try_get("fingerprint")?, outcome, result }))
    }

    /// Inserts it in a new transaction, unless there is one. A rival's that is not committed yet is waited for.
    pub(super) async fn insert(&self, pool: &PgPool, key: &Key, fence: i64) -> Result<Inserted, sqlx::Error> {
        let mut refused = sqlx::Error::RowNotFound;
        for _ in 0..ROUNDS {
            let mut transaction = pool.begin().await?;
            let patience = format!("{}ms", RIVAL_PATIENCE.as_millis());
            sqlx::query(include_str!("prepare.sql")).bind(patience).execute(&mut *transaction).await?;
            match self.insert_into(&mut transaction, key, fence).await {
                Ok(()) => {
                    sqlx::query(include_str!("restore.sql")).execute(&mut *transaction).await?;
                    return Ok(Inserted::Ours(transaction));
                }
                Err(sqlx::Error::Database(error)) if error.kind() == ErrorKind::UniqueViolation => {
                    transaction.rollback().await?;
                    if let Some(receipt) = Self::find(pool, key).await? {
                        return Ok(Inserted::Theirs(receipt));
                    }
                    refused = sqlx::Error::Database(error);
                }
                Err(sqlx::Error::Database(error)) if error.code().as_deref() == Some(LOCK_NOT_AVAILABLE) => {
                    transaction.rollback().await?;
                    return Ok(Inserted::Rival);
                }
                Err(error) => return Err(error),
            }
        }
        Err(refused)
    }

    async fn insert_into(&self, connection: &mut PgConnection, key: &Key, fence: i64) -> Result<(), sqlx::Error> {
        let query = sqlx::query(include_str!("insert.sql"))
            .bind(key.namespace())
            .bind(key.subject_text())
            .bind(key.value())
            .bind(&self.fingerprint)
            .bind(fence)
            .bind(self.outcome.code())
            .bind(self.result.code)
            .bind(self.metadata()?)
            .bind(self.result.body.as_ref());
        query.execute(connection).await.map(drop)
    }

    /// Adds the result to the one that was inserted in this transaction; false if it is not there, because somebody has ended
    /// the transaction underneath.
    pub(super) async fn settle(
        &self,
        connection: &mut PgConnection,
        key: &Key,
        fence: i64,
    ) -> Result<bool, sqlx::Error> {
        let query = sqlx::query(include_str!("settle.sql"))
            .bind(key.namespace())
            .bind(key.subject_text())
            .bind(key.value())
            .bind(self.result.code)
            .bind(self.metadata()?)
            .bind(self.result.body.as_ref())
            .bind(fence);
        Ok(connection.is_in_transaction() && query.execute(&mut *connection).await?.rows_affected() == 1)
    }

    /// Whether it answers a request of this fingerprint: those of different schemes do not compare.
    pub(super) fn may_answer(&self, fingerprint: Option<&str>) -> bool {
        match (
            self.fingerprint.as_deref().and_then(|own| own.split_once(':')),
            fingerprint.and_then(|other| other.split_once(':')),
        ) {
            (Some((own_scheme, own)), Some((scheme, other))) => own_scheme != scheme || own == other,
            _ => true,
        }
    }

    /// As what is known of a key.
    pub(super) fn entry(self) -> Entry {
        match self.outcome {
            Outcome::Completed => Entry::Completed(self.result),
            Outcome::Failed => Entry::Failed(self.result),
        }
    }

    /// As what an operator would say.
    pub(super) fn resolution(&self) -> Resolution {
        match self.outcome {
            Outcome::Completed => Resolution::Complete(self.result.clone()),
            Outcome::Failed => Resolution::Fail(self.result.clone()),
        }
    }

    fn metadata(&self) -> Result<String, sqlx::Error> {
        serde_json::to_string(&self.result.metadata).map_err(|error| sqlx::Error::Encode(error.into()))
    }
}
