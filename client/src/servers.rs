//! [`Servers`]: the servers of the service, and which of them gets the next call.
//!
//! Any server may answer any call. Those that fail are avoided for a while; a connection that is silent is left for a new one.
//! Each server has two connections: Reserves that wait have one of their own, so that they never take the place of a
//! Complete.

use std::{
    pin::pin,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::{
    runtime::Handle,
    time::{Instant, sleep, timeout},
};
use tonic::{
    Request, Status,
    metadata::MetadataValue,
    transport::{Channel, Endpoint},
};

use crate::{
    error::{is_of_silence, is_of_the_way},
    proto::{
        BatchOperation, BatchRequest, BatchResult, batch_operation::Operation, batch_result,
        idempotency_service_client::IdempotencyServiceClient,
    },
};

/// For how long a server is avoided after its first failure in a row.
const AVOIDED_MIN: Duration = Duration::from_millis(50);
/// For how long at most.
const AVOIDED_MAX: Duration = Duration::from_secs(5);
/// A call that should be answered at once is overdue after this: its server gets no others until it has answered.
const OVERDUE_AFTER: Duration = Duration::from_millis(500);
/// A try with less time than this says nothing of its server when it ends without an answer.
const TELLING: Duration = Duration::from_millis(100);

/// What the credentials are sent as.
pub(crate) type Authorization = MetadataValue<tonic::metadata::Ascii>;

/// Which of the connections of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lane {
    /// Calls that are answered at once.
    Prompt,
    /// Calls that are held by the server.
    Waiting,
}

/// The servers of the service.
pub(crate) struct Servers {
    servers: Vec<Server>,
    next: AtomicUsize,
    authorization: Option<Authorization>,
}

struct Server {
    endpoint: Endpoint,
    /// Where the client was made, which drives the connections.
    runtime: Handle,
    lines: Mutex<[Line; 2]>,
    health: Mutex<Health>,
}

/// A connection, which is made when it is needed and made again when it breaks.
struct Line {
    channel: Channel,
    /// Which one it is, of those that this server had.
    generation: usize,
}

/// How a server has answered lately.
#[derive(Default)]
struct Health {
    /// In a row.
    failures: u32,
    avoided_until: Option<Instant>,
    /// One call finds out whether it is well again, and not all of them.
    probed: bool,
}

/// A connection that was chosen for a call.
struct Choice<'s> {
    server: &'s Server,
    /// Whether it is the one that finds out.
    probes: bool,
    lane: Lane,
    channel: Channel,
    generation: usize,
}

impl Servers {
    /// To be called inside a runtime, which drives the connections.
    pub(crate) fn new(endpoints: Vec<Endpoint>, authorization: Option<Authorization>) -> Self {
        Self { servers: endpoints.into_iter().map(Server::new).collect(), next: AtomicUsize::new(0), authorization }
    }

    /// Calls one operation by itself.
    ///
    /// # Cancel safety
    ///
    /// Dropped, the call is given up, and it may have been done.
    pub(crate) async fn call(
        &self,
        lane: Lane,
        operation: Operation,
        patience: Duration,
    ) -> Result<batch_result::Result, Status> {
        let Some(choice) = self.choose(lane) else { return Err(Status::unavailable("there is no server")) };
        let mut client = choice.client();
        let answer = async {
            use batch_result::Result as Answer;
            Ok(match operation {
                Operation::Reserve(request) => {
                    Answer::Reserve(client.reserve(self.request(request, patience)).await?.into_inner())
                }
                Operation::Complete(request) => {
                    Answer::Complete(client.complete(self.request(request, patience)).await?.into_inner())
                }
                Operation::Fail(request) => {
                    Answer::Fail(client.fail(self.request(request, patience)).await?.into_inner())
                }
                Operation::Renew(request) => {
                    Answer::Renew(client.renew(self.request(request, patience)).await?.into_inner())
                }
                Operation::Lookup(request) => {
                    Answer::Lookup(client.lookup(self.request(request, patience)).await?.into_inner())
                }
                Operation::Resolve(request) => {
                    Answer::Resolve(client.resolve(self.request(request, patience)).await?.into_inner())
                }
            })
        };
        choice.judge(patience, answer).await
    }

    /// Calls several operations as one Batch, whose results are in their order.
    ///
    /// # Cancel safety
    ///
    /// Dropped, the call is given up, and each of them may have been done.
    pub(crate) async fn batch(
        &self,
        operations: Vec<Operation>,
        patience: Duration,
    ) -> Result<Vec<BatchResult>, Status> {
        let Some(choice) = self.choose(Lane::Prompt) else { return Err(Status::unavailable("there is no server")) };
        let operations =
            operations.into_iter().map(|operation| BatchOperation { operation: Some(operation) }).collect();
        let mut client = choice.client();
        let answer = client.batch(self.request(BatchRequest { operations }, patience));
        choice.judge(patience, answer).await.map(|answer| answer.into_inner().results)
    }

