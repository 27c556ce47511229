//! The client against the service, through real sockets.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    unreachable_pub,
    reason = "tests"
)]

mod chaos;
mod coalescing;
mod fake;
mod faults;
mod grpc;
mod grpc_service;
mod guard;
mod handlers;
mod http;
mod http_bodies;
mod http_outages;
mod ledger;
mod ledger_faults;
mod once;
mod proxy;
mod reserve;
mod servers;
mod silence;
mod steps;
mod support;
mod web;
