//! [`Postgres`]: the store for production.
//!
//! The database's clock decides everything. Each batch of writes of one kind is one statement and one commit; rows are
//! locked in the order of their ids, so that batches cannot deadlock. Statements work on arrays, so one text serves any
//! number of writes and stays prepared.
//!
//! What the statements rely on is set on each connection, or on Onceward's own role: see [`settings`].

mod batch;
pub mod settings;

use std::{collections::HashMap, fmt, str::FromStr, sync::Arc, time::Duration};

use async_trait::async_trait;
use futures_util::future::BoxFuture;
use sqlx::{ConnectOptions, Connection, PgConnection, Row, postgres::PgConnectOptions};

use self::batch::{Batch, Kind};
use super::{
    Loaded, OpenError, OpenOptions, Purged, Store, StoreError,
    connections::{Connections, Fault, Urgency},
    migrations::{self, Step},
    row,
};
use crate::{
    record::{Key, Timestamp, micros},
    write::{Stamp, Write},
};

/// The migrations, oldest first.
const MIGRATIONS: [Step; 1] =
    [Step { version: 1, name: "record", sql: include_str!("../../migrations/postgres/0001_record.sql") }];

/// A little longer than the database itself lets a statement run.
const WORK_TIMEOUT: Duration = Duration::from_secs(8);
/// How often a statement is tried that the database rolled back for reasons of its own.
const TRIES: u32 = 5;

/// Records in a Postgres, versions 14 to 18.
pub struct Postgres {
    calls: Connections<PgConnection>,
    sweep: Connections<PgConnection>,
    probe: Connections<PgConnection>,
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
        let first = settings::connect(url, options).await?;
        Self::check_migrated(url, first).await?;
        let connections = |count| {
            let (url, options) = (url.clone(), options.clone());
            Connections::new(
                count,
                WORK_TIMEOUT,
                None,
                Box::new(move || {
                    let (url, options) = (url.clone(), options.clone());
                    Box::pin(async move { settings::connect(&url, &options).await.map_err(|e| e.to_string()) })
                }),
            )
        };
        Ok(Self { calls: connections(options.connections), sweep: connections(1), probe: connections(1) })
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
            // undefined_table
            Err(error) if code(&error).as_deref() == Some("42P01") => Err(OpenError::NotMigrated(url.to_string())),
            Err(error) => Err(url.connect_error(&error)),
        }
    }

    async fn write_kind(&self, batch: Batch) -> Result<Vec<Option<Stamp>>, StoreError> {
        let urgency = if batch.is_reservation() { Urgency::Reservation } else { Urgency::Completion };
        let batch = Arc::new(batch);
        self.calls
            .run(urgency, move |connection| {
                Box::pin(retried(connection, move |connection| {
                    let batch = batch.clone();
                    Box::pin(async move { batch.run(connection).await })
                }))
            })
            .await
    }

    /// Writes one by one what could not be written together, because somebody holds the row of one of them.
    async fn write_singly(&self, batch: Batch) -> Vec<Result<Option<Stamp>, StoreError>> {
        let mut results = Vec::with_capacity(batch.len());
        for single in batch.split() {
            results.push(self.write_kind(single).await.map(|stamps| stamps.into_iter().next().flatten()));
        }
        results
    }
}

#[async_trait]
impl Store for Postgres {
    async fn write(&self, writes: Vec<Write>) -> Vec<Result<Option<Stamp>, StoreError>> {
        let mut results: Vec<_> = writes.iter().map(|_| Err(StoreError::Unavailable)).collect();
        for kind in Kind::ALL {
            let (places, batch) = Batch::of(kind, &writes);
            if batch.len() == 0 {
                continue;
            }
            let written = match self.write_kind(batch.clone()).await {
                Ok(stamps) => stamps.into_iter().map(Ok).collect(),
                Err(StoreError::Locked) if batch.len() > 1 => self.write_singly(batch).await,
                Err(error) => vec![Err(error); batch.len()],
            };
            for (place, result) in places.into_iter().zip(written) {
                if let Some(slot) = results.get_mut(place) {
                    *slot = result;
                }
            }
        }
        results
    }

