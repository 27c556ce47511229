//! Servers, databases and short ways to say a request.

use std::{
    path::PathBuf,
    process::Stdio,
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use bytes::Bytes;
use clap::Parser;
use onceward::{
    config::{Command, Serve},
    proto::{
        self, Acquired, CompleteRequest, CompleteResponse, FailRequest, FailResponse, Finished, InDoubt, InProgress,
        Key, LookupRequest, Record, RenewRequest, RenewResponse, ReserveRequest, ResolveRequest,
        idempotency_service_client::IdempotencyServiceClient, reserve_response::Outcome, resolve_request::Resolution,
    },
    server::{self, Listeners, ServeError, ServeOptions},
    store,
};
use sqlx::{Connection, PgConnection, Postgres, Transaction};
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    process::{Child, ChildStderr},
    sync::oneshot,
    task::JoinHandle,
    time::{Instant, sleep, timeout},
};
use tonic::{Code, Request, Status, transport::Channel};
use tonic_types::{ErrorDetails, StatusExt};

pub use onceward_testing::incompressible;

pub const MICROSECOND: Duration = Duration::from_micros(1);
pub const SECOND: Duration = Duration::from_secs(1);

/// Which store a test runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    Sqlite,
    Postgres,
}

/// A fresh database.
pub struct Database {
    pub url: String,
    pub folder: tempfile::TempDir,
}

impl Backend {
    pub async fn database(self) -> Database {
        let folder = tempfile::tempdir().unwrap();
        let url = match self {
            Self::Sqlite => format!("sqlite:{}", folder.path().join("onceward.db").display()),
            Self::Postgres => {
                onceward_testing::database(|url| async move { store::migrate(&url.parse().unwrap()).await.unwrap() })
                    .await
            }
        };
        Database { url, folder }
    }

    /// A server on a fresh database, which allows locks and retentions of a microsecond.
    pub async fn server(self) -> (Server, Database) {
        let database = self.database().await;
        (Server::start(&database.url, &[]).await, database)
    }

    /// A client of such a server; what else there is must live as long.
    pub async fn client(self) -> (Client, (Server, Database)) {
        let (server, database) = self.server().await;
        (server.client().await, (server, database))
    }
}

impl Backend {
    /// A client of the program itself, on a fresh database; what else there is must live as long.
    pub async fn program(self, flags: &[&str]) -> (Client, (Program, Database)) {
        let database = self.database().await;
        let program = Program::lenient(&database.url, flags).await;
        (program.client().await, (program, database))
    }
}

/// A server in this process.
pub struct Server {
    pub address: String,
    pub admin: String,
    stop: Option<oneshot::Sender<()>>,
    task: JoinHandle<Result<(), ServeError>>,
}

impl Server {
    /// Starts with these flags on top of the tests' own.
    pub async fn start(url: &str, flags: &[&str]) -> Self {
        let tests = ["onceward", "--database-url", url, "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"];
        let bounds = ["--lock-ttl-min", "1us", "--retention-min", "1us"];
        // The last of a flag counts.
        let arguments: Vec<_> = tests.into_iter().chain(bounds).chain(flags.iter().copied()).collect();
        let config = Command::try_parse_from(arguments).unwrap().serve;
        Self::with(&config, config.validate().unwrap()).await
    }

    pub async fn with(config: &Serve, options: ServeOptions) -> Self {
        let listeners = Listeners::bind(config.listen, config.admin_listen).await.unwrap();
        let url = config.database.url().unwrap();
        let store = store::open(&url, &config.open_options(&url)).await.unwrap();
        let [address, admin] =
            [&listeners.calls, &listeners.admin].map(|listener| listener.local_addr().unwrap().to_string());
        let (stop, stopped) = oneshot::channel();
        let task = tokio::spawn(server::run(listeners, store, options, async {
            let _ = stopped.await;
        }));
        Self { address, admin, stop: Some(stop), task }
    }

    pub async fn channel(&self) -> Channel {
        Channel::from_shared(format!("http://{}", self.address)).unwrap().connect().await.unwrap()
    }

