//! The program itself: what it says when it cannot start, and its verbs.

use std::{net::TcpListener, os::unix::fs::PermissionsExt};

use onceward::proto::Key;
use sqlx::{Connection, PgConnection};

use crate::support::*;

/// Runs it to its end, which must be a failure with one line on the standard error; gives the line.
async fn fails(arguments: &[&str]) -> String {
    let run = Program::command(arguments).output();
    let output = tokio::time::timeout(20 * SECOND, run).await.expect("it ends by itself").unwrap();
    assert_ne!(output.status.code(), Some(0));
    let errors = String::from_utf8(output.stderr).unwrap();
    let lines: Vec<_> = errors.lines().filter(|line| !line.is_empty()).collect();
    assert_eq!(lines.len(), 1, "{errors}");
    lines[0].to_owned()
}

const PORTS: [&str; 4] = ["--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"];

async fn fails_to_serve(arguments: &[&str]) -> String {
    fails(&[&PORTS, arguments].concat()).await
}

#[tokio::test]
async fn an_unreachable_database_is_one_clear_line_without_the_password() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let url = format!("postgres://ann:secret@127.0.0.1:{port}/db");
    for arguments in
        [&["--database-url", &url][..], &["migrate", "--database-url", &url], &["sweep", "--database-url", &url]]
    {
        let arguments: Vec<_> = match arguments[0] {
            "--database-url" => [&PORTS, arguments].concat(),
            _ => arguments.into(),
        };
        let error = fails(&arguments).await;
        assert!(error.contains("cannot connect to the database") && error.contains(&port.to_string()), "{error}");
        assert!(!error.contains("secret"), "{error}");
    }
}

#[tokio::test]
async fn a_bad_database_url_is_one_clear_line_that_does_not_repeat_it() {
    for url in ["mysql://ann:secret@host/db", "secret.db", "postgres://ann:secret@host:port/db", "", "sqlite:"] {
        for verb in [&PORTS[..], &["migrate"], &["sweep"]] {
            let error = fails(&[verb, &["--database-url", url]].concat()).await;
            assert!(error.contains("the database URL is invalid"), "{error}");
            assert!(!error.contains("secret"), "{error}");
        }
    }
    let mut command = Program::command(&PORTS);
    let output = command.env("ONCEWARD_DATABASE_URL", "postgres://ann:secret#x@host/db").output().await.unwrap();
    assert!(!output.status.success() && !String::from_utf8(output.stderr).unwrap().contains("secret"));
}

#[tokio::test]
async fn a_database_that_never_answers_is_one_clear_line_and_can_be_interrupted() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("postgres://ann@{}/db", silent.local_addr().unwrap());
    for verb in [&PORTS[..], &["migrate"], &["sweep"]] {
        let error = fails(&[verb, &["--database-url", &url]].concat()).await;
        assert!(error.contains("it does not answer"), "{error}");
    }
    let mut child = Program::command(&[&PORTS[..], &["--database-url", &url]].concat()).spawn().unwrap();
    // It has its signal handlers by the time that it connects.
    let accept = move || (0..4).map(|_| silent.accept().unwrap()).collect::<Vec<_>>();
    let _silent = tokio::task::spawn_blocking(accept).await.unwrap();
    let pid = child.id().unwrap().to_string();
    std::process::Command::new("kill").args(["-TERM", &pid]).status().unwrap();
    let (status, took) = timed(child.wait()).await;
    assert_eq!(status.unwrap().code(), Some(0));
    assert!(took < 3 * SECOND, "{took:?}");
}

#[tokio::test]
async fn a_role_that_may_not_write_is_refused() {
    let database = Backend::Postgres.database().await;
    let mut connection = PgConnection::connect(&database.url).await.unwrap();
    let role = format!("reader_{}", std::process::id());
    let make = format!("CREATE ROLE {role} LOGIN; GRANT SELECT ON ALL TABLES IN SCHEMA public TO {role}");
    sqlx::raw_sql(sqlx::AssertSqlSafe(make)).execute(&mut connection).await.unwrap();
    let url = database.url.replace("//postgres@", &format!("//{role}@"));
    let error = fails_to_serve(&["--database-url", &url]).await;
    assert!(error.contains("the role needs SELECT, INSERT, UPDATE and DELETE"), "{error}");
}

#[tokio::test]
async fn several_processes_may_begin_with_one_new_file() {
    for _ in 0..10 {
        let folder = tempfile::tempdir().unwrap();
        let url = format!("sqlite:{}", folder.path().join("onceward.db").display());
        let migrations = (0..5).map(|_| Program::command(&["migrate", "--database-url", &url]).output());
        for output in futures_util::future::join_all(migrations).await {
            let output = output.unwrap();
            assert!(output.status.success(), "{output:?}");
        }
    }
}

