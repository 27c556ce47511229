//! [`Fake`]: a service that notes what it is sent, and answers as the test wants.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex},
};

use onceward::proto::{
    self, BatchOperation, BatchRequest, BatchResponse, BatchResult,
    batch_operation::Operation,
    batch_result::Result as Answer,
    idempotency_service_server::{IdempotencyService, IdempotencyServiceServer},
};
use tokio::{net::TcpListener, sync::Semaphore, task::JoinSet};
use tonic::{Request, Response, Status, transport::Server};

/// A call as it came in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Call {
    /// By itself: its verb and the value of its key.
    Single(&'static str, String),
    /// As a Batch of these.
    Batch(Vec<(&'static str, String)>),
}

/// What each operation is answered; `true` says that it is an item of a Batch.
type Answering = dyn Fn(&Operation, bool) -> Result<Answer, Status> + Send + Sync;

pub struct Fake {
    pub address: SocketAddr,
    calls: Arc<Mutex<Vec<Call>>>,
    authorizations: Arc<Mutex<Vec<Option<String>>>>,
    gate: Arc<Semaphore>,
    _serving: JoinSet<()>,
}

impl Fake {
    /// One that holds every call until it is let go.
    pub async fn start(answering: impl Fn(&Operation, bool) -> Result<Answer, Status> + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (calls, authorizations, gate) = (Arc::default(), Arc::default(), Arc::new(Semaphore::new(0)));
        let service = Service {
            answering: Arc::new(answering),
            calls: Arc::clone(&calls),
            authorizations: Arc::clone(&authorizations),
            gate: gate.clone(),
        };
        let mut serving = JoinSet::new();
        serving.spawn(async move {
            let incoming = tonic::transport::server::TcpIncoming::from(listener);
            let service = IdempotencyServiceServer::new(service);
            Server::builder().add_service(service).serve_with_incoming(incoming).await.unwrap();
        });
        Self { address, calls, authorizations, gate, _serving: serving }
    }

    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Lets so many calls go.
    pub fn let_go(&self, calls: usize) {
        self.gate.add_permits(calls);
    }

    pub fn calls(&self) -> Vec<Call> {
        self.calls.lock().unwrap().clone()
    }

    pub fn authorizations(&self) -> Vec<Option<String>> {
        self.authorizations.lock().unwrap().clone()
    }
}

/// Grants everything.
pub fn granting(operation: &Operation, _: bool) -> Result<Answer, Status> {
    let lock_ttl = Some(prost_types::Duration { seconds: 30, nanos: 0 });
    Ok(match operation {
        Operation::Reserve(_) => Answer::Reserve(proto::ReserveResponse {
            outcome: Some(proto::reserve_response::Outcome::Acquired(proto::Acquired {
                fence: 1,
                attempt: 1,
                lock_ttl,
                locked_until: None,
                checkpoint: None,
            })),
        }),
        Operation::Complete(_) => Answer::Complete(proto::CompleteResponse::default()),
        Operation::Fail(_) => Answer::Fail(proto::FailResponse::default()),
        Operation::Renew(_) => Answer::Renew(proto::RenewResponse { lock_ttl, locked_until: None }),
        Operation::Lookup(_) => Answer::Lookup(proto::LookupResponse::default()),
        Operation::Resolve(_) => Answer::Resolve(proto::ResolveResponse::default()),
    })
}

struct Service {
    answering: Arc<Answering>,
    calls: Arc<Mutex<Vec<Call>>>,
    authorizations: Arc<Mutex<Vec<Option<String>>>>,
    gate: Arc<Semaphore>,
}

impl Service {
    async fn note<M>(&self, request: &Request<M>, call: Call) {
        let authorization = request.metadata().get("authorization").map(|value| value.to_str().unwrap().to_owned());
        self.authorizations.lock().unwrap().push(authorization);
        self.calls.lock().unwrap().push(call);
        self.gate.acquire().await.unwrap().forget();
    }
}

fn described(operation: &Operation) -> (&'static str, String) {
    let (verb, key) = match operation {
        Operation::Reserve(request) => ("reserve", &request.key),
        Operation::Complete(request) => ("complete", &request.key),
        Operation::Fail(request) => ("fail", &request.key),
        Operation::Renew(request) => ("renew", &request.key),
        Operation::Lookup(request) => ("lookup", &request.key),
        Operation::Resolve(request) => ("resolve", &request.key),
    };
    (verb, key.as_ref().unwrap().value.clone())
}

macro_rules! single {
    ($($verb:ident: $variant:ident, $request:ident -> $response:ident;)*) => {
        #[tonic::async_trait]
        impl IdempotencyService for Service {
            $(async fn $verb(&self, request: Request<proto::$request>) -> Result<Response<proto::$response>, Status> {
                let operation = Operation::$variant(request.get_ref().clone());
                let (verb, key) = described(&operation);
                self.note(&request, Call::Single(verb, key)).await;
                match (self.answering)(&operation, false)? {
                    Answer::$variant(answer) => Ok(Response::new(answer)),
                    other => panic!("the answer of another verb: {other:?}"),
                }
            })*

            async fn batch(&self, request: Request<BatchRequest>) -> Result<Response<BatchResponse>, Status> {
                let operations: Vec<_> = request.get_ref().operations.iter().map(|BatchOperation { operation }| operation.clone().unwrap()).collect();
                self.note(&request, Call::Batch(operations.iter().map(described).collect())).await;
                let results = operations.iter().map(|operation| {
                    let result = (self.answering)(operation, true).unwrap_or_else(|status| {
                        use prost::Message;
                        Answer::Error(tonic_types::Status::decode(status.details()).unwrap_or_else(|_| panic!("no details")))
                    });
                    BatchResult { result: Some(result) }
                });
                Ok(Response::new(BatchResponse { results: results.collect() }))
            }
        }
    };
}

single! {
    reserve: Reserve, ReserveRequest -> ReserveResponse;
    complete: Complete, CompleteRequest -> CompleteResponse;
    fail: Fail, FailRequest -> FailResponse;
    renew: Renew, RenewRequest -> RenewResponse;
    lookup: Lookup, LookupRequest -> LookupResponse;
    resolve: Resolve, ResolveRequest -> ResolveResponse;
}
