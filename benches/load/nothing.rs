//! The service on a store that does nothing: what all but the database costs.

use std::{net::SocketAddr, sync::Arc};

use onceward::{
    config::Serve,
    server::{self, Listeners},
    telemetry,
};

use crate::{Failure, support::Nothing};

pub async fn serve(config: &Serve, listen: SocketAddr, admin_listen: SocketAddr) -> Result<(), Failure> {
    telemetry::start_logging();
    let options = config.validate()?;
    let listeners = Listeners::bind(listen, admin_listen).await?;
    server::run(listeners, Arc::new(Nothing), options, std::future::pending()).await?;
    Ok(())
}
