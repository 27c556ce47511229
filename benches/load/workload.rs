//! What callers do: which work, by which keys, with which results.

use std::sync::atomic::{AtomicU64, Ordering};

use clap::{Args, ValueEnum};
use uuid::Uuid;

use crate::Failure;

/// How many completed keys there are to replay.
pub const COMPLETED_KEYS: usize = 1000;

/// Who does the work.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Side {
    /// The service, one RPC for each step.
    Unary,
    /// The service, many callers' steps in one Batch.
    Batch,
    /// The service by the client crate, which sends the steps of its callers together by itself.
    Client,
    /// Plain SQL, as each service would write it for itself.
    PlainSql,
    /// The service on a store that does nothing.
    Nothing,
}

/// What is done.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Work {
    /// A fresh key is reserved and then completed.
    Pairs,
    /// A key that was completed before is reserved, and the stored result comes back.
    Replays,
}

/// How keys are made.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Keys {
    /// At random.
    UuidV4,
    /// By time.
    UuidV7,
}

/// What callers do.
#[derive(Args, Clone, Debug)]
pub struct Workload {
    /// What is done.
    #[arg(long, value_enum, default_value_t = Work::Pairs)]
    pub work: Work,
    /// The share of pairs that reserve a completed key instead of a fresh one, from 0 to 1.
    #[arg(long, default_value_t = 0.0)]
    pub duplicates: f64,
    /// How keys are made.
    #[arg(long, value_enum, default_value_t = Keys::UuidV4)]
    pub keys: Keys,
    /// The size of a stored result.
    #[arg(long, default_value_t = 256)]
    pub response_bytes: usize,
    /// How many HTTP/2 connections the callers share.
    #[arg(long, default_value_t = 4)]
    pub connections: usize,
    /// How many of a Batch's callers share one call; half of all if nothing is said.
    #[arg(long)]
    pub batch: Option<usize>,
    /// How many database connections the callers share on the side of plain SQL.
    #[arg(long, default_value_t = 16)]
    pub pool: u32,
}

impl Workload {
    /// A key that nobody has used.
    pub fn fresh_key(&self) -> String {
        match self.keys {
            Keys::UuidV4 => Uuid::new_v4(),
            Keys::UuidV7 => Uuid::now_v7(),
        }
        .to_string()
    }

    /// Whether any operation is of a completed key.
    pub fn has_replays(&self) -> bool {
        self.work == Work::Replays || self.duplicates > 0.0
    }

    /// Whether the next operation is to be of a completed key.
    pub fn is_replay(&self) -> bool {
        self.work == Work::Replays || (self.duplicates > 0.0 && self.is_duplicate())
    }

    fn is_duplicate(&self) -> bool {
        // The golden ratio spreads any share evenly.
        static TURN: AtomicU64 = AtomicU64::new(0);
        let turn = TURN.fetch_add(1, Ordering::Relaxed).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (turn as f64) < self.duplicates * u64::MAX as f64
    }
}

/// A caller, or several that go together.
#[async_trait::async_trait]
pub trait Caller: Send {
    /// Does the work once, and gives how many operations that was.
    async fn turn(&mut self) -> Result<u64, Failure>;
}

pub type Callers = Vec<Box<dyn Caller>>;
