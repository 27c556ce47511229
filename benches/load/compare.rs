//! Every side in turns on one Postgres, several times, so that a busy minute of the machine meets all of them.

use std::{collections::BTreeMap, path::PathBuf, time::Duration};

use clap::Args;
use serde_json::{Value, json};

use crate::{
    Failure, by_client,
    measure::{Report, measure},
    plain_sql, service,
    workload::{Side, Work, Workload},
    world::{World, own_cpu},
    write_json,
};

/// How to compare.
#[derive(Args)]
pub struct Options {
    /// At which numbers of callers.
    #[arg(long, value_delimiter = ',', default_values_t = [1, 16, 64, 256])]
    callers: Vec<usize>,
    /// How long each side runs at a time.
    #[arg(long, default_value = "3s", value_parser = humantime::parse_duration)]
    duration: Duration,
    /// How often each side has its turn; the median counts.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Flags for the service, such as `--batches-in-flight=2`.
    #[arg(long, value_delimiter = ' ', allow_hyphen_values = true)]
    flags: Vec<String>,
    /// Where the figures go as JSON.
    #[arg(long, default_value = "target/bench.json")]
    json: PathBuf,
    #[command(flatten)]
    workload: Workload,
}

/// What has its turn: some work on one side.
type Cell = (Work, Side);

const CELLS: [Cell; 7] = [
    (Work::Pairs, Side::PlainSql),
    (Work::Pairs, Side::Unary),
    (Work::Pairs, Side::Batch),
    (Work::Pairs, Side::Client),
    (Work::Pairs, Side::Nothing),
    (Work::Replays, Side::PlainSql),
    (Work::Replays, Side::Unary),
];

/// One turn: its figures, and the processor time of an operation in microseconds.
#[derive(Clone, Copy)]
struct Turn {
    report: Report,
    service: f64,
    load: f64,
    postgres: f64,
}

/// Each cell's turns, by callers.
type Turns = BTreeMap<usize, Vec<(Cell, Vec<Turn>)>>;

pub fn run(options: &Options) -> Result<(), Failure> {
    let mut world = World::start(None)?;
    let url = world.database_url.clone();
    let flags: Vec<&str> = options.flags.iter().map(String::as_str).filter(|flag| !flag.is_empty()).collect();
    let endpoint = crate::runtime(Side::Unary)?.block_on(world.serve_from(&url, &flags))?;
    let nothing = crate::runtime(Side::Unary)?.block_on(world.serve_nothing())?;
    let mut turns: Turns =
        options.callers.iter().map(|callers| (*callers, CELLS.map(|cell| (cell, Vec::new())).to_vec())).collect();
    let mut memory = 0;
    for round in 1..=options.rounds {
        for (callers, cells) in &mut turns {
            for ((work, side), turns) in cells {
                eprintln!("round {round} of {}: {work:?}, {side:?}, {callers} callers", options.rounds);
                let turn = turn(&world, &endpoint, &nothing, options, (*work, *side), *callers);
                turns.push(crate::runtime(*side)?.block_on(turn)?);
                if (*work, *side, *callers) == (Work::Pairs, Side::Unary, 256) {
                    memory = memory.max(world.memory(0)?.0);
                }
            }
        }
    }
    let medians = turns.into_iter().map(|(callers, cells)| (callers, Medians(cells))).collect::<BTreeMap<_, _>>();
    print(&medians, memory);
    write_json(&options.json, &figures(&medians, memory))
}

async fn turn(
    world: &World,
    endpoint: &str,
    nothing: &str,
    options: &Options,
    (work, side): Cell,
    callers: usize,
) -> Result<Turn, Failure> {
    let workload = Workload { work, ..options.workload.clone() };
    let (service, callers) = match side {
        Side::PlainSql => (0, plain_sql::callers(&world.database_url, &workload, callers).await?),
        Side::Client => (0, by_client::callers(endpoint, &workload, callers).await?),
        Side::Nothing => (1, service::callers(Side::Unary, nothing, &workload, callers).await?),
        side => (0, service::callers(side, endpoint, &workload, callers).await?),
    };
    let cpu = || Ok::<_, Failure>([world.service_cpu(service)?, own_cpu()?, world.postgres_cpu()?]);
    let before = cpu()?;
    let report = Report::of(&measure(callers, options.duration, false).await?);
    let after = cpu()?;
    let cost = |n: usize| after[n].saturating_sub(before[n]).as_secs_f64() * 1e6 / report.operations.max(1) as f64;
    Ok(Turn { report, service: cost(0), load: cost(1), postgres: cost(2) })
}

/// Each cell's turns at one number of callers, read as their medians.
struct Medians(Vec<(Cell, Vec<Turn>)>);

