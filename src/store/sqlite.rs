//! [`Sqlite`]: the embedded store, in a file or in memory.
//!
//! One connection writes, in turn: a file has one writer at a time anyway. Files are read and checked on connections apart;
//! memory belongs to its one connection. Each batch is one transaction that takes the write lock first; the clock, this
//! process's, is read under it. WAL with synchronous=FULL: a commit is on the disk before it is answered.

use std::{
    fmt,
    path::PathBuf,
    str::FromStr,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use async_trait::async_trait;
use sqlx::{
    ConnectOptions, Connection, Row, SqliteConnection,
    migrate::MigrateError,
    query::Query,
    sqlite::{SqliteArguments, SqliteConnectOptions, SqliteJournalMode, SqliteSynchronous},
};
use tokio::time::sleep;

use super::{
    Loaded, OpenError, OpenOptions, Purged, Store, StoreError, Urgency,
    connections::{Connections, Fault},
    metadata,
    migrations::{self, Script},
    row,
};
use crate::{
    record::{Key, Record, Timestamp, micros},
    write::{Action, Condition, Stamp, Write},
};

/// The migrations, oldest first.
const MIGRATIONS: [Script; 1] =
    [Script { version: 1, name: "record", sql: include_str!("../../migrations/sqlite/0001_record.sql") }];

/// How long to wait for another process that writes to the same file.
const BUSY_TIMEOUT: Duration = Duration::from_secs(1);
/// How often, and after which pause, a migration is tried that another process got in the way of.
const MIGRATION_TRIES: u32 = 20;
const MIGRATION_PAUSE: Duration = Duration::from_millis(50);
/// Disks stall. Longer than that, and the file is opened anew.
const WORK_TIMEOUT: Duration = Duration::from_secs(30);

/// Records in an SQLite database.
pub struct Sqlite {
    writer: Connections<SqliteConnection>,
    /// Memory has but the one: it dies with its connection, which is never thrown away.
    file: Option<FileConnections>,
}

/// What else there is of a file, so that nobody who only looks waits for those who write.
struct FileConnections {
    reader: Connections<SqliteConnection>,
    probe: Connections<SqliteConnection>,
}

impl Sqlite {
    /// Opens the file; makes it if it is to migrate.
    ///
    /// # Cancel safety
    ///
    /// See [`open`](super::open).
    pub async fn open(url: &Url, options: &OpenOptions) -> Result<Self, OpenError> {
        let mut first = url.connect(options.migrate).await?;
        if options.migrate {
            url.migrate(&mut first).await?;
        }
        url.check_migrated(&mut first).await?;
        url.check_writable(&mut first).await?;
        let connections = |first| {
            let url = url.clone();
            let timeout = if url.in_memory { Duration::MAX } else { WORK_TIMEOUT };
            let open = Box::new(move || {
                let url = url.clone();
                Box::pin(async move { url.connect(false).await.map_err(|e| e.to_string()) }) as _
            });
            Connections::new(1, timeout, first, open)
        };
        let file = || FileConnections { reader: connections(None), probe: connections(None) };
        Ok(Self { writer: connections(Some(first)), file: (!url.in_memory).then(file) })
    }

    /// Runs `work` in a transaction that holds the write lock, with the clock read under it.
    async fn transaction<T, W>(&self, urgency: Urgency, work: W) -> Result<T, StoreError>
    where
        T: Send + 'static,
        W: for<'c> FnOnce(&'c mut SqliteConnection, Timestamp) -> BoxedResult<'c, T> + Send + 'static,
    {
        let in_memory = self.file.is_none();
        self.writer
            .run(urgency, move |connection| {
                Box::pin(async move {
                    let done: Result<T, sqlx::Error> = async {
                        let mut transaction = connection.begin_with("BEGIN IMMEDIATE").await?;
                        let answer = work(&mut transaction, clock()).await?;
                        transaction.commit().await?;
                        Ok(answer)
                    }
                    .await;
                    done.map_err(|error| fault(&error, in_memory))
                })
            })
            .await
    }
}

