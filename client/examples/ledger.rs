//! An effect in your own Postgres, exactly once.
//!
//! ```sh
//! cargo run --release                                     # the service, in another terminal
//! DATABASE_URL=postgres://localhost/shop cargo run -p onceward-client --features ledger --example ledger -- request-17
//! ```

use onceward_client::{
    Client, Key,
    ledger::{Entry, Ledger},
};
use sqlx::{PgPool, Row};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let request = std::env::args().nth(1).unwrap_or_else(|| "request-17".into());
    let client = Client::builder(["http://127.0.0.1:50051"]).environment().connect().await?;
    let pool = PgPool::connect(&std::env::var("DATABASE_URL")?).await?;
    let orders = "CREATE TABLE IF NOT EXISTS example_order (id bigint GENERATED ALWAYS AS IDENTITY, cents bigint)";
    sqlx::query(orders).execute(&pool).await?;
    let ledger = Ledger::new(client.clone(), pool);
    ledger.migrate().await?;

    match ledger.open(client.reserve(Key::new("examples.ledger", request))).await? {
        Entry::Open(mut effect) => {
            let insert = sqlx::query("INSERT INTO example_order (cents) VALUES (100) RETURNING id");
            let id: i64 = insert.fetch_one(effect.connection()?).await?.try_get("id")?;
            // The order and its receipt are committed as one, and only then the service is told.
            effect.commit(format!("placed as {id}")).await?;
            println!("placed as {id}");
        }
        Entry::Completed(result) => println!("placed before: {:?}", result.body),
        Entry::Failed(result) => println!("refused before: {:?}", result.body),
        other => println!("{other:?}"),
    }
    client.close().await;
    Ok(())
}
