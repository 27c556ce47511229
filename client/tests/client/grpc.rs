//! Idempotency keys in the metadata of unary calls. The calls are those of Onceward itself, on a service that does other
//! things with them.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use http::request::Parts;
use onceward_client::{
    Client,
    grpc::{GrpcLayer, Keep},
    proto::{
        Key, LookupRequest, LookupResponse, Record, Result as Stored,
        idempotency_service_client::IdempotencyServiceClient,
    },
};
use prost::Message;
use tokio::{net::TcpListener, task::JoinSet};
use tonic::{
    Code, Request, Response, Status,
    metadata::MetadataValue,
    transport::{Channel, Server, server::TcpIncoming},
};
use tonic_types::{ErrorDetails, StatusExt};

use crate::{
    grpc_service::{Handler, serving},
    proxy::Fault,
    support::{MILLISECOND, SECOND, eventually, within, world, world_of},
    web::{Gate, Version, Web, post},
};

struct Service {
    address: SocketAddr,
    runs: Arc<AtomicUsize>,
    _tasks: JoinSet<()>,
}

impl Service {
    /// Serves lookups by this handler, which is told how often it has run.
    async fn start(
        layer: GrpcLayer,
        handler: impl Fn(usize, Request<LookupRequest>) -> Handler + Send + Sync + 'static,
    ) -> Self {
        let runs = Arc::new(AtomicUsize::new(0));
        let counted = runs.clone();
        let service = serving(move |request| handler(counted.fetch_add(1, Ordering::SeqCst) + 1, request));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let server = Server::builder().layer(layer).add_service(service);
            server.serve_with_incoming(TcpIncoming::from(listener)).await.unwrap();
        });
        Self { address, runs, _tasks: tasks }
    }

    async fn client(&self) -> IdempotencyServiceClient<Channel> {
        IdempotencyServiceClient::connect(format!("http://{}", self.address)).await.unwrap()
    }

    async fn call(&self, key: Option<&str>, value: &str) -> Result<Response<LookupResponse>, Status> {
        self.client().await.lookup(lookup(key, value)).await
    }

    fn runs(&self) -> usize {
        self.runs.load(Ordering::SeqCst)
    }
}

fn lookup(key: Option<&str>, value: &str) -> Request<LookupRequest> {
    let key_of = Key { namespace: String::new(), subject: String::new(), value: value.into() };
    let mut request = Request::new(LookupRequest { key: Some(key_of) });
    if let Some(key) = key {
        request.metadata_mut().insert("idempotency-key", key.parse().unwrap());
    }
    request
}

fn user(call: &Parts) -> Option<String> {
    let user = call.headers.get("x-user").map(|user| user.to_str().unwrap().to_owned());
    // `nobody` is one whom no layer has found.
    Some(user.unwrap_or_default()).filter(|user| user != "nobody")
}

fn layer(client: &Client) -> GrpcLayer {
    GrpcLayer::new(client.clone(), "tests", user)
}

fn answer(owner: impl Into<String>) -> Result<Response<LookupResponse>, Status> {
    let record = Record { owner: Some(owner.into()), ..Record::default() };
    let mut response = Response::new(LookupResponse { record: Some(record) });
    response.metadata_mut().insert("x-note", "kept".parse().unwrap());
    response.metadata_mut().insert_bin("x-note-bin", MetadataValue::from_bytes(&[0, 255]));
    Ok(response)
}

fn owner(response: &Response<LookupResponse>) -> &str {
    response.get_ref().record.as_ref().unwrap().owner.as_deref().unwrap()
}

fn is_replay<T>(response: &Response<T>) -> bool {
    response.metadata().get("idempotent-replayed").is_some_and(|value| value == "true")
}

fn reason(status: &Status) -> String {
    let info = status.get_details_error_info().unwrap();
    assert_eq!(info.domain, "onceward");
    info.reason
}

#[tokio::test]
async fn a_call_that_is_sent_again_gets_the_answer_of_the_first() {
    let world = world().await;
    let service = Service::start(layer(&world.client), |run, request| {
        let fenced = request.extensions().get::<onceward_client::Lease>().is_some();
        Box::pin(async move { answer(format!("run {run}, fenced: {fenced}")) })
    })
    .await;
    for replay in [false, true, true] {
        let response = service.call(Some("k"), "v").await.unwrap();
        assert_eq!((owner(&response), is_replay(&response)), ("run 1, fenced: true", replay));
        assert_eq!(response.metadata().get("x-note").unwrap(), "kept");
        assert_eq!(response.metadata().get_bin("x-note-bin").unwrap().to_bytes().unwrap().as_ref(), &[0, 255]);
    }
    assert_eq!(owner(&service.call(None, "v").await.unwrap()), "run 2, fenced: false");
}

