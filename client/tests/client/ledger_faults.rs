//! Misuse, refusals and lost connections of a ledger, and what must not come of them.

use std::time::Duration;

use onceward_client::{
    Client, Error, Fingerprint, Key, Reservation, Resolution,
    ledger::{Effect, Entry, Ledger, LedgerError},
};
use sqlx::{
    AssertSqlSafe, Connection, PgPool,
    postgres::{PgConnectOptions, PgPoolOptions},
};
use tokio::time::{sleep, timeout};

use crate::{
    ledger::{World, act, world},
    proxy::{Fault, Proxy, Way},
    support::{MILLISECOND, SECOND, direct, eventually, is_free, key, server, within},
};

async fn open(ledger: &Ledger, client: &Client, value: &str) -> Effect {
    match ledger.open(client.reserve(key(value))).await.unwrap() {
        Entry::Open(effect) => effect,
        other => panic!("{other:?}"),
    }
}

async fn insert(effect: &mut Effect, by_whom: &str) -> Result<(), LedgerError> {
    let key = effect.lease().key().value().to_owned();
    let query = sqlx::query("INSERT INTO effect (key, by_whom) VALUES ($1, $2)").bind(key).bind(by_whom);
    query.execute(effect.connection()?).await?;
    Ok(())
}

async fn receipts(world: &World) -> i64 {
    sqlx::query_scalar("SELECT count(*) FROM onceward_receipt").fetch_one(&world.pool).await.unwrap()
}

/// The ledger of another process: the service that it asks knows nothing of the keys here.
fn elsewhere(world: &World) -> (onceward_client::testing::Server, Client, Ledger) {
    let server = server();
    let client = direct(&server);
    let ledger = Ledger::new(client.clone(), world.pool.clone());
    (server, client, ledger)
}

/// A pool whose database is so far away.
async fn far(world: &World, delay: Duration, connections: u32) -> (Proxy, PgPool) {
    let options: PgConnectOptions = world.url.parse().unwrap();
    let proxy = Proxy::start(([127, 0, 0, 1], options.get_port()).into()).await;
    proxy.fault(Way::There, Fault::Delay(delay));
    let port = proxy.endpoint().rsplit(':').next().unwrap().parse().unwrap();
    let pool = PgPoolOptions::new().max_connections(connections).acquire_timeout(10 * SECOND);
    let pool = pool.connect_with(options.port(port)).await.unwrap();
    (proxy, pool)
}

#[tokio::test]
async fn a_resolution_that_is_refused_leaves_no_receipt() {
    let world = world().await;
    let by_hand = || Resolution::Complete("by hand".into());
    let refused = world.ledger.resolve(key("none"), 1, by_hand(), false).await;
    assert!(matches!(refused, Err(LedgerError::Service(Error::KeyNotFound))), "{refused:?}");

    // A holder that lives, with a transaction that is open: nobody waits for it.
    let effect = open(&world.ledger, &world.client, "held").await;
    let fence = effect.lease().fence();
    let refused = within(SECOND, world.ledger.resolve(key("held"), fence, by_hand(), false)).await;
    assert!(matches!(refused, Err(LedgerError::Service(Error::LockLive))), "{refused:?}");
    let refused = world.ledger.resolve(key("held"), fence - 1, by_hand(), true).await;
    assert!(matches!(refused, Err(LedgerError::Service(Error::FenceMismatch))), "{refused:?}");
    let large = Resolution::Complete(vec![0; (1 << 20) + 1].into());
    let refused = world.ledger.resolve(key("held"), fence, large, true).await;
    assert!(matches!(refused, Err(LedgerError::Service(Error::Invalid(_)))), "{refused:?}");
    effect.release().await.unwrap();
    assert_eq!(receipts(&world).await, 0);
    for value in ["none", "held"] {
        assert_eq!(act(&world.ledger, &world.client, key(value), "later", SECOND).await.unwrap(), "later");
    }
}

