//! [`Store`]: where records live. Three batch primitives, each promise stated on its method.
//!
//! Anything that can put-if-absent and compare-and-swap on one record can be a store. A store knows no rules: it applies
//! [`Write`]s as [`Write::apply`] says, on its own clock, and tells which of them took. Every promise below has its case
//! in the contract suite, which runs on every store, or, where it takes a rival that only one store knows, beside that store.

pub mod cached;
mod connections;
#[cfg(test)]
mod contract;
pub mod grouped;
#[cfg(test)]
pub(crate) mod memory;
mod metadata;
mod migrations;
pub mod postgres;
mod row;
pub mod sqlite;

use std::{fmt, sync::Arc, time::Duration};

use async_trait::async_trait;

use crate::{
    record::{Key, Record, Timestamp},
    write::{Stamp, Write},
};

/// The most items that a caller may hand to one call of a [`Store`].
pub const BATCH_ITEMS_MAX: usize = 256;

/// Where records live.
///
/// # Cancel safety
///
/// A future of any method may be dropped at any time, but is not to be kept without being polled: it may hold a connection. A
/// call that has reached the database goes on to its end without the caller: it may have been applied, and leaves no open
/// transaction behind. A reservation that still waits for its turn is not begun; a completion may be.
#[async_trait]
pub trait Store: Send + Sync + 'static {
    /// Tries each write on its own, and tells for each, in order, whether it took.
    ///
    /// - A write is atomic and durable once it is answered with a [`Stamp`]: it survives a crash of the service and of the
    ///   database.
    /// - Of any number of inserts of one absent key, from any number of processes, exactly one takes.
    /// - A change takes only if its condition holds at that moment. No two writes take under the same version.
    /// - `Ok(None)` is *unknown*, not refused: the condition did not hold, or something else got in the way. Load and decide
    ///   again.
    /// - The writes of one call are of different keys. One whose row somebody else holds never fails its neighbours; an outage
    ///   may fail all.
    /// - An error says nothing about what was done, except [`StoreError::Refused`], [`StoreError::Locked`] and
    ///   [`StoreError::Overloaded`]: nothing.
    /// - Completions are never refused for reservations that wait: they have room of their own in every queue.
    async fn write(&self, writes: Vec<Write>) -> Vec<Result<Option<Stamp>, StoreError>>;

    /// Whether somebody else was just seen to hold the row of this key. A write to it is best handed over alone: together with
    /// others it may keep them waiting.
    fn is_locked(&self, _key: &Key) -> bool {
        false
    }

    /// Loads the records of these keys, in order, with the store's clock from just before.
    ///
    /// A record that some earlier call was told of is found. Records past their expiry are found until they are purged.
    async fn load(&self, keys: Vec<Key>, urgency: Urgency) -> Result<Loaded, StoreError>;

    /// Of the first `limit` records that are due after `after`, deletes those whose expiry lies at least `grace` back.
    ///
    /// A record is due once it would have expired if nobody had finished it: one that was finished sooner, or for a shorter
    /// retention, counts no more from its expiry on and is deleted when it is due. This is how the sweeper purges.
    ///
    /// - Never one that was extended, finished or reserved anew meanwhile.
    /// - Several may purge at once without waiting for each other or for anybody's lock.
    /// - Records that live longer keep nobody waiting: they are put off until their expiry.
    async fn purge(&self, after: Timestamp, grace: Duration, limit: u32) -> Result<Purged, StoreError>;

    /// Whether the store can take writes now. It uses a connection of its own, so a busy store still answers.
    async fn check(&self) -> Result<(), StoreError>;

    /// Lets what has begun end, and closes every connection. Calls that come later fail.
    async fn close(&self);
}

/// Who asks, where there is not room for all.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Urgency {
    /// Nothing has happened yet: it may be refused.
    Reservation,
    /// The effect may have happened: it has room of its own.
    Completion,
}

impl Urgency {
    /// Of these writes together: one completion is enough.
    fn of(writes: &[Write]) -> Self {
        if writes.iter().all(Write::is_reservation) { Self::Reservation } else { Self::Completion }
    }
}

/// What [`Store::load`] found.
#[derive(Clone, PartialEq, Debug)]
pub struct Loaded {
    /// The store's clock, read before the records were. It means nothing where no key was asked for.
    pub now: Timestamp,
    /// One for each key, in order.
    pub records: Vec<Result<Option<Record>, StoreError>>,
}

/// What [`Store::purge`] did.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Purged {
    /// Records met. Fewer than the limit means that no more are due.
    pub met: u64,
    /// Records deleted.
    pub deleted: u64,
    /// Records that live longer, to be looked at again later.
    pub postponed: u64,
    /// When the last record met was due, which is where the next call goes on.
    pub last: Option<Timestamp>,
}

