//! Effects in a Postgres of the caller's own: one for each key, whatever happens.

use std::{net::SocketAddr, time::Duration};

use onceward_client::{
    Client, Error, Fingerprint, Key, Reservation, Resolution,
    ledger::{Entry, Ledger, LedgerError},
    testing::Server,
};
use sqlx::{
    PgPool, Row,
    postgres::{PgConnectOptions, PgPoolOptions},
};
use tokio::task::JoinSet;

use crate::{
    steps::{At, Steps},
    support::{MILLISECOND, SECOND, database, direct, eventually, is_free, key, server, within},
};

pub struct World {
    pub server: Server,
    pub url: String,
    pub pool: PgPool,
    pub ledger: Ledger,
    pub client: Client,
}

pub async fn world() -> World {
    let url = database().await;
    let server = server();
    let pool = PgPoolOptions::new().max_connections(20).connect(&url).await.unwrap();
    let client = direct(&server);
    World { ledger: Ledger::new(client.clone(), pool.clone()), server, url, pool, client }
}

impl World {
    /// A ledger whose every connection goes through these steps, as that of another process would.
    async fn through(&self, steps: &Steps) -> Ledger {
        let options: PgConnectOptions = self.url.parse().unwrap();
        let database = steps.before(SocketAddr::from(([127, 0, 0, 1], options.get_port()))).await;
        let service = steps.before(self.server.address()).await;
        let pool = PgPoolOptions::new().max_connections(2).acquire_timeout(2 * SECOND);
        let pool = pool.connect_lazy_with(options.port(database.port()));
        let client = Client::builder([format!("http://{service}")]).timeout(2 * SECOND).lazy().unwrap();
        Ledger::new(client, pool)
    }

    pub async fn effects(&self, key: &Key) -> Vec<String> {
        let rows = sqlx::query("SELECT by_whom FROM effect WHERE key = $1")
            .bind(key.value())
            .fetch_all(&self.pool)
            .await
            .unwrap();
        rows.iter().map(|row| row.get(0)).collect()
    }
}

/// Acts unless it was done; gives the result that counts.
pub async fn act(
    ledger: &Ledger,
    client: &Client,
    key: Key,
    by_whom: &str,
    lock: Duration,
) -> Result<String, LedgerError> {
    let reserve = client.reserve(key.clone()).lock_ttl(lock).wait(10 * SECOND);
    match ledger.open(reserve).await? {
        Entry::Open(mut effect) => {
            let insert =
                sqlx::query("INSERT INTO effect (key, by_whom) VALUES ($1, $2)").bind(key.value()).bind(by_whom);
            insert.execute(effect.connection()?).await?;
            effect.commit(by_whom.to_owned()).await?;
            Ok(by_whom.into())
        }
        Entry::Completed(result) => Ok(String::from_utf8(result.body.to_vec()).unwrap()),
        other => panic!("{other:?}"),
    }
}

const LOCK: Duration = Duration::from_millis(150);

/// How many steps an undisturbed run may take; beyond, no fault happens any more.
const STEPS_MAX: u64 = 90;

#[tokio::test]
async fn a_crash_at_any_step_leaves_one_effect_and_its_result() {
    let world = world().await;
    let mut crashes = 0;
    let mut runs = JoinSet::new();
    let world = std::sync::Arc::new(world);
    for step in 1..=STEPS_MAX {
        let world = world.clone();
        if runs.len() >= 6 {
            crashes += runs.join_next().await.unwrap().unwrap();
        }
        runs.spawn(async move {
            let (key, steps) = (key(&format!("crash {step}")), Steps::new(step, At::Crash));
            let ledger = world.through(&steps).await;
            let (first_client, first_key) = (ledger.client().clone(), key.clone());
            let first = tokio::spawn(async move { act(&ledger, &first_client, first_key, "first", LOCK).await });
            let crashed = tokio::select! {
                () = steps.happened() => true,
                () = async { while !first.is_finished() { tokio::time::sleep(MILLISECOND).await } } => false,
            };
            // What was committed before counts.
            let second = within(20 * SECOND, act(&world.ledger, &world.client, key.clone(), "second", LOCK)).await;
            let second = second.unwrap_or_else(|error| panic!("step {step}: {error}"));
            assert_eq!(world.effects(&key).await, [second.as_str()], "step {step}");
            let Reservation::Completed(finished) = world.client.reserve(key).await.unwrap() else {
                panic!("step {step}")
            };
            assert_eq!(finished.result.body, second, "step {step}");
            if let Ok(Ok(Ok(first))) = tokio::time::timeout(5 * SECOND, first).await {
                assert_eq!(first, second, "step {step}");
            }
            u32::from(crashed)
        });
    }
    crashes += runs.join_all().await.iter().sum::<u32>();
    // Of both kinds there were many.
    assert!((20..STEPS_MAX as u32).contains(&crashes), "{crashes}");
}