impl Medians {
    fn of(&self, cell: Cell, figure: impl Fn(&Turn) -> f64) -> f64 {
        let turns = self.0.iter().find(|(other, _)| *other == cell).map_or(&[][..], |(_, turns)| turns);
        let mut figures: Vec<f64> = turns.iter().map(figure).collect();
        figures.sort_by(f64::total_cmp);
        figures.get(figures.len() / 2).copied().unwrap_or(f64::NAN)
    }

    fn per_second(&self, work: Work, side: Side) -> f64 {
        self.of((work, side), |turn| turn.report.per_second)
    }

    fn ratio(&self, work: Work, side: Side) -> f64 {
        self.per_second(work, side) / self.per_second(work, Side::PlainSql)
    }

    fn share_of_nothing(&self) -> f64 {
        self.per_second(Work::Pairs, Side::Unary) / self.per_second(Work::Pairs, Side::Nothing)
    }

    fn p50_ratio(&self) -> f64 {
        let p50 = |side| self.of((Work::Pairs, side), |turn| turn.report.p50_ms);
        p50(Side::Unary) / p50(Side::PlainSql)
    }
}

fn print(medians: &BTreeMap<usize, Medians>, memory: u64) {
    use Side::{Batch, Client, Nothing, PlainSql, Unary};
    use Work::{Pairs, Replays};
    println!("\nper second, and against plain SQL by the callers themselves");
    println!(
        "callers │ pairs: plain SQL  service        by Batch       by client      on nothing     │ replays: plain SQL  service        │ p50 of a pair: plain SQL  service"
    );
    for (callers, at) in medians {
        let p50 = |side| at.of((Pairs, side), |turn| turn.report.p50_ms);
        println!(
            "{callers:>7} │ {:>16.0} {:>8.0} {:>4.1}× {:>9.0} {:>4.1}× {:>9.0} {:>4.1}× {:>9.0} {:>3.0} % │ {:>18.0} {:>8.0} {:>4.1}× │ {:>21.2} ms {:>5.2} ms {:>4.2}×",
            at.per_second(Pairs, PlainSql),
            at.per_second(Pairs, Unary),
            at.ratio(Pairs, Unary),
            at.per_second(Pairs, Batch),
            at.ratio(Pairs, Batch),
            at.per_second(Pairs, Client),
            at.ratio(Pairs, Client),
            at.per_second(Pairs, Nothing),
            100.0 * at.share_of_nothing(),
            at.per_second(Replays, PlainSql),
            at.per_second(Replays, Unary),
            at.ratio(Replays, Unary),
            p50(PlainSql),
            p50(Unary),
            at.p50_ratio(),
        );
    }
    println!("\nprocessor time of a pair in µs: service + load + Postgres");
    for (callers, at) in medians {
        let cost = |cell| {
            let of = |figure: fn(&Turn) -> f64| at.of(cell, figure);
            format!("{:>4.0} + {:>3.0} + {:>3.0}", of(|t| t.service), of(|t| t.load), of(|t| t.postgres))
        };
        let [sql, unary, batch, client, nothing] =
            [PlainSql, Unary, Batch, Client, Nothing].map(|side| cost((Pairs, side)));
        println!(
            "{callers:>7} │ plain SQL {sql} │ service {unary} │ by Batch {batch} │ by client {client} │ on nothing {nothing}"
        );
    }
    println!("\nmemory of the service at 256 callers: {:.1} MB", memory as f64 / 1e6);
}

fn figures(medians: &BTreeMap<usize, Medians>, memory: u64) -> Value {
    let at = |callers: usize, medians: &Medians| {
        let cells = medians.0.iter().map(|((work, side), turns)| {
            json!({
                "work": format!("{work:?}"),
                "side": format!("{side:?}"),
                "turns": turns.iter().map(|turn| {
                    let mut figures = turn.report.json();
                    figures["service_cpu_us"] = json!(turn.service);
                    figures["load_cpu_us"] = json!(turn.load);
                    figures["postgres_cpu_us"] = json!(turn.postgres);
                    figures
                }).collect::<Vec<_>>(),
            })
        });
        json!({
            "callers": callers,
            "pairs_ratio": medians.ratio(Work::Pairs, Side::Unary),
            "batch_ratio": medians.ratio(Work::Pairs, Side::Batch),
            "client_ratio": medians.ratio(Work::Pairs, Side::Client),
            "replays_ratio": medians.ratio(Work::Replays, Side::Unary),
            "share_of_nothing": medians.share_of_nothing(),
            "p50_ratio": medians.p50_ratio(),
            "cells": cells.collect::<Vec<_>>(),
        })
    };
    json!({
        "service_memory_bytes_at_256_callers": memory,
        "callers": medians.iter().map(|(callers, medians)| at(*callers, medians)).collect::<Vec<_>>(),
    })
}
