//! The RPCs: proto in, one verb of the engine, proto out.
//!
//! [`convert`] turns messages into nouns and back and is the only place that checks inputs; [`status`] is the only place
//! that turns an error into a gRPC status; [`calls`] is what every call passes through on its way in and out.

mod batch;
pub mod calls;
mod convert;
mod deadline;
mod status;

use std::{sync::Arc, time::Duration};

use tonic::{Request, Response, Status, metadata::MetadataMap};

pub use self::convert::{Bounds, Limits};
use self::{batch::Batches, status::CallError};
use crate::{
    engine::Engine,
    lifecycle::Reserved,
    proto::{
        BatchRequest, BatchResponse, CompleteRequest, CompleteResponse, FailRequest, FailResponse, LookupRequest,
        LookupResponse, RenewRequest, RenewResponse, ReserveRequest, ReserveResponse, ResolveRequest, ResolveResponse,
        idempotency_service_server::IdempotencyService,
    },
    record::Origin,
    telemetry,
};

/// The service, on one engine.
#[derive(Clone)]
pub struct Service {
    engine: Engine,
    limits: Limits,
    batches: Arc<Batches>,
}

/// What a call brings besides its message.
#[derive(Clone, Debug, Default)]
struct CallContext {
    /// The trace that it belongs to.
    origin: Option<Origin>,
    /// How long it can be held before its caller gives up.
    patience: Option<Duration>,
}

impl CallContext {
    fn of(metadata: &MetadataMap) -> Self {
        let text = |name| metadata.get(name).and_then(|value| value.to_str().ok());
        Self {
            origin: text("traceparent").and_then(Origin::parse),
            patience: text(deadline::HEADER).and_then(deadline::parse).map(deadline::patience),
        }
    }
}

impl Service {
    /// The service on `engine`; requests beyond `limits` are refused.
    pub fn new(engine: Engine, limits: Limits) -> Self {
        Self { engine, limits, batches: Arc::default() }
    }

    async fn reserve(&self, request: ReserveRequest, context: &CallContext) -> Result<ReserveResponse, CallError> {
        let (key, reservation, wait) = convert::reserve(request, &self.limits, context.origin.as_ref())?;
        let wait = context.patience.map_or(wait, |patience| wait.min(patience));
        let reserved = self.engine.reserve(&key, &reservation, wait).await?;
        telemetry::reserved(match reserved {
            Reserved::Acquired(_) => "acquired",
            Reserved::Completed(_) => "completed",
            Reserved::Failed(_) => "failed",
            Reserved::InProgress(_) => "in_progress",
            Reserved::InDoubt(_) => "in_doubt",
        });
        Ok(convert::reserve_response(reserved, &self.limits))
    }

    async fn complete(&self, request: CompleteRequest) -> Result<CompleteResponse, CallError> {
        let (key, token, finish) = convert::complete(request, &self.limits)?;
        Ok(convert::complete_response(self.engine.finish(&key, &token, &finish).await?))
    }

    async fn fail(&self, request: FailRequest) -> Result<FailResponse, CallError> {
        let (key, token, finish) = convert::fail(request)?;
        Ok(convert::fail_response(self.engine.finish(&key, &token, &finish).await?))
    }

    async fn renew(&self, request: RenewRequest) -> Result<RenewResponse, CallError> {
        let (key, token, extension) = convert::renew(request, &self.limits)?;
        Ok(convert::renew_response(self.engine.renew(&key, &token, &extension).await?))
    }

    async fn lookup(&self, request: LookupRequest) -> Result<LookupResponse, CallError> {
        let key = convert::lookup(request)?;
        let (record, now) = self.engine.lookup(&key).await?;
        Ok(LookupResponse { record: Some(convert::record(record, now)) })
    }

    async fn resolve(&self, request: ResolveRequest) -> Result<ResolveResponse, CallError> {
        let (key, fence, force, resolution) = convert::resolve(request)?;
        let (record, now) = self.engine.resolve(&key, fence, force, &resolution).await?;
        Ok(ResolveResponse { record: Some(convert::record(record, now)) })
    }
}

/// The methods of the proto, each one verb.
#[tonic::async_trait]
impl IdempotencyService for Service {
    async fn reserve(&self, request: Request<ReserveRequest>) -> Result<Response<ReserveResponse>, Status> {
        let context = CallContext::of(request.metadata());
        answer(self.reserve(request.into_inner(), &context).await)
    }

    async fn complete(&self, request: Request<CompleteRequest>) -> Result<Response<CompleteResponse>, Status> {
        answer(self.complete(request.into_inner()).await)
    }

    async fn fail(&self, request: Request<FailRequest>) -> Result<Response<FailResponse>, Status> {
        answer(self.fail(request.into_inner()).await)
    }

    async fn renew(&self, request: Request<RenewRequest>) -> Result<Response<RenewResponse>, Status> {
        answer(self.renew(request.into_inner()).await)
    }

    async fn lookup(&self, request: Request<LookupRequest>) -> Result<Response<LookupResponse>, Status> {
        answer(self.lookup(request.into_inner()).await)
    }

    async fn resolve(&self, request: Request<ResolveRequest>) -> Result<Response<ResolveResponse>, Status> {
        answer(self.resolve(request.into_inner()).await)
    }

    async fn batch(&self, request: Request<BatchRequest>) -> Result<Response<BatchResponse>, Status> {
        let context = CallContext::of(request.metadata());
        answer(self.batch(request.into_inner(), &context).await)
    }
}

fn answer<T>(result: Result<T, CallError>) -> Result<Response<T>, Status> {
    result.map(Response::new).map_err(|error| {
        telemetry::refused(error.reason());
        error.into()
    })
}
