//! What takes a rival session to show.

use super::*;
use crate::{
    record::{OnExpiry, Token},
    store::contract,
    write::{Action, Reservation},
};

fn key(value: &str) -> Key {
    Key::new("payments.charge", "", value).unwrap()
}

/// A new record that is over and expired at once.
fn insert(value: &str) -> Write {
    let reservation = Reservation {
        token: Token::new("token").unwrap(),
        fingerprint: None,
        lock_ttl: Duration::ZERO,
        retention: Duration::ZERO,
        owner: None,
        on_expiry: OnExpiry::Retry,
        origin: None,
    };
    Write { key: key(value), action: Action::Insert(reservation) }
}

fn renew(value: &str) -> Write {
    let extension = crate::write::Extension { lock_ttl: None, on_expiry: OnExpiry::Retry, checkpoint: None };
    let holder = crate::write::Condition::Holder(Token::new("token").unwrap());
    Write { key: key(value), action: Action::Extend(holder, extension) }
}

struct World {
    store: Postgres,
    rival: PgConnection,
}

impl World {
    /// A store with these records.
    async fn with(values: &[&str]) -> Self {
        let text = contract::fresh_postgres_url().await;
        let store = Postgres::open(&Url::parse(&text).unwrap(), &contract::options()).await.unwrap();
        let written = store.write(values.iter().map(|value| insert(value)).collect()).await;
        assert!(written.into_iter().all(|written| written.unwrap().is_some()));
        Self { store, rival: PgConnection::connect(&text).await.unwrap() }
    }
}

const HOLD_ONE: &str = "SELECT 1 FROM onceward_record WHERE value = 'held' FOR UPDATE";

#[tokio::test(flavor = "multi_thread")]
async fn a_row_that_another_session_holds_fails_alone() {
    let World { store, mut rival } = World::with(&["free 1", "held", "free 2"]).await;
    let mut transaction = rival.begin().await.unwrap();
    sqlx::raw_sql(HOLD_ONE).execute(&mut *transaction).await.unwrap();
    // Also the second time, when it is known to be locked.
    for _ in 0..2 {
        let written = store.write(["free 1", "held", "free 2"].map(renew).into()).await;
        assert!(matches!(written[..], [Ok(Some(_)), Err(StoreError::Locked), Ok(Some(_))]), "{written:?}");
    }
    transaction.rollback().await.unwrap();
    let written = store.write(["free 1", "held", "free 2"].map(renew).into()).await;
    assert!(written.into_iter().all(|written| written.unwrap().is_some()));
}

