//! The protocol as it is compiled from `onceward/v1/idempotency.proto`, whose comments are the reference.
//!
//! For those who want the bare calls; everybody else has no need of it.

#![allow(missing_docs, unreachable_pub, clippy::all, clippy::pedantic, clippy::unwrap_used, clippy::indexing_slicing)]

tonic::include_proto!("onceward.v1");
