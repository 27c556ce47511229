//! The command line and the environment, as one validated struct for each verb.
//!
//! The doc of each field is its `--help`. Every flag is an environment variable too: `--lock-ttl-max` is
//! `ONCEWARD_LOCK_TTL_MAX`.

#[cfg(test)]
mod tests;

use std::{fmt, net::SocketAddr, time::Duration};

use clap::{ArgAction, Args, Parser, Subcommand, builder::FalseyValueParser};

use crate::{
    grpc::{Bounds, Limits},
    server::ServeOptions,
    store::{DatabaseUrl, OpenError, OpenOptions, postgres::settings::Scope},
    sweeper::SweepOptions,
    waiters::WaiterLimits,
};

/// No duration of the configuration is longer: ten years.
const DURATION_MAX: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// Onceward makes any operation safe to retry.
#[derive(Parser, Debug)]
#[command(
    name = "onceward",
    version,
    args_conflicts_with_subcommands = true,
    args_override_self = true,
    max_term_width = 100
)]
pub struct Command {
    /// What to do; serve if nothing is said.
    #[command(subcommand)]
    pub verb: Option<Verb>,
    /// How to serve.
    #[command(flatten)]
    pub serve: Serve,
}

/// What to do.
#[derive(Subcommand, Debug)]
pub enum Verb {
    /// Serve; what runs without a verb.
    Serve(Box<Serve>),
    /// Bring the tables of the database up to date, and exit.
    Migrate(Migrate),
    /// Delete the expired records of one pass, and exit.
    Sweep(Sweep),
}

/// How to serve.
#[derive(Args, Debug)]
pub struct Serve {
    /// Where to listen for RPCs.
    #[arg(long, env = "ONCEWARD_LISTEN", value_name = "ADDRESS", default_value = "127.0.0.1:50051")]
    pub listen: SocketAddr,

    /// Where to listen for operators: /healthz, /readyz and /metrics over HTTP.
    #[arg(long, env = "ONCEWARD_ADMIN_LISTEN", value_name = "ADDRESS", default_value = "127.0.0.1:9090")]
    pub admin_listen: SocketAddr,

    /// Listen beyond loopback although anybody there can then read and finish every key: there are no credentials yet.
    #[arg(long, env = "ONCEWARD_INSECURE", action = ArgAction::SetTrue, value_parser = FalseyValueParser::new())]
    pub insecure: bool,

    /// Where records live, and how to reach it.
    #[command(flatten)]
    pub database: Database,

    /// How many connections to a Postgres serve calls; five more are for locked rows, sweeping and probing. SQLite has
    /// three in all.
    #[arg(long, env = "ONCEWARD_DATABASE_POOL_SIZE", value_name = "COUNT", default_value_t = 16,
          value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub database_pool_size: u16,

    /// How many threads serve calls; half of the processors if nothing is said, since Postgres often is beside it and the
    /// threads of a service that is little busy wake each other for nothing.
    #[arg(long, env = "ONCEWARD_WORKER_THREADS", value_name = "COUNT",
          value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub worker_threads: Option<u16>,