#[tokio::test]
async fn a_resolution_of_what_has_finished_otherwise_leaves_no_receipt() {
    let world = world().await;
    let effect = open(&world.ledger, &world.client, "k").await;
    let fence = effect.lease().fence();
    effect.release().await.unwrap();
    let refused = world.ledger.resolve(key("k"), fence, Resolution::Complete("by hand".into()), true).await;
    assert!(matches!(refused, Err(LedgerError::Service(Error::AlreadyFinished))), "{refused:?}");
    assert_eq!(receipts(&world).await, 0);
    assert_eq!(act(&world.ledger, &world.client, key("k"), "later", SECOND).await.unwrap(), "later");
}

#[tokio::test]
async fn a_resolution_does_not_take_the_receipt_of_another_request() {
    let world = world().await;
    let reserve = |client: &Client, body: &str| client.reserve(key("k")).fingerprint(Fingerprint::of_bytes(body));
    let Entry::Open(effect) = world.ledger.open(reserve(&world.client, "a")).await.unwrap() else { panic!() };
    effect.commit("of a").await.unwrap();
    let (_server, client, ledger) = elsewhere(&world);
    let Reservation::Acquired(guard) = reserve(&client, "b").hold().await.unwrap() else { panic!() };
    let fence = guard.fence();
    drop(guard);
    let refused = ledger.resolve(key("k"), fence, Resolution::Complete("of b".into()), true).await;
    assert!(matches!(refused, Err(LedgerError::Service(Error::FingerprintMismatch))), "{refused:?}");
    assert_eq!(ledger.resolve(key("k"), fence, Resolution::Retry, true).await.unwrap(), None);
    // And from then on the ledger says that the key was another's.
    let other = ledger.open(reserve(&client, "b")).await;
    assert!(matches!(other, Err(LedgerError::Service(Error::FingerprintMismatch))), "{other:?}");
}

#[tokio::test]
async fn a_transaction_that_was_ended_underneath_is_noticed_and_nothing_leaks_from_it() {
    let world = world().await;
    // By a nested one that is given up on the way.
    let (_proxy, pool) = far(&world, 10 * MILLISECOND, 5).await;
    let ledger = Ledger::new(world.client.clone(), pool);
    let mut effect = open(&ledger, &world.client, "nested").await;
    let nested = async { drop(effect.connection().unwrap().begin().await) };
    assert!(timeout(5 * MILLISECOND, nested).await.is_err());
    assert!(matches!(insert(&mut effect, "first").await, Err(LedgerError::TransactionEnded)));
    assert!(matches!(effect.commit("first").await, Err(LedgerError::TransactionEnded)));
    assert!(world.effects(&key("nested")).await.is_empty());

    // By statements of its own; and a rival has acted since.
    for end in ["COMMIT", "ROLLBACK"] {
        let mut effect = open(&world.ledger, &world.client, end).await;
        sqlx::raw_sql(end).execute(effect.connection().unwrap()).await.unwrap();
        if end == "ROLLBACK" {
            let (_server, client, ledger) = elsewhere(&world);
            let mut rival = open(&ledger, &client, end).await;
            insert(&mut rival, "rival").await.unwrap();
            rival.commit("rival").await.unwrap();
        }
        let committed = effect.commit("first").await;
        assert!(matches!(committed, Err(LedgerError::TransactionEnded)), "{end}: {committed:?}");
    }
    let (_server, client, ledger) = elsewhere(&world);
    let Entry::Completed(result) = ledger.open(client.reserve(key("ROLLBACK"))).await.unwrap() else { panic!() };
    assert_eq!(result.body, "rival");
}