#[tokio::test]
async fn a_file_that_is_not_there_is_made_by_migrations_only() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("typo.db");
    let url = format!("sqlite:{}", path.display());
    let error = fails(&["sweep", "--database-url", &url]).await;
    assert!(error.contains("cannot connect to the database"), "{error}");
    let error = fails_to_serve(&["--database-url", &url, "--migrate=false"]).await;
    assert!(error.contains("cannot connect to the database"), "{error}");
    assert!(!path.exists());
}

#[tokio::test]
async fn a_path_that_cannot_be_opened_is_one_clear_line() {
    let error = fails_to_serve(&["--database-url", "sqlite:/nowhere/onceward.db"]).await;
    assert!(error.contains("cannot connect to the database sqlite:/nowhere/onceward.db"), "{error}");
}

#[tokio::test]
async fn a_taken_port_is_one_clear_line() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    for flag in ["--listen", "--admin-listen"] {
        let other = if flag == "--listen" { "--admin-listen" } else { "--listen" };
        let database = Backend::Sqlite.database().await;
        let error = fails(&[flag, &address, other, "127.0.0.1:0", "--database-url", &database.url]).await;
        assert!(error.contains(&format!("cannot listen on {address}")), "{error}");
    }
}

#[tokio::test]
async fn listening_beyond_loopback_wants_a_word() {
    let error = fails(&["--listen", "0.0.0.0:0", "--admin-listen", "127.0.0.1:0"]).await;
    assert!(error.contains("--insecure"), "{error}");
    let database = Backend::Sqlite.database().await;
    Program::serve(&["--listen", "0.0.0.0:0", "--insecure", "--database-url", &database.url]).await;
}

#[tokio::test]
async fn a_database_without_tables_is_refused_until_it_is_migrated() {
    let url = onceward_testing::empty_database().await;
    let error = fails_to_serve(&["--database-url", &url]).await;
    assert!(error.contains("not migrated") && error.contains("onceward migrate"), "{error}");
    let error = fails(&["sweep", "--database-url", &url]).await;
    assert!(error.contains("not migrated"), "{error}");
    for _ in 0..2 {
        let output = Program::command(&["migrate", "--database-url", &url]).output().await.unwrap();
        assert!(output.status.success());
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(said.contains("is up to date"), "{said}");
    }
    let program = Program::serve(&["--database-url", &url]).await;
    program.client().await.acquire(reserve(&fresh_key(), "a")).await;
    let file = tempfile::tempdir().unwrap();
    let path = file.path().join("onceward.db");
    std::fs::File::create(&path).unwrap();
    let error = fails_to_serve(&["--database-url", &format!("sqlite:{}", path.display()), "--migrate=false"]).await;
    assert!(error.contains("not migrated"), "{error}");
}

#[tokio::test]
async fn a_read_only_database_is_one_clear_line() {
    let database = Backend::Postgres.database().await;
    let read_only = format!("{}?options=-c%20default_transaction_read_only%3Don", database.url);
    let error = fails_to_serve(&["--database-url", &read_only]).await;
    assert!(error.contains("is read-only"), "{error}");
    let database = Backend::Sqlite.database().await;
    Program::serve(&["--database-url", &database.url]).await.child.kill().await.unwrap();
    let error = fails_to_serve(&["--database-url", &format!("{}?mode=ro", database.url)]).await;
    assert!(error.contains("is read-only"), "{error}");
    let path = sqlite_path(&database);
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o444)).unwrap();
    // Root writes whatever the permissions say.
    if std::fs::OpenOptions::new().append(true).open(&path).is_err() {
        let error = fails_to_serve(&["--database-url", &database.url]).await;
        assert!(error.contains("is read-only"), "{error}");
    }
}

#[tokio::test]
async fn a_database_that_may_forget_is_refused_unless_told() {
    let database = Backend::Postgres.database().await;
    let forgetful = format!("{}?options=-c%20synchronous_commit%3Doff", database.url);
    let error = fails_to_serve(&["--database-url", &forgetful]).await;
    assert!(error.contains("synchronous_commit is off") && error.contains("--allow-unsafe-durability"), "{error}");
    Program::serve(&["--database-url", &forgetful, "--allow-unsafe-durability"]).await;
    let postgres = onceward_testing::Postgres::start(&["fsync=off"]).unwrap();
    let url = postgres.url("postgres");
    let error = fails_to_serve(&["--database-url", &url, "--migrate"]).await;
    assert!(error.contains("fsync is off"), "{error}");
}