    pub async fn client(&self) -> Client {
        Client(IdempotencyServiceClient::new(self.channel().await))
    }

    /// Begins the drain.
    pub fn stop(&mut self) {
        let _ = self.stop.take().unwrap().send(());
    }

    /// The end of the drain.
    pub async fn stopped(self) -> Result<(), ServeError> {
        self.task.await.unwrap()
    }

    /// What the admin listener answers.
    pub async fn get(&self, path: &str) -> (u16, String) {
        get(&self.admin, path).await
    }
}

/// A GET over plain HTTP.
pub async fn get(address: &str, path: &str) -> (u16, String) {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.split(' ').nth(1).unwrap().parse().unwrap(), body.into())
}

/// The program itself, killed on drop.
pub struct Program {
    pub child: Child,
    pub address: String,
    pub admin: String,
    /// Kept open: the program goes on logging.
    _log: BufReader<ChildStderr>,
}

impl Program {
    pub fn command(arguments: &[&str]) -> tokio::process::Command {
        let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_onceward"));
        command.args(arguments).env_remove("RUST_LOG").stdin(Stdio::null()).kill_on_drop(true);
        command
    }

    /// Starts it on free ports and waits until it serves.
    pub async fn serve(arguments: &[&str]) -> Self {
        let ports = ["--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"];
        let mut child =
            Self::command(&[&ports, arguments].concat()).stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let mut log = BufReader::new(child.stderr.take().unwrap());
        let mut line = String::new();
        loop {
            line.clear();
            assert_ne!(log.read_line(&mut line).await.unwrap(), 0, "it ended before it served");
            if line.contains(" serving ") {
                break;
            }
        }
        let field = |name: &str| {
            let after = line.split(&format!(" {name}=")).nth(1).unwrap();
            after.split_whitespace().next().unwrap().to_owned()
        };
        Self { child, address: field("listen"), admin: field("admin_listen"), _log: log }
    }

    /// Starts it with locks and retentions of a microsecond allowed.
    pub async fn lenient(url: &str, flags: &[&str]) -> Self {
        let tests = ["--database-url", url, "--lock-ttl-min", "1us", "--retention-min", "1us"];
        Self::serve(&[&tests, flags].concat()).await
    }

    /// Until this many Reserves wait for a key.
    pub async fn waiters(&self, count: usize) {
        let metric = format!("\nonceward_waiters {count}\n");
        eventually("they wait", async || get(&self.admin, "/metrics").await.1.contains(&metric)).await;
    }

    pub async fn client(&self) -> Client {
        Client::connect(&self.address).await
    }

    pub fn signal(&self, name: &str) {
        let pid = self.child.id().unwrap().to_string();
        assert!(std::process::Command::new("kill").args([&format!("-{name}"), &pid]).status().unwrap().success());
    }
}

/// The RPCs, each as one line.
#[derive(Clone)]
pub struct Client(pub IdempotencyServiceClient<Channel>);

impl Client {
    pub async fn connect(address: &str) -> Self {
        let channel = Channel::from_shared(format!("http://{address}")).unwrap().connect().await.unwrap();
        Self(IdempotencyServiceClient::new(channel))
    }

    pub async fn reserve(&self, request: ReserveRequest) -> Result<Outcome, Status> {
        Ok(self.0.clone().reserve(request).await?.into_inner().outcome.unwrap())
    }

    pub async fn acquire(&self, request: ReserveRequest) -> Acquired {
        match self.reserve(request).await.unwrap() {
            Outcome::Acquired(acquired) => acquired,
            other => panic!("expected to acquire, got {other:?}"),
        }
    }

    pub async fn complete(&self, key: &Key, token: &str, body: &[u8]) -> Result<CompleteResponse, Status> {
        self.complete_with(complete(key, token, body)).await
    }

    pub async fn complete_with(&self, request: CompleteRequest) -> Result<CompleteResponse, Status> {
        Ok(self.0.clone().complete(request).await?.into_inner())
    }