#[tokio::test]
async fn a_receipt_is_not_purged_while_its_key_is_unfinished() {
    let world = world().await;
    let proxy = Proxy::start(world.server.address()).await;
    let away = Client::builder([proxy.endpoint()]).timeout(SECOND).lazy().unwrap();
    let ledger = Ledger::new(away.clone(), world.pool.clone());
    let reserve = |client: &Client| client.reserve(key("k")).retention(MILLISECOND).lock_ttl(3 * SECOND);
    let Entry::Open(mut effect) = ledger.open(reserve(&away)).await.unwrap() else { panic!() };
    insert(&mut effect, "first").await.unwrap();
    // The process ends right after its COMMIT.
    proxy.both(Fault::Blackhole);
    let _ = timeout(500 * MILLISECOND, effect.commit("first")).await;
    assert_eq!(world.effects(&key("k")).await, ["first"]);
    sleep(100 * MILLISECOND).await;
    assert_eq!(world.ledger.purge(MILLISECOND).await.unwrap(), 0);
    // Who comes while the lock is live learns it from the ledger, and who comes later too.
    for wait in [Duration::ZERO, 10 * SECOND] {
        let entry = world.ledger.open(reserve(&world.client).wait(wait)).await.unwrap();
        assert!(matches!(&entry, Entry::Completed(result) if result.body == "first"), "{entry:?}");
    }
    sleep(100 * MILLISECOND).await;
    assert_eq!(world.ledger.purge(MILLISECOND).await.unwrap(), 1);
}

#[tokio::test]
async fn a_rival_that_does_not_end_costs_a_bounded_time_and_no_connections() {
    let world = world().await;
    let (_server, _client, stuck) = elsewhere(&world);
    let _stuck = open(&stuck, stuck.client(), "k").await;
    let (_proxy, pool) = far(&world, Duration::ZERO, 3).await;
    let ledger = Ledger::new(world.client.clone(), pool);
    for _ in 0..3 {
        // Whoever gives up waiting gives the key back.
        eventually("it was tried", async || {
            let opening = timeout(200 * MILLISECOND, ledger.open(world.client.reserve(key("k")))).await;
            opening.is_err()
        })
        .await;
    }
    act(&ledger, &world.client, key("other"), "other", SECOND).await.unwrap();
    let entry = within(8 * SECOND, ledger.open(world.client.reserve(key("k")).wait(2 * SECOND))).await.unwrap();
    assert!(matches!(entry, Entry::InProgress(_)), "{entry:?}");
    eventually("the key is free", async || is_free(&world.client, key("k")).await).await;
}

#[tokio::test]
async fn making_what_is_there_waits_for_nobody_and_needs_no_rights() {
    let world = world().await;
    let _long = open(&world.ledger, &world.client, "long").await;
    within(SECOND, world.ledger.migrate()).await.unwrap();
    act(&world.ledger, &world.client, key("other"), "other", SECOND).await.unwrap();

    let database: String = sqlx::query_scalar("SELECT current_database()").fetch_one(&world.pool).await.unwrap();
    let role = format!("app_{database}");
    let grants = format!(
        "CREATE ROLE \"{role}\"; REVOKE CREATE ON SCHEMA public FROM public; \
         GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO \"{role}\""
    );
    sqlx::raw_sql(AssertSqlSafe(grants)).execute(&world.pool).await.unwrap();
    let as_role = format!("SET ROLE \"{role}\"");
    let pool = PgPoolOptions::new().max_connections(2).after_connect(move |connection, _| {
        let as_role = as_role.clone();
        Box::pin(async move { sqlx::raw_sql(AssertSqlSafe(as_role)).execute(connection).await.map(drop) })
    });
    let ledger = Ledger::new(world.client.clone(), pool.connect(&world.url).await.unwrap());
    ledger.migrate().await.unwrap();
    assert_eq!(act(&ledger, &world.client, key("k"), "done", SECOND).await.unwrap(), "done");
}

#[tokio::test]
async fn a_doubt_of_another_request_is_not_settled_by_this_ones_receipt() {
    let world = world().await;
    let of = |body: &str| Fingerprint::of_bytes(body);
    let reserve = |client: &Client, body: &str| client.reserve(key("k")).fingerprint(of(body));
    let Entry::Open(effect) = world.ledger.open(reserve(&world.client, "a")).await.unwrap() else { panic!() };
    effect.commit("of a").await.unwrap();
    let (_server, client, ledger) = elsewhere(&world);
    drop(reserve(&client, "b").hold().lock_ttl(50 * MILLISECOND).await.unwrap());
    eventually("it is in doubt", async || match ledger.open(reserve(&client, "b")).await.unwrap() {
        Entry::InDoubt(_) => true,
        Entry::InProgress(_) => false,
        other => panic!("{other:?}"),
    })
    .await;
}

