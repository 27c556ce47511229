//! Brings the tables of a database up to date, alike for every SQL database.
//!
//! Migrations are embedded and append-only: databases remember what they have run. They expand before they contract,
//! since older programs go on serving while a newer one migrates.

use sqlx::{
    SqlSafeStr,
    migrate::{Migrate, MigrateError, Migration, MigrationType, Migrator},
};

/// Where a database remembers: a table of our own, so that another program in the same database is left alone.
const TABLE: &str = "onceward_migration";
/// What a database has run.
pub(super) const APPLIED: &str = "SELECT version FROM onceward_migration WHERE success";

/// A step from one state of the tables to the next.
pub(super) struct Script {
    /// Counts from 1.
    pub(super) version: i64,
    /// The name of its file.
    pub(super) name: &'static str,
    /// What it runs.
    pub(super) sql: &'static str,
}

/// Runs the scripts that the database has not run yet. Several processes at once take turns.
pub(super) async fn run<C: Migrate>(scripts: &[Script], connection: &mut C) -> Result<(), MigrateError> {
    let migrations = scripts.iter().map(|script| {
        Migration::new(script.version, script.name.into(), MigrationType::Simple, script.sql.into_sql_str(), false)
    });
    let mut migrator = Migrator::with_migrations(migrations.collect());
    migrator.dangerous_set_table_name(TABLE);
    // A newer program may have migrated further: the older one goes on serving during a rollout.
    migrator.set_ignore_missing(true);
    // Not `run`: its future is not Send wherever a caller spawns it (rust-lang/rust#100013).
    migrator.run_direct(None, connection, false).await
}

/// Whether a database that has run `applied` has all that this program needs.
pub(super) fn are_complete(scripts: &[Script], applied: &[i64]) -> bool {
    scripts.iter().all(|script| applied.contains(&script.version))
}