    pub async fn fail(&self, key: &Key, token: &str, retryable: bool) -> Result<FailResponse, Status> {
        let request = FailRequest { key: Some(key.clone()), token: token.into(), retryable, ..Default::default() };
        self.fail_with(request).await
    }

    pub async fn fail_with(&self, request: FailRequest) -> Result<FailResponse, Status> {
        Ok(self.0.clone().fail(request).await?.into_inner())
    }

    pub async fn renew(&self, key: &Key, token: &str) -> Result<RenewResponse, Status> {
        self.renew_with(renew(key, token)).await
    }

    pub async fn renew_with(&self, request: RenewRequest) -> Result<RenewResponse, Status> {
        Ok(self.0.clone().renew(request).await?.into_inner())
    }

    pub async fn lookup(&self, key: &Key) -> Result<Record, Status> {
        let request = LookupRequest { key: Some(key.clone()) };
        Ok(self.0.clone().lookup(request).await?.into_inner().record.unwrap())
    }

    pub async fn resolve(&self, key: &Key, fence: i64, resolution: Resolution, force: bool) -> Result<Record, Status> {
        let request =
            ResolveRequest { key: Some(key.clone()), fence, force: Some(force), resolution: Some(resolution) };
        Ok(self.0.clone().resolve(request).await?.into_inner().record.unwrap())
    }

    /// A Reserve with a deadline of its own.
    pub async fn reserve_within(&self, request: ReserveRequest, deadline: Duration) -> Result<Outcome, Status> {
        let mut request = Request::new(request);
        request.set_timeout(deadline);
        Ok(self.0.clone().reserve(request).await?.into_inner().outcome.unwrap())
    }
}

/// A key of its own in this process.
pub fn fresh_key() -> Key {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    key(&format!("key-{}", COUNT.fetch_add(1, Ordering::Relaxed)))
}

pub fn key(value: &str) -> Key {
    Key { namespace: "payments.charge".into(), subject: "ann".into(), value: value.into() }
}

pub fn reserve(key: &Key, token: &str) -> ReserveRequest {
    ReserveRequest { key: Some(key.clone()), token: token.into(), ..Default::default() }
}

/// A Reserve whose lock is over at once.
pub fn lapsed(key: &Key, token: &str) -> ReserveRequest {
    ReserveRequest { lock_ttl: Some(duration(MICROSECOND)), ..reserve(key, token) }
}

pub fn hold(request: ReserveRequest) -> ReserveRequest {
    ReserveRequest { on_expiry: Some(proto::OnExpiry::Hold.into()), ..request }
}

pub fn waiting(request: ReserveRequest, wait: Duration) -> ReserveRequest {
    ReserveRequest { wait: Some(duration(wait)), ..request }
}

pub fn complete(key: &Key, token: &str, body: &[u8]) -> CompleteRequest {
    CompleteRequest { key: Some(key.clone()), token: token.into(), result: Some(result(body)), retention: None }
}

pub fn renew(key: &Key, token: &str) -> RenewRequest {
    RenewRequest { key: Some(key.clone()), token: token.into(), ..Default::default() }
}

pub fn result(body: &[u8]) -> proto::Result {
    proto::Result { code: 200, metadata: Vec::new(), body: Bytes::copy_from_slice(body) }
}

pub fn resolve_complete(body: &[u8]) -> Resolution {
    Resolution::Complete(proto::ResolveComplete { result: Some(result(body)) })
}

pub fn resolve_fail(retryable: bool) -> Resolution {
    Resolution::Fail(proto::ResolveFail { retryable, result: None })
}

pub fn duration(duration: Duration) -> prost_types::Duration {
    duration.try_into().unwrap()
}

/// Repeats a call for as long as it is unavailable, as every client does: on a slow disk a rival's commit may take longer
/// than the lock timeout.
pub async fn insist<T, F: Future<Output = Result<T, Status>>>(call: impl Fn() -> F) -> Result<T, Status> {
    let until = Instant::now() + 30 * SECOND;
    loop {
        match call().await {
            Err(status) if status.code() == Code::Unavailable && Instant::now() < until => {
                sleep(Duration::from_millis(50)).await;
            }
            answer => return answer,
        }
    }
}