#[tokio::test]
async fn a_commit_that_a_trigger_refuses_frees_the_key_also_where_it_is_to_be_held() {
    let world = world().await;
    let trigger = "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'no'; END $$;
        CREATE CONSTRAINT TRIGGER refuse AFTER INSERT ON effect DEFERRABLE INITIALLY DEFERRED FOR EACH ROW
        EXECUTE FUNCTION refuse()";
    sqlx::raw_sql(trigger).execute(&world.pool).await.unwrap();
    let Entry::Open(mut effect) = world.ledger.open(world.client.reserve(key("k")).hold()).await.unwrap() else {
        panic!()
    };
    insert(&mut effect, "first").await.unwrap();
    let refused = effect.commit("first").await;
    assert!(matches!(refused, Err(LedgerError::Database(_))), "{refused:?}");
    eventually("the key is free", async || is_free(&world.client, key("k")).await).await;
}

#[test]
fn an_effect_may_be_dropped_outside_of_a_runtime() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let (world, effect) = runtime.block_on(async {
        let world = world().await;
        let effect = open(&world.ledger, &world.client, "k").await;
        (world, effect)
    });
    std::thread::spawn(move || drop(effect)).join().unwrap();
    runtime.block_on(async {
        assert_eq!(act(&world.ledger, &world.client, key("k"), "later", SECOND).await.unwrap(), "later");
    });
}

#[tokio::test]
async fn whoever_gives_up_at_any_moment_leaves_no_transaction_and_no_disagreement() {
    let world = world().await;
    let (_proxy, pool) = far(&world, 5 * MILLISECOND, 3).await;
    let ledger = Ledger::new(world.client.clone(), pool.clone());
    let moments: Vec<u32> = (0..100).collect();
    for moment in &moments {
        let value = moment.to_string();
        let working = async {
            let mut effect = open(&ledger, &world.client, &value).await;
            insert(&mut effect, "first").await.unwrap();
            if moment % 2 == 0 {
                effect.commit("first").await.unwrap();
            } else {
                effect.fail("refused").await.unwrap();
            }
        };
        let _ = timeout(*moment * MILLISECOND, working).await;
    }
    let idle = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in%'";
    eventually("no transaction is open", async || {
        sqlx::query_scalar::<_, i64>(idle).fetch_one(&world.pool).await.unwrap() == 0
    })
    .await;
    let mut done = 0;
    for moment in &moments {
        let key: Key = key(&moment.to_string());
        let committed = world.effects(&key).await.len();
        let entry = ledger.open(world.client.reserve(key).wait(10 * SECOND)).await.unwrap();
        match (&entry, committed) {
            (Entry::Open(_) | Entry::Failed(_), 0) => {}
            (Entry::Completed(_), 1) => done += 1,
            _ => panic!("{moment}: {committed} effects, {entry:?}"),
        }
    }
    assert!((5..50).contains(&done), "{done}");
}

#[tokio::test]
async fn the_ledger_works_under_every_isolation_and_with_one_connection() {
    let world = world().await;
    for isolation in ["read committed", "repeatable read", "serializable"] {
        let options: PgConnectOptions = world.url.parse().unwrap();
        let options = options.options([("default_transaction_isolation", isolation)]);
        let pool = PgPoolOptions::new().max_connections(1).connect_with(options).await.unwrap();
        let ledger = Ledger::new(world.client.clone(), pool);
        assert_eq!(act(&ledger, &world.client, key(isolation), "first", SECOND).await.unwrap(), "first");
        let (_server, client, _) = elsewhere(&world);
        let ledger = Ledger::new(client.clone(), world.pool.clone());
        assert_eq!(act(&ledger, &client, key(isolation), "second", SECOND).await.unwrap(), "first");
        let Reservation::Completed(_) = client.reserve(key(isolation)).await.unwrap() else { panic!("{isolation}") };
    }
}