type BoxedResult<'c, T> = futures_util::future::BoxFuture<'c, Result<T, sqlx::Error>>;

#[async_trait]
impl Store for Sqlite {
    async fn write(&self, writes: Vec<Write>) -> Vec<Result<Option<Stamp>, StoreError>> {
        let count = writes.len();
        let urgency = Urgency::of(&writes);
        let written = self
            .transaction(urgency, move |connection, now| {
                Box::pin(async move {
                    let mut stamps = Vec::with_capacity(writes.len());
                    for write in &writes {
                        let row = statement(write, now).fetch_optional(&mut *connection).await?;
                        stamps.push(row.map(|row| row::stamp::<sqlx::Sqlite>(&row)).transpose()?);
                    }
                    Ok(stamps)
                })
            })
            .await;
        match written {
            Ok(stamps) => stamps.into_iter().map(Ok).collect(),
            Err(error) => vec![Err(error); count],
        }
    }

    async fn load(&self, keys: Vec<Key>, urgency: Urgency) -> Result<Loaded, StoreError> {
        let in_memory = self.file.is_none();
        let reader = self.file.as_ref().map_or(&self.writer, |file| &file.reader);
        reader
            .run(urgency, move |connection| {
                Box::pin(async move {
                    let now = clock();
                    let mut records = Vec::with_capacity(keys.len());
                    for key in &keys {
                        records.push(load(connection, key).await.map_err(|error| fault(&error, in_memory))?);
                    }
                    Ok(Loaded { now, records })
                })
            })
            .await
    }

    async fn purge(&self, after: Timestamp, grace: Duration, limit: u32) -> Result<Purged, StoreError> {
        self.transaction(Urgency::Completion, move |connection, now| {
            Box::pin(async move {
                let edge = now.0.saturating_sub(micros(grace));
                let due = sqlx::query(include_str!("sqlite/due.sql")).bind(after.0).bind(edge).bind(limit);
                let row = due.fetch_one(&mut *connection).await?;
                let (met, last) = (row.try_get::<i64, _>("met")?.unsigned_abs(), row.try_get("last")?);
                let Some(Timestamp(until)) = last else { return Ok(Purged::default()) };
                let purge = sqlx::query(include_str!("sqlite/purge.sql")).bind(after.0).bind(until).bind(edge);
                let deleted = purge.execute(&mut *connection).await?.rows_affected();
                let postpone = sqlx::query(include_str!("sqlite/postpone.sql")).bind(after.0).bind(until);
                let postponed = postpone.bind(edge).bind(now.0).execute(connection).await?.rows_affected();
                Ok(Purged { met, deleted, postponed, last })
            })
        })
        .await
    }

    async fn check(&self) -> Result<(), StoreError> {
        let Some(file) = &self.file else {
            return if self.writer.is_closed() { Err(StoreError::Unavailable) } else { Ok(()) };
        };
        let checked = file
            .probe
            .run(Urgency::Completion, |connection| {
                Box::pin(async move {
                    let checked = sqlx::query(include_str!("sqlite/check.sql")).execute(connection).await;
                    checked.map(drop).map_err(|error| fault(&error, false))
                })
            })
            .await;
        // Whoever holds the lock writes.
        if checked == Err(StoreError::Locked) { Ok(()) } else { checked }
    }

    async fn close(&self) {
        if let Some(file) = &self.file {
            tokio::join!(file.reader.close(), file.probe.close());
        }
        // The last one out tidies the file up.
        self.writer.close().await;
    }
}

/// The clock of this process: an embedded database has none of its own.
fn clock() -> Timestamp {
    Timestamp(0).after(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default())
}

async fn load(connection: &mut SqliteConnection, key: &Key) -> Result<Result<Option<Record>, StoreError>, sqlx::Error> {
    let row = sqlx::query(include_str!("sqlite/load.sql")).bind(key.id()).fetch_optional(connection).await?;
    match row {
        Some(row) => Ok(row::readable(row::record::<sqlx::Sqlite>(&row, key)).map(Some)),
        None => Ok(Ok(None)),
    }
}