/// Why a store could not do what it was asked.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The store cannot be reached, or did not answer in time. What was asked may have been done.
    #[error("the store is unavailable")]
    Unavailable,
    /// The store refuses what it was asked, or something that was asked along with it. Nothing was done.
    #[error("the store refuses the statement")]
    Refused,
    /// Another session holds the row of this key. Nothing was done.
    #[error("the record is locked by another session")]
    Locked,
    /// Too much is waiting already. Nothing was done.
    #[error("the store is overloaded")]
    Overloaded,
    /// Another key is stored under the same hash. Nothing was done.
    #[error("another key is stored under the same hash")]
    KeyCollision,
}

/// Why a store could not be opened: one line for the person who starts the service.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The URL names no store.
    #[error("the database URL is invalid: {0}")]
    Url(String),
    /// There is no connection to be had.
    #[error("cannot connect to the database {database}: {reason}")]
    Connect {
        /// Where, without credentials.
        database: String,
        /// Why not.
        reason: String,
    },
    /// It takes no writes.
    #[error("the database {0} is read-only")]
    ReadOnly(String),
    /// Its tables are missing or older than this program.
    #[error("the database {0} is not migrated: run `onceward migrate` on it, or serve with `--migrate`")]
    NotMigrated(String),
    /// Migrating it failed.
    #[error("cannot migrate the database {database}: {reason}")]
    Migrate {
        /// Where, without credentials.
        database: String,
        /// Why not.
        reason: String,
    },
    /// It may forget what it has acknowledged.
    #[error(
        "the database {database} may lose acknowledged writes: {setting}; `--allow-unsafe-durability` accepts that"
    )]
    Unsafe {
        /// Where, without credentials.
        database: String,
        /// The setting at fault.
        setting: String,
    },
    /// A setting that the store relies on is not in force.
    #[error("the database {database} has an unsuitable setting: {setting}")]
    Setting {
        /// Where, without credentials.
        database: String,
        /// The setting at fault, and what is wanted.
        setting: String,
    },
}

/// How to open a store.
#[derive(Clone, Debug)]
pub struct OpenOptions {
    /// How many connections serve calls.
    pub connections: usize,
    /// Whether to bring the tables up to date first.
    pub migrate: bool,
    /// Whether a database that may lose acknowledged writes is accepted.
    pub allow_unsafe_durability: bool,
    /// Where the settings of a Postgres session are made.
    pub settings: postgres::settings::Scope,
}

/// Opens the store that a URL names: `postgres://…` or `sqlite:…`.
///
/// # Cancel safety
///
/// Nothing is kept of a dropped call, but a migration that has begun may have been applied.
pub async fn open(url: &DatabaseUrl, options: &OpenOptions) -> Result<Arc<dyn Store>, OpenError> {
    Ok(match url {
        DatabaseUrl::Postgres(url) => Arc::new(postgres::Postgres::open(url, options).await?),
        DatabaseUrl::Sqlite(url) => Arc::new(sqlite::Sqlite::open(url, options).await?),
    })
}

/// Brings the tables of a database up to date. Safe from several processes at once.
///
/// # Cancel safety
///
/// A migration that has begun may have been applied; none is left half done.
pub async fn migrate(url: &DatabaseUrl) -> Result<(), OpenError> {
    match url {
        DatabaseUrl::Postgres(url) => postgres::migrate(url).await,
        DatabaseUrl::Sqlite(url) => sqlite::migrate(url).await,
    }
}

/// Names a database. Shown without its credentials.
#[derive(Clone)]
pub enum DatabaseUrl {
    /// A Postgres.
    Postgres(postgres::Url),
    /// An SQLite file, or memory.
    Sqlite(sqlite::Url),
}

impl DatabaseUrl {
    /// Whether the database is embedded in this process.
    pub fn is_embedded(&self) -> bool {
        matches!(self, Self::Sqlite(_))
    }
}

impl std::str::FromStr for DatabaseUrl {
    type Err = OpenError;

    fn from_str(text: &str) -> Result<Self, OpenError> {
        match text.split_once(':').map(|(scheme, _)| scheme) {
            Some("postgres" | "postgresql") => postgres::Url::parse(text).map(Self::Postgres),
            Some("sqlite") => sqlite::Url::parse(text).map(Self::Sqlite),
            _ => Err(OpenError::Url("it must start with `postgres://` or `sqlite:`".into())),
        }
    }
}

impl fmt::Display for DatabaseUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Postgres(url) => url.fmt(f),
            Self::Sqlite(url) => url.fmt(f),
        }
    }
}

impl fmt::Debug for DatabaseUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DatabaseUrl({self})")
    }
}
