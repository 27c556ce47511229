//! [`Calls`]: what every call passes through, in and out.
//!
//! It counts calls, refuses new ones once the server drains, ends a call at its deadline, and gives tonic's own refusals the
//! form of ours: a caller that looks for a reason finds one whatever went wrong.

use std::{
    convert::Infallible,
    task::{Context, Poll},
    time::Instant,
};

use futures_util::future::BoxFuture;
use http::{Request, Response};
use tokio::time::timeout;
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tonic::{Code, Status, body::Body, server::NamedService};
use tower::Service;

use super::{deadline, status::CallError};
use crate::telemetry;

/// Opens and closes the way in. Cloning gives another handle to the same one.
#[derive(Clone, Default)]
pub struct Gate {
    closed: CancellationToken,
    calls: TaskTracker,
}

impl Gate {
    /// Refuses whatever comes from now on.
    pub fn close(&self) {
        self.closed.cancel();
        self.calls.close();
    }

    /// Until the calls that came before the gate was closed have their answers.
    ///
    /// # Cancel safety
    ///
    /// May be dropped and called again.
    pub async fn drained(&self) {
        self.calls.wait().await;
    }
}

/// A service behind a [`Gate`].
#[derive(Clone)]
pub struct Calls<S> {
    inner: S,
    gate: Gate,
}

impl<S> Calls<S> {
    /// `inner`, behind `gate`.
    pub fn new(inner: S, gate: Gate) -> Self {
        Self { inner, gate }
    }
}

impl<S: NamedService> NamedService for Calls<S> {
    const NAME: &'static str = S::NAME;
}

impl<S> Service<Request<Body>> for Calls<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible>,
    S::Future: Send + 'static,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Response<Body>, Infallible>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let began = Instant::now();
        let call = Call::begin(&self.gate, &request);
        if self.gate.closed.is_cancelled() {
            return Box::pin(async move { Ok(call.end(began, refusal(CallError::ShuttingDown))) });
        }
        let header = request.headers().get(deadline::HEADER).and_then(|value| value.to_str().ok());
        let cutoff = header.and_then(deadline::parse).map(deadline::cutoff);
        // Outside of the block below, which would otherwise hold the request as well.
        let answer = self.inner.call(request);
        Box::pin(async move {
            let response = match cutoff {
                None => answer.await,
                Some(cutoff) => {
                    timeout(cutoff, answer).await.unwrap_or_else(|_| Ok(refusal(CallError::DeadlineExceeded)))
                }
            };
            let response = response.map_or_else(|never| match never {}, in_our_form);
            Ok(call.end(began, response))
        })
    }
}

/// A call that is being served; also one whose caller has left, until it is dropped.
struct Call {
    method: &'static str,
    _counted: tokio_util::task::task_tracker::TaskTrackerToken,
}

impl Call {
    fn begin(gate: &Gate, request: &Request<Body>) -> Self {
        telemetry::calls_in_flight_changed(1.0);
        Self { method: method(request.uri().path()), _counted: gate.calls.token() }
    }

    fn end(self, began: Instant, response: Response<Body>) -> Response<Body> {
        telemetry::call_answered(self.method, code(&response), began.elapsed());
        response
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        telemetry::calls_in_flight_changed(-1.0);
    }
}

/// The method as a label: one of a known few, whatever the caller sent.
fn method(path: &str) -> &'static str {
    let known = ["Reserve", "Complete", "Fail", "Renew", "Lookup", "Resolve", "Batch"];
    let name = path.rsplit('/').next().unwrap_or_default();
    known.into_iter().find(|known| *known == name).unwrap_or("other")
}

fn code(response: &Response<Body>) -> Code {
    Status::from_header_map(response.headers()).map_or(Code::Ok, |status| status.code())
}

/// A refusal without details is tonic's own: the request could not be read.
fn in_our_form(response: Response<Body>) -> Response<Body> {
    match Status::from_header_map(response.headers()) {
        Some(status) if status.details().is_empty() => match status.code() {
            Code::Internal => refusal(CallError::Undecodable),
            Code::OutOfRange => refusal(CallError::RequestTooLarge),
            _ => response,
        },
        _ => response,
    }
}

fn refusal(error: CallError) -> Response<Body> {
    telemetry::refused(error.reason());
    Status::from(error).into_http()
}
