//! [`ClientBuilder`]: how to reach the service.

use std::{env, str::FromStr, sync::Arc, time::Duration};

use ::http::Uri;
use tokio::{runtime::Handle, time::Instant};
use tonic::transport::Endpoint;
#[cfg(feature = "tls")]
use tonic::transport::{Certificate, ClientTlsConfig, Identity};
use tracing::warn;

use crate::{
    call::{Caller, Way},
    client::Client,
    coalescer::{Coalescer, CoalescerOptions},
    error::Error,
    servers::{Authorization, Servers},
};

/// The endpoints of the service, separated by commas.
const ENDPOINTS_VARIABLE: &str = "ONCEWARD_ENDPOINTS";
/// The bearer token.
const TOKEN_VARIABLE: &str = "ONCEWARD_TOKEN";
/// Whether to do without the service.
const DISABLED_VARIABLE: &str = "ONCEWARD_DISABLED";

/// No timeout is longer: a day.
const TIMEOUT_MAX: Duration = Duration::from_secs(24 * 3600);

/// How to reach the service.
///
/// ```no_run
/// use std::time::Duration;
/// use onceward_client::Client;
///
/// # async fn example() -> Result<(), Box<dyn std::error::Error>> {
/// let client = Client::builder(["https://onceward-0.internal:50051", "https://onceward-1.internal:50051"])
///     .bearer_token(std::fs::read_to_string("/var/run/secrets/onceward")?.trim())
///     .owner("payments-7c9f")
///     .timeout(Duration::from_secs(5))
///     .connect()
///     .await?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
#[must_use]
pub struct ClientBuilder {
    endpoints: Vec<String>,
    token: Option<String>,
    insecure: bool,
    #[cfg(feature = "tls")]
    tls: ClientTlsConfig,
    /// Whether an authority was named, in place of the machine's.
    #[cfg(feature = "tls")]
    own_authority: bool,
    owner: Option<String>,
    timeout: Duration,
    attempt_timeout: Duration,
    connect_timeout: Duration,
    keepalive_interval: Duration,
    keepalive_timeout: Duration,
    batch_calls_max: usize,
    batches_in_flight: usize,
    disabled: bool,
}

/// Why there is no client.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BuildError {
    /// No endpoint was given.
    #[error("there is no endpoint")]
    NoEndpoint,
    /// An endpoint is no URL of a server.
    #[error("`{0}` is no endpoint: write it as in http://127.0.0.1:50051 or https://onceward.internal:50051")]
    Endpoint(String),
    /// The TLS configuration cannot be used.
    #[error("TLS cannot be set up: {0}")]
    Tls(String),
    /// The token cannot be sent in a header.
    #[error("the bearer token is not printable ASCII")]
    Token,
    /// Anybody on the way could read the token.
    #[error("a bearer token would go to {0} in clear text: use https, or `insecure` to accept that")]
    TokenInClear(String),
    /// There is no Tokio runtime, which drives the connections.
    #[error("a client is made inside a Tokio runtime")]
    NoRuntime,
    /// The service does not answer.
    #[error("the service cannot be reached: {0}")]
    Unreachable(Error),
}

impl Client {
    /// Chooses how to reach the service. Several endpoints share the calls; those that fail are avoided while others do not.
    pub fn builder(endpoints: impl IntoIterator<Item = impl Into<String>>) -> ClientBuilder {
        ClientBuilder::new(endpoints.into_iter().map(Into::into).collect())
    }
}

impl ClientBuilder {
    pub(crate) fn new(endpoints: Vec<String>) -> Self {
        Self {
            endpoints,
            token: None,
            insecure: false,
            #[cfg(feature = "tls")]
            tls: ClientTlsConfig::new(),
            #[cfg(feature = "tls")]
            own_authority: false,
            owner: None,
            timeout: Duration::from_secs(10),
            attempt_timeout: Duration::from_secs(3),
            connect_timeout: Duration::from_secs(2),
            keepalive_interval: Duration::from_secs(10),
            keepalive_timeout: Duration::from_secs(5),
            batch_calls_max: 256,
            batches_in_flight: 2,
            disabled: false,
        }
    }

    /// As the environment says: `ONCEWARD_ENDPOINTS` (separated by commas), `ONCEWARD_TOKEN`, and `ONCEWARD_DISABLED=true` to
    /// do without the service. What it does not say stays.
    pub fn environment(self) -> Self {
        self.variables(|name| env::var(name).ok())
    }

