//! A private Postgres for tests and trials: a cluster of its own, started from the machine's programs and thrown away.
//!
//! ```no_run
//! let postgres = onceward_testing::Postgres::start(&[])?;
//! println!("{}", postgres.url("postgres"));
//! # Ok::<(), std::io::Error>(())
//! ```

use std::{
    env, fs, io,
    net::TcpListener,
    os::unix::{
        fs::{MetadataExt, chown},
        process::CommandExt,
    },
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    sync::atomic::{AtomicUsize, Ordering},
    thread::sleep,
    time::Duration,
};

use sqlx::{AssertSqlSafe, Connection, PgConnection};
use tempfile::TempDir;
use tokio::sync::OnceCell;

/// The environment variable that names the server of [`database`], without a database.
pub const SERVER_VARIABLE: &str = "ONCEWARD_TEST_POSTGRES";

/// A Postgres of its own, stopped and deleted on drop.
pub struct Postgres {
    programs: PathBuf,
    /// Whom to run as: Postgres refuses to run as root.
    user: Option<(u32, u32)>,
    folder: TempDir,
    port: u16,
    options: String,
}

impl Postgres {
    /// Makes a cluster and starts it with these settings, such as `fsync=off`.
    ///
    /// The programs are those of `$PG_BIN`, of the path, or the newest in `/usr/lib/postgresql`.
    pub fn start(settings: &[&str]) -> io::Result<Self> {
        let folder = tempfile::Builder::new().prefix("onceward-postgres-").tempdir()?;
        let user = unprivileged_user()?;
        if let Some((uid, gid)) = user {
            chown(folder.path(), Some(uid), Some(gid))?;
        }
        let port = TcpListener::bind(("127.0.0.1", 0))?.local_addr()?.port();
        let settings: String = settings.iter().map(|setting| format!(" -c {setting}")).collect();
        let options = format!(
            "-p {port} -c listen_addresses=127.0.0.1 -c unix_socket_directories= -c max_connections=500{settings}"
        );
        let mut postgres = Self { programs: programs()?, user, folder, port, options };
        let data = postgres.data().display().to_string();
        postgres
            .run("initdb", &["-D", &data, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"])?;
        postgres.restart()?;
        Ok(postgres)
    }

    /// The URL of one of its databases.
    pub fn url(&self, database: &str) -> String {
        format!("{}/{database}", self.server())
    }

    /// The URL of the server, without a database.
    pub fn server(&self) -> String {
        format!("postgres://postgres@127.0.0.1:{}", self.port)
    }

    /// Kills it as a crash would: no checkpoint, nothing said to anybody.
    pub fn kill(&self) -> io::Result<()> {
        check(Command::new("kill").args(["-9", &self.pid()?.to_string()]).output()?)
    }

    /// Freezes it: it keeps its connections and answers nobody.
    pub fn freeze(&self) -> io::Result<()> {
        self.signal_all("STOP")
    }

    /// Lets it go on after a [`freeze`](Self::freeze).
    pub fn thaw(&self) -> io::Result<()> {
        self.signal_all("CONT")
    }

    fn signal_all(&self, signal: &str) -> io::Result<()> {
        let pid = self.pid()?.to_string();
        check(Command::new("kill").args([&format!("-{signal}"), &pid]).output()?)?;
        // There may be none.
        Command::new("pkill").args([&format!("-{signal}"), "-P", &pid]).output().map(drop)
    }

    /// The number of its main process.
    pub fn pid(&self) -> io::Result<u32> {
        let file = fs::read_to_string(self.data().join("postmaster.pid"))?;
        file.lines().next().and_then(|line| line.parse().ok()).ok_or_else(|| io::Error::other("no process number"))
    }

    /// Stops it in good order.
    pub fn stop(&self) -> io::Result<()> {
        self.run("pg_ctl", &["-D", &self.data().display().to_string(), "-m", "fast", "stop"])
    }

    /// Starts it again after a [`kill`](Self::kill) or a [`stop`](Self::stop).
    pub fn restart(&mut self) -> io::Result<()> {
        let [data, log] = ["data", "log"].map(|name| self.folder.path().join(name).display().to_string());
        let mut tries = 0;
        loop {
            tries += 1;
            match self.run("pg_ctl", &["-w", "-D", &data, "-l", &log, "-o", &self.options, "start"]) {
                // The children of a killed server take a moment to leave.
                Err(_) if tries < 50 => sleep(Duration::from_millis(100)),
                result => return result,
            }
        }
    }

    fn data(&self) -> PathBuf {
        self.folder.path().join("data")
    }

    fn run(&self, program: &str, arguments: &[&str]) -> io::Result<()> {
        let mut command = Command::new(self.programs.join(program));
        // The server inherits its starter's files, and would keep a pipe of ours open.
        let output = fs::File::create(self.folder.path().join("output"))?;
        command.args(arguments).current_dir(self.folder.path()).stdin(Stdio::null());
        command.stdout(output.try_clone()?).stderr(output);
        if let Some((uid, gid)) = self.user {
            command.uid(uid).gid(gid);
        }
        if command.status()?.success() {
            return Ok(());
        }
        let read = |name| fs::read_to_string(self.folder.path().join(name)).unwrap_or_default();
        Err(io::Error::other(format!("{program} failed: {}\n{}", read("output"), read("log"))))
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        // It may be stopped already, or frozen.
        let _ = self.thaw();
        let _ = self.run("pg_ctl", &["-D", &self.data().display().to_string(), "-m", "immediate", "stop"]);
    }
}

/// A fresh database on the shared server, copied from a template that `prepare` has filled once for this process.
///
/// # Panics
///
/// Where no server is named by [`SERVER_VARIABLE`], or it does not answer: a test cannot go on without it.
#[expect(clippy::expect_used, reason = "it serves tests only")]
pub async fn database<P: Future<Output = ()>>(prepare: impl FnOnce(String) -> P) -> String {
    static TEMPLATE: OnceCell<String> = OnceCell::const_new();
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let server = server();
    let template = TEMPLATE
        .get_or_init(|| async {
            let template = format!("template_{}", std::process::id());
            execute(&server, format!("CREATE DATABASE {template}")).await.expect("the test server creates databases");
            prepare(format!("{server}/{template}")).await;
            template
        })
        .await;
    let name = format!("test_{}_{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
    let create = format!("CREATE DATABASE {name} TEMPLATE {template}");
    execute(&server, create).await.expect("the test server copies databases");
    format!("{server}/{name}")
}

/// A fresh database on the shared server with nothing in it.
///
/// # Panics
///
/// See [`database`].
#[expect(clippy::expect_used, reason = "it serves tests only")]
pub async fn empty_database() -> String {
    static COUNT: AtomicUsize = AtomicUsize::new(0);
    let name = format!("empty_{}_{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
    execute(&server(), format!("CREATE DATABASE {name}")).await.expect("the test server creates databases");
    format!("{}/{name}", server())
}

/// Text that nothing can compress, so that limits of index rows and of disk pages count in full.
pub fn incompressible(length: usize) -> String {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    std::iter::repeat_with(|| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        match state % 64 {
            n @ 0..26 => char::from(b'A' + n as u8),
            n @ 26..52 => char::from(b'a' + (n - 26) as u8),
            n @ 52..62 => char::from(b'0' + (n - 52) as u8),
            62 => '.',
            _ => '_',
        }
    })
    .take(length)
    .collect()
}

#[expect(clippy::expect_used, reason = "it serves tests only")]
fn server() -> String {
    env::var(SERVER_VARIABLE).expect("no Postgres is named: run `make test`, which starts one")
}

async fn execute(server: &str, statement: String) -> Result<(), sqlx::Error> {
    let mut connection = PgConnection::connect(&format!("{server}/postgres")).await?;
    sqlx::raw_sql(AssertSqlSafe(statement)).execute(&mut connection).await?;
    connection.close().await
}

fn programs() -> io::Result<PathBuf> {
    let named = env::var_os("PG_BIN").map(PathBuf::from).into_iter();
    let path = env::var_os("PATH").unwrap_or_default();
    let on_path: Vec<_> = env::split_paths(&path).collect();
    let mut installed: Vec<_> =
        fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    let version = |path: &PathBuf| path.file_name().and_then(|name| name.to_str()?.parse::<u32>().ok());
    installed.sort_by_key(|path| std::cmp::Reverse(version(path)));
    let installed = installed.into_iter().map(|path| path.join("bin"));
    let has_programs = |folder: &PathBuf| folder.join("initdb").exists() && folder.join("pg_ctl").exists();
    named
        .chain(on_path)
        .chain(installed)
        .find(has_programs)
        .ok_or_else(|| io::Error::other("no Postgres programs: set PG_BIN, or install the package `postgresql`"))
}

/// Whom to run Postgres as where this process is root; nobody else where it is not.
fn unprivileged_user() -> io::Result<Option<(u32, u32)>> {
    if Path::new("/proc/self").metadata()?.uid() != 0 {
        return Ok(None);
    }
    let users = fs::read_to_string("/etc/passwd")?;
    let ids = |name: &str| {
        let line = users.lines().find(|line| line.starts_with(&format!("{name}:")))?;
        let mut fields = line.split(':').skip(2).map(|field| field.parse::<u32>().ok());
        Some((fields.next()??, fields.next()??))
    };
    let found = ids("postgres").or_else(|| ids("nobody"));
    found.map(Some).ok_or_else(|| io::Error::other("no user `postgres` or `nobody` to run Postgres as"))
}

fn check(output: Output) -> io::Result<()> {
    if output.status.success() {
        return Ok(());
    }
    Err(io::Error::other(String::from_utf8_lossy(&output.stderr).into_owned()))
}
