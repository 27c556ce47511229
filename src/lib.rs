//! Onceward: a central gRPC service that makes any operation safe to retry.
//!
//! A caller reserves a key before it acts and completes the key with its result; every later caller with the same key gets
//! that result back and does not act again. A database is the arbiter: of all replicas of the service, and of all callers.
//!
//! The modules, in reading order. Each knows only what stands before it.

// Nouns: keys, tokens, records. Valid by construction.
pub mod record;
// Everything that can be done to a record in one atomic step.
pub mod write;
// The rules: what a call on a record means. The whole protocol.
pub mod lifecycle;
// Where records live: the trait and its promises, Postgres, SQLite.
pub mod store;
// Every metric name, and how the process logs.
pub mod telemetry;
// Callers that wait for a key which somebody else holds.
pub mod waiters;
// The verbs: write, else load and decide, and write again.
pub mod engine;
// Deletes what has expired.
pub mod sweeper;
// The protocol, compiled from the proto.
pub mod proto;
// The RPCs: messages to verbs and back, and errors as statuses.
pub mod grpc;
// Connections as they come in, each of which can be cut.
pub mod listener;
// Whether this server is to get calls.
pub mod health;
// What operators ask over HTTP.
pub mod admin;
// The wiring, and the order in which it drains.
pub mod server;
// The command line and the environment.
pub mod config;