    fn request<M>(&self, message: M, patience: Duration) -> Request<M> {
        let mut request = Request::new(message);
        request.set_timeout(patience);
        if let Some(authorization) = &self.authorization {
            request.metadata_mut().insert("authorization", authorization.clone());
        }
        request
    }

    /// The servers in turn, without those that are avoided; if all are, the one that is so for the shortest time.
    fn choose(&self, lane: Lane) -> Option<Choice<'_>> {
        let now = Instant::now();
        let first = self.next.fetch_add(1, Ordering::Relaxed);
        let in_turn =
            || (0..self.servers.len()).filter_map(|n| self.servers.get(first.wrapping_add(n) % self.servers.len()));
        let fine = in_turn().find_map(|server| Some(server.choice(lane, server.admits(lane, now)?)));
        fine.or_else(|| {
            let soonest = in_turn().min_by_key(|server| locked(&server.health).avoided_until)?;
            Some(soonest.choice(lane, Admission::Regular))
        })
    }
}

/// How a call comes to a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Admission {
    Regular,
    Probe,
}

impl Server {
    fn new(endpoint: Endpoint) -> Self {
        let line = || Line { channel: endpoint.connect_lazy(), generation: 0 };
        Self { lines: Mutex::new([line(), line()]), health: Mutex::default(), runtime: Handle::current(), endpoint }
    }

    /// Whether it gets a call: always if it is well, and one at a time if it has failed and was avoided since. A call that is held
    /// finds nothing out in good time.
    fn admits(&self, lane: Lane, now: Instant) -> Option<Admission> {
        let mut health = locked(&self.health);
        if health.failures == 0 {
            return Some(Admission::Regular);
        }
        if health.probed || lane == Lane::Waiting || health.avoided_until.is_some_and(|until| until > now) {
            return None;
        }
        health.probed = true;
        Some(Admission::Probe)
    }

    fn choice(&self, lane: Lane, admission: Admission) -> Choice<'_> {
        let [prompt, waiting] = &*locked(&self.lines);
        let line = if lane == Lane::Prompt { prompt } else { waiting };
        let (channel, generation) = (line.channel.clone(), line.generation);
        Choice { server: self, probes: admission == Admission::Probe, lane, channel, generation }
    }
}

impl Choice<'_> {
    fn client(&self) -> IdempotencyServiceClient<Channel> {
        IdempotencyServiceClient::new(self.channel.clone())
    }

    /// Waits for an answer, and draws from it what it says of the server and of the connection.
    async fn judge<T>(self, patience: Duration, answer: impl Future<Output = Result<T, Status>>) -> Result<T, Status> {
        let begun = Instant::now();
        let mut answer = pin!(timeout(patience, answer));
        let answer = tokio::select! {
            biased;
            answer = &mut answer => answer,
            () = sleep(OVERDUE_AFTER), if self.lane == Lane::Prompt => {
                self.count(true);
                answer.await
            }
        };
        let answer = answer.unwrap_or_else(|_| Err(Status::deadline_exceeded("no answer in time")));
        let error = answer.as_ref().err();
        // The library has a timer of its own for the same end, and calls it a cancellation.
        let silent = begun.elapsed() >= patience && error.is_some_and(is_of_silence);
        if silent && patience >= TELLING {
            self.leave();
        }
        if !silent || patience >= TELLING {
            self.count(silent || error.is_some_and(is_of_the_way));
        }
        answer
    }

    fn count(&self, failed: bool) {
        let mut health = locked(&self.server.health);
        if failed {
            let avoided = (AVOIDED_MIN * 2_u32.pow(health.failures.min(10))).min(AVOIDED_MAX);
            health.failures = health.failures.saturating_add(1);
            health.avoided_until = Some(Instant::now() + avoided);
        } else if health.failures > 0 {
            *health = Health::default();
        }
    }

    /// A connection may be dead without anybody having said so, and would be taken for alive until its keepalive fails. Those
    /// who still wait on it keep it.
    fn leave(&self) {
        let [prompt, waiting] = &mut *locked(&self.server.lines);
        let line = if self.lane == Lane::Prompt { prompt } else { waiting };
        if line.generation == self.generation {
            // This call may run on a runtime that ends earlier.
            let _inside = self.server.runtime.enter();
            *line = Line { channel: self.server.endpoint.connect_lazy(), generation: self.generation + 1 };
        }
    }
}

impl Drop for Choice<'_> {
    fn drop(&mut self) {
        if self.probes {
            locked(&self.server.health).probed = false;
        }
    }
}

/// What is kept under these locks is whole at any time.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
