//! Parse, run; nothing else.

use std::process::ExitCode;

use clap::Parser;
use onceward::{
    config::{Command, Migrate, Serve, Sweep, Verb},
    server::{self, Listeners},
    store::{self, DatabaseUrl, postgres::settings},
    sweeper, telemetry,
};
use tokio::signal::unix::{SignalKind, signal};
use tracing::info;

type Failure = Box<dyn std::error::Error>;

#[tokio::main]
async fn main() -> ExitCode {
    let command = Command::parse();
    telemetry::start_logging();
    let done = match command.verb {
        None => serve(&command.serve).await,
        Some(Verb::Serve(options)) => serve(&options).await,
        Some(Verb::Migrate(options)) => migrate(&options).await,
        Some(Verb::Sweep(options)) => sweep(&options).await,
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("onceward: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn serve(config: &Serve) -> Result<(), Failure> {
    let options = config.validate()?;
    let (mut terminate, mut interrupt) = (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let listeners = Listeners::bind(config.listen, config.admin_listen).await?;
    let store = store::open(&config.database.database_url, &config.open_options()).await?;
    info!(
        database = %config.database.database_url,
        listen = %listeners.calls.local_addr()?,
        admin_listen = %listeners.admin.local_addr()?,
        "serving"
    );
    let shutdown = async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    };
    Ok(server::run(listeners, store, options, shutdown).await?)
}

async fn migrate(config: &Migrate) -> Result<(), Failure> {
    let url = &config.database.database_url;
    store::migrate(url).await?;
    println!("{url} is up to date");
    if let DatabaseUrl::Postgres(url) = url {
        let role = settings::role(url);
        println!("\nBehind a pooler in transaction mode, run these once and serve with --database-settings role:\n");
        print!("{}", settings::role_statements(role));
    }
    Ok(())
}

async fn sweep(config: &Sweep) -> Result<(), Failure> {
    let store = store::open(&config.database.database_url, &config.open_options()).await?;
    let swept = sweeper::pass(&*store, config.sweep_grace).await;
    store.close().await;
    println!("{} expired records deleted", swept?.deleted);
    Ok(())
}
