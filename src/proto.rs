//! The protocol as it is compiled from `proto/onceward/v1/idempotency.proto`, whose comments are the reference.

#![allow(missing_docs, unreachable_pub, clippy::all, clippy::pedantic, clippy::unwrap_used, clippy::indexing_slicing)]

tonic::include_proto!("onceward.v1");

/// The descriptors of the protocol and of the error details, with their comments, for server reflection.
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/onceward_descriptor.bin"));
