//! [`Postgres`]: the store for production.
//!
//! The database's clock decides everything. Each batch of writes of one kind is one statement and one commit; rows are
//! locked in the order of their ids, so that batches cannot deadlock. Statements work on arrays, so one text serves any
//! number of writes and stays prepared.
//!
//! What the statements rely on is set on each connection, or on Onceward's own role: see [`settings`].

mod batch;
mod locked;
#[cfg(test)]
mod plans;
pub mod settings;
#[cfg(test)]
mod tests;
mod url;

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use async_trait::async_trait;
use futures_util::future::{BoxFuture, join_all};
use sqlx::{Connection, PgConnection, Row};
use uuid::Uuid;

pub use self::url::Url;
use self::{
    batch::Batch,
    locked::{Access, LockedRows, Turn},
};
use super::{
    Loaded, OpenError, OpenOptions, Purged, Store, StoreError, Urgency,
    connections::{Connections, Fault},
    migrations::{self, Script},
    row,
};
use crate::{
    record::{Key, Timestamp, micros},
    write::{Stamp, Write},
};

/// The migrations, oldest first.
const MIGRATIONS: [Script; 2] = [
    Script { version: 1, name: "record", sql: include_str!("../../migrations/postgres/0001_record.sql") },
    Script { version: 2, name: "fillfactor", sql: include_str!("../../migrations/postgres/0002_fillfactor.sql") },
];

/// A little longer than the database itself lets a statement run.
const WORK_TIMEOUT: Duration = Duration::from_secs(6);
/// How many connections try rows that somebody else was seen to hold.
const SLOW_CONNECTIONS: usize = 2;
/// How often a statement is tried that the database rolled back for reasons of its own.
const TRIES: u32 = 5;

/// Which connections a write goes by.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Lane {
    /// Like everybody's.
    Fast,
    /// On connections for rows that may be locked.
    Slow,
}

/// Records in a Postgres, versions 14 to 18.
pub struct Postgres {
    url: Url,
    options: OpenOptions,
    calls: Connections<PgConnection>,
    /// For rows that somebody else was seen to hold.
    slow: Connections<PgConnection>,
    /// To find out which rows somebody holds.
    finder: Connections<PgConnection>,
    sweep: Connections<PgConnection>,
    probe: Connections<PgConnection>,
    locked: Arc<LockedRows>,
}

impl Postgres {
    /// Opens the store, or says why it must not be served from.
    ///
    /// # Cancel safety
    ///
    /// See [`open`](super::open).
    pub async fn open(url: &Url, options: &OpenOptions) -> Result<Self, OpenError> {
        if options.migrate {
            migrate(url).await?;
        }
        let first = settings::connect(url, options, Lane::Fast).await?;
        Self::check_migrated(url, first).await?;
        let connections = |count, lane| {
            let (url, options) = (url.clone(), options.clone());
            Connections::new(
                count,
                WORK_TIMEOUT,
                None,
                Box::new(move || {
                    let (url, options) = (url.clone(), options.clone());
                    Box::pin(async move { settings::connect(&url, &options, lane).await.map_err(|e| e.to_string()) })
                }),
            )
        };
        Ok(Self {
            calls: connections(options.connections, Lane::Fast),
            slow: connections(SLOW_CONNECTIONS, Lane::Slow),
            finder: connections(1, Lane::Slow),
            sweep: connections(1, Lane::Fast),
            probe: connections(1, Lane::Fast),
            locked: Arc::default(),
            url: url.clone(),
            options: options.clone(),
        })
    }

