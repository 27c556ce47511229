//! Servers, and short ways to say what is wanted.

use std::{future::Future, time::Duration};

use onceward_client::{
    Client, ClientBuilder, Error, Guard, Key, Reservation, Reserve, ledger::Ledger, testing::Server,
};
use sqlx::postgres::PgPoolOptions;
use tokio::time::{Instant, sleep, timeout};

use crate::proxy::Proxy;

pub const MILLISECOND: Duration = Duration::from_millis(1);
pub const SECOND: Duration = Duration::from_secs(1);

/// A server with records in memory, a proxy before it, and a client that goes through the proxy.
pub struct World {
    pub server: Server,
    pub proxy: Proxy,
    pub client: Client,
}

pub async fn world() -> World {
    world_of(|builder| builder).await
}

pub async fn world_of(configure: impl FnOnce(ClientBuilder) -> ClientBuilder) -> World {
    let server = server();
    let proxy = Proxy::start(server.address()).await;
    let client = configure(Client::builder([proxy.endpoint()])).lazy().unwrap();
    World { server, proxy, client }
}

pub fn server() -> Server {
    Server::with(&["--database-url=sqlite::memory:", "--lock-ttl-min=1ms", "--retention-min=1ms"]).unwrap()
}

/// A database with the tables of the service, those of a ledger, and one for effects.
pub async fn database() -> String {
    onceward_testing::database(|url| async move {
        onceward::store::migrate(&url.parse().unwrap()).await.unwrap();
        let pool = PgPoolOptions::new().max_connections(1).connect(&url).await.unwrap();
        let client = Client::builder(["http://127.0.0.1:1"]).disabled(true).lazy().unwrap();
        let ledger = Ledger::new(client, pool.clone());
        // It may be made again.
        ledger.migrate().await.unwrap();
        ledger.migrate().await.unwrap();
        sqlx::query("CREATE TABLE effect (key text NOT NULL, by_whom text NOT NULL)").execute(&pool).await.unwrap();
        pool.close().await;
    })
    .await
}

/// A client that goes to the server directly.
pub fn direct(server: &Server) -> Client {
    server.client().unwrap()
}

pub fn key(value: &str) -> Key {
    Key::new("tests", value)
}

pub async fn acquired(reserve: Reserve) -> Guard {
    match reserve.await.unwrap() {
        Reservation::Acquired(guard) => guard,
        other => panic!("not acquired: {other:?}"),
    }
}

pub async fn completed(reserve: Reserve) -> String {
    match reserve.await.unwrap() {
        Reservation::Completed(finished) => String::from_utf8(finished.result.body.to_vec()).unwrap(),
        other => panic!("not completed: {other:?}"),
    }
}

/// Looks again and again until it is so.
pub async fn eventually<F: Future<Output = bool>>(what: &str, mut so: impl FnMut() -> F) {
    let end = Instant::now() + 20 * SECOND;
    while !so().await {
        assert!(Instant::now() < end, "it never came that {what}");
        sleep(5 * MILLISECOND).await;
    }
}

/// Whether anybody has reserved the key.
pub async fn is_known(client: &Client, key: Key) -> bool {
    client.lookup(key).await.unwrap().is_some()
}

/// Whether the key can be had now.
pub async fn is_free(client: &Client, key: Key) -> bool {
    match client.reserve(key).await.unwrap() {
        Reservation::Acquired(guard) => guard.release().await.is_ok(),
        Reservation::InProgress(_) => false,
        other => panic!("neither free nor held: {other:?}"),
    }
}

pub async fn within<T>(time: Duration, work: impl Future<Output = T>) -> T {
    timeout(time, work).await.expect("it took too long")
}

pub fn is_unavailable<T>(result: &Result<T, Error>) -> bool {
    matches!(result, Err(Error::Unavailable(_)))
}