/// Neither a lock nor a snapshot shows the row of an insert that is not yet committed.
#[tokio::test(flavor = "multi_thread")]
async fn rows_that_other_sessions_hold_in_any_way_are_found_out_at_once() {
    let values: Vec<String> = (0..250).map(|n| format!("free {n}")).collect();
    let World { store, mut rival } = World::with(&["held", "deleted"]).await;
    let mut transaction = rival.begin().await.unwrap();
    let insert_rival = "INSERT INTO onceward_record
        SELECT (jsonb_populate_record(r, jsonb_build_object('id', $1, 'value', 'inserted'))).*
        FROM onceward_record AS r WHERE value = 'held'";
    sqlx::query(insert_rival).bind(key("inserted").id()).execute(&mut *transaction).await.unwrap();
    sqlx::raw_sql("DELETE FROM onceward_record WHERE value = 'deleted'").execute(&mut *transaction).await.unwrap();
    sqlx::raw_sql(HOLD_ONE).execute(&mut *transaction).await.unwrap();
    let mut writes: Vec<Write> = values.iter().map(|value| insert(value)).collect();
    writes.extend([insert("inserted"), renew("held"), insert("deleted"), renew("absent")]);
    let began = std::time::Instant::now();
    let written = store.write(writes).await;
    // One lock timeout for the batch, a short one for each of the three, and room for a busy machine.
    assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
    let (free, others) = written.split_at(values.len());
    assert!(free.iter().all(|written| matches!(written, Ok(Some(_)))));
    let locked = Err(StoreError::Locked);
    assert_eq!(others, [locked, locked, locked, Ok(None)]);
    transaction.rollback().await.unwrap();
    let left: i64 = sqlx::query_scalar("SELECT count(*) FROM onceward_record WHERE namespace = ''")
        .fetch_one(&mut rival)
        .await
        .unwrap();
    assert_eq!(left, 0, "what it was found out by is gone");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_purge_passes_by_rows_that_another_session_holds() {
    let World { store, mut rival } = World::with(&["due 1", "held", "due 2"]).await;
    let mut transaction = rival.begin().await.unwrap();
    sqlx::raw_sql(HOLD_ONE).execute(&mut *transaction).await.unwrap();
    assert_eq!(store.purge(Timestamp(0), Duration::ZERO, 10).await.unwrap().deleted, 2);
    transaction.rollback().await.unwrap();
    assert_eq!(store.purge(Timestamp(0), Duration::ZERO, 10).await.unwrap().deleted, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_check_answers_while_every_connection_is_busy() {
    let World { store, mut rival } = World::with(&[]).await;
    let store = Arc::new(store);
    let mut transaction = rival.begin().await.unwrap();
    sqlx::raw_sql("LOCK TABLE onceward_record IN SHARE MODE").execute(&mut *transaction).await.unwrap();
    // More than there are connections, each for a whole lock timeout.
    let busy: Vec<_> = (0..200)
        .map(|n| {
            let store = store.clone();
            tokio::spawn(async move { store.write(vec![insert(&n.to_string())]).await })
        })
        .collect();
    for _ in 0..3 {
        assert_eq!(store.check().await, Ok(()));
    }
    assert!(busy.iter().any(|call| !call.is_finished()), "they are still busy");
    transaction.rollback().await.unwrap();
    join_all(busy).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_statement_that_fails_costs_nobody_a_connection() {
    let World { store, mut rival } = World::with(&["sound"]).await;
    let fail = "CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS
            $$ BEGIN RAISE EXCEPTION 'corrupt' USING ERRCODE = 'XX001'; END $$;
        CREATE TRIGGER fail BEFORE INSERT ON onceward_record FOR EACH ROW WHEN (NEW.value = 'bad') EXECUTE FUNCTION fail()";
    sqlx::raw_sql(fail).execute(&mut rival).await.unwrap();
    let sessions = async |rival: &mut PgConnection| -> Vec<i32> {
        let query = "SELECT pid FROM pg_stat_activity
            WHERE datname = current_database() AND application_name = 'onceward' ORDER BY pid";
        sqlx::query_scalar(query).fetch_all(rival).await.unwrap()
    };
    let before = sessions(&mut rival).await;
    for _ in 0..5 {
        assert_eq!(store.write(vec![insert("bad")]).await, [Err(StoreError::Refused)]);
        assert!(matches!(store.write(vec![renew("sound")]).await[..], [Ok(Some(_))]));
    }
    assert_eq!(sessions(&mut rival).await, before);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sweep_passes_over_a_crowd_of_living_records() {
    let World { store, mut rival } = World::with(&["expired", "living"]).await;
    // Due since the beginning of time, and to be held, which is to live.
    let crowd = "INSERT INTO onceward_record
        SELECT (jsonb_populate_record(r, jsonb_build_object(
            'id', gen_random_uuid(), 'on_expiry', 2, 'expires_at', null, 'purge_after', timestamptz '2000-01-01' + n * interval '1 ms'
        ))).*
        FROM onceward_record AS r CROSS JOIN generate_series(1, 20000) AS n
        WHERE value = 'living'";
    sqlx::raw_sql(crowd).execute(&mut rival).await.unwrap();
    let swept = crate::sweeper::pass(&store, Duration::ZERO).await.unwrap();
    assert_eq!((swept.deleted, swept.postponed), (2, 20_000));
    assert_eq!(crate::sweeper::pass(&store, Duration::ZERO).await.unwrap(), Purged::default());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_row_that_was_held_a_moment_ago_fails_nobody() {
    let World { store, .. } = World::with(&["a", "b", "c"]).await;
    store.locked.note(key("b").id());
    let writes = ["a", "b", "c"].map(renew);
    for (_, batch) in Batch::all(writes.into_iter().enumerate().collect()) {
        let written = store.write_together(batch).await;
        assert!(written.iter().all(|written| matches!(written, Ok(Some(_)))), "{written:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_record_that_cannot_be_read_fails_alone() {
    let World { store, mut rival } = World::with(&["sound", "edited"]).await;
    let edit = "UPDATE onceward_record SET result_code = 1, result_metadata = '{' WHERE value = 'edited'";
    sqlx::raw_sql(edit).execute(&mut rival).await.unwrap();
    let loaded = store.load(["edited", "sound", "absent"].map(key).into(), Urgency::Completion).await.unwrap();
    assert!(matches!(loaded.records[..], [Err(StoreError::Refused), Ok(Some(_)), Ok(None)]));
}
