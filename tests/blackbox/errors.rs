//! Every error reason with its code and details. Those that the rules give are with the rules.

use onceward::proto::{Key, ReserveRequest, ReserveResponse, ResolveRequest, reserve_response::Outcome};
use rstest::rstest;
use sqlx::{Connection, PgConnection, SqliteConnection};
use tonic::{Code, Request, Status, client::Grpc, codegen::http::uri::PathAndQuery};
use tonic_prost::ProstCodec;

use crate::support::*;

/// A Reserve whose token is no text.
#[derive(Clone, PartialEq, prost::Message)]
struct Garbled {
    #[prost(bytes, tag = "2")]
    token: Vec<u8>,
}

async fn send<M: prost::Message + 'static>(server: &Server, path: &'static str, message: M) -> Result<(), Status> {
    let mut grpc = Grpc::new(server.channel().await);
    grpc.ready().await.unwrap();
    let codec = ProstCodec::<M, ReserveResponse>::default();
    grpc.unary(Request::new(message), PathAndQuery::from_static(path), codec).await.map(drop)
}

const RESERVE: &str = "/onceward.v1.IdempotencyService/Reserve";

#[rstest]
#[tokio::test(flavor = "multi_thread")]
async fn an_invalid_request_names_every_field_and_echoes_none(
    #[values(Backend::Sqlite, Backend::Postgres)] backend: Backend,
) {
    let (client, _server) = backend.client().await;
    let request = ReserveRequest {
        key: Some(Key { namespace: "no spaces".into(), subject: "\0".into(), value: String::new() }),
        token: "secret\n".into(),
        fingerprint: Some(String::new()),
        owner: Some(String::new()),
        traceparent: Some(String::new()),
        on_expiry: Some(9),
        ..Default::default()
    };
    let status = client.reserve(request).await.unwrap_err();
    assert!(!format!("{status:?}").contains("secret"));
    invalid::<Outcome>(
        Err(status),
        &["key.namespace", "key.subject", "key.value", "token", "fingerprint", "owner", "on_expiry", "traceparent"],
    );
    invalid(client.reserve(ReserveRequest::default()).await, &["key", "token"]);
    let unresolved = ResolveRequest { key: Some(key("k")), ..Default::default() };
    let status = client.0.clone().resolve(unresolved).await.map(drop);
    invalid(status, &["resolution"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_transport_refuses_has_our_form() {
    let (server, _database) = Backend::Sqlite.server().await;
    let garbled = send(&server, RESERVE, Garbled { token: vec![0xff] }).await;
    refused(garbled, Code::InvalidArgument, "INVALID_REQUEST");
    let huge = send(&server, RESERVE, Garbled { token: vec![b'x'; 5 << 20] }).await;
    refused(huge, Code::InvalidArgument, "INVALID_REQUEST");
    let unknown = send(&server, "/onceward.v1.IdempotencyService/Release", Garbled::default()).await;
    assert_eq!(unknown.unwrap_err().code(), Code::Unimplemented);
}

#[tokio::test(flavor = "multi_thread")]
async fn two_keys_under_one_hash_are_an_error_and_not_each_others() {
    for backend in [Backend::Sqlite, Backend::Postgres] {
        let (client, (_server, database)) = backend.client().await;
        let key = fresh_key();
        client.acquire(reserve(&key, "a")).await;
        let statement = "UPDATE onceward_record SET value = 'another'";
        match backend {
            Backend::Postgres => {
                let mut connection = PgConnection::connect(&database.url).await.unwrap();
                sqlx::raw_sql(statement).execute(&mut connection).await.unwrap();
            }
            Backend::Sqlite => {
                let mut connection = SqliteConnection::connect(&database.url).await.unwrap();
                sqlx::raw_sql(statement).execute(&mut connection).await.unwrap();
            }
        }
        refused(client.reserve(reserve(&key, "a")).await, Code::Internal, "KEY_COLLISION");
        refused(client.complete(&key, "a", b"r").await, Code::Internal, "KEY_COLLISION");
        refused(client.renew(&key, "a").await, Code::Internal, "KEY_COLLISION");
        refused(client.lookup(&key).await, Code::Internal, "KEY_COLLISION");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deadline_that_passes_at_the_server_has_our_form() {
    let database = Backend::Postgres.database().await;
    let server = Server::start(&database.url, &[]).await;
    let client = server.client().await;
    let mut holder = PgConnection::connect(&database.url).await.unwrap();
    let _table = lock_table(&mut holder).await;
    // The first batch waits for a lock timeout of 100 ms, and the others for the first.
    let round = async || {
        let calls = (0..30).map(|_| client.reserve_within(reserve(&fresh_key(), "a"), SECOND / 11));
        let answers = futures_util::future::join_all(calls).await;
        answers.into_iter().filter_map(Result::err).find(|status| status.code() == Code::DeadlineExceeded)
    };
    // On a busy machine the caller's own clock may be first, and then it has hung up.
    let late = async || match round().await {
        None => false,
        Some(status) => {
            refused::<Outcome>(Err(status), Code::DeadlineExceeded, "DEADLINE_EXCEEDED");
            true
        }
    };
    eventually("one is late", late).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn overload_refuses_reservations_at_once_and_never_completions() {
    let database = Backend::Postgres.database().await;
    let server = Server::start(&database.url, &["--database-pool-size", "1"]).await;
    let client = server.client().await;
    let held = fresh_key();
    client.acquire(reserve(&held, "a")).await;
    let mut holder = PgConnection::connect(&database.url).await.unwrap();
    let table = lock_table(&mut holder).await;
    let flood: Vec<_> = (0..6000)
        .map(|_| {
            let client = client.clone();
            tokio::spawn(async move { client.reserve(reserve(&fresh_key(), "a")).await })
        })
        .collect();
    let metrics = async || server.get("/metrics").await.1;
    eventually("the queue is full", async || metrics().await.contains("reason=\"OVERLOADED\"")).await;
    let completion = {
        let (client, held) = (client.clone(), held.clone());
        tokio::spawn(async move { client.complete(&held, "a", b"r").await })
    };
    table.rollback().await.unwrap();
    completion.await.unwrap().expect("a completion has room");
    let mut overloaded = 0;
    for call in flood {
        if let Err(status) = call.await.unwrap()
            && status.code() == Code::ResourceExhausted
        {
            refused::<Outcome>(Err(status), Code::ResourceExhausted, "OVERLOADED");
            overloaded += 1;
        }
    }
    assert!(overloaded > 0);
}