    /// How many batches of writes, and how many of loads, are in flight at once. With two, the database works on one while
    /// the next is gathered; more make smaller batches, and hide the way to a database that is far.
    #[arg(long, env = "ONCEWARD_BATCHES_IN_FLIGHT", value_name = "COUNT", default_value_t = 2,
          value_parser = clap::value_parser!(u16).range(1..=100))]
    pub batches_in_flight: u16,

    /// How many bytes of finished records are kept in memory, so that duplicates of them cost the database nothing; 0 keeps
    /// none.
    #[arg(long, env = "ONCEWARD_CACHE_BYTES", value_name = "BYTES", default_value_t = 64 << 20)]
    pub cache_bytes: u64,

    /// Bring the tables up to date before serving; on by default with SQLite, off with Postgres.
    #[arg(long, env = "ONCEWARD_MIGRATE", value_name = "BOOL", num_args = 0..=1, require_equals = true,
          default_missing_value = "true")]
    pub migrate: Option<bool>,

    /// Where the settings of a Postgres session are made: on each connection, or, behind a pooler in transaction mode, on
    /// the role (`onceward migrate --database-settings role` prints how).
    #[arg(long, env = "ONCEWARD_DATABASE_SETTINGS", value_enum, default_value_t)]
    pub database_settings: Scope,

    /// From the end of one sweep to the start of the next.
    #[arg(long, env = "ONCEWARD_SWEEP_INTERVAL", value_name = "DURATION", default_value = "30s", value_parser = duration)]
    pub sweep_interval: Duration,

    /// How long after its expiry a record is kept. A step back of the database's clock by less than this is harmless; keep it
    /// above the ten seconds that a stalled statement may take.
    #[arg(long, env = "ONCEWARD_SWEEP_GRACE", value_name = "DURATION", default_value = "10m", value_parser = duration)]
    pub sweep_grace: Duration,

    /// From SIGTERM until new calls are refused. The server says that it is not serving at once, and load balancers need a
    /// few seconds to notice.
    #[arg(long, env = "ONCEWARD_DRAIN_DELAY", value_name = "DURATION", default_value = "0s", value_parser = duration)]
    pub drain_delay: Duration,

    /// From the end of the drain delay until calls that are still in flight are cut.
    #[arg(long, env = "ONCEWARD_DRAIN_TIMEOUT", value_name = "DURATION", default_value = "20s", value_parser = duration)]
    pub drain_timeout: Duration,

    /// The shortest lock that may be asked for.
    #[arg(long, env = "ONCEWARD_LOCK_TTL_MIN", value_name = "DURATION", default_value = "100ms", value_parser = duration)]
    pub lock_ttl_min: Duration,

    /// The lock of a reservation that asks for none.
    #[arg(long, env = "ONCEWARD_LOCK_TTL_DEFAULT", value_name = "DURATION", default_value = "30s", value_parser = duration)]
    pub lock_ttl_default: Duration,

    /// The longest lock that may be asked for.
    #[arg(long, env = "ONCEWARD_LOCK_TTL_MAX", value_name = "DURATION", default_value = "24h", value_parser = duration)]
    pub lock_ttl_max: Duration,

    /// The shortest retention that may be asked for.
    #[arg(long, env = "ONCEWARD_RETENTION_MIN", value_name = "DURATION", default_value = "1s", value_parser = duration)]
    pub retention_min: Duration,

    /// The retention of a reservation that asks for none.
    #[arg(long, env = "ONCEWARD_RETENTION_DEFAULT", value_name = "DURATION", default_value = "24h", value_parser = duration)]
    pub retention_default: Duration,

    /// The longest retention that may be asked for.
    #[arg(long, env = "ONCEWARD_RETENTION_MAX", value_name = "DURATION", default_value = "90d", value_parser = duration)]
    pub retention_max: Duration,

    /// The longest wait that may be asked for.
    #[arg(long, env = "ONCEWARD_WAIT_MAX", value_name = "DURATION", default_value = "60s", value_parser = duration)]
    pub wait_max: Duration,

    /// The longest time after which a caller that found a key held is told to come back.
    #[arg(long, env = "ONCEWARD_RETRY_AFTER_MAX", value_name = "DURATION", default_value = "1s", value_parser = duration)]
    pub retry_after_max: Duration,

    /// How many calls may wait for one key; more are answered at once.
    #[arg(long, env = "ONCEWARD_WAITERS_PER_KEY_MAX", value_name = "COUNT", default_value_t = 1000)]
    pub waiters_per_key_max: usize,

    /// How many calls may wait in all; more are answered at once.
    #[arg(long, env = "ONCEWARD_WAITERS_MAX", value_name = "COUNT", default_value_t = 10_000)]
    pub waiters_max: usize,
}

/// How to bring the tables up to date.
#[derive(Args, Debug)]
pub struct Migrate {
    /// Where records live, and how to reach it.
    #[command(flatten)]
    pub database: Database,

    /// Where the settings of a Postgres session are to be made: with `role`, the statements for it are printed.
    #[arg(long, env = "ONCEWARD_DATABASE_SETTINGS", value_enum, default_value_t)]
    pub database_settings: Scope,
}

/// How to sweep by hand.
#[derive(Args, Debug)]
pub struct Sweep {
    /// Where records live, and how to reach it.
    #[command(flatten)]
    pub database: Database,

    /// How long after its expiry a record is kept.
    #[arg(long, env = "ONCEWARD_SWEEP_GRACE", value_name = "DURATION", default_value = "10m", value_parser = duration)]
    pub sweep_grace: Duration,

    /// Where the settings of a Postgres session are made.
    #[arg(long, env = "ONCEWARD_DATABASE_SETTINGS", value_enum, default_value_t)]
    pub database_settings: Scope,
}

/// Where records live, and how to reach it.
#[derive(Args, Debug)]
pub struct Database {
    /// Where records live: `postgres://user:password@host:port/database`, `sqlite:path` or `sqlite::memory:`.
    #[arg(
        long,
        env = "ONCEWARD_DATABASE_URL",
        value_name = "URL",
        hide_env_values = true,
        default_value = "sqlite:onceward.db"
    )]
    pub database_url: SecretText,

    /// Accept a Postgres with `fsync` or `synchronous_commit` off, which may forget what it has acknowledged.
    #[arg(long, env = "ONCEWARD_ALLOW_UNSAFE_DURABILITY", action = ArgAction::SetTrue,
          value_parser = FalseyValueParser::new())]
    pub allow_unsafe_durability: bool,
}

