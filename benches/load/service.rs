//! Callers of the service.

use std::sync::Arc;

use bytes::Bytes;
use onceward::proto::{
    BatchOperation, BatchRequest, BatchResult, CompleteRequest, Key, ReserveRequest, ReserveResponse, Result as Stored,
    batch_operation::Operation, batch_result, reserve_response::Outcome,
};

use crate::{
    Failure,
    connection::{Client, connect},
    workload::{COMPLETED_KEYS, Caller, Callers, Side, Workload},
};

const NAMESPACE: &str = "load.pairs";

/// `count` callers of the service at `endpoint`.
pub async fn callers(side: Side, endpoint: &str, workload: &Workload, count: usize) -> Result<Callers, Failure> {
    let mut clients = Vec::new();
    for _ in 0..workload.connections.clamp(1, count.max(1)) {
        clients.push(connect(endpoint).await?);
    }
    let completed =
        if workload.has_replays() { complete_some(&mut clients[0].clone(), workload).await? } else { Arc::default() };
    let size = match side {
        Side::Batch => workload.batch.unwrap_or(count / 2).clamp(1, 500),
        _ => 1,
    };
    let caller = |n: usize| {
        let callers = Together {
            client: clients[n % clients.len()].clone(),
            workload: workload.clone(),
            completed: completed.clone(),
            next: n * 7919,
            size,
        };
        let caller: Box<dyn Caller> = if side == Side::Batch { Box::new(callers) } else { Box::new(Single(callers)) };
        caller
    };
    Ok((0..count.div_ceil(size)).map(caller).collect())
}

/// Callers whose steps go in one call.
struct Together {
    client: Client,
    workload: Workload,
    completed: Arc<Vec<String>>,
    next: usize,
    size: usize,
}

/// One caller whose steps are calls of their own.
struct Single(Together);

impl Together {
    fn completed_key(&mut self) -> String {
        self.next += 1;
        self.completed[self.next % self.completed.len()].clone()
    }

    async fn batch(&mut self, operations: Vec<Operation>) -> Result<Vec<BatchResult>, Failure> {
        let operations =
            operations.into_iter().map(|operation| BatchOperation { operation: Some(operation) }).collect();
        Ok(self.client.batch(BatchRequest { operations }).await?.into_inner().results)
    }
}

#[async_trait::async_trait]
impl Caller for Together {
    async fn turn(&mut self) -> Result<u64, Failure> {
        let replays: Vec<bool> = (0..self.size).map(|_| self.workload.is_replay()).collect();
        let keys: Vec<String> = replays
            .iter()
            .map(|replay| if *replay { self.completed_key() } else { self.workload.fresh_key() })
            .collect();
        let reserves = keys.iter().map(|key| Operation::Reserve(reserve(key))).collect();
        for (result, replay) in self.batch(reserves).await?.into_iter().zip(&replays) {
            match result.result {
                Some(batch_result::Result::Reserve(answer)) => expect(&answer, *replay)?,
                other => return Err(format!("a Reserve in a Batch got {other:?}").into()),
            }
        }
        let fresh = keys.iter().zip(&replays).filter(|(_, replay)| !**replay);
        let completes: Vec<_> =
            fresh.map(|(key, _)| Operation::Complete(complete(key, self.workload.response_bytes))).collect();
        if !completes.is_empty() {
            for result in self.batch(completes).await? {
                match result.result {
                    Some(batch_result::Result::Complete(_)) => {}
                    other => return Err(format!("a Complete in a Batch got {other:?}").into()),
                }
            }
        }
        Ok(self.size as u64)
    }
}

#[async_trait::async_trait]
impl Caller for Single {
    async fn turn(&mut self) -> Result<u64, Failure> {
        let Self(caller) = self;
        let replay = caller.workload.is_replay();
        let key = if replay { caller.completed_key() } else { caller.workload.fresh_key() };
        let answer = caller.client.reserve(reserve(&key)).await?.into_inner();
        expect(&answer, replay)?;
        if !replay {
            caller.client.complete(complete(&key, caller.workload.response_bytes)).await?;
        }
        Ok(1)
    }
}

fn expect(answer: &ReserveResponse, replay: bool) -> Result<(), Failure> {
    match &answer.outcome {
        Some(Outcome::Acquired(_)) if !replay => Ok(()),
        Some(Outcome::Completed(_)) if replay => Ok(()),
        other => Err(format!("a Reserve got {other:?}").into()),
    }
}

async fn complete_some(client: &mut Client, workload: &Workload) -> Result<Arc<Vec<String>>, Failure> {
    let mut keys = Vec::with_capacity(COMPLETED_KEYS);
    for _ in 0..COMPLETED_KEYS {
        let key = workload.fresh_key();
        client.reserve(reserve(&key)).await?;
        client.complete(complete(&key, workload.response_bytes)).await?;
        keys.push(key);
    }
    Ok(Arc::new(keys))
}

fn key(value: &str) -> Option<Key> {
    Some(Key { namespace: NAMESPACE.into(), subject: String::new(), value: value.into() })
}

fn reserve(value: &str) -> ReserveRequest {
    // What identifies an execution is random for each; here the key is.
    ReserveRequest { key: key(value), token: value.into(), ..ReserveRequest::default() }
}

fn complete(value: &str, bytes: usize) -> CompleteRequest {
    let result = Stored { code: 200, metadata: Vec::new(), body: Bytes::from(vec![b'r'; bytes]) };
    CompleteRequest { key: key(value), token: value.into(), result: Some(result), retention: None }
}
