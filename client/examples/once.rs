//! The whole dance in one call, by a crowd.
//!
//! ```sh
//! cargo run --release                                     # the service, in another terminal
//! cargo run -p onceward-client --example once
//! ```

use std::time::Duration;

use onceward_client::{Client, Failure, Fingerprint, Key, OnceError};
use serde::{Deserialize, Serialize};
use tokio::task::JoinSet;

#[derive(Serialize)]
struct Order {
    id: String,
    cents: u64,
}

#[derive(Debug, Serialize, Deserialize)]
struct Receipt {
    charge: String,
    cents: u64,
}

/// What a payment provider may say.
#[derive(Debug, thiserror::Error)]
enum ChargeError {
    #[error("the card is declined")]
    Declined,
    #[error("the provider did not answer")]
    NoAnswer,
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let client = Client::builder(["http://127.0.0.1:50051"]).environment().connect().await?;
    let id = Key::random("examples.once").value().to_owned();
    let mut crowd = JoinSet::new();
    for _ in 0..5 {
        let (client, order) = (client.clone(), Order { id: id.clone(), cents: 100 });
        crowd.spawn(async move { pay(&client, &order).await });
    }
    while let Some(paid) = crowd.join_next().await {
        println!("{:?}", paid?);
    }
    client.close().await;
    Ok(())
}

async fn pay(client: &Client, order: &Order) -> Result<Receipt, Box<dyn std::error::Error + Send + Sync>> {
    let outcome = client
        .once(Key::new("examples.once", &order.id))
        .fingerprint(Fingerprint::of_value(order)?)
        .run(async |lease| match charge(order, lease.fence()).await {
            Ok(receipt) => Ok(receipt),
            // It will be declined again: every retry is to be told so.
            Err(error @ ChargeError::Declined) => Err(Failure::permanent(error)),
            // It may have been charged: nobody may try before the lock has run out.
            Err(error @ ChargeError::NoAnswer) => Err(Failure::Unknown(error)),
        })
        .await;
    match outcome {
        Ok(outcome) => {
            println!("{:?}", outcome.source);
            Ok(outcome.value)
        }
        Err(OnceError::InProgress(held)) => Err(format!("try again in {:?}", held.retry_after).into()),
        Err(error) => Err(error.into()),
    }
}

async fn charge(order: &Order, fence: i64) -> Result<Receipt, ChargeError> {
    println!("charging {} cents under fence {fence}", order.cents);
    tokio::time::sleep(Duration::from_millis(300)).await;
    match order.cents {
        0 => Err(ChargeError::Declined),
        cents if cents > 1_000_000 => Err(ChargeError::NoAnswer),
        cents => Ok(Receipt { charge: format!("ch_{}", order.id), cents }),
    }
}