    async fn check_migrated(url: &Url, mut connection: PgConnection) -> Result<(), OpenError> {
        let applied = sqlx::query(migrations::APPLIED)
            .fetch_all(&mut connection)
            .await
            .and_then(|rows| rows.iter().map(|row| row.try_get::<i64, _>("version")).collect::<Result<Vec<_>, _>>());
        // The other end need not be told in good order.
        let _ = connection.close().await;
        match applied {
            Ok(applied) if migrations::are_complete(&MIGRATIONS, &applied) => Ok(()),
            Ok(_) => Err(OpenError::NotMigrated(url.to_string())),
            // insufficient_privilege
            Err(error) if code(&error).as_deref() == Some("42501") => Err(OpenError::Setting {
                database: url.to_string(),
                setting: "the role needs SELECT on onceward_migration".into(),
            }),
            // undefined_table
            Err(error) if code(&error).as_deref() == Some("42P01") => Err(OpenError::NotMigrated(url.to_string())),
            Err(error) => Err(url.connect_error(&error)),
        }
    }

    /// Runs writes as one statement; if `heeding`, not where a row of theirs was met locked while they queued.
    async fn run(&self, lane: Lane, heeding: bool, batch: Arc<Batch>) -> Result<Vec<Option<Stamp>>, StoreError> {
        let urgency = Urgency::of(batch.writes());
        let connections = match lane {
            Lane::Fast => &self.calls,
            Lane::Slow => &self.slow,
        };
        let locked = self.locked.clone();
        connections
            .run(urgency, move |connection| {
                Box::pin(async move {
                    if heeding && batch.ids().any(|id| locked.contains(id)) {
                        return Err(Fault::Answer(StoreError::Locked));
                    }
                    let statement = batch.clone();
                    let ran = retried(connection, move |connection| {
                        let statement = statement.clone();
                        Box::pin(async move { statement.run(connection).await })
                    })
                    .await;
                    // A batch does not tell which of its rows it was.
                    if matches!(ran, Err(Fault::Answer(StoreError::Locked))) && batch.len() == 1 {
                        batch.ids().for_each(|id| locked.note(id));
                    }
                    ran
                })
            })
            .await
    }

    /// Writes together; if somebody holds the row of one of them, the others.
    async fn write_together(&self, batch: Batch) -> Vec<Result<Option<Stamp>, StoreError>> {
        let batch = Arc::new(batch);
        match self.run(Lane::Fast, true, batch.clone()).await {
            Ok(stamps) => stamps.into_iter().map(Ok).collect(),
            Err(StoreError::Locked) if batch.len() > 1 => self.write_unlocked(&batch).await,
            Err(error) => vec![Err(error); batch.len()],
        }
    }

    /// Finds out which rows are locked, which a statement that fails does not tell, and writes the others; again, if more are
    /// locked by then.
    async fn write_unlocked(&self, batch: &Batch) -> Vec<Result<Option<Stamp>, StoreError>> {
        let ids: Vec<Uuid> = batch.ids().collect();
        let mut results = HashMap::with_capacity(ids.len());
        let mut rest = batch.clone();
        for _ in 0..TRIES {
            let locked = match self.find_locked(&rest).await {
                Ok(locked) => locked,
                Err(error) => {
                    results.extend(rest.ids().map(|id| (id, Err(error))));
                    break;
                }
            };
            locked.iter().for_each(|id| self.locked.note(*id));
            rest = rest.without(&locked);
            if rest.len() == 0 {
                break;
            }
            match self.run(Lane::Fast, false, Arc::new(rest.clone())).await {
                Ok(stamps) => results.extend(rest.ids().zip(stamps.into_iter().map(Ok))),
                Err(StoreError::Locked) => continue,
                Err(error) => results.extend(rest.ids().map(|id| (id, Err(error)))),
            }
            break;
        }
        ids.iter().map(|id| results.remove(id).unwrap_or(Err(StoreError::Locked))).collect()
    }

    async fn find_locked(&self, batch: &Batch) -> Result<HashSet<Uuid>, StoreError> {
        let ids: Arc<[Uuid]> = batch.ids().collect();
        let found = self.finder.run(Urgency::Completion, move |connection| {
            Box::pin(retried(connection, move |connection| {
                let ids = ids.clone();
                Box::pin(async move { locked::find(connection, &ids).await })
            }))
        });
        found.await
    }