#[tokio::test]
async fn an_error_with_its_details_is_replayed_too() {
    let world = world().await;
    let service = Service::start(layer(&world.client), |_, _| {
        Box::pin(async {
            let details = ErrorDetails::with_error_info("NO_MONEY", "bank", []);
            Err(Status::with_error_details(Code::FailedPrecondition, "no money: ä", details))
        })
    })
    .await;
    for _ in 0..2 {
        let status = service.call(Some("k"), "v").await.unwrap_err();
        assert_eq!((status.code(), status.message()), (Code::FailedPrecondition, "no money: ä"));
        assert_eq!(status.get_details_error_info().unwrap().reason, "NO_MONEY");
    }
    assert_eq!(service.runs(), 1);
}

#[tokio::test]
async fn what_an_answer_means_for_its_key_is_said_by_its_code() {
    let world = world().await;
    let service = Service::start(layer(&world.client), |_, request| {
        let code = request.get_ref().key.as_ref().unwrap().value.parse::<i32>().unwrap();
        Box::pin(async move { Err(Status::new(Code::from_i32(code), "so it is")) })
    })
    .await;
    for (code, next) in [
        (Code::NotFound, "replay"),
        (Code::InvalidArgument, "replay"),
        (Code::PermissionDenied, "replay"),
        (Code::Unavailable, "again"),
        (Code::ResourceExhausted, "again"),
        (Code::Aborted, "again"),
        (Code::Unauthenticated, "again"),
        (Code::Internal, "held"),
        (Code::Unknown, "held"),
        (Code::DeadlineExceeded, "held"),
    ] {
        let (before, key, value) = (service.runs(), format!("{code:?}"), (code as i32).to_string());
        assert_eq!(service.call(Some(&key), &value).await.unwrap_err().code(), code);
        let second = service.call(Some(&key), &value).await.unwrap_err();
        match next {
            "held" => assert_eq!((second.code(), reason(&second).as_str()), (Code::Aborted, "IN_PROGRESS")),
            _ => assert_eq!((second.code(), second.message()), (code, "so it is")),
        }
        assert_eq!(service.runs() - before, if next == "again" { 2 } else { 1 }, "{code:?}");
    }
    let all = Service::start(layer(&world.client).keep(|_| Keep::Store), |_, _| {
        Box::pin(async { Err(Status::internal("so it is")) })
    })
    .await;
    for _ in 0..2 {
        assert_eq!(all.call(Some("all"), "v").await.unwrap_err().message(), "so it is");
    }
    assert_eq!(all.runs(), 1);
}

#[tokio::test]
async fn a_call_that_meets_another_learns_which() {
    let (world, gate) = (world().await, Gate::default());
    let gate_of = gate.clone();
    let service = Arc::new(
        Service::start(layer(&world.client).required(), move |_, _| {
            let gate = gate_of.clone();
            Box::pin(async move {
                gate.pass().await;
                answer("done")
            })
        })
        .await,
    );
    let first = tokio::spawn({
        let service = service.clone();
        async move { service.call(Some("k"), "v").await }
    });
    gate.begun().await;
    let status = service.call(Some("k"), "v").await.unwrap_err();
    assert_eq!((status.code(), reason(&status).as_str()), (Code::Aborted, "IN_PROGRESS"));
    assert!(status.get_details_retry_info().unwrap().retry_delay.is_some());
    let status = service.call(Some("k"), "other").await.unwrap_err();
    assert_eq!((status.code(), reason(&status).as_str()), (Code::FailedPrecondition, "KEY_REUSED"));
    gate.open();
    within(5 * SECOND, first).await.unwrap().unwrap();

    for (key, expected) in [(None, "KEY_MISSING"), (Some("a, b"), "KEY_MALFORMED")] {
        let status = service.call(key, "v").await.unwrap_err();
        assert_eq!((status.code(), reason(&status).as_str()), (Code::InvalidArgument, expected));
    }
    // Another caller's key is another key.
    let mut by_ann = lookup(Some("k"), "v");
    by_ann.metadata_mut().insert("x-user", "ann".parse().unwrap());
    gate.open();
    assert!(!is_replay(&service.client().await.lookup(by_ann).await.unwrap()));
}

#[tokio::test]
async fn an_outcome_that_nobody_knows_is_told_without_a_time_to_retry() {
    let world = world().await;
    let layer = layer(&world.client).hold().lock_ttl(50 * MILLISECOND);
    let service = Service::start(layer, |_, _| Box::pin(async { Err(Status::internal("who knows")) })).await;
    service.call(Some("k"), "v").await.unwrap_err();
    eventually("it is in doubt", async || {
        let status = service.call(Some("k"), "v").await.unwrap_err();
        assert_eq!(status.code(), Code::Aborted);
        reason(&status) == "IN_DOUBT" && status.get_details_retry_info().is_none()
    })
    .await;
    assert_eq!(service.runs(), 1);
}

#[tokio::test]
async fn a_call_runs_to_its_end_although_its_caller_leaves() {
    let (world, gate) = (world().await, Gate::default());
    let gate_of = gate.clone();
    let service = Service::start(layer(&world.client), move |_, _| {
        let gate = gate_of.clone();
        Box::pin(async move {
            gate.pass().await;
            answer("done")
        })
    })
    .await;
    let mut impatient = lookup(Some("k"), "v");
    impatient.set_timeout(100 * MILLISECOND);
    let mut client = service.client().await;
    let calling = tokio::spawn(async move { client.lookup(impatient).await });
    gate.begun().await;
    calling.await.unwrap().unwrap_err();
    gate.open();
    eventually("the answer is stored", async || {
        service.call(Some("k"), "v").await.is_ok_and(|response| is_replay(&response) && owner(&response) == "done")
    })
    .await;
    assert_eq!(service.runs(), 1);
}

