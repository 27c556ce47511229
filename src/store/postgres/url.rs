//! [`Url`]: which Postgres, and as whom.

use std::{fmt, str::FromStr};

use sqlx::{ConnectOptions, postgres::PgConnectOptions};

use crate::store::OpenError;

/// Names a Postgres. Shown without credentials.
#[derive(Clone)]
pub struct Url(pub(super) PgConnectOptions);

impl Url {
    pub(in crate::store) fn parse(text: &str) -> Result<Self, OpenError> {
        // The reason may quote the URL with its password.
        let options = PgConnectOptions::from_str(text)
            .map_err(|_| OpenError::Url("expected `postgres://user:password@host:port/database`".into()))?;
        // Poolers refuse startup parameters that they do not know, and we read no floats.
        let options = options.extra_float_digits(None);
        Ok(Self(options.application_name("onceward").disable_statement_logging()))
    }
}

impl fmt::Display for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let database = self.0.get_database().unwrap_or(self.0.get_username());
        match self.0.get_socket() {
            Some(socket) => write!(f, "postgres://{}/{database}", socket.display()),
            None => write!(f, "postgres://{}:{}/{database}", self.0.get_host(), self.0.get_port()),
        }
    }
}