impl Database {
    /// Reads the URL. It is read here and not by the command line, whose errors repeat what they refuse.
    pub fn url(&self) -> Result<DatabaseUrl, OpenError> {
        self.database_url.0.parse()
    }
}

/// A text that is never shown.
#[derive(Clone)]
pub struct SecretText(String);

impl From<&str> for SecretText {
    fn from(text: &str) -> Self {
        Self(text.into())
    }
}

impl fmt::Debug for SecretText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SecretText(…)")
    }
}

/// Why a configuration is refused.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// Anybody could reach it.
    #[error(
        "{flag} {address} is reachable from other machines and there are no credentials yet: add --insecure to accept that"
    )]
    Insecure {
        /// The flag.
        flag: &'static str,
        /// The address.
        address: SocketAddr,
    },
    /// A minimum, default and maximum are out of order.
    #[error(
        "{flag}-min, -default and -max must be in this order and more than zero, not {min:?}, {default:?} and {max:?}"
    )]
    Bounds {
        /// What the three flags start with.
        flag: &'static str,
        /// The minimum.
        min: Duration,
        /// The default.
        default: Duration,
        /// The maximum.
        max: Duration,
    },
    /// An interval that never passes, or passes all the time.
    #[error("{0} must be more than zero")]
    Zero(&'static str),
}

impl Serve {
    /// Checks what no field can check by itself.
    pub fn validate(&self) -> Result<ServeOptions, ConfigError> {
        for (flag, address) in [("--listen", self.listen), ("--admin-listen", self.admin_listen)] {
            if !self.insecure && !address.ip().is_loopback() {
                return Err(ConfigError::Insecure { flag, address });
            }
        }
        for (flag, duration) in [("--sweep-interval", self.sweep_interval), ("--retry-after-max", self.retry_after_max)]
        {
            if duration.is_zero() {
                return Err(ConfigError::Zero(flag));
            }
        }
        let limits = Limits {
            lock_ttl: bounds("--lock-ttl", self.lock_ttl_min, self.lock_ttl_default, self.lock_ttl_max)?,
            retention: bounds("--retention", self.retention_min, self.retention_default, self.retention_max)?,
            wait_max: self.wait_max,
            retry_after_max: self.retry_after_max,
        };
        Ok(ServeOptions {
            limits,
            waiters: WaiterLimits { per_key: self.waiters_per_key_max, total: self.waiters_max },
            batches_in_flight: self.batches_in_flight.into(),
            cache_bytes: self.cache_bytes,
            sweep: SweepOptions { interval: self.sweep_interval, grace: self.sweep_grace },
            drain_delay: self.drain_delay,
            drain_timeout: self.drain_timeout,
        })
    }

    /// How many threads serve calls.
    pub fn worker_threads(&self) -> usize {
        let half = || std::thread::available_parallelism().map_or(1, |processors| processors.get().div_ceil(2));
        self.worker_threads.map_or_else(half, usize::from)
    }

    /// How to open the store at `url`.
    pub fn open_options(&self, url: &DatabaseUrl) -> OpenOptions {
        OpenOptions {
            connections: self.database_pool_size.into(),
            migrate: self.migrate.unwrap_or(url.is_embedded()),
            allow_unsafe_durability: self.database.allow_unsafe_durability,
            settings: self.database_settings,
        }
    }
}

impl Sweep {
    /// How to open the store.
    pub fn open_options(&self) -> OpenOptions {
        OpenOptions {
            connections: 1,
            migrate: false,
            allow_unsafe_durability: self.database.allow_unsafe_durability,
            settings: self.database_settings,
        }
    }
}

fn bounds(flag: &'static str, min: Duration, default: Duration, max: Duration) -> Result<Bounds, ConfigError> {
    if min.is_zero() || min > default || default > max {
        return Err(ConfigError::Bounds { flag, min, default, max });
    }
    Ok(Bounds { min, default, max })
}

/// A duration as people write it: `30s`, `24h`, `1h 30m`.
fn duration(text: &str) -> Result<Duration, String> {
    let duration = humantime::parse_duration(text).map_err(|error| format!("{error}; write it as in 30s or 24h"))?;
    if duration > DURATION_MAX {
        return Err("it must be at most ten years".into());
    }
    Ok(duration)
}
