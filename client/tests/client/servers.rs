//! Several servers, TLS, and how a client is built.

use std::{
    collections::HashMap,
    net::SocketAddr,
    sync::{Arc, Mutex},
};

use onceward_client::{BuildError, Client, Failure, Source, testing::Server};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use tokio::{
    io::copy_bidirectional,
    net::{TcpListener, TcpStream},
    task::JoinSet,
};
use tokio_rustls::{
    TlsAcceptor,
    rustls::{
        RootCertStore, ServerConfig,
        pki_types::{CertificateDer, PrivateKeyDer},
        server::WebPkiClientVerifier,
    },
};

use crate::{
    proxy::{Fault, Proxy},
    support::{MILLISECOND, SECOND, acquired, completed, database, direct, key, server, within},
};

/// Two servers on one database. They are on threads of their own, as they would be on machines of their own.
async fn two_servers() -> [Server; 2] {
    let url = database().await;
    [0, 1].map(|_| Server::with(&[&format!("--database-url={url}"), "--drain-timeout=5s"]).unwrap())
}

/// Keys done by many callers, some keys by several of them, while `disturb` does its worst.
async fn load(client: &Client, disturb: impl Future<Output = ()>) {
    let runs: Arc<Mutex<HashMap<u32, u32>>> = Arc::default();
    let mut callers = JoinSet::new();
    for caller in 0..40 {
        let (client, runs) = (client.clone(), runs.clone());
        callers.spawn(async move {
            let mut fresh = 0;
            for n in 0..50 {
                // Each key has two callers.
                let number = caller / 2 * 1000 + n;
                let once = client.once(key(&number.to_string()));
                let outcome = once
                    .run(async |_| {
                        *runs.lock().unwrap().entry(number).or_default() += 1;
                        tokio::time::sleep(10 * MILLISECOND).await;
                        Ok::<_, Failure<std::convert::Infallible>>(number)
                    })
                    .await
                    .unwrap();
                assert_eq!(outcome.value, number);
                fresh += usize::from(outcome.source == Source::Fresh);
            }
            fresh
        });
    }
    disturb.await;
    let fresh: usize = within(60 * SECOND, callers.join_all()).await.into_iter().sum();
    let runs = runs.lock().unwrap();
    assert_eq!((fresh, runs.len()), (1000, 1000));
    assert!(
        runs.values().all(|times| *times == 1),
        "{:?}",
        runs.iter().filter(|(_, times)| **times > 1).collect::<Vec<_>>()
    );
}

#[tokio::test]
async fn one_of_two_servers_may_be_lost_under_load() {
    for gently in [true, false] {
        let [first, second] = two_servers().await;
        let client = Client::builder([first.endpoint(), second.endpoint()]).lazy().unwrap();
        load(&client, async {
            tokio::time::sleep(300 * MILLISECOND).await;
            tokio::task::spawn_blocking(move || if gently { first.stop() } else { first.kill() }).await.unwrap();
        })
        .await;
        drop(second);
    }
}

#[tokio::test]
async fn one_of_two_servers_may_fall_silent_under_load() {
    let [first, second] = two_servers().await;
    let proxy = Proxy::start(first.address()).await;
    let builder = Client::builder([proxy.endpoint(), second.endpoint()]);
    let client = builder.attempt_timeout(500 * MILLISECOND).lazy().unwrap();
    load(&client, async {
        tokio::time::sleep(200 * MILLISECOND).await;
        proxy.both(Fault::Blackhole);
    })
    .await;
}

#[tokio::test]
async fn a_connection_may_be_cut_and_slow_under_load() {
    let server = server();
    let proxy = Proxy::start(server.address()).await;
    let client = Client::builder([proxy.endpoint()]).lazy().unwrap();
    load(&client, async {
        for _ in 0..10 {
            tokio::time::sleep(50 * MILLISECOND).await;
            proxy.cut_all();
            proxy.both(Fault::Delay(2 * MILLISECOND));
        }
        proxy.both(Fault::None);
    })
    .await;
}

#[tokio::test]
async fn who_connects_eagerly_learns_that_nobody_is_there() {
    let builder = Client::builder(["http://127.0.0.1:1"]).timeout(200 * MILLISECOND);
    assert!(matches!(builder.connect().await, Err(BuildError::Unreachable(_))));
    direct(&server()).close().await;
}

