//! [`run`]: the wiring of everything, and the order in which it drains.
//!
//! It owns nothing global: listeners, store and the signal to stop come from outside, so a test runs as many servers as it
//! likes. Every task is owned here and joined; one that ends early stops the server.

use std::{future::Future, io, net::SocketAddr, sync::Arc, time::Duration};

use tokio::{
    net::TcpListener,
    runtime::{Builder, Runtime},
    sync::watch,
    task::{JoinError, JoinSet},
    time::{Instant, sleep, timeout, timeout_at},
};
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;
use tracing::{info, warn};

use crate::{
    admin,
    engine::Engine,
    grpc::{
        Limits, Service,
        calls::{Calls, Gate},
    },
    health,
    listener::{Connections, Incoming},
    proto::{self, idempotency_service_server::IdempotencyServiceServer},
    store::{Store, cached::Cached, grouped::Grouped},
    sweeper::{self, SweepOptions},
    telemetry,
    waiters::{WaiterLimits, Waiters},
};

/// How many calls one connection may have under way; those that wait count too, and must not keep a Complete out.
const STREAMS_MAX: u32 = 8192;
/// How much one connection may have sent that no call has read yet. HTTP/2 servers end a connection for too many small
/// frames that wait, and our library allows one for each 512 bytes of this: here, one for each call.
const CONNECTION_WINDOW_BYTES: u32 = STREAMS_MAX * 512;
/// How often a silent peer is asked whether it is still there.
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(20);
/// How long its answer may take.
const KEEPALIVE_TIMEOUT: Duration = Duration::from_secs(10);
/// How long connections get to close once their calls are answered.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// Where the server listens.
pub struct Listeners {
    /// For RPCs.
    pub calls: TcpListener,
    /// For operators: health and metrics over HTTP.
    pub admin: TcpListener,
}

impl Listeners {
    /// Listens on these addresses; port 0 takes a free one.
    ///
    /// # Cancel safety
    ///
    /// Dropped, nothing listens.
    pub async fn bind(calls: SocketAddr, admin: SocketAddr) -> Result<Self, ServeError> {
        Ok(Self { calls: bind(calls).await?, admin: bind(admin).await? })
    }
}

/// How to serve.
#[derive(Clone, Copy, Debug)]
pub struct ServeOptions {
    /// What requests may ask for.
    pub limits: Limits,
    /// How many may wait.
    pub waiters: WaiterLimits,
    /// How many batches of writes, and of loads, the store works on at once.
    pub batches_in_flight: usize,
    /// How much memory finished records may take.
    pub cache_bytes: u64,
    /// When to sweep, and what.
    pub sweep: SweepOptions,
    /// From the signal to stop until new calls are refused.
    pub drain_delay: Duration,
    /// From then until what is left is cut.
    pub drain_timeout: Duration,
}

/// Why the server cannot start or stopped by itself.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// An address cannot be listened on.
    #[error("cannot listen on {address}: {reason}")]
    Bind {
        /// The address.
        address: SocketAddr,
        /// Why not.
        reason: io::Error,
    },
    /// A part of the server cannot be set up.
    #[error("cannot set up {part}: {reason}")]
    Setup {
        /// The part.
        part: &'static str,
        /// Why not.
        reason: String,
    },
    /// A task that runs as long as the server ended before it.
    #[error("the {0} ended early")]
    TaskEnded(&'static str),
}

/// A runtime with so many threads, to run a server on.
///
/// A single thread runs its tasks strictly in turn. So the answers of a batch go out together, where several threads would
/// make a system call for each (a task that is woken goes first, and every answer wakes the connection).
pub fn runtime(threads: usize) -> io::Result<Runtime> {
    let mut runtime = if threads == 1 { Builder::new_current_thread() } else { Builder::new_multi_thread() };
    runtime.worker_threads(threads).enable_all().build()
}

/// Serves `store` on `listeners` until `shutdown`, then drains and closes the store.
///
/// # Cancel safety
///
/// Dropped, everything stops at once: calls in flight get no answer, and what they have handed to the store goes on.
pub async fn run(
    listeners: Listeners,
    store: Arc<dyn Store>,
    options: ServeOptions,
    shutdown: impl Future<Output = ()>,
) -> Result<(), ServeError> {
    let mut server = Running::start(listeners, store, options).await?;
    let ended = tokio::select! {
        () = shutdown => None,
        ended = server.tasks.join_next() => ended,
    };
    let result = match ended {
        None => Ok(()),
        Some(Ok(name)) => Err(ServeError::TaskEnded(name)),
        Some(Err(error)) => Err(task_failed(&error)),
    };
    server.drain(options).await;
    result
}

/// A server that runs, as the parts that its drain goes through in order.
struct Running {
    /// Each gives its name.
    tasks: JoinSet<&'static str>,
    serving: CancellationToken,
    gate: Gate,
    waiters: Waiters,
    goaway: CancellationToken,
    connections: Connections,
    background: CancellationToken,
    store: Arc<dyn Store>,
}

