//! The load generator: a closed loop of callers against the service, or against the SQL that they would write for themselves.
//!
//! ```sh
//! cargo bench --bench load                                # fresh pairs by 64 callers, on a private Postgres
//! cargo bench --bench load -- --side plain-sql            # the same by plain SQL
//! cargo bench --bench load -- --help                      # everything that can be chosen
//! cargo bench --bench load -- compare                     # all sides in turns, with their ratios: `make bench`
//! cargo bench --bench load -- growth                      # an empty table against a full one: `make bench-growth`
//! ```
//!
//! Nothing needs to be running: it starts a Postgres of its own and this build of the service, and ends both.

#![allow(unreachable_pub, clippy::unwrap_used, clippy::indexing_slicing)]

mod by_client;
mod compare;
mod connection;
mod growth;
mod measure;
mod nothing;
mod plain_sql;
mod service;
#[path = "../support/nothing.rs"]
mod support;
mod workload;
mod world;

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use clap::{Args, Parser, Subcommand};

use self::{
    measure::{Report, measure},
    workload::{Side, Workload},
    world::World,
};

/// Calls allocate and free many small things on several threads, which is what it is good at.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

type Failure = Box<dyn std::error::Error + Send + Sync>;

#[derive(Parser)]
#[command(name = "load", args_conflicts_with_subcommands = true, max_term_width = 100)]
struct Command {
    #[command(subcommand)]
    verb: Option<Verb>,
    #[command(flatten)]
    load: Load,
    /// What `cargo bench` passes to every bench.
    #[arg(long, hide = true, global = true)]
    bench: bool,
}

#[derive(Subcommand)]
enum Verb {
    /// Every side in turns, at several numbers of callers, with the ratios between them.
    Compare(compare::Options),
    /// Fresh pairs on an empty table and on a full one, in turns.
    Growth(growth::Options),
    /// Serve from a store that does nothing.
    #[command(hide = true)]
    ServeNothing { listen: SocketAddr, admin_listen: SocketAddr },
}

/// One load on one side.
#[derive(Args)]
struct Load {
    /// Who does the work.
    #[arg(long, value_enum, default_value_t = Side::Unary)]
    side: Side,
    #[command(flatten)]
    workload: Workload,
    /// How many callers, each with one call under way at a time.
    #[arg(long, default_value_t = 64)]
    callers: usize,
    /// How long.
    #[arg(long, default_value = "10s", value_parser = humantime::parse_duration)]
    duration: Duration,
    /// A service that runs already, such as `http://127.0.0.1:50051`; one is started if none is named.
    #[arg(long)]
    endpoint: Option<String>,
    /// A Postgres that runs already; one is started if none is named.
    #[arg(long)]
    database_url: Option<String>,
    /// Print the figures as JSON.
    #[arg(long)]
    json: bool,
}

fn main() -> Result<(), Failure> {
    let command = Command::parse();
    match command.verb {
        None => runtime(command.load.side)?.block_on(load(command.load)),
        Some(Verb::Compare(options)) => compare::run(&options),
        Some(Verb::Growth(options)) => runtime(Side::Unary)?.block_on(growth::run(&options)),
        // As the service does it.
        Some(Verb::ServeNothing { listen, admin_listen }) => {
            let serve = onceward::config::Command::try_parse_from(["onceward"])?.serve;
            onceward::server::runtime(serve.worker_threads())?.block_on(nothing::serve(&serve, listen, admin_listen))
        }
    }
}

/// What is best for each side: plain SQL gains by all processors; callers of the service, by going in turn.
fn runtime(side: Side) -> Result<tokio::runtime::Runtime, Failure> {
    let mut runtime = match side {
        Side::PlainSql => tokio::runtime::Builder::new_multi_thread(),
        _ => tokio::runtime::Builder::new_current_thread(),
    };
    Ok(runtime.enable_all().build()?)
}

async fn load(options: Load) -> Result<(), Failure> {
    let mut world = World::start(options.database_url.as_deref())?;
    let callers = match (options.side, options.endpoint) {
        (Side::PlainSql, _) => plain_sql::callers(&world.database_url, &options.workload, options.callers).await?,
        (Side::Client, Some(endpoint)) => by_client::callers(&endpoint, &options.workload, options.callers).await?,
        (Side::Client, None) => by_client::callers(&world.serve().await?, &options.workload, options.callers).await?,
        (side, Some(endpoint)) => service::callers(side, &endpoint, &options.workload, options.callers).await?,
        (Side::Nothing, None) => {
            let endpoint = world.serve_nothing().await?;
            service::callers(Side::Unary, &endpoint, &options.workload, options.callers).await?
        }
        (side, None) => {
            let endpoint = world.serve().await?;
            service::callers(side, &endpoint, &options.workload, options.callers).await?
        }
    };
    let report = Report::of(&measure(callers, options.duration, true).await?);
    if options.json {
        println!("{}", serde_json::to_string_pretty(&report.json())?);
    } else {
        println!("{report}");
    }
    Ok(())
}

/// Writes figures where a program can read them.
fn write_json(path: &PathBuf, figures: &serde_json::Value) -> Result<(), Failure> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    std::fs::write(path, serde_json::to_string_pretty(figures)?)?;
    eprintln!("figures: {}", path.display());
    Ok(())
}