#[tokio::test]
async fn two_holders_interleaved_at_any_step_leave_one_effect_and_agree_on_it() {
    let world = std::sync::Arc::new(world().await);
    let mut runs = JoinSet::new();
    let mut outcomes = Vec::new();
    for step in 1..=STEPS_MAX {
        let world = world.clone();
        if runs.len() >= 6 {
            outcomes.push(runs.join_next().await.unwrap().unwrap());
        }
        runs.spawn(async move {
            let (key, steps) = (key(&format!("two {step}")), Steps::new(step, At::Pause));
            let ledger = world.through(&steps).await;
            let (first_client, first_key) = (ledger.client().clone(), key.clone());
            let first = tokio::spawn(async move { act(&ledger, &first_client, first_key, "first", LOCK).await });
            tokio::select! {
                () = steps.happened() => {}
                () = async { while !first.is_finished() { tokio::time::sleep(MILLISECOND).await } } => {}
            }
            let (of_second, second_key) = (world.clone(), key.clone());
            let mut second =
                tokio::spawn(
                    async move { act(&of_second.ledger, &of_second.client, second_key, "second", LOCK).await },
                );
            // It ends, or waits for the transaction of the first.
            let ended = tokio::time::timeout(4 * LOCK, &mut second).await;
            steps.resume();
            let second = match ended {
                Ok(second) => second,
                Err(_) => within(20 * SECOND, second).await,
            };
            let second = second.unwrap().unwrap_or_else(|error| panic!("step {step}: {error}"));
            let effects = world.effects(&key).await;
            assert_eq!(effects, [second.as_str()], "step {step}");
            // The first may have given up meanwhile, but never says anything else.
            if let Ok(first) = within(20 * SECOND, first).await.unwrap() {
                assert_eq!(first, second, "step {step}");
            }
            second
        });
    }
    outcomes.extend(runs.join_all().await);
    // Each of them was the faster one at times.
    for who in ["first", "second"] {
        assert!(outcomes.iter().filter(|outcome| *outcome == who).count() > 5, "{outcomes:?}");
    }
}

#[tokio::test]
async fn an_effect_that_is_dropped_or_released_has_not_happened() {
    let world = world().await;
    for (value, release) in [("dropped", false), ("released", true)] {
        let Entry::Open(mut effect) = world.ledger.open(world.client.reserve(key(value))).await.unwrap() else {
            panic!()
        };
        let insert = sqlx::query("INSERT INTO effect (key, by_whom) VALUES ($1, 'nobody')").bind(value);
        insert.execute(effect.connection().unwrap()).await.unwrap();
        if release {
            effect.release().await.unwrap()
        } else {
            drop(effect)
        }
        eventually("the key is free", async || is_free(&world.client, key(value)).await).await;
        assert!(world.effects(&key(value)).await.is_empty());
        assert_eq!(act(&world.ledger, &world.client, key(value), "later", SECOND).await.unwrap(), "later");
    }
}