    /// Writes in as few statements as can be, all at once. The places say which of all the writes each result is for.
    async fn write_free(&self, writes: Vec<(usize, Write)>) -> Vec<(usize, Result<Option<Stamp>, StoreError>)> {
        let written = Batch::all(writes)
            .into_iter()
            .map(async |(places, batch)| places.into_iter().zip(self.write_together(batch).await));
        join_all(written).await.into_iter().flatten().collect()
    }

    /// Writes one whose row was met locked, while nobody else may.
    async fn write_in_turn(&self, write: Write, turn: Turn<'_>) -> Result<Option<Stamp>, StoreError> {
        let stamps = self.run(Lane::Slow, false, Arc::new(Batch::single(write))).await?;
        turn.free();
        Ok(stamps.into_iter().next().flatten())
    }
}

#[async_trait]
impl Store for Postgres {
    async fn write(&self, writes: Vec<Write>) -> Vec<Result<Option<Stamp>, StoreError>> {
        let mut results: Vec<_> = writes.iter().map(|_| Err(StoreError::Locked)).collect();
        let (mut free, mut in_turn) = (Vec::new(), Vec::new());
        for (place, write) in writes.into_iter().enumerate() {
            match self.locked.access(write.key.id()) {
                Access::Free => free.push((place, write)),
                Access::Turn(turn) => in_turn.push(async move { (place, self.write_in_turn(write, turn).await) }),
                Access::Taken => {}
            }
        }
        let (free, in_turn) = tokio::join!(self.write_free(free), join_all(in_turn));
        for (place, result) in free.into_iter().chain(in_turn) {
            if let Some(slot) = results.get_mut(place) {
                *slot = result;
            }
        }
        results
    }

    fn is_locked(&self, key: &Key) -> bool {
        self.locked.contains(key.id())
    }

    async fn load(&self, keys: Vec<Key>, urgency: Urgency) -> Result<Loaded, StoreError> {
        let keys: Arc<[Key]> = keys.into();
        self.calls
            .run(urgency, move |connection| {
                Box::pin(retried(connection, move |connection| {
                    let keys = keys.clone();
                    Box::pin(async move { load(connection, &keys).await })
                }))
            })
            .await
    }

    async fn purge(&self, after: Timestamp, grace: Duration, limit: u32) -> Result<Purged, StoreError> {
        self.sweep
            .run(Urgency::Completion, move |connection| {
                Box::pin(retried(connection, move |connection| Box::pin(purge(connection, after, grace, limit))))
            })
            .await
    }

    async fn check(&self) -> Result<(), StoreError> {
        let (url, options) = (self.url.clone(), self.options.clone());
        self.probe
            .run(Urgency::Completion, move |connection| {
                Box::pin(async move {
                    let broken = |reason: &dyn std::fmt::Display| Fault::Broken(reason.to_string());
                    let properties = settings::Properties::of(connection).await.map_err(|error| broken(&error))?;
                    properties.accept(&url, &options).map_err(|error| broken(&error))
                })
            })
            .await
    }

    async fn close(&self) {
        tokio::join!(
            self.calls.close(),
            self.slow.close(),
            self.finder.close(),
            self.sweep.close(),
            self.probe.close()
        );
    }
}

/// Two statements, so that the rows of those that live are locked for no longer than it takes to move them.
async fn purge(
    connection: &mut PgConnection,
    after: Timestamp,
    grace: Duration,
    limit: u32,
) -> Result<Purged, sqlx::Error> {
    let row = sqlx::query(include_str!("postgres/purge.sql"))
        .bind(micros(grace))
        .bind(after.0)
        .bind(i64::from(limit))
        .fetch_one(&mut *connection)
        .await?;
    let count = |name| row.try_get::<i64, _>(name).map(i64::unsigned_abs);
    let (met, deleted, last) = (count("met")?, count("deleted")?, row.try_get::<Option<Timestamp>, _>("last")?);
    let postponed = match last {
        Some(last) if deleted < met => {
            let postpone = sqlx::query(include_str!("postgres/postpone.sql"));
            let postpone = postpone.bind(micros(grace)).bind(after.0).bind(last.0);
            postpone.execute(connection).await?.rows_affected()
        }
        _ => 0,
    };
    Ok(Purged { met, deleted, postponed, last })
}

