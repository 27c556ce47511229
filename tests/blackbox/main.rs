//! The service as its callers see it: real sockets, real databases.
//!
//! Servers run in this process where that is enough, and as the program itself where a signal, an exit code or a kill is
//! what is tested. Locks and retentions of a microsecond stand for those that ran out.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    unreachable_pub,
    reason = "tests"
)]

mod support;

mod admin;
mod batch;
mod cases;
mod draining;
mod durability;
mod errors;
mod grouping;
mod limits;
mod postgres;
mod program;
mod races;
mod recovery;
mod reflection;
mod rules;
mod sweeping;
mod waiting;
