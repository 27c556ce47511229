//! A service with one call that does something.

use std::{future::Future, pin::Pin, sync::Arc};

use onceward::proto::{
    self,
    idempotency_service_server::{IdempotencyService, IdempotencyServiceServer},
};
use onceward_client::proto::{LookupRequest, LookupResponse};
use prost::Message;
use tonic::{Request, Response, Status};

pub type Handler = Pin<Box<dyn Future<Output = Result<Response<LookupResponse>, Status>> + Send>>;

/// Serves lookups by this handler.
pub fn serving(
    handler: impl Fn(Request<LookupRequest>) -> Handler + Send + Sync + 'static,
) -> IdempotencyServiceServer<impl IdempotencyService> {
    IdempotencyServiceServer::new(Service(Arc::new(handler)))
        .max_decoding_message_size(64 << 20)
        .max_encoding_message_size(64 << 20)
}

struct Service(Arc<dyn Fn(Request<LookupRequest>) -> Handler + Send + Sync>);

/// The same message, as the types of the service's crate have it, or those of the client's.
fn recoded<A: Message, B: Message + Default>(message: &A) -> B {
    B::decode(message.encode_to_vec().as_slice()).unwrap()
}

macro_rules! unimplemented {
    ($($verb:ident: $request:ident -> $response:ident;)*) => {
        #[tonic::async_trait]
        impl IdempotencyService for Service {
            async fn lookup(&self, request: Request<proto::LookupRequest>) -> Result<Response<proto::LookupResponse>, Status> {
                let (metadata, extensions, message) = request.into_parts();
                let request = Request::from_parts(metadata, extensions, recoded(&message));
                Ok((self.0)(request).await?.map(|answer| recoded(&answer)))
            }

            $(async fn $verb(&self, _: Request<proto::$request>) -> Result<Response<proto::$response>, Status> {
                Err(Status::unimplemented(""))
            })*
        }
    };
}

unimplemented! {
    reserve: ReserveRequest -> ReserveResponse;
    complete: CompleteRequest -> CompleteResponse;
    fail: FailRequest -> FailResponse;
    renew: RenewRequest -> RenewResponse;
    resolve: ResolveRequest -> ResolveResponse;
    batch: BatchRequest -> BatchResponse;
}
