//! Callers that keep their keys in a table of their own, as each service would write it for itself: each statement its own
//! transaction, on a pool.

use std::sync::Arc;

use sqlx::{PgPool, postgres::PgPoolOptions};

use crate::{
    Failure,
    workload::{COMPLETED_KEYS, Caller, Callers, Workload},
};

const TABLE: &str = "CREATE TABLE IF NOT EXISTS idempotency_key (
    key text PRIMARY KEY,
    status text NOT NULL,
    locked_until timestamptz NOT NULL,
    expires_at timestamptz NOT NULL,
    response bytea
)";
const INSERT: &str = "INSERT INTO idempotency_key (key, status, locked_until, expires_at)
    VALUES ($1, 'in progress', now() + interval '30 s', now() + interval '24 h') ON CONFLICT DO NOTHING";
const SELECT: &str = "SELECT status, response FROM idempotency_key WHERE key = $1";
const UPDATE: &str = "UPDATE idempotency_key SET status = 'completed', response = $2,
    expires_at = now() + interval '24 h' WHERE key = $1 AND status = 'in progress'";

/// `count` callers on the database at `url`.
pub async fn callers(url: &str, workload: &Workload, count: usize) -> Result<Callers, Failure> {
    let pool = PgPoolOptions::new().max_connections(workload.pool).connect(url).await?;
    sqlx::query(TABLE).execute(&pool).await?;
    let mut completed = Vec::new();
    if workload.has_replays() {
        for _ in 0..COMPLETED_KEYS {
            let key = workload.fresh_key();
            pair(&pool, &key, workload.response_bytes).await?;
            completed.push(key);
        }
    }
    let completed = Arc::new(completed);
    let caller = |n: usize| {
        let (pool, workload, completed) = (pool.clone(), workload.clone(), completed.clone());
        Box::new(Single { pool, workload, completed, next: n * 7919 }) as Box<dyn Caller>
    };
    Ok((0..count).map(caller).collect())
}

struct Single {
    pool: PgPool,
    workload: Workload,
    completed: Arc<Vec<String>>,
    next: usize,
}

#[async_trait::async_trait]
impl Caller for Single {
    async fn turn(&mut self) -> Result<u64, Failure> {
        if self.workload.is_replay() {
            self.next += 1;
            let key = &self.completed[self.next % self.completed.len()];
            replay(&self.pool, key).await?;
        } else {
            pair(&self.pool, &self.workload.fresh_key(), self.workload.response_bytes).await?;
        }
        Ok(1)
    }
}

async fn pair(pool: &PgPool, key: &str, bytes: usize) -> Result<(), Failure> {
    if sqlx::query(INSERT).bind(key).execute(pool).await?.rows_affected() != 1 {
        return Err("a fresh key was there already".into());
    }
    if sqlx::query(UPDATE).bind(key).bind(vec![b'r'; bytes]).execute(pool).await?.rows_affected() != 1 {
        return Err("a key in progress was gone".into());
    }
    Ok(())
}

async fn replay(pool: &PgPool, key: &str) -> Result<(), Failure> {
    if sqlx::query(INSERT).bind(key).execute(pool).await?.rows_affected() != 0 {
        return Err("a completed key was gone".into());
    }
    let (status, _): (String, Vec<u8>) = sqlx::query_as(SELECT).bind(key).fetch_one(pool).await?;
    if status != "completed" {
        return Err("a completed key was not completed".into());
    }
    Ok(())
}
