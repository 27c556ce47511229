//! Callers who share one client of the client crate, as those of one process do.

use std::{sync::Arc, time::Duration};

use onceward_client::{Client, Guard, Key, Reservation};

use crate::{
    Failure,
    workload::{COMPLETED_KEYS, Caller, Callers, Workload},
};

/// `count` callers of the service at `endpoint`.
pub async fn callers(endpoint: &str, workload: &Workload, count: usize) -> Result<Callers, Failure> {
    let client = Client::builder([endpoint]).timeout(Duration::from_secs(60)).connect().await?;
    let completed = if workload.has_replays() { complete_some(&client, workload).await? } else { Arc::default() };
    let caller = |n: usize| -> Box<dyn Caller> {
        Box::new(ByClient {
            client: client.clone(),
            workload: workload.clone(),
            completed: completed.clone(),
            next: n * 7919,
        })
    };
    Ok((0..count).map(caller).collect())
}

struct ByClient {
    client: Client,
    workload: Workload,
    completed: Arc<Vec<String>>,
    next: usize,
}

#[async_trait::async_trait]
impl Caller for ByClient {
    async fn turn(&mut self) -> Result<u64, Failure> {
        let replay = self.workload.is_replay();
        if replay {
            self.next += 1;
            let key = self.completed[self.next % self.completed.len()].clone();
            match self.client.reserve(key_of(key)).await? {
                Reservation::Completed(_) => {}
                other => return Err(format!("a replay got {other:?}").into()),
            }
        } else {
            complete(fresh(&self.client, self.workload.fresh_key()).await?, &self.workload).await?;
        }
        Ok(1)
    }
}

async fn fresh(client: &Client, key: String) -> Result<Guard, Failure> {
    match client.reserve(key_of(key)).await? {
        Reservation::Acquired(guard) => Ok(guard),
        other => Err(format!("a fresh key got {other:?}").into()),
    }
}

async fn complete(guard: Guard, workload: &Workload) -> Result<(), Failure> {
    guard.complete(vec![b'r'; workload.response_bytes]).await?;
    Ok(())
}

async fn complete_some(client: &Client, workload: &Workload) -> Result<Arc<Vec<String>>, Failure> {
    let mut keys = Vec::with_capacity(COMPLETED_KEYS);
    for _ in 0..COMPLETED_KEYS {
        let key = workload.fresh_key();
        complete(fresh(client, key.clone()).await?, workload).await?;
        keys.push(key);
    }
    Ok(Arc::new(keys))
}

fn key_of(value: String) -> Key {
    Key::new("load.pairs", value)
}