/// Checks an error whole: its code, its reason and its domain; gives its details.
#[track_caller]
pub fn refused<T: std::fmt::Debug>(result: Result<T, Status>, code: Code, reason: &str) -> ErrorDetails {
    let status = result.expect_err(reason);
    let details = status.get_error_details();
    let info = details.error_info().unwrap_or_else(|| panic!("{status:?} has no reason"));
    assert_eq!((status.code(), info.reason.as_str(), info.domain.as_str()), (code, reason, "onceward"));
    let retry = matches!(code, Code::Unavailable | Code::ResourceExhausted);
    assert_eq!(details.retry_info().is_some_and(|retry| retry.retry_delay.is_some()), retry, "{status:?}");
    details
}

/// Checks that exactly these fields are refused.
#[track_caller]
pub fn invalid<T: std::fmt::Debug>(result: Result<T, Status>, fields: &[&str]) {
    let details = refused(result, Code::InvalidArgument, "INVALID_REQUEST");
    let violations = &details.bad_request().expect("it names fields").field_violations;
    let named: Vec<_> = violations.iter().map(|violation| violation.field.as_str()).collect();
    assert_eq!(named, fields);
}

pub fn completed(outcome: Result<Outcome, Status>) -> Finished {
    match outcome.unwrap() {
        Outcome::Completed(finished) => finished,
        other => panic!("expected a completed key, got {other:?}"),
    }
}

pub fn failed(outcome: Result<Outcome, Status>) -> Finished {
    match outcome.unwrap() {
        Outcome::Failed(finished) => finished,
        other => panic!("expected a failed key, got {other:?}"),
    }
}

pub fn in_progress(outcome: Result<Outcome, Status>) -> InProgress {
    match outcome.unwrap() {
        Outcome::InProgress(held) => held,
        other => panic!("expected a key in progress, got {other:?}"),
    }
}

pub fn in_doubt(outcome: Result<Outcome, Status>) -> InDoubt {
    match outcome.unwrap() {
        Outcome::InDoubt(doubt) => doubt,
        other => panic!("expected a key in doubt, got {other:?}"),
    }
}

pub fn body(finished: Finished) -> Bytes {
    finished.result.unwrap().body
}

/// Asks until it is so; a test that waits for longer than half a minute has failed.
pub async fn eventually<F: Future<Output = bool>>(what: &str, mut is_so: impl FnMut() -> F) {
    let asked = timeout(Duration::from_secs(30), async {
        while !is_so().await {
            sleep(Duration::from_millis(10)).await;
        }
    });
    assert!(asked.await.is_ok(), "not within half a minute: {what}");
}

/// How long a future takes.
pub async fn timed<T>(future: impl Future<Output = T>) -> (T, Duration) {
    let began = Instant::now();
    let value = future.await;
    (value, began.elapsed())
}

pub fn sqlite_path(database: &Database) -> PathBuf {
    database.folder.path().join("onceward.db")
}

/// Keeps everybody else from writing, until the transaction ends.
pub async fn lock_table(connection: &mut PgConnection) -> Transaction<'_, Postgres> {
    let mut transaction = connection.begin().await.unwrap();
    sqlx::raw_sql("LOCK TABLE onceward_record IN SHARE MODE").execute(&mut *transaction).await.unwrap();
    transaction
}

/// Holds the row of one key, until the transaction ends.
pub async fn lock_record<'c>(connection: &'c mut PgConnection, key: &Key) -> Transaction<'c, Postgres> {
    let mut transaction = connection.begin().await.unwrap();
    let locked = sqlx::query("UPDATE onceward_record SET owner = owner WHERE value = $1")
        .bind(&key.value)
        .execute(&mut *transaction)
        .await
        .unwrap();
    assert_eq!(locked.rows_affected(), 1);
    transaction
}