    /// Who reserves, for people who look: at most 128 characters of printable ASCII. The name of the pod is a good choice.
    pub fn owner(self, owner: impl Into<String>) -> Self {
        Self { owner: Some(owner.into()), ..self }
    }

    /// A token that is sent with each call. It goes over TLS or to loopback only, unless [`insecure`](Self::insecure).
    pub fn bearer_token(self, token: impl Into<String>) -> Self {
        Self { token: Some(token.into()), ..self }
    }

    /// Accepts that a token is sent in clear text.
    pub fn insecure(self) -> Self {
        Self { insecure: true, ..self }
    }

    /// The authority that signed the servers' certificates, as PEM, in place of the machine's roots.
    #[cfg(feature = "tls")]
    pub fn ca_certificate(self, pem: impl AsRef<[u8]>) -> Self {
        Self { tls: self.tls.ca_certificate(Certificate::from_pem(pem)), own_authority: true, ..self }
    }

    /// A certificate of our own and its key, as PEM, for servers that ask for one.
    #[cfg(feature = "tls")]
    pub fn client_certificate(self, certificate_pem: impl AsRef<[u8]>, key_pem: impl AsRef<[u8]>) -> Self {
        Self { tls: self.tls.identity(Identity::from_pem(certificate_pem, key_pem)), ..self }
    }

    /// The name in the servers' certificates, where it is not that of the endpoint.
    #[cfg(feature = "tls")]
    pub fn tls_name(self, name: impl Into<String>) -> Self {
        Self { tls: self.tls.domain_name(name), ..self }
    }

    /// How long a call may take with all its repetitions, 10 s by default; a wait comes on top. Completions go on until they
    /// are answered.
    pub fn timeout(self, timeout: Duration) -> Self {
        Self { timeout: timeout.min(TIMEOUT_MAX), ..self }
    }

    /// How long one try of a call may take, 3 s by default; a wait comes on top.
    pub fn attempt_timeout(self, attempt_timeout: Duration) -> Self {
        Self { attempt_timeout: attempt_timeout.min(TIMEOUT_MAX), ..self }
    }

    /// How long it may take to connect, 2 s by default.
    pub fn connect_timeout(self, connect_timeout: Duration) -> Self {
        Self { connect_timeout: connect_timeout.min(TIMEOUT_MAX), ..self }
    }

    /// How often a silent server is asked whether it is still there, and how long its answer may take: 10 s and 5 s by default.
    pub fn keepalive(self, interval: Duration, timeout: Duration) -> Self {
        Self { keepalive_interval: interval.min(TIMEOUT_MAX), keepalive_timeout: timeout.min(TIMEOUT_MAX), ..self }
    }

    /// How many concurrent calls go together in one Batch at most, 256 by default, of the 500 that the service takes; 1 sends
    /// each call by itself.
    pub fn batch_calls_max(self, calls: usize) -> Self {
        Self { batch_calls_max: calls.clamp(1, 500), ..self }
    }

    /// How many Batches are on the way at once, 2 by default. A service that is far away is worth more.
    pub fn batches_in_flight(self, batches: usize) -> Self {
        Self { batches_in_flight: batches.max(1), ..self }
    }

    /// Does without the service: every key is fresh and nothing is kept, so that retries act again. For local work only.
    pub fn disabled(self, disabled: bool) -> Self {
        Self { disabled, ..self }
    }

    /// A client that connects when it is first needed. To be called inside a Tokio runtime.
    ///
    /// # Errors
    ///
    /// The configuration cannot be used, or there is no runtime.
    pub fn lazy(self) -> Result<Client, BuildError> {
        let runtime = Handle::try_current().map_err(|_| BuildError::NoRuntime)?;
        let way = if self.disabled {
            warn!("idempotency is disabled: every retry acts again");
            None
        } else {
            Some(self.way()?)
        };
        Ok(Client::new(Caller { way }, runtime, self.timeout, self.attempt_timeout, self.owner))
    }

    /// A client that has reached the service. To be called inside a Tokio runtime.
    ///
    /// # Errors
    ///
    /// As [`lazy`](Self::lazy), and when the service does not answer within the timeout.
    ///
    /// # Cancel safety
    ///
    /// Dropped, there is no client.
    pub async fn connect(self) -> Result<Client, BuildError> {
        let end = Instant::now() + self.timeout;
        let client = self.lazy()?;
        client.reach(end).await.map_err(BuildError::Unreachable)?;
        Ok(client)
    }

