//! [`Coalescer`]: concurrent calls as one Batch.
//!
//! There is no timer. A call that finds nobody else on the way goes alone and at once; those that come while as many calls as
//! may be are on the way, go together with the next. So a quiet client has the latency of a plain call and a busy one spends
//! a small part of it on each.
//!
//! Who leaves is not sent any more: whoever needs an answer asks again and is queued anew.

use std::{collections::VecDeque, pin::pin, sync::Arc, time::Duration};

use prost::Message;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot},
    time::sleep,
};
use tokio_util::task::TaskTracker;
use tonic::{Code, Status};

use crate::{
    proto::{BatchResult, batch_operation::Operation, batch_result},
    servers::{Lane, Servers},
};

/// How many calls may wait, of each kind; more wait at the door.
const QUEUE_LENGTH: usize = 4096;
/// After this a call does not keep others from being sent any more: its server may be silent.
const OVERDUE_AFTER: Duration = Duration::from_millis(500);
/// How much a Batch has at most, but for one call alone: the service takes 4 MiB.
const BATCH_BYTES: usize = 3 << 20;

/// How calls go together.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CoalescerOptions {
    /// How many calls make a Batch at most; 1 turns it off.
    pub(crate) batch_calls_max: usize,
    /// How many are on the way at once.
    pub(crate) in_flight_max: usize,
    /// How long each may take.
    pub(crate) patience: Duration,
}

/// One call and who waits for it.
struct Call {
    operation: Box<Operation>,
    answer: oneshot::Sender<Answer>,
}

type Answer = Result<batch_result::Result, Status>;

/// The way in.
pub(crate) struct Coalescer {
    reserves: mpsc::Sender<Call>,
    /// What must not queue behind reservations: the effect has been, or a lock runs out.
    others: mpsc::Sender<Call>,
}

impl Coalescer {
    /// Starts it, inside a runtime. Its tasks end when this way in is gone and all calls are answered.
    pub(crate) fn start(servers: Arc<Servers>, options: CoalescerOptions) -> Self {
        let (reserves, reserves_queue) = mpsc::channel(QUEUE_LENGTH);
        let (others, others_queue) = mpsc::channel(QUEUE_LENGTH);
        let queue = Queue { others: others_queue, reserves: reserves_queue, taken: VecDeque::new(), options };
        let tasks = TaskTracker::new();
        tasks.spawn(dispatch(queue, servers, tasks.clone()));
        Self { reserves, others }
    }

    /// Calls an operation; nothing if the task that sends is gone.
    ///
    /// # Cancel safety
    ///
    /// Dropped, it is not sent, unless it is on the way already.
    pub(crate) async fn call(&self, operation: Box<Operation>) -> Option<Answer> {
        let queue = if matches!(*operation, Operation::Reserve(_)) { &self.reserves } else { &self.others };
        let (answer, answered) = oneshot::channel();
        queue.reserve().await.ok()?.send(Call { operation, answer });
        answered.await.ok()
    }
}

/// Sends what waits, whenever there is room for one more on the way.
async fn dispatch(mut queue: Queue, servers: Arc<Servers>, tasks: TaskTracker) {
    let in_flight = Arc::new(Semaphore::new(queue.options.in_flight_max));
    while queue.wait().await {
        let Ok(room) = in_flight.clone().acquire_owned().await else { return };
        // Whoever was just answered gets its turn to ask for the next thing, so that the batch has it too.
        tokio::task::yield_now().await;
        let calls = queue.take();
        if calls.is_empty() {
            continue;
        }
        tasks.spawn(send(calls, servers.clone(), queue.options.patience, room));
    }
}

/// What waits.
struct Queue {
    others: mpsc::Receiver<Call>,
    reserves: mpsc::Receiver<Call>,
    /// Taken from the queues but not yet sent.
    taken: VecDeque<Call>,
    options: CoalescerOptions,
}

impl Queue {
    /// Waits until there is something; false when nothing can come any more.
    async fn wait(&mut self) -> bool {
        if !self.taken.is_empty() {
            return true;
        }
        let call = tokio::select! {
            biased;
            Some(call) = self.others.recv() => Some(call),
            Some(call) = self.reserves.recv() => Some(call),
            else => None,
        };
        self.taken.extend(call);
        !self.taken.is_empty()
    }

    /// As much as one Batch may have.
    fn take(&mut self) -> Vec<Call> {
        let (mut calls, mut bytes) = (Vec::new(), 0);
        while calls.len() < self.options.batch_calls_max {
            let next = self
                .taken
                .pop_front()
                .or_else(|| self.others.try_recv().ok())
                .or_else(|| self.reserves.try_recv().ok());
            let Some(call) = next else { break };
            if call.answer.is_closed() {
                continue;
            }
            bytes += encoded_bytes(&call.operation);
            if bytes > BATCH_BYTES && !calls.is_empty() {
                self.taken.push_front(call);
                break;
            }
            calls.push(call);
        }
        calls
    }
}

/// What an operation takes in a Batch.
fn encoded_bytes(operation: &Operation) -> usize {
    // The tag and the length of each of the two messages around it.
    const AROUND: usize = 12;
    operation.encoded_len() + AROUND
}

/// Sends calls and hands out their answers.
async fn send(calls: Vec<Call>, servers: Arc<Servers>, patience: Duration, room: OwnedSemaphorePermit) {
    let (operations, waiting): (Vec<_>, Vec<_>) = calls.into_iter().map(|call| (*call.operation, call.answer)).unzip();
    let mut answers = pin!(answers(operations, &servers, patience));
    let answers = tokio::select! {
        biased;
        answers = &mut answers => {
            // Before the answers are out: who gets one may want to send the next thing.
            drop(room);
            answers
        }
        () = sleep(OVERDUE_AFTER) => {
            drop(room);
            answers.await
        }
    };
    for (waiting, answer) in waiting.into_iter().zip(answers) {
        let _ = waiting.send(answer);
    }
}

/// One answer for each operation.
async fn answers(mut operations: Vec<Operation>, servers: &Servers, patience: Duration) -> Vec<Answer> {
    let count = operations.len();
    if let (1, Some(operation)) = (count, operations.pop_if(|_| count == 1)) {
        return vec![servers.call(Lane::Prompt, operation, patience).await];
    }
    match servers.batch(operations, patience).await {
        Ok(results) if results.len() == count => results.into_iter().map(unwrapped).collect(),
        Ok(_) => vec![Err(Status::unknown("a batch has another number of results than operations")); count],
        Err(status) => vec![Err(status); count],
    }
}

/// The answer of one operation of a Batch.
fn unwrapped(result: BatchResult) -> Answer {
    match result.result {
        Some(batch_result::Result::Error(error)) => {
            // The details of a status are its message, encoded.
            let details = error.encode_to_vec().into();
            Err(Status::with_details(Code::from_i32(error.code), error.message, details))
        }
        Some(answer) => Ok(answer),
        None => Err(Status::unknown("an operation of a batch has no result")),
    }
}
