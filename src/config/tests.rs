//! What is accepted, what is refused, and what is never shown.

use super::*;

fn serve(arguments: &[&str]) -> Result<ServeOptions, ConfigError> {
    let command = Command::try_parse_from(["onceward"].iter().chain(arguments)).unwrap();
    command.serve.validate()
}

#[test]
fn the_defaults_are_valid_and_local() {
    assert!(serve(&[]).is_ok());
}

#[test]
fn listening_beyond_loopback_wants_a_word() {
    for flag in ["--listen", "--admin-listen"] {
        assert!(matches!(serve(&[flag, "0.0.0.0:1"]), Err(ConfigError::Insecure { .. })));
        assert!(serve(&[flag, "0.0.0.0:1", "--insecure"]).is_ok());
        assert!(serve(&[flag, "[::1]:1"]).is_ok());
    }
}

#[test]
fn bounds_are_in_order() {
    assert!(matches!(serve(&["--lock-ttl-min", "1m"]), Err(ConfigError::Bounds { flag: "--lock-ttl", .. })));
    assert!(matches!(serve(&["--retention-max", "1h"]), Err(ConfigError::Bounds { flag: "--retention", .. })));
    assert!(matches!(serve(&["--lock-ttl-min", "0s"]), Err(ConfigError::Bounds { .. })));
    assert_eq!(serve(&["--sweep-interval", "0s"]).unwrap_err(), ConfigError::Zero("--sweep-interval"));
}

#[test]
fn durations_are_as_people_write_them() {
    assert_eq!(duration("90d"), Ok(Duration::from_secs(90 * 24 * 3600)));
    assert_eq!(duration("1h 30m"), Ok(Duration::from_secs(5400)));
    for refused in ["", "30", "-1s", "1 fortnight", "100 years"] {
        assert!(duration(refused).is_err(), "{refused}");
    }
}

#[test]
fn serving_is_what_happens_without_a_verb() {
    let verb = |arguments: &[&str]| Command::try_parse_from(["onceward"].iter().chain(arguments)).unwrap().verb;
    assert!(verb(&[]).is_none());
    assert!(
        matches!(verb(&["serve", "--listen", "127.0.0.1:0"]), Some(Verb::Serve(serve)) if serve.listen.port() == 0)
    );
    assert!(matches!(verb(&["migrate"]), Some(Verb::Migrate(_))));
}

#[test]
fn sqlite_migrates_by_itself_and_postgres_when_told() {
    let migrate = |arguments: &[&str]| {
        let command = Command::try_parse_from(["onceward"].iter().chain(arguments)).unwrap();
        command.serve.open_options(&command.serve.database.url().unwrap()).migrate
    };
    assert!(migrate(&[]));
    assert!(!migrate(&["--migrate=false"]));
    assert!(!migrate(&["--database-url", "postgres://localhost/db"]));
    assert!(migrate(&["--database-url", "postgres://localhost/db", "--migrate"]));
}

#[test]
fn a_database_url_is_never_shown() {
    for url in ["postgres://user:secret@host:port/db", "mysql://user:secret@host", "postgres://user:secret@host/db"] {
        let command = Command::try_parse_from(["onceward", "--database-url", url]).unwrap();
        let shown = format!("{command:?} {:?}", command.serve.database.url());
        assert!(!shown.contains("secret"), "{shown}");
    }
}

#[test]
fn an_sqlite_url_names_a_file_or_memory() {
    let url = |text: &str| text.parse::<DatabaseUrl>();
    assert!(url("sqlite:onceward.db").is_ok() && url("sqlite::memory:").is_ok());
    // SQLite would take these for a file that is deleted at the end.
    for refused in ["sqlite:", "sqlite://", "sqlite:?mode=rwc"] {
        assert!(url(refused).is_err(), "{refused}");
    }
}