fn fault(error: &sqlx::Error, in_memory: bool) -> Fault {
    let code = error.as_database_error().and_then(|error| error.code());
    // The primary result code is the low byte of the extended one.
    match code.and_then(|code| code.parse::<i32>().ok()).map(|code| code & 0xff) {
        // SQLITE_BUSY, SQLITE_LOCKED
        Some(5 | 6) => Fault::Answer(StoreError::Locked),
        // SQLITE_TOOBIG, SQLITE_CONSTRAINT, SQLITE_MISMATCH: it is the statement's fault, and the transaction is rolled back.
        Some(18..=20) => Fault::Refused(error.to_string()),
        _ if in_memory => Fault::Answer(StoreError::Unavailable),
        _ => Fault::Broken(error.to_string()),
    }
}

fn statement(write: &Write, now: Timestamp) -> Query<'_, sqlx::Sqlite, SqliteArguments> {
    let key = |sql| {
        sqlx::query(sql)
            .bind(now.0)
            .bind(write.key.id())
            .bind(write.key.namespace())
            .bind(write.key.subject())
            .bind(write.key.value())
    };
    let change = |sql, condition: &Condition| {
        key(sql).bind(condition.holder().map(|token| token.as_str().to_owned())).bind(condition.seen())
    };
    match &write.action {
        Action::Insert(reservation) => key(include_str!("sqlite/insert.sql"))
            .bind(reservation.token.as_str())
            .bind(reservation.on_expiry.code())
            .bind(reservation.owner.as_ref().map(|owner| owner.as_str()))
            .bind(reservation.fingerprint.as_ref().map(|fingerprint| fingerprint.as_str()))
            .bind(reservation.origin.as_ref().map(|origin| origin.as_str()))
            .bind(micros(reservation.lock_ttl))
            .bind(micros(reservation.retention)),
        Action::Reserve(condition, next) => change(include_str!("sqlite/reserve.sql"), condition)
            .bind(next.reservation.token.as_str())
            .bind(next.reservation.on_expiry.code())
            .bind(next.reservation.owner.as_ref().map(|owner| owner.as_str()))
            .bind(next.reservation.fingerprint.as_ref().map(|fingerprint| fingerprint.as_str()))
            .bind(next.reservation.origin.as_ref().map(|origin| origin.as_str()))
            .bind(micros(next.reservation.lock_ttl))
            .bind(micros(next.reservation.retention))
            .bind(next.attempt)
            .bind(next.earlier_tokens.as_bytes()),
        Action::Extend(condition, extension) => change(include_str!("sqlite/extend.sql"), condition)
            .bind(extension.lock_ttl.map(micros))
            .bind(extension.on_expiry.code())
            .bind(extension.checkpoint.as_ref().map(|checkpoint| checkpoint.bytes.as_ref()))
            .bind(extension.checkpoint.as_ref().and_then(|checkpoint| checkpoint.sequence)),
        Action::Finish(condition, finish) => change(include_str!("sqlite/finish.sql"), condition)
            .bind(finish.status.code())
            .bind(finish.resolved)
            .bind(finish.retention.map(micros))
            .bind(finish.checkpoint.as_deref())
            .bind(finish.result.as_ref().map(|result| result.code))
            .bind(finish.result.as_ref().and_then(|result| metadata::encode(&result.metadata)))
            .bind(finish.result.as_ref().map(|result| result.body.as_ref())),
    }
}

/// Brings the tables of a file up to date.
///
/// # Cancel safety
///
/// See [`migrate`](super::migrate).
pub async fn migrate(url: &Url) -> Result<(), OpenError> {
    let mut connection = url.connect(true).await?;
    let result = url.migrate(&mut connection).await;
    let _ = connection.close().await;
    result
}

/// Names an SQLite database.
#[derive(Clone)]
pub struct Url {
    options: SqliteConnectOptions,
    in_memory: bool,
}

