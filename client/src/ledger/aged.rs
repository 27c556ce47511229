//! [`Aged`]: receipts that are old enough to be deleted.

use sqlx::{PgPool, Row};

use crate::key::Key;

/// A receipt, as it was when it was looked at.
#[derive(Clone, Debug)]
pub(super) struct Aged {
    pub(super) key: Key,
    /// As the database writes it.
    created_at: String,
}

impl Aged {
    /// Before all receipts.
    pub(super) fn first() -> Self {
        Self { key: Key::new("", ""), created_at: "-infinity".into() }
    }

    /// Those that are older than so many seconds, in their order, after `last`.
    pub(super) async fn after(pool: &PgPool, age_seconds: f64, last: &Self) -> Result<Vec<Self>, sqlx::Error> {
        let rows = sqlx::query(include_str!("aged.sql"))
            .bind(age_seconds)
            .bind(&last.created_at)
            .bind(last.key.namespace())
            .bind(last.key.subject_text())
            .bind(last.key.value())
            .fetch_all(pool)
            .await?;
        let aged = rows.iter().map(|row| {
            let text = |name| row.try_get::<String, _>(name);
            let key = Key::new(text("namespace")?, text("value")?).subject(text("subject")?);
            Ok(Self { key, created_at: text("created_at")? })
        });
        aged.collect()
    }

    /// Deletes those that are still as they were.
    pub(super) async fn delete(pool: &PgPool, receipts: &[Self]) -> Result<u64, sqlx::Error> {
        let column = |of: fn(&Self) -> &str| receipts.iter().map(of).collect::<Vec<_>>();
        let query = sqlx::query(include_str!("purge.sql"))
            .bind(column(|aged| aged.key.namespace()))
            .bind(column(|aged| aged.key.subject_text()))
            .bind(column(|aged| aged.key.value()))
            .bind(column(|aged| &aged.created_at));
        Ok(query.execute(pool).await?.rows_affected())
    }
}
