//! The client against the service, through real sockets.

#![allow(unreachable_pub, clippy::unwrap_used, clippy::indexing_slicing)]

mod coalescing;
mod fake;
mod grpc;
mod grpc_service;
mod guard;
mod http;
mod ledger;
mod once;
mod proxy;
mod reserve;
mod servers;
mod steps;
mod support;
mod web;