#[tokio::test]
async fn an_answer_too_large_to_be_stored_reaches_the_first_caller_and_nobody_acts_again() {
    let world = world().await;
    let service = Service::start(layer(&world.client), |_, _| {
        Box::pin(async {
            let result = Stored { body: vec![7; 2 << 20].into(), ..Stored::default() };
            Ok(Response::new(LookupResponse { record: Some(Record { result: Some(result), ..Record::default() }) }))
        })
    })
    .await;
    let first = service.call(Some("k"), "v").await.unwrap();
    assert_eq!(first.get_ref().record.as_ref().unwrap().result.as_ref().unwrap().body.len(), 2 << 20);
    let status = service.call(Some("k"), "v").await.unwrap_err();
    assert_eq!((status.code(), reason(&status).as_str()), (Code::FailedPrecondition, "ANSWER_NOT_KEPT"));
    let large = "x".repeat(3 << 20);
    let status = service.call(Some("large"), &large).await.unwrap_err();
    assert_eq!((status.code(), reason(&status).as_str()), (Code::ResourceExhausted, "BODY_TOO_LARGE"));
    assert_eq!(service.runs(), 1);
}

#[tokio::test]
async fn without_the_service_calls_are_refused_or_by_choice_handled() {
    let world = world_of(|builder| builder.timeout(200 * MILLISECOND)).await;
    world.proxy.both(Fault::Blackhole);
    let handler = |_, _| -> Handler { Box::pin(async { answer("done") }) };
    let closed = Service::start(layer(&world.client), handler).await;
    let status = closed.call(Some("k"), "v").await.unwrap_err();
    assert_eq!((status.code(), reason(&status).as_str()), (Code::Unavailable, "UNAVAILABLE"));
    assert_eq!(status.get_details_retry_info().unwrap().retry_delay, Some(Duration::from_secs(1)));
    assert_eq!(closed.runs(), 0);
    let open = Service::start(layer(&world.client).fail_open(), handler).await;
    assert_eq!(owner(&open.call(Some("k"), "v").await.unwrap()), "done");
}

/// A message with the flag and the length before it.
fn framed(message: &[u8]) -> Vec<u8> {
    [&[0], &u32::try_from(message.len()).unwrap().to_be_bytes()[..], message].concat()
}

#[tokio::test]
async fn a_keyed_call_that_is_not_unary_grpc_is_refused_and_never_passes() {
    let world = world().await;
    let service = Service::start(layer(&world.client), |_, _| Box::pin(async { answer("done") })).await;
    let web = Web::at(service.address);
    let call = |content_type: &str, body: Vec<u8>| {
        let mut request = post("/onceward.v1.IdempotencyService/Lookup", "k", body);
        request.headers_mut().insert("te", "trailers".parse().unwrap());
        if !content_type.is_empty() {
            request.headers_mut().insert("content-type", content_type.parse().unwrap());
        }
        web.send(Version::Two, request)
    };
    let message = framed(&LookupRequest::default().encode_to_vec());
    for (content_type, body) in [
        ("", message.clone()),
        ("application/x-protobuf", message.clone()),
        ("application/grpc-web+proto", message.clone()),
        ("application/grpc", [message.clone(), message.clone()].concat()),
        ("application/grpc", message[..3].to_vec()),
        ("application/grpc", Vec::new()),
    ] {
        let refused = call(content_type, body).await.unwrap();
        assert_eq!(refused.header("grpc-status"), Some("3"), "{content_type} {refused:?}");
    }
    assert_eq!(service.runs(), 0);
    for (content_type, replay) in [("Application/gRPC+proto", None), ("application/grpc", Some("true"))] {
        let answered = call(content_type, message.clone()).await.unwrap();
        assert_eq!(answered.trailers.as_ref().unwrap()["grpc-status"], "0");
        assert_eq!(answered.header("idempotent-replayed"), replay);
    }
    assert_eq!(service.runs(), 1);
}

#[tokio::test]
async fn a_call_that_an_operator_has_failed_is_told_so() {
    let world = world().await;
    let service =
        Service::start(layer(&world.client).hold(), |_, _| Box::pin(async { Err(Status::internal("?")) })).await;
    service.call(Some("k"), "v").await.unwrap_err();
    let key = onceward_client::Key::new("tests", "k");
    let fence = world.client.lookup(key.clone()).await.unwrap().unwrap().fence;
    let resolution = onceward_client::Resolution::Fail("it was not done".into());
    world.client.resolve(key, fence, resolution, true).await.unwrap();
    let status = service.call(Some("k"), "v").await.unwrap_err();
    assert_eq!((status.code(), reason(&status).as_str()), (Code::FailedPrecondition, "FAILED"));
}
