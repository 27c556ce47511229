//! Fresh pairs on an empty table and on a full one, in turns: what the size of the table costs.

use std::{collections::BTreeMap, path::PathBuf, time::Duration};

use clap::Args;
use serde_json::{Value, json};
use sqlx::{Connection, PgConnection};

use crate::{
    Failure,
    measure::{Report, measure},
    service,
    workload::{Keys, Side, Workload},
    world::World,
    write_json,
};

/// How to measure growth.
#[derive(Args)]
pub struct Options {
    /// How many completed records the full table has.
    #[arg(long, default_value_t = 10_000_000)]
    rows: u64,
    /// How long each table has its turn.
    #[arg(long, default_value = "10s", value_parser = humantime::parse_duration)]
    duration: Duration,
    /// How often each has its turn; the median counts.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// How many callers.
    #[arg(long, default_value_t = 256)]
    callers: usize,
    /// Where the figures go as JSON.
    #[arg(long, default_value = "target/growth.json")]
    json: PathBuf,
    #[command(flatten)]
    workload: Workload,
}

const FILL: &str = include_str!("fill.sql");
/// Rows of one filling statement.
const FILL_ROWS: u64 = 500_000;
/// Pairs leave about nine completed rows on a page: fewer than fit, and too many for a new reservation. Inserted as they are
/// in the end, rows would leave room for one on every page, and new ones would be strewn over the whole table.
const FILL_AS_PAIRS_DO: &str = "ALTER TABLE onceward_record SET (fillfactor = 60)";
const FILL_DONE: &str = include_str!("../../migrations/postgres/0002_fillfactor.sql");

pub async fn run(options: &Options) -> Result<(), Failure> {
    let mut world = World::start(None)?;
    let mut endpoints = Vec::new();
    // Each kind of keys has a full table of its own kind, as it would come to be.
    for (name, keys, full) in [
        ("empty_v4", Keys::UuidV4, false),
        ("full_v4", Keys::UuidV4, true),
        ("empty_v7", Keys::UuidV7, false),
        ("full_v7", Keys::UuidV7, true),
    ] {
        let url = world.database(name).await?;
        endpoints.push((name, keys, world.serve_from(&url, &[]).await?, url.clone()));
        if full {
            fill(&url, keys, options.rows).await?;
        }
    }
    let mut rates: BTreeMap<&str, Vec<Value>> = BTreeMap::new();
    for round in 1..=options.rounds {
        for (name, keys, endpoint, url) in &endpoints {
            let workload = Workload { keys: *keys, ..options.workload.clone() };
            let callers = service::callers(Side::Unary, endpoint, &workload, options.callers).await?;
            // Each starts from a fresh checkpoint, so that each pays for its own full-page images.
            let mut connection = PgConnection::connect(url).await?;
            sqlx::query("CHECKPOINT").execute(&mut connection).await?;
            let before = wal_bytes(&mut connection).await?;
            let report = Report::of(&measure(callers, options.duration, false).await?);
            let wal = (wal_bytes(&mut connection).await? - before) / report.operations.max(1) as f64;
            println!("round {round}: {name:>8} {report}   {wal:>5.0} WAL bytes a pair");
            let mut figures = report.json();
            figures["wal_bytes"] = json!(wal);
            rates.entry(name).or_default().push(figures);
        }
    }
    let median = |name: &str| {
        let mut rates: Vec<f64> = rates[name].iter().filter_map(|figures| figures["per_second"].as_f64()).collect();
        rates.sort_by(f64::total_cmp);
        rates[rates.len() / 2]
    };
    let shares = [("v4", "empty_v4", "full_v4"), ("v7", "empty_v7", "full_v7")]
        .map(|(keys, empty, full)| (keys, median(full) / median(empty)));
    for (keys, share) in shares {
        println!("UUID{keys}: with {} rows, {:.0} % of the pairs/s of an empty table", options.rows, 100.0 * share);
    }
    for (name, _, _, url) in endpoints.iter().filter(|(name, ..)| name.starts_with("full")) {
        let mut connection = PgConnection::connect(url).await?;
        let sizes: (i64, i64, i64) = sqlx::query_as(
            "SELECT pg_relation_size('onceward_record'), pg_relation_size('onceward_record_pkey'),
                pg_relation_size('onceward_record_purge_after')",
        )
        .fetch_one(&mut connection)
        .await?;
        let [table, key, purge] = [sizes.0, sizes.1, sizes.2].map(|bytes| bytes as f64 / 1e6);
        println!("{name}: table {table:.0} MB, primary key {key:.0} MB, purge index {purge:.0} MB");
    }
    write_json(
        &options.json,
        &json!({ "rows": options.rows, "shares": shares.map(|(_, share)| share), "turns": rates }),
    )
}

/// Completed records as a day of this service would leave them.
async fn fill(url: &str, keys: Keys, rows: u64) -> Result<(), Failure> {
    let mut connection = PgConnection::connect(url).await?;
    sqlx::raw_sql("SET synchronous_commit = off").execute(&mut connection).await?;
    sqlx::raw_sql(FILL_AS_PAIRS_DO).execute(&mut connection).await?;
    let mut filled = 0;
    while filled < rows {
        let count = FILL_ROWS.min(rows - filled);
        sqlx::query(FILL)
            .bind(count as i64)
            .bind(keys == Keys::UuidV7)
            .bind((rows - filled) as i64)
            .execute(&mut connection)
            .await?;
        filled += count;
        eprint!("\r{url}: {filled} of {rows} rows ");
    }
    eprintln!();
    sqlx::raw_sql(FILL_DONE).execute(&mut connection).await?;
    sqlx::raw_sql("VACUUM ANALYZE onceward_record").execute(&mut connection).await?;
    Ok(())
}

async fn wal_bytes(connection: &mut PgConnection) -> Result<f64, Failure> {
    let bytes = sqlx::query_scalar("SELECT (pg_current_wal_lsn() - '0/0')::float8").fetch_one(connection).await?;
    Ok(bytes)
}
