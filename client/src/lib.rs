//! The client of Onceward, the service that makes any operation safe to retry.
//!
//! Reserve a key before you act and complete the key with the result; every later caller with the same key gets that result
//! back and does not act again. [`Once::run`] is the whole dance in one call:
//!
//! ```no_run
//! use onceward_client::{Client, Failure, Fingerprint, Key};
//!
//! # #[derive(serde::Serialize, serde::Deserialize)] struct Receipt { charge: String }
//! # #[derive(serde::Serialize)] struct Order { id: String, cents: u64 }
//! # async fn charge(order: &Order, fence: i64) -> Result<Receipt, std::io::Error> { unimplemented!() }
//! # async fn example(order: Order) -> Result<(), Box<dyn std::error::Error>> {
//! let client = Client::builder(["http://127.0.0.1:50051"]).connect().await?;
//!
//! let outcome = client
//!     .once(Key::new("payments.charge", &order.id))
//!     .fingerprint(Fingerprint::of_value(&order)?)
//!     // An error passed on by `?` is one of which nobody knows whether the charge was made.
//!     .run(|lease| async move { Ok::<Receipt, Failure<std::io::Error>>(charge(&order, lease.fence()).await?) })
//!     .await?;
//! println!("charged as {}, now or by an earlier call: {:?}", outcome.value.charge, outcome.source);
//! # Ok(())
//! # }
//! ```
//!
//! With a [`Guard`] the same is done by hand, step by step.

// The modules, in reading order. Each knows only what stands before it.

// The protocol, compiled from the proto.
pub mod proto;
// Nouns: keys, fingerprints, results.
mod fingerprint;
mod key;
mod result;
// Why a call has no answer, and which of the reasons pass.
mod error;
// The servers: which of them gets the next call.
mod servers;
// Concurrent calls as one Batch.
mod coalescer;
// What can be asked.
mod question;
// Answers without a service, for local work.
mod offline;
// One call until it is answered.
mod call;
// What everything starts from.
mod client;
// How to reach the service.
mod builder;
// The right to act, as those who act see it; and the outcome that it gets.
mod lease;
mod settlement;
// Holds a reservation, renews it and sends its outcome.
mod keeper;
// A reservation in the caller's hands, and what else may be known of a key.
mod guard;
mod reservation;
mod reserve;
// The whole dance in one call.
mod codec;
mod once;
// Finishing in place of a holder.
mod resolve;
// A request and its answer, made safe to retry: of HTTP, and of gRPC.
#[cfg(feature = "_exchange")]
mod exchange;
#[cfg(feature = "grpc")]
pub mod grpc;
#[cfg(feature = "http")]
pub mod http;
// Effects in the caller's own Postgres, exactly once.
#[cfg(feature = "ledger")]
pub mod ledger;
// The whole service inside a test.
#[cfg(feature = "testing")]
pub mod testing;

pub use self::{
    builder::{BuildError, ClientBuilder},
    client::Client,
    codec::{Codec, CodecError, Json, Prost},
    error::Error,
    fingerprint::Fingerprint,
    guard::Guard,
    key::Key,
    lease::Lease,
    once::{Failure, Once, OnceError, Outcome, Source},
    reservation::{InDoubt, InProgress, Reservation},
    reserve::Reserve,
    resolve::Resolution,
    result::{Finished, StoredResult},
    settlement::Settled,
};

/// The code in the README compiles.
#[cfg(all(doctest, feature = "http", feature = "ledger", feature = "testing", feature = "tls"))]
#[doc = include_str!("../README.md")]
struct Readme;