#[tokio::test]
async fn settings_on_the_role_are_checked() {
    let database = Backend::Postgres.database().await;
    let mut connection = PgConnection::connect(&database.url).await.unwrap();
    let role = format!("role_{}", std::process::id());
    let make = format!("CREATE ROLE {role} LOGIN SUPERUSER");
    sqlx::raw_sql(sqlx::AssertSqlSafe(make)).execute(&mut connection).await.unwrap();
    let url = database.url.replace("//postgres@", &format!("//{role}@"));
    let flags = ["--database-url", &url, "--database-settings", "role"];
    let error = fails_to_serve(&flags).await;
    assert!(error.contains("unsuitable setting") && error.contains("onceward migrate"), "{error}");
    let output =
        Program::command(&["migrate", "--database-url", &url, "--database-settings", "role"]).output().await.unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    let statements: String = said.lines().filter(|line| line.starts_with("ALTER ROLE")).collect();
    sqlx::raw_sql(sqlx::AssertSqlSafe(statements)).execute(&mut connection).await.unwrap();
    let program = Program::serve(&flags).await;
    program.client().await.acquire(reserve(&fresh_key(), "a")).await;
}

#[tokio::test]
async fn a_migration_waits_for_maintenance_longer_than_a_call_would() {
    let database = Backend::Postgres.database().await;
    let mut rival = PgConnection::connect(&database.url).await.unwrap();
    let name = database.url.rsplit('/').next().unwrap();
    let impatient = format!("ALTER ROLE postgres IN DATABASE \"{name}\" SET lock_timeout = '100ms'");
    sqlx::raw_sql(sqlx::AssertSqlSafe(impatient)).execute(&mut rival).await.unwrap();
    sqlx::raw_sql("DELETE FROM onceward_migration WHERE version > 1").execute(&mut rival).await.unwrap();
    let hold = "BEGIN; LOCK TABLE onceward_record IN SHARE UPDATE EXCLUSIVE MODE";
    sqlx::raw_sql(hold).execute(&mut rival).await.unwrap();
    let mut migrate = Program::command(&["migrate", "--database-url", &database.url]).spawn().unwrap();
    let waits = "SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted AND relation = 'onceward_record'::regclass)";
    while !sqlx::query_scalar::<_, bool>(waits).fetch_one(&mut rival).await.unwrap() {
        assert!(migrate.try_wait().unwrap().is_none(), "it ended without waiting");
    }
    // Longer than the role's patience.
    sqlx::raw_sql("SELECT pg_sleep(0.3); ROLLBACK").execute(&mut rival).await.unwrap();
    assert!(migrate.wait().await.unwrap().success());
}

#[tokio::test]
async fn the_environment_configures_too_and_secrets_are_not_shown() {
    let database = Backend::Sqlite.database().await;
    let help = Program::command(&["--help"]).env("ONCEWARD_DATABASE_URL", "postgres://ann:secret@h/d").output().await;
    let help = String::from_utf8(help.unwrap().stdout).unwrap();
    assert!(help.contains("ONCEWARD_LOCK_TTL_MAX") && !help.contains("secret"), "{help}");
    let mut command = Program::command(&["serve"]);
    command
        .env("ONCEWARD_LISTEN", "127.0.0.1:0")
        .env("ONCEWARD_ADMIN_LISTEN", "127.0.0.1:0")
        .env("ONCEWARD_DATABASE_URL", &database.url)
        .env("ONCEWARD_LOCK_TTL_DEFAULT", "48h");
    let output = command.output().await.unwrap();
    let errors = String::from_utf8(output.stderr).unwrap();
    assert!(errors.contains("--lock-ttl-min, -default and -max must be in this order"), "{errors}");
    assert!(errors.contains("172800s"), "{errors}");
}

#[tokio::test]
async fn the_log_tells_no_secret_however_much_it_tells() {
    let database = Backend::Postgres.database().await;
    let url = database.url.replace("postgres@", "postgres:database-secret@");
    let mut command = Program::command(&[&PORTS[..], &["--database-url", &url]].concat());
    let log = tempfile::NamedTempFile::new().unwrap();
    // The transport's own tracing shows the bytes that it carries, and nobody asks it to.
    command.env("RUST_LOG", "trace,h2=info,hyper=info,hyper_util=info,tonic=info,sqlx=trace");
    command.stderr(log.reopen().unwrap());
    let mut child = command.spawn().unwrap();
    let read = || std::fs::read_to_string(log.path()).unwrap();
    eventually("it serves", async || read().contains(" serving ")).await;
    let line = read().lines().find(|line| line.contains(" serving ")).unwrap().to_owned();
    let address = line.split(" listen=").nth(1).unwrap().split_whitespace().next().unwrap().to_owned();
    let client = Client::connect(&address).await;
    let key = Key { subject: "subject-secret".into(), value: "value-secret".into(), ..key("") };
    client.acquire(reserve(&key, "token-secret")).await;
    client.complete(&key, "other-secret", b"body-secret").await.unwrap_err();
    client.complete(&key, "token-secret", b"body-secret").await.unwrap();
    completed(client.reserve(reserve(&key, "third-secret")).await);
    std::process::Command::new("kill").args(["-TERM", &child.id().unwrap().to_string()]).status().unwrap();
    child.wait().await.unwrap();
    let told = read();
    assert!(told.contains("stopped") && !told.contains("secret"), "{told}");
}