#[test]
fn a_client_that_cannot_be_built_says_why() {
    let lazy = |endpoint: &str| Client::builder([endpoint]).lazy();
    assert!(matches!(lazy("http://127.0.0.1:1"), Err(BuildError::NoRuntime)));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let _inside = runtime.enter();
    assert!(matches!(Client::builder(Vec::<String>::new()).lazy(), Err(BuildError::NoEndpoint)));
    for endpoint in ["", "127.0.0.1:50051", "ftp://host", "http://"] {
        assert!(matches!(lazy(endpoint), Err(BuildError::Endpoint(_))), "{endpoint}");
    }
    let with_token = |endpoint: &str| Client::builder([endpoint]).bearer_token("secret");
    assert!(matches!(with_token("http://10.0.0.1:50051").lazy(), Err(BuildError::TokenInClear(_))));
    for fine in [
        with_token("http://127.0.0.1:1"),
        with_token("http://[::1]:1"),
        with_token("https://10.0.0.1:1"),
        with_token("http://10.0.0.1:1").insecure(),
    ] {
        fine.lazy().unwrap();
    }
    assert!(matches!(with_token("http://127.0.0.1:1").bearer_token("a\nb").lazy(), Err(BuildError::Token)));
}

/// Certificates of one authority.
struct Authority {
    certificate: String,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    fn new() -> Self {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let certificate = params.self_signed(&key).unwrap().pem();
        Self { certificate, issuer: Issuer::new(params, key) }
    }

    /// A certificate and its key, as PEM and as rustls wants them.
    fn issue(&self, name: &str) -> (String, String, CertificateDer<'static>, PrivateKeyDer<'static>) {
        let key = KeyPair::generate().unwrap();
        let certificate = CertificateParams::new([name.to_owned()]).unwrap().signed_by(&key, &self.issuer).unwrap();
        let der = PrivateKeyDer::try_from(key.serialize_der()).unwrap();
        (certificate.pem(), key.serialize_pem(), certificate.der().clone(), der)
    }
}

/// Stands before a server and speaks TLS, with those alone who have a certificate of this authority.
async fn tls_before(server: SocketAddr, authority: &Authority, tasks: &mut JoinSet<()>) -> SocketAddr {
    let mut roots = RootCertStore::empty();
    let (.., certificate, key) = authority.issue("onceward.test");
    let pem = authority.certificate.clone();
    let root = <CertificateDer<'_> as tokio_rustls::rustls::pki_types::pem::PemObject>::from_pem_slice(pem.as_bytes())
        .unwrap();
    roots.add(root).unwrap();
    let provider = Arc::new(tokio_rustls::rustls::crypto::ring::default_provider());
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider.clone()).build().unwrap();
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_client_cert_verifier(verifier)
        .with_single_cert(vec![certificate], key)
        .unwrap();
    config.alpn_protocols = vec![b"h2".to_vec()];
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tasks.spawn(async move {
        let mut connections = JoinSet::new();
        while let Ok((client, _)) = listener.accept().await {
            let acceptor = acceptor.clone();
            connections.spawn(async move {
                let Ok(mut client) = acceptor.accept(client).await else { return };
                let mut server = TcpStream::connect(server).await.unwrap();
                let _ = copy_bidirectional(&mut client, &mut server).await;
            });
        }
    });
    address
}

#[tokio::test]
async fn tls_checks_both_ends() {
    let (ours, theirs) = (Authority::new(), Authority::new());
    let server = server();
    let mut tasks = JoinSet::new();
    let address = tls_before(server.address(), &ours, &mut tasks).await;
    let (certificate, key_pem, ..) = ours.issue("client");
    let client = || Client::builder([format!("https://{address}")]).timeout(SECOND).tls_name("onceward.test");

    let fine = client().ca_certificate(&ours.certificate).client_certificate(&certificate, &key_pem);
    let fine = fine.bearer_token("secret").connect().await.unwrap();
    acquired(fine.reserve(key("k"))).await.complete("by TLS").await.unwrap();
    assert_eq!(completed(direct(&server).reserve(key("k"))).await, "by TLS");

    let (other_certificate, other_key, ..) = theirs.issue("client");
    for refused in [
        client().ca_certificate(&ours.certificate),
        client().ca_certificate(&ours.certificate).client_certificate(&other_certificate, &other_key),
        client().ca_certificate(&theirs.certificate).client_certificate(&certificate, &key_pem),
        client().client_certificate(&certificate, &key_pem),
        client().ca_certificate(&ours.certificate).client_certificate(&certificate, &key_pem).tls_name("other.test"),
    ] {
        assert!(matches!(refused.connect().await, Err(BuildError::Unreachable(_))));
    }
}