impl Running {
    async fn start(listeners: Listeners, store: Arc<dyn Store>, options: ServeOptions) -> Result<Self, ServeError> {
        let recorder = telemetry::recorder().map_err(|error| setup("metrics")(error.to_string()))?;
        let store =
            Arc::new(Cached::new(Arc::new(Grouped::new(store, options.batches_in_flight)), options.cache_bytes));
        let mut server = Self {
            tasks: JoinSet::new(),
            serving: CancellationToken::new(),
            gate: Gate::default(),
            waiters: Waiters::new(options.waiters),
            goaway: CancellationToken::new(),
            connections: Connections::default(),
            background: CancellationToken::new(),
            store,
        };
        let (health_reporter, health_service) = tonic_health::server::health_reporter();
        let (ready, readiness) = watch::channel(true);
        health::report(&health_reporter, &ready, true).await;
        let reflection_failed = |error: tonic_reflection::server::Error| setup("reflection")(error.to_string());
        let reflection_v1 = reflection().build_v1().map_err(reflection_failed)?;
        // What older tools still speak.
        let reflection_v1alpha = reflection().build_v1alpha().map_err(reflection_failed)?;

        server.spawn(
            "health check",
            health::follow(server.store.clone(), health_reporter, ready, server.serving.clone()),
        );
        let poll = server.waiters.clone();
        let (store, background) = (server.store.clone(), server.background.clone());
        server.spawn("waiters' poll", async move { poll.poll(store, background).await });
        server.spawn("sweeper", sweeper::run(server.store.clone(), options.sweep, server.background.clone()));
        server.spawn("metrics upkeep", telemetry::upkeep(recorder.clone(), server.background.clone()));
        let admin =
            axum::serve(Incoming::new(listeners.admin, server.connections.clone()), admin::routes(readiness, recorder));
        let stopped = server.background.clone();
        server.spawn("admin listener", async move {
            tokio::select! {
                _ = admin => {}
                () = stopped.cancelled() => {}
            }
        });

        let service = Service::new(Engine::new(server.store.clone(), server.waiters.clone()), options.limits);
        let calls = Server::builder()
            .max_concurrent_streams(STREAMS_MAX)
            .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
            // Callers that leave in a burst reset their streams before we have accepted them. By default twenty such end the
            // connection, with everybody else's calls on it.
            .http2_max_pending_accept_reset_streams(Some(STREAMS_MAX as usize))
            .http2_keepalive_interval(Some(KEEPALIVE_INTERVAL))
            .http2_keepalive_timeout(Some(KEEPALIVE_TIMEOUT))
            .add_service(Calls::new(IdempotencyServiceServer::new(service), server.gate.clone()))
            .add_service(health_service)
            .add_service(reflection_v1)
            .add_service(reflection_v1alpha)
            .serve_with_incoming_shutdown(
                Incoming::new(listeners.calls, server.connections.clone()).into_stream(),
                server.goaway.clone().cancelled_owned(),
            );
        server.spawn("listener", async move {
            if let Err(error) = calls.await {
                warn!(%error, "the listener failed");
            }
        });
        Ok(server)
    }

    fn spawn(&mut self, name: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        self.tasks.spawn(async move {
            task.await;
            name
        });
    }

    async fn drain(mut self, options: ServeOptions) {
        info!("not serving any more");
        self.serving.cancel();
        sleep(options.drain_delay).await;

        let deadline = Instant::now() + options.drain_timeout;
        self.gate.close();
        self.waiters.close();
        if timeout_at(deadline, self.gate.drained()).await.is_err() {
            warn!("calls are cut: the drain timeout is over");
        }
        self.goaway.cancel();
        // Idle peers need not answer; there is nothing left to say to them.
        let close_by = deadline.min(Instant::now() + CLOSE_TIMEOUT);
        // The admin listener's connections are among them: probes work until now.
        let _ = timeout_at(close_by, self.connections.closed()).await;
        self.background.cancel();
        self.connections.cut();
        let rest = async {
            self.connections.closed().await;
            while self.tasks.join_next().await.is_some() {}
            self.store.close().await;
        };
        if timeout(CLOSE_TIMEOUT, rest).await.is_err() {
            warn!("the database is left without an answer");
        }
        info!("stopped");
    }
}

async fn bind(address: SocketAddr) -> Result<TcpListener, ServeError> {
    TcpListener::bind(address).await.map_err(|reason| ServeError::Bind { address, reason })
}

/// Server reflection, which answers from the descriptors of everything that is served.
fn reflection() -> tonic_reflection::server::Builder<'static> {
    tonic_reflection::server::Builder::configure()
        .register_encoded_file_descriptor_set(proto::FILE_DESCRIPTOR_SET)
        .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
}

fn setup(part: &'static str) -> impl Fn(String) -> ServeError {
    move |reason| ServeError::Setup { part, reason }
}

fn task_failed(error: &JoinError) -> ServeError {
    warn!(%error, "a background task failed");
    ServeError::TaskEnded("server task")
}