    async fn load(&self, keys: Vec<Key>) -> Result<Loaded, StoreError> {
        let keys: Arc<[Key]> = keys.into();
        self.calls
            .run(Urgency::Completion, move |connection| {
                Box::pin(retried(connection, move |connection| {
                    let keys = keys.clone();
                    Box::pin(async move { load(connection, &keys).await })
                }))
            })
            .await
    }

    async fn purge(&self, grace: Duration, limit: u32) -> Result<Purged, StoreError> {
        self.sweep
            .run(Urgency::Completion, move |connection| {
                Box::pin(retried(connection, move |connection| {
                    Box::pin(async move {
                        let row = sqlx::query(include_str!("postgres/purge.sql"))
                            .bind(micros(grace))
                            .bind(i64::from(limit))
                            .fetch_one(connection)
                            .await?;
                        let count = |name| row.try_get::<i64, _>(name).map(i64::unsigned_abs);
                        Ok(Purged { deleted: count("deleted")?, postponed: count("postponed")? })
                    })
                }))
            })
            .await
    }

    async fn check(&self) -> Result<(), StoreError> {
        self.probe
            .run(Urgency::Completion, |connection| {
                Box::pin(async move {
                    match settings::Condition::of(connection).await {
                        Ok(condition) if condition.read_only => Err(Fault::Broken("it is read-only".into())),
                        Ok(_) => Ok(()),
                        Err(error) => Err(Fault::Broken(error.to_string())),
                    }
                })
            })
            .await
    }

    async fn close(&self) {
        tokio::join!(self.calls.close(), self.sweep.close(), self.probe.close());
    }
}

async fn load(connection: &mut PgConnection, keys: &[Key]) -> Result<Loaded, sqlx::Error> {
    let ids: Vec<_> = keys.iter().map(Key::id).collect();
    let rows = sqlx::query(include_str!("postgres/load.sql")).bind(&ids).fetch_all(connection).await?;
    let mut now = None;
    let mut found = HashMap::with_capacity(rows.len());
    for row in &rows {
        now = Some(row.try_get::<Timestamp, _>("now")?);
        if row.try_get::<Option<i64>, _>("version")?.is_some() {
            found.insert(row.try_get::<uuid::Uuid, _>("id")?, row);
        }
    }
    let record = |key: &Key| match found.get(&key.id()) {
        Some(row) => row::record::<sqlx::Postgres>(row, key).map(|record| record.map(Some)),
        None => Ok(Ok(None)),
    };
    let records = keys.iter().map(record).collect::<Result<_, _>>()?;
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
                _ => return Err(Fault::Broken(error.to_string())),
            },
        }
    }
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
    let mut connection = PgConnection::connect_with(&url.0).await.map_err(|error| url.connect_error(&error))?;
    let result = migrations::run(&MIGRATIONS, &mut connection).await;
    let _ = connection.close().await;
    result.map_err(|error| OpenError::Migrate { database: url.to_string(), reason: one_line(&error) })
}

/// Names a Postgres. Shown without credentials.
#[derive(Clone)]
pub struct Url(PgConnectOptions);

impl Url {
    pub(super) fn parse(text: &str) -> Result<Self, OpenError> {
        // The reason may quote the URL with its password.
        let options = PgConnectOptions::from_str(text)
            .map_err(|_| OpenError::Url("expected `postgres://user:password@host:port/database`".into()))?;
        // Poolers refuse startup parameters that they do not know, and we read no floats.
        let options = options.extra_float_digits(None);
        Ok(Self(options.application_name("onceward").disable_statement_logging()))
    }
}

impl fmt::Display for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let database = self.0.get_database().unwrap_or(self.0.get_username());
        match self.0.get_socket() {
            Some(socket) => write!(f, "postgres://{}/{database}", socket.display()),
            None => write!(f, "postgres://{}:{}/{database}", self.0.get_host(), self.0.get_port()),
        }
    }
}

fn one_line(error: &dyn std::error::Error) -> String {
    error.to_string().replace('\n', " ")
}