    fn variables(mut self, variable: impl Fn(&str) -> Option<String>) -> Self {
        if let Some(endpoints) = variable(ENDPOINTS_VARIABLE) {
            self.endpoints = endpoints.split(',').map(|endpoint| endpoint.trim().to_owned()).collect();
        }
        self.token = variable(TOKEN_VARIABLE).or(self.token);
        if let Some(value) = variable(DISABLED_VARIABLE) {
            self.disabled = matches!(value.to_lowercase().as_str(), "1" | "true" | "yes" | "on");
        }
        self
    }

    fn way(&self) -> Result<Way, BuildError> {
        let endpoints = self.endpoints.iter().map(|url| self.endpoint(url)).collect::<Result<Vec<_>, _>>()?;
        if endpoints.is_empty() {
            return Err(BuildError::NoEndpoint);
        }
        let servers = Arc::new(Servers::new(endpoints, self.authorization()?));
        let options = CoalescerOptions {
            batch_calls_max: self.batch_calls_max,
            in_flight_max: self.batches_in_flight,
            patience: self.attempt_timeout,
        };
        let coalescer = (self.batch_calls_max > 1).then(|| Coalescer::start(servers.clone(), options));
        Ok(Way { servers, coalescer, attempt: self.attempt_timeout })
    }

    fn endpoint(&self, url: &str) -> Result<Endpoint, BuildError> {
        let refused = || BuildError::Endpoint(url.to_owned());
        let uri = Uri::from_str(url).map_err(|_| refused())?;
        let secure = match uri.scheme_str() {
            Some("http") => false,
            Some("https") => true,
            _ => return Err(refused()),
        };
        let host = uri.host().ok_or_else(refused)?;
        if self.token.is_some() && !secure && !self.insecure && !is_loopback(host) {
            return Err(BuildError::TokenInClear(url.to_owned()));
        }
        let endpoint = Endpoint::from(uri.clone())
            .connect_timeout(self.connect_timeout)
            .tcp_nodelay(true)
            .http2_keep_alive_interval(self.keepalive_interval)
            .keep_alive_timeout(self.keepalive_timeout)
            .keep_alive_while_idle(true);
        #[cfg(feature = "tls")]
        let endpoint = if secure {
            let tls = if self.own_authority { self.tls.clone() } else { self.tls.clone().with_native_roots() };
            endpoint.tls_config(tls).map_err(|error| BuildError::Tls(error.to_string()))?
        } else {
            endpoint
        };
        #[cfg(not(feature = "tls"))]
        if secure {
            return Err(BuildError::Tls("the feature `tls` is off".into()));
        }
        Ok(endpoint)
    }

    fn authorization(&self) -> Result<Option<Authorization>, BuildError> {
        let Some(token) = &self.token else { return Ok(None) };
        let mut authorization = Authorization::try_from(format!("Bearer {token}")).map_err(|_| BuildError::Token)?;
        // It is shown nowhere.
        authorization.set_sensitive(true);
        Ok(Some(authorization))
    }
}

fn is_loopback(host: &str) -> bool {
    let address = host.trim_start_matches('[').trim_end_matches(']');
    host == "localhost" || address.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_says_where_the_service_is_and_whether_to_do_without() {
        let built = |variables: &'static [(&str, &str)]| {
            let variable =
                |name: &str| variables.iter().find(|(other, _)| *other == name).map(|(_, value)| (*value).to_owned());
            ClientBuilder::new(vec!["http://default".into()]).bearer_token("default").variables(variable)
        };
        let silent = built(&[]);
        assert_eq!(
            (silent.endpoints, silent.token, silent.disabled),
            (vec!["http://default".into()], Some("default".into()), false)
        );
        let said = built(&[
            ("ONCEWARD_ENDPOINTS", "http://a:1, http://b:2"),
            ("ONCEWARD_TOKEN", "secret"),
            ("ONCEWARD_DISABLED", "TRUE"),
        ]);
        assert_eq!(
            (said.endpoints, said.token),
            (vec!["http://a:1".into(), "http://b:2".into()], Some("secret".into()))
        );
        assert!(said.disabled);
        for no in ["", "0", "false", "maybe"] {
            assert!(!ClientBuilder::new(Vec::new()).variables(|_| Some(no.into())).disabled, "{no}");
        }
    }
}