#[tokio::test]
async fn a_permanent_failure_is_a_receipt_and_the_effect_is_rolled_back() {
    let world = world().await;
    let Entry::Open(mut effect) = world.ledger.open(world.client.reserve(key("k"))).await.unwrap() else { panic!() };
    sqlx::query("INSERT INTO effect (key, by_whom) VALUES ('k', 'nobody')")
        .execute(effect.connection().unwrap())
        .await
        .unwrap();
    assert!(matches!(effect.fail("no money").await.unwrap(), Resolution::Fail(_)));
    assert!(world.effects(&key("k")).await.is_empty());
    // Also for a service that has forgotten it all.
    let forgetful = server();
    for client in [world.client.clone(), direct(&forgetful)] {
        let ledger = Ledger::new(client.clone(), world.pool.clone());
        let Entry::Failed(result) = ledger.open(client.reserve(key("k"))).await.unwrap() else { panic!() };
        assert_eq!(result.body, "no money");
    }
}

#[tokio::test]
async fn a_receipt_outlives_its_record_and_knows_its_request() {
    let world = world().await;
    let reserve = |client: &Client, body: &str| client.reserve(key("k")).fingerprint(Fingerprint::of_bytes(body));
    let Entry::Open(effect) = world.ledger.open(reserve(&world.client, "a")).await.unwrap() else { panic!() };
    let result = onceward_client::StoredResult::new("done").code(201).metadata("a", "ÿ\"");
    effect.commit(result.clone()).await.unwrap();
    let forgetful = server();
    let client = direct(&forgetful);
    let ledger = Ledger::new(client.clone(), world.pool.clone());
    let other = ledger.open(reserve(&client, "b")).await;
    assert!(matches!(other, Err(LedgerError::Service(Error::FingerprintMismatch))), "{other:?}");
    let Entry::Completed(stored) = ledger.open(reserve(&client, "a")).await.unwrap() else { panic!() };
    assert_eq!(stored, result);
    // Other schemes do not compare.
    let Entry::Completed(_) =
        ledger.open(client.reserve(key("k")).fingerprint(Fingerprint::of_parts(["b"]))).await.unwrap()
    else {
        panic!()
    };
}

#[tokio::test]
async fn a_commit_that_is_refused_has_not_happened_and_frees_the_key() {
    let world = world().await;
    let deferred = "ALTER TABLE effect ADD CONSTRAINT once UNIQUE (by_whom) DEFERRABLE INITIALLY DEFERRED";
    sqlx::query(deferred).execute(&world.pool).await.unwrap();
    act(&world.ledger, &world.client, key("one"), "same", SECOND).await.unwrap();
    let refused = act(&world.ledger, &world.client, key("two"), "same", SECOND).await;
    assert!(matches!(refused, Err(LedgerError::Database(_))), "{refused:?}");
    eventually("the key is free", async || is_free(&world.client, key("two")).await).await;
    assert!(world.effects(&key("two")).await.is_empty());

    let Entry::Open(effect) = world.ledger.open(world.client.reserve(key("large"))).await.unwrap() else { panic!() };
    assert!(matches!(effect.commit(vec![0; (1 << 20) + 1]).await, Err(LedgerError::Service(Error::Invalid(_)))));
    eventually("the key is free", async || is_free(&world.client, key("large")).await).await;
}