async fn load(connection: &mut PgConnection, keys: &[Key]) -> Result<Loaded, sqlx::Error> {
    let ids: Vec<_> = keys.iter().map(Key::id).collect();
    let rows = sqlx::query(include_str!("postgres/load.sql")).bind(&ids).fetch_all(connection).await?;
    let mut now = None;
    let mut found = HashMap::with_capacity(rows.len());
    for row in &rows {
        now = Some(row.try_get::<Timestamp, _>("now")?);
        if row.try_get::<Option<i64>, _>("version")?.is_some() {
            found.insert(row.try_get::<Uuid, _>("id")?, row);
        }
    }
    let record = |key: &Key| match found.get(&key.id()) {
        Some(row) => row::readable(row::record::<sqlx::Postgres>(row, key)).map(Some),
        None => Ok(None),
    };
    let records = keys.iter().map(record).collect();
    Ok(Loaded { now: now.unwrap_or(Timestamp(0)), records })
}

/// Runs a statement again when the database rolled it back for reasons of its own: a deadlock, or a serialization
/// failure where the role insists on another isolation than ours.
async fn retried<T>(
    connection: &mut PgConnection,
    statement: impl for<'c> Fn(&'c mut PgConnection) -> BoxFuture<'c, Result<T, sqlx::Error>>,
) -> Result<T, Fault> {
    let mut tries = 0;
    loop {
        tries += 1;
        match statement(connection).await {
            Ok(answer) => return Ok(answer),
            Err(error) => match code(&error).as_deref() {
                // serialization_failure, deadlock_detected
                Some("40001" | "40P01") if tries < TRIES => {}
                Some("40001" | "40P01") => return Err(Fault::Answer(StoreError::Unavailable)),
                // lock_not_available
                Some("55P03") => return Err(Fault::Answer(StoreError::Locked)),
                // query_canceled, by the statement timeout
                Some("57014") => return Err(Fault::Answer(StoreError::Unavailable)),
                // The session is as good as before, unless it is ending, read-only, or has outlived a change of the tables.
                Some(code) if !breaks_session(code) => return Err(Fault::Refused(one_line(&error))),
                _ => return Err(Fault::Broken(one_line(&error))),
            },
        }
    }
}

/// Connection exceptions, operator intervention, read_only_sql_transaction, in_failed_sql_transaction, and the two that a
/// prepared statement meets after a change of its tables or behind a pooler.
fn breaks_session(code: &str) -> bool {
    code.starts_with("08") || code.starts_with("57") || matches!(code, "25006" | "25P02" | "0A000" | "26000")
}

fn code(error: &sqlx::Error) -> Option<String> {
    error.as_database_error().and_then(|error| error.code()).map(|code| code.into_owned())
}

/// Brings the tables of a database up to date. Safe from several processes at once: they take turns.
///
/// # Cancel safety
///
/// See [`migrate`](super::migrate).
pub async fn migrate(url: &Url) -> Result<(), OpenError> {
    let mut connection = url.connect().await?;
    settings::give_time(&mut connection).await.map_err(|error| url.connect_error(&error))?;
    let result = migrations::run(&MIGRATIONS, &mut connection).await;
    let _ = connection.close().await;
    result
        .map_err(|error| OpenError::Migrate { database: url.to_string(), reason: error.to_string().replace('\n', " ") })
}

/// What went wrong, without the places in Postgres' own code that the library adds.
fn one_line(error: &sqlx::Error) -> String {
    let message = error.as_database_error().map_or_else(|| error.to_string(), |error| error.message().into());
    message.replace('\n', " ")
}
