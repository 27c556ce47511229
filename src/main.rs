//! Parse, run; nothing else.

use std::process::ExitCode;

use clap::Parser;
use onceward::{
    config::{Command, Migrate, Serve, Sweep, Verb},
    server::{self, Listeners},
    store::{
        self, DatabaseUrl,
        postgres::settings::{self, Scope},
    },
    sweeper, telemetry,
};
use tokio::signal::unix::{SignalKind, signal};
use tracing::{info, warn};

/// Calls allocate and free many small things on several threads, which is what it is good at.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

type Failure = Box<dyn std::error::Error>;

fn main() -> ExitCode {
    let command = Command::parse();
    telemetry::start_logging();
    let done = match command.verb {
        None => run(command.serve.worker_threads(), serve(&command.serve)),
        Some(Verb::Serve(options)) => run(options.worker_threads(), serve(&options)),
        Some(Verb::Migrate(options)) => run(1, migrate(&options)),
        Some(Verb::Sweep(options)) => run(1, sweep(&options)),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("onceward: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(threads: usize, work: impl Future<Output = Result<(), Failure>>) -> Result<(), Failure> {
    server::runtime(threads)?.block_on(work)
}

async fn serve(config: &Serve) -> Result<(), Failure> {
    let options = config.validate()?;
    let url = config.database.url()?;
    let mut stop = stop_signals()?;
    let open_options = config.open_options(&url);
    let store = tokio::select! {
        store = store::open(&url, &open_options) => store?,
        () = stop.next() => return Ok(()),
    };
    let listeners = Listeners::bind(config.listen, config.admin_listen).await?;
    info!(
        database = %url,
        listen = %listeners.calls.local_addr()?,
        admin_listen = %listeners.admin.local_addr()?,
        "serving"
    );
    let (drain, draining) = tokio::sync::oneshot::channel::<()>();
    let server = server::run(listeners, store, options, async {
        // Also when the other end is gone.
        let _ = draining.await;
    });
    let signals = async {
        stop.next().await;
        let _ = drain.send(());
        stop.next().await;
    };
    tokio::select! {
        served = server => Ok(served?),
        () = signals => {
            warn!("stopped at once by a second signal");
            Ok(())
        }
    }
}

async fn migrate(config: &Migrate) -> Result<(), Failure> {
    let url = config.database.url()?;
    store::migrate(&url).await?;
    eprintln!("{url} is up to date");
    if let (DatabaseUrl::Postgres(url), Scope::Role) = (&url, config.database_settings) {
        print!("{}", settings::role_statements(settings::role(url)));
    }
    Ok(())
}

async fn sweep(config: &Sweep) -> Result<(), Failure> {
    let store = store::open(&config.database.url()?, &config.open_options()).await?;
    let swept = sweeper::pass(&*store, config.sweep_grace).await;
    store.close().await;
    println!("{} expired records deleted", swept?.deleted);
    Ok(())
}

/// SIGTERM and SIGINT.
struct StopSignals {
    terminate: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
}

fn stop_signals() -> Result<StopSignals, std::io::Error> {
    Ok(StopSignals { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
}

impl StopSignals {
    async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}
