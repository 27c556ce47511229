//! The `Idempotency-Key` header while the service is away, or somebody else takes over.

use std::sync::Arc;

use axum::{Router, routing::post as on_post};
use http::StatusCode;
use metrics_util::debugging::{DebugValue, DebuggingRecorder};
use onceward_client::Client;

use crate::{
    handlers::{Runs, echo, layer},
    proxy::{Fault, Proxy},
    support::{MILLISECOND, SECOND, World, direct, eventually, is_free, key, within, world, world_of},
    web::{Answer, Gate, Version, Web},
};

#[tokio::test]
async fn without_the_service_requests_are_refused_or_by_choice_handled() {
    let (world, runs) = (world_of(|builder| builder.timeout(200 * MILLISECOND)).await, Runs::default());
    world.proxy.both(Fault::Blackhole);
    let closed = Web::layered(echo(&runs), layer(&world.client)).await;
    let answer = closed.post(Version::One, "/", "k", "").await;
    assert_eq!(
        (answer.status.as_u16(), answer.problem().as_str(), answer.header("retry-after")),
        (503, "unavailable", Some("1"))
    );
    assert_eq!(runs.so_far(), 0);
    let open = Web::layered(echo(&runs), layer(&world.client).fail_open()).await;
    assert_eq!(open.post(Version::One, "/", "k", "100").await.body, "1 None b\"100\"");
}

#[tokio::test]
async fn an_answer_waits_a_bounded_time_until_it_is_stored_and_is_stored_later() {
    let (World { server, proxy, client }, runs) = (world().await, Runs::default());
    let proxy = Arc::new(proxy);
    let (runs_of, proxy_of) = (runs.clone(), proxy.clone());
    let router = Router::new().fallback(async move || {
        runs_of.count();
        proxy_of.both(Fault::Blackhole);
        (StatusCode::CREATED, "done")
    });
    let web = Web::layered(router, layer(&client).complete_timeout(200 * MILLISECOND)).await;
    let answer = within(2 * SECOND, web.post(Version::One, "/", "k", "")).await;
    assert_eq!((answer.status.as_u16(), answer.body.as_ref()), (201, &b"done"[..]));
    let observer = direct(&server);
    assert!(!is_free(&observer, key("k")).await);
    proxy.both(Fault::None);
    eventually("it is stored", async || web.post(Version::One, "/", "k", "").await.is_replay()).await;
    assert_eq!(runs.so_far(), 1);
}

#[tokio::test]
async fn the_service_may_be_away_between_the_handler_and_its_answer() {
    let folder = std::env::temp_dir().join(format!("onceward-http-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let url = format!("--database-url=sqlite:{}", folder.join("http.db").display());
    let server = onceward_client::testing::Server::with(&[&url]).unwrap();
    let (address, runs, gate) = (server.address(), Runs::default(), Gate::default());
    let (runs_of, gate_of) = (runs.clone(), gate.clone());
    let router = Router::new().fallback(async move || {
        runs_of.count();
        gate_of.pass().await;
        (StatusCode::CREATED, "done")
    });
    let web = Arc::new(Web::layered(router, layer(&direct(&server))).await);
    let posting = tokio::spawn({
        let web = web.clone();
        async move { web.post(Version::One, "/", "k", "").await }
    });
    gate.begun().await;
    server.kill();
    gate.open();
    tokio::time::sleep(SECOND).await;
    let _server = onceward_client::testing::Server::on(address, &[&url]).unwrap();
    let answer = within(10 * SECOND, posting).await.unwrap();
    assert_eq!((answer.status.as_u16(), answer.is_replay()), (201, false));
    assert!(web.post(Version::One, "/", "k", "").await.is_replay());
    assert_eq!(runs.so_far(), 1);
    std::fs::remove_dir_all(folder).unwrap();
}

#[tokio::test]
async fn who_was_overtaken_answers_what_everybody_else_gets() {
    let recorder = DebuggingRecorder::new();
    let _recorded = metrics::set_default_local_recorder(&recorder);
    let (world, runs, gate) = (world().await, Runs::default(), Gate::default());
    let proxy = Proxy::start(world.server.address()).await;
    let slow_client = Client::builder([proxy.endpoint()]).lazy().unwrap();
    let (runs_of, gate_of) = (runs.clone(), gate.clone());
    let router = Router::new().route(
        "/",
        on_post(async move || {
            let run = runs_of.count();
            if run == 1 {
                gate_of.pass().await;
            }
            format!("run {run}")
        }),
    );
    let slow = Arc::new(Web::layered(router.clone(), layer(&slow_client).lock_ttl(200 * MILLISECOND)).await);
    let fast = Web::layered(router, layer(&world.client).wait(10 * SECOND)).await;
    let first = tokio::spawn({
        let slow = slow.clone();
        async move { slow.post(Version::One, "/", "k", "").await }
    });
    gate.begun().await;
    proxy.both(Fault::Blackhole);
    let second: Answer = within(5 * SECOND, fast.post(Version::One, "/", "k", "")).await;
    assert_eq!((second.body.as_ref(), second.is_replay()), (&b"run 2"[..], false));
    proxy.both(Fault::None);
    gate.open();
    let first = within(10 * SECOND, first).await.unwrap();
    assert_eq!((first.body.as_ref(), first.is_replay()), (&b"run 2"[..], true));
    let metrics = recorder.snapshotter().snapshot().into_vec();
    let counted = metrics.iter().map(|(name, .., value)| (name.key().name(), value));
    assert_eq!(counted.collect::<Vec<_>>(), [("onceward_client_leases_lost_total", &DebugValue::Counter(1))]);
}

#[tokio::test]
async fn a_client_that_is_closed_does_not_open_the_way() {
    let (world, runs) = (world().await, Runs::default());
    let web = Web::layered(echo(&runs), layer(&world.client).fail_open()).await;
    world.client.close().await;
    assert_eq!(web.post(Version::One, "/", "k", "").await.problem(), "unavailable");
    assert_eq!(runs.so_far(), 0);
}
