//! How Postgres goes about our statements: by the index, whatever it believes of the table.
//!
//! A planner that has seen an empty table takes a scan of it for cheap, and a prepared statement keeps that plan while the
//! table grows: calls that took microseconds take seconds, in the night, months later.

use sqlx::{AssertSqlSafe, PgConnection};

use super::{Lane, Url, batch, settings};
use crate::store::contract;

/// Every statement of ours on records.
fn statements() -> Vec<(&'static str, &'static str)> {
    let mut statements = batch::statements();
    statements.extend([
        ("load", include_str!("load.sql")),
        ("purge", include_str!("purge.sql")),
        ("postpone", include_str!("postpone.sql")),
    ]);
    statements
}

async fn execute(connection: &mut PgConnection, sql: String) {
    sqlx::raw_sql(AssertSqlSafe(sql)).execute(connection).await.unwrap();
}

async fn prepare(connection: &mut PgConnection, prefix: &str) {
    for (name, sql) in statements() {
        execute(connection, format!("PREPARE {prefix}_{name} AS {sql}")).await;
    }
}

async fn assert_plans(connection: &mut PgConnection, prefix: &str, state: &str) {
    for (name, sql) in statements() {
        let arguments = vec!["NULL"; batch::parameters(sql)].join(", ");
        let explain = format!("EXPLAIN (COSTS OFF) EXECUTE {prefix}_{name}({arguments})");
        let lines: Vec<String> = sqlx::query_scalar(AssertSqlSafe(explain)).fetch_all(&mut *connection).await.unwrap();
        assert_plan(&lines, &format!("{name}, prepared {prefix}, {state}:\n{}\n", lines.join("\n")));
    }
}

fn assert_plan(lines: &[String], about: &str) {
    for (n, line) in lines.iter().enumerate() {
        for bad in ["Seq Scan on onceward_record", "Hash Join", "Merge Join", "Materialize", "Bitmap", "Memoize"] {
            assert!(!line.contains(bad), "{about}");
        }
        // An index without a condition is a scan of all of it.
        if line.contains("Index") && line.contains("Scan using") {
            assert!(lines.get(n + 1).is_some_and(|next| next.contains("Index Cond:")), "{about}");
        }
    }
    assert!(lines.iter().any(|line| line.contains("onceward_record")), "{about}");
}

#[tokio::test]
async fn every_statement_goes_by_an_index_whatever_the_table_is_like() {
    let url = Url::parse(&contract::fresh_postgres_url().await).unwrap();
    let connection = &mut settings::connect(&url, &contract::options(), Lane::Fast).await.unwrap();
    prepare(connection, "early").await;
    let fill = |rows: u32| {
        format!(
            "INSERT INTO onceward_record (id, namespace, subject, value, token, earlier_tokens, fence, version, attempt, status,
                resolved, on_expiry, lock_ttl, retention, created_at, locked_until, expires_at, purge_after)
             SELECT gen_random_uuid(), 'n', '', n::text, 't', '', 1, 1, 1, 2, false, 1, 1, 1, now(), now(), now(), now()
             FROM generate_series(1, {rows}) AS n"
        )
    };
    let analyse = || "ANALYZE onceward_record".to_owned();
    for (state, change) in [
        ("empty and never analysed", String::new()),
        ("empty and analysed", analyse()),
        ("of 10 rows, analysed when it was empty", fill(10)),
        ("of 10 rows and analysed", analyse()),
        ("of 200,010 rows, analysed when there were 10", fill(200_000)),
        ("of 200,010 rows and analysed", analyse()),
    ] {
        execute(connection, change).await;
        assert_plans(connection, "early", state).await;
        prepare(connection, "now").await;
        assert_plans(connection, "now", state).await;
        for (name, _) in statements() {
            execute(connection, format!("DEALLOCATE now_{name}")).await;
        }
    }
}