#[tokio::test]
async fn a_resolution_agrees_with_the_ledger() {
    let world = world().await;
    let doubtful = async |value: &str| {
        let guard = match world.client.reserve(key(value)).hold().lock_ttl(50 * MILLISECOND).await.unwrap() {
            Reservation::Acquired(guard) => guard,
            other => panic!("{other:?}"),
        };
        let fence = guard.fence();
        drop(guard);
        eventually("it is in doubt", async || {
            matches!(world.client.reserve(key(value)).await.unwrap(), Reservation::InDoubt(_))
        })
        .await;
        fence
    };
    // Without a receipt the operator is right, and from then on the ledger says so too.
    let fence = doubtful("completed").await;
    let resolution = Resolution::Complete("by hand".into());
    let counts = world.ledger.resolve(key("completed"), fence, resolution.clone(), false).await.unwrap();
    assert_eq!(counts, Some(resolution));
    assert_eq!(act(&world.ledger, &world.client, key("completed"), "later", SECOND).await.unwrap(), "by hand");

    let fence = doubtful("retried").await;
    assert_eq!(world.ledger.resolve(key("retried"), fence, Resolution::Retry, false).await.unwrap(), None);
    assert_eq!(act(&world.ledger, &world.client, key("retried"), "later", SECOND).await.unwrap(), "later");

    // With one, the ledger is right.
    let Entry::Open(effect) = world.ledger.open(world.client.reserve(key("committed"))).await.unwrap() else {
        panic!()
    };
    effect.commit("committed").await.unwrap();
    let forgetful = server();
    let client = direct(&forgetful);
    let ledger = Ledger::new(client.clone(), world.pool.clone());
    for resolution in [Resolution::Retry, Resolution::Fail("by hand".into())] {
        let Reservation::Acquired(guard) =
            client.reserve(key("committed")).hold().lock_ttl(50 * MILLISECOND).await.unwrap()
        else {
            break;
        };
        let fence = guard.fence();
        drop(guard);
        eventually("the lock is over", async || {
            match ledger.resolve(key("committed"), fence, resolution.clone(), false).await {
                Ok(counts) => {
                    assert_eq!(counts, Some(Resolution::Complete("committed".into())));
                    true
                }
                Err(LedgerError::Service(Error::LockLive)) => false,
                Err(error) => panic!("{error}"),
            }
        })
        .await;
    }

    // A doubt with a receipt is none.
    let third = server();
    let client = direct(&third);
    drop(client.reserve(key("committed")).hold().lock_ttl(50 * MILLISECOND).await.unwrap());
    let ledger = Ledger::new(client.clone(), world.pool.clone());
    eventually("the doubt is settled", async || {
        let entry = ledger.open(client.reserve(key("committed"))).await.unwrap();
        assert!(matches!(entry, Entry::Completed(_)), "{entry:?}");
        matches!(client.reserve(key("committed")).await.unwrap(), Reservation::Completed(_))
    })
    .await;
}

#[tokio::test]
async fn receipts_are_purged_when_no_retry_can_ask_for_them() {
    let world = world().await;
    for value in ["old", "young"] {
        act(&world.ledger, &world.client, key(value), "done", SECOND).await.unwrap();
    }
    let age = "UPDATE onceward_receipt SET created_at = created_at - interval '49 hours' WHERE value = 'old'";
    sqlx::query(age).execute(&world.pool).await.unwrap();
    let day = Duration::from_secs(24 * 3600);
    assert_eq!(world.ledger.purge(2 * day).await.unwrap(), 0);
    assert_eq!(world.ledger.purge(day).await.unwrap(), 1);
    let left = sqlx::query("SELECT value FROM onceward_receipt").fetch_one(&world.pool).await.unwrap();
    assert_eq!(left.get::<String, _>(0), "young");
}

#[tokio::test]
async fn two_effects_at_once_wait_for_each_other_and_not_for_others() {
    let world = world().await;
    let Entry::Open(mut first) =
        world.ledger.open(world.client.reserve(key("k")).lock_ttl(50 * MILLISECOND)).await.unwrap()
    else {
        panic!()
    };
    sqlx::query("INSERT INTO effect (key, by_whom) VALUES ('k', 'first')")
        .execute(first.connection().unwrap())
        .await
        .unwrap();
    // As if its lease were lost: the service has forgotten it.
    let forgetful = server();
    let client = direct(&forgetful);
    let ledger = Ledger::new(client.clone(), world.pool.clone());
    let second = tokio::spawn(async move { act(&ledger, &client, key("k"), "second", SECOND).await });
    act(&world.ledger, &world.client, key("other"), "other", SECOND).await.unwrap();
    tokio::time::sleep(100 * MILLISECOND).await;
    assert!(!second.is_finished());
    first.commit("first").await.unwrap();
    assert_eq!(within(5 * SECOND, second).await.unwrap().unwrap(), "first");
    assert_eq!(world.effects(&key("k")).await, ["first"]);
}
