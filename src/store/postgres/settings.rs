//! What the statements rely on: settings of the session, and properties of the database.
//!
//! The settings go with each connection. A pooler in transaction mode forgets them, and hands one session's to another;
//! there they belong on a role of Onceward's own, and serving checks that they are in force.

use std::time::Duration;

use sqlx::{AssertSqlSafe, Connection, PgConnection, Row};
use tokio::time::timeout;

use super::{Lane, Url, one_line};
use crate::store::{OpenError, OpenOptions};

/// Each setting of the session, as Postgres shows it.
///
/// The planner's switches leave only index access and nested loops, for every table size and state of its statistics. The
/// timeouts bound what a call can wait for and what a lost connection can leave behind.
const SETTINGS: [(&str, &str); 12] = [
    ("default_transaction_isolation", "read committed"),
    ("lock_timeout", "100ms"),
    ("statement_timeout", "5s"),
    ("idle_in_transaction_session_timeout", "10s"),
    // Connections are held open between uses.
    ("idle_session_timeout", "0"),
    ("jit", "off"),
    ("enable_seqscan", "off"),
    ("enable_hashjoin", "off"),
    ("enable_mergejoin", "off"),
    ("enable_bitmapscan", "off"),
    ("enable_memoize", "off"),
    ("plan_cache_mode", "force_generic_plan"),
];

/// What was accepted at the start stays in force for the session, whatever becomes of the server's configuration.
const PIN_DURABILITY: &str = "SELECT set_config('synchronous_commit', current_setting('synchronous_commit'), false);";
/// A row that is known to be locked is not worth waiting for.
const SLOW_LANE: &str = "SET lock_timeout = '10ms';";
/// A migration waits for others that migrate and for maintenance of the table, whatever the role is set to. So none may ask
/// for a lock that calls would have to wait behind.
const MIGRATION: &str = "SET lock_timeout = '60s'; SET statement_timeout = 0;";
/// How long a database may take to let us in.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Where the settings of the session are made.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, clap::ValueEnum)]
pub enum Scope {
    /// On each connection.
    #[default]
    Connection,
    /// On the role that Onceward connects as; for a pooler in transaction mode.
    Role,
}

/// The statements that put the settings on a role.
pub fn role_statements(role: &str) -> String {
    let role = role.replace('"', "\"\"");
    SETTINGS.map(|(name, value)| format!("ALTER ROLE \"{role}\" SET {name} = '{value}';\n")).concat()
}

/// The role that a URL connects as.
pub fn role(url: &Url) -> &str {
    url.0.get_username()
}

/// Connects, puts the settings in force, and refuses a database that does not keep its promises.
pub(super) async fn connect(url: &Url, options: &OpenOptions, lane: Lane) -> Result<PgConnection, OpenError> {
    let mut connection = url.connect().await?;
    match options.settings {
        Scope::Connection => {
            let statements = SETTINGS.map(|(name, value)| format!("SET {name} = '{value}';")).concat();
            // Constants only.
            let lane = if lane == Lane::Slow { SLOW_LANE } else { "" };
            let set = sqlx::raw_sql(AssertSqlSafe(statements + PIN_DURABILITY + lane)).execute(&mut connection).await;
            set.map_err(|error| url.connect_error(&error))?;
        }
        Scope::Role => check_settings(url, &mut connection).await?,
    }
    let properties = Properties::of(&mut connection).await.map_err(|error| url.connect_error(&error))?;
    properties.accept(url, options)?;
    Ok(connection)
}

/// Lets the session migrate.
pub(super) async fn give_time(connection: &mut PgConnection) -> Result<(), sqlx::Error> {
    sqlx::raw_sql(MIGRATION).execute(connection).await.map(drop)
}

async fn check_settings(url: &Url, connection: &mut PgConnection) -> Result<(), OpenError> {
    for (name, value) in SETTINGS {
        let found: String = sqlx::query_scalar("SELECT current_setting($1)")
            .bind(name)
            .fetch_one(&mut *connection)
            .await
            .map_err(|error| url.connect_error(&error))?;
        if found != value {
            let setting = format!("{name} is {found}, not {value}; `onceward migrate` prints how to set it");
            return Err(OpenError::Setting { database: url.to_string(), setting });
        }
    }
    Ok(())
}

/// Properties of the database that decide whether it may be served from.
pub(super) struct Properties {
    read_only: bool,
    fsync: String,
    synchronous_commit: String,
    server_encoding: String,
    /// Unknown where there is no table yet.
    privileged: Option<bool>,
}

impl Properties {
    pub(super) async fn of(connection: &mut PgConnection) -> Result<Self, sqlx::Error> {
        let row = sqlx::query(include_str!("check.sql")).fetch_one(connection).await?;
        Ok(Self {
            read_only: row.try_get("read_only")?,
            fsync: row.try_get("fsync")?,
            synchronous_commit: row.try_get("synchronous_commit")?,
            server_encoding: row.try_get("server_encoding")?,
            privileged: row.try_get("privileged")?,
        })
    }

    /// Refuses a database that does not keep its promises.
    pub(super) fn accept(&self, url: &Url, options: &OpenOptions) -> Result<(), OpenError> {
        let database = url.to_string();
        if self.server_encoding != "UTF8" {
            let setting = format!("server_encoding is {}, not UTF8", self.server_encoding);
            return Err(OpenError::Setting { database, setting });
        }
        if self.read_only {
            return Err(OpenError::ReadOnly(database));
        }
        if self.privileged == Some(false) {
            let setting = "the role needs SELECT, INSERT, UPDATE and DELETE on onceward_record".into();
            return Err(OpenError::Setting { database, setting });
        }
        for (name, value) in [("fsync", &self.fsync), ("synchronous_commit", &self.synchronous_commit)] {
            if value == "off" && !options.allow_unsafe_durability {
                return Err(OpenError::Unsafe { database, setting: format!("{name} is off") });
            }
        }
        Ok(())
    }
}

impl Url {
    /// A connection without any settings.
    pub(super) async fn connect(&self) -> Result<PgConnection, OpenError> {
        match timeout(CONNECT_TIMEOUT, PgConnection::connect_with(&self.0)).await {
            Ok(connected) => connected.map_err(|error| self.connect_error(&error)),
            Err(_) => Err(OpenError::Connect { database: self.to_string(), reason: "it does not answer".into() }),
        }
    }

    pub(super) fn connect_error(&self, error: &sqlx::Error) -> OpenError {
        OpenError::Connect { database: self.to_string(), reason: one_line(error) }
    }
}
