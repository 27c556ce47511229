//! Runs a command beside a private Postgres, which it names in `ONCEWARD_TEST_POSTGRES`, and stops it afterwards.

use std::process::ExitCode;

use onceward_testing::{Postgres, SERVER_VARIABLE};
use tokio::{process::Command, signal::ctrl_c};

#[tokio::main]
async fn main() -> Result<ExitCode, std::io::Error> {
    let mut arguments = std::env::args_os().skip(1);
    let Some(program) = arguments.next() else {
        eprintln!("usage: with-postgres COMMAND [ARGUMENT ...]");
        return Ok(ExitCode::FAILURE);
    };
    let postgres = Postgres::start(&[])?;
    let mut child = Command::new(program).args(arguments).env(SERVER_VARIABLE, postgres.server()).spawn()?;
    let status = loop {
        tokio::select! {
            status = child.wait() => break status?,
            // The command has got it too, and decides.
            _ = ctrl_c() => {}
        }
    };
    Ok(ExitCode::from(status.code().and_then(|code| code.try_into().ok()).unwrap_or(1)))
}
