//! Batch: independent operations in one call, those of one key in order.

use std::{
    collections::HashMap,
    sync::atomic::{AtomicUsize, Ordering},
};

use futures_util::{StreamExt, stream};
use prost::Message;
use tokio::sync::Semaphore;

use super::{CallContext, Service, status::CallError};
use crate::{
    proto::{BatchOperation, BatchRequest, BatchResponse, BatchResult, Key, batch_operation::Operation, batch_result},
    telemetry,
};

/// The most operations of a Batch.
const OPERATIONS_MAX: usize = 500;
/// The most bytes of its answers; what does not fit any more is an error of a few bytes.
const RESPONSE_BYTES_MAX: usize = 3 << 20;
/// How many keys of all Batches together are worked on at once: of a few Batches all, so that they share commits with each
/// other, and not so many that they fill the store's queue and others are refused.
const KEYS_AT_ONCE: usize = 2048;

/// What Batches share.
pub(super) struct Batches {
    keys: Semaphore,
}

impl Default for Batches {
    fn default() -> Self {
        Self { keys: Semaphore::new(KEYS_AT_ONCE) }
    }
}

impl Service {
    pub(super) async fn batch(&self, request: BatchRequest, context: &CallContext) -> Result<BatchResponse, CallError> {
        let count = request.operations.len();
        if count > OPERATIONS_MAX {
            return Err(super::convert::violation("operations", format!("must be at most {OPERATIONS_MAX}")));
        }
        let mut results = vec![BatchResult::default(); count];
        let room = Room(AtomicUsize::new(RESPONSE_BYTES_MAX));
        let mut answers = stream::iter(by_key(request.operations))
            .map(|operations| self.in_order(operations, context, &room))
            .buffer_unordered(OPERATIONS_MAX);
        while let Some(answered) = answers.next().await {
            for (place, result) in answered {
                if let Some(slot) = results.get_mut(place) {
                    *slot = result;
                }
            }
        }
        drop(answers);
        Ok(BatchResponse { results })
    }

    async fn in_order(
        &self,
        operations: Vec<(usize, Option<Operation>)>,
        context: &CallContext,
        room: &Room,
    ) -> Vec<(usize, BatchResult)> {
        // Nobody closes it.
        let _turn = self.batches.keys.acquire().await;
        let mut answers = Vec::with_capacity(operations.len());
        let mut unavailable = false;
        for (place, operation) in operations {
            let answer =
                if unavailable { Err(CallError::AfterUnavailable) } else { self.one(operation, context).await };
            unavailable |= answer.as_ref().is_err_and(CallError::is_unavailable);
            answers.push((place, room.fit(answer)));
        }
        answers
    }

    async fn one(
        &self,
        operation: Option<Operation>,
        context: &CallContext,
    ) -> Result<batch_result::Result, CallError> {
        use batch_result::Result as Answer;
        match operation {
            Some(Operation::Reserve(request)) if request.wait.is_some() => {
                Err(super::convert::violation("wait", "does not belong to a batch"))
            }
            Some(Operation::Reserve(request)) => self.reserve(request, context).await.map(Answer::Reserve),
            Some(Operation::Complete(request)) => self.complete(request).await.map(Answer::Complete),
            Some(Operation::Fail(request)) => self.fail(request).await.map(Answer::Fail),
            Some(Operation::Renew(request)) => self.renew(request).await.map(Answer::Renew),
            Some(Operation::Lookup(request)) => self.lookup(request).await.map(Answer::Lookup),
            Some(Operation::Resolve(request)) => self.resolve(request).await.map(Answer::Resolve),
            None => Err(super::convert::violation("operation", "must be set")),
        }
    }
}

/// The operations with their places, those of one key together and in order.
fn by_key(operations: Vec<BatchOperation>) -> Vec<Vec<(usize, Option<Operation>)>> {
    let mut groups: Vec<Vec<_>> = Vec::new();
    let mut group_of: HashMap<Option<Key>, usize> = HashMap::new();
    for (place, BatchOperation { operation }) in operations.into_iter().enumerate() {
        let group = *group_of.entry(key(operation.as_ref()).cloned()).or_insert(groups.len());
        match groups.get_mut(group) {
            Some(group) => group.push((place, operation)),
            None => groups.push(vec![(place, operation)]),
        }
    }
    groups
}

fn key(operation: Option<&Operation>) -> Option<&Key> {
    match operation? {
        Operation::Reserve(request) => request.key.as_ref(),
        Operation::Complete(request) => request.key.as_ref(),
        Operation::Fail(request) => request.key.as_ref(),
        Operation::Renew(request) => request.key.as_ref(),
        Operation::Lookup(request) => request.key.as_ref(),
        Operation::Resolve(request) => request.key.as_ref(),
    }
}

/// What is left of the room for answers. They are fitted as they come, so that a Batch never holds more than fits.
struct Room(AtomicUsize);

impl Room {
    fn fit(&self, answer: Result<batch_result::Result, CallError>) -> BatchResult {
        let reason = answer.as_ref().err().map(CallError::reason);
        let fitting = as_result(answer);
        let length = fitting.encoded_len();
        let taken = self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(length));
        let (result, reason) = match taken {
            Ok(_) => (fitting, reason),
            Err(_) => {
                let error = CallError::ResponseTooLarge;
                let reason = error.reason();
                (as_result(Err(error)), Some(reason))
            }
        };
        if let Some(reason) = reason {
            telemetry::refused(reason);
        }
        result
    }
}

fn as_result(answer: Result<batch_result::Result, CallError>) -> BatchResult {
    let result = answer.unwrap_or_else(|error| batch_result::Result::Error(error.into_message()));
    BatchResult { result: Some(result) }
}
