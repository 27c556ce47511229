//! Step by step: reserve a key, act, complete it.
//!
//! ```sh
//! cargo run --release                                     # the service, in another terminal
//! cargo run -p onceward-client --example guard -- order-17
//! cargo run -p onceward-client --example guard -- order-17   # replayed
//! ```

use std::time::Duration;

use onceward_client::{Client, Key, Reservation};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let order = std::env::args().nth(1).unwrap_or_else(|| "order-17".into());
    let client = Client::builder(["http://127.0.0.1:50051"]).owner("guard-example").environment().connect().await?;

    match client.reserve(Key::new("examples.guard", &order)).lock_ttl(Duration::from_secs(10)).await? {
        Reservation::Acquired(mut guard) => {
            println!("acting on {order}: attempt {}, fence {}", guard.attempt(), guard.fence());
            // Where this attempt is, for the next one, if this process dies.
            guard.checkpoint("charged").await?;
            tokio::time::sleep(Duration::from_secs(2)).await;
            // An error if somebody else has taken the key meanwhile.
            let settled = guard.complete(format!("{order} is charged")).await?;
            println!("done; retries get this result until {:?}", settled.expires_at);
        }
        Reservation::Completed(finished) => println!("done before: {:?}", finished.result.body),
        Reservation::Failed(finished) => println!("refused before: {:?}", finished.result.body),
        Reservation::InProgress(held) => println!("{:?} is at it, ask again in {:?}", held.owner, held.retry_after),
        Reservation::InDoubt(doubt) => println!("nobody knows; resolve fence {}", doubt.fence),
        _ => {}
    }
    client.close().await;
    Ok(())
}