impl Url {
    pub(super) fn parse(text: &str) -> Result<Self, OpenError> {
        let options = SqliteConnectOptions::from_str(text)
            .map_err(|_| OpenError::Url("expected `sqlite:path` or `sqlite::memory:`".into()))?;
        let in_memory = text.contains(":memory:") || text.contains("mode=memory");
        // SQLite takes it for a file that is deleted when it is closed: every answer would be forgotten.
        if !in_memory && options.get_filename().as_os_str().is_empty() {
            return Err(OpenError::Url("it names no file: expected `sqlite:path` or `sqlite::memory:`".into()));
        }
        let mut options = options
            .synchronous(SqliteSynchronous::Full)
            .busy_timeout(BUSY_TIMEOUT)
            .optimize_on_close(false, None)
            .disable_statement_logging();
        if !in_memory {
            options = options.journal_mode(SqliteJournalMode::Wal);
        }
        Ok(Self { options, in_memory })
    }

    /// Where the file lies; `None` for memory.
    pub fn path(&self) -> Option<PathBuf> {
        let path = self.options.get_filename();
        (!self.in_memory).then(|| std::path::absolute(path).unwrap_or_else(|_| path.into()))
    }

    /// Connects; a file that is not there is made only where it is to be filled.
    async fn connect(&self, create: bool) -> Result<SqliteConnection, OpenError> {
        let options = self.options.clone().create_if_missing(create && !self.in_memory);
        SqliteConnection::connect_with(&options).await.map_err(|error| self.refused(&error))
    }

    async fn migrate(&self, connection: &mut SqliteConnection) -> Result<(), OpenError> {
        let mut tries = 0;
        loop {
            tries += 1;
            let Err(error) = migrations::run(&MIGRATIONS, connection).await else { return Ok(()) };
            match &error {
                MigrateError::Execute(error) | MigrateError::ExecuteMigration(error, _) if is_read_only(error) => {
                    return Err(OpenError::ReadOnly(self.to_string()));
                }
                // SQLite has no lock for a whole migration: another process may have been first, or be at it.
                _ if tries < MIGRATION_TRIES => sleep(MIGRATION_PAUSE).await,
                _ => {
                    let reason = error.to_string().replace('\n', " ");
                    return Err(OpenError::Migrate { database: self.to_string(), reason });
                }
            }
        }
    }

    async fn check_writable(&self, connection: &mut SqliteConnection) -> Result<(), OpenError> {
        let checked = sqlx::query(include_str!("sqlite/check.sql")).execute(connection).await;
        checked.map(drop).map_err(|error| self.refused(&error))
    }

    async fn check_migrated(&self, connection: &mut SqliteConnection) -> Result<(), OpenError> {
        let not_migrated = || OpenError::NotMigrated(self.to_string());
        let applied = sqlx::query(migrations::APPLIED).fetch_all(connection).await.map_err(|_| not_migrated())?;
        let applied: Vec<i64> = applied.iter().filter_map(|row| row.try_get("version").ok()).collect();
        let complete = migrations::are_complete(&MIGRATIONS, &applied);
        complete.then_some(()).ok_or_else(not_migrated)
    }

    fn refused(&self, error: &sqlx::Error) -> OpenError {
        if is_read_only(error) {
            return OpenError::ReadOnly(self.to_string());
        }
        OpenError::Connect { database: self.to_string(), reason: error.to_string().replace('\n', " ") }
    }
}

impl fmt::Display for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.path() {
            Some(path) => write!(f, "sqlite:{}", path.display()),
            None => f.write_str("sqlite::memory:"),
        }
    }
}

fn is_read_only(error: &sqlx::Error) -> bool {
    let code = error.as_database_error().and_then(|error| error.code());
    // SQLITE_READONLY is the low byte of the extended codes of its kind.
    code.and_then(|code| code.parse::<i32>().ok()).is_some_and(|code| code & 0xff == 8)
}
