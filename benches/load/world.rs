//! What a load runs against: a Postgres, and the service in a process of its own.

use std::{
    env, fs,
    net::{SocketAddr, TcpListener},
    process::{Child, Command, Stdio},
    time::Duration,
};

use onceward_testing::Postgres;

use crate::{Failure, connection::connect};

/// A Postgres and the services on it, which end with it.
pub struct World {
    pub database_url: String,
    postgres: Option<Postgres>,
    services: Vec<Service>,
}

/// A service that runs in a process of its own, ended on drop.
struct Service(Child);

impl Drop for Service {
    fn drop(&mut self) {
        // It may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl World {
    /// With the Postgres at `database_url`, else with one of its own.
    pub fn start(database_url: Option<&str>) -> Result<Self, Failure> {
        let (postgres, database_url) = match database_url {
            Some(url) => (None, url.to_owned()),
            None => {
                let postgres = Postgres::start(&[])?;
                let url = postgres.url("postgres");
                (Some(postgres), url)
            }
        };
        Ok(Self { database_url, postgres, services: Vec::new() })
    }

    /// Starts the service on the database, and gives where it is.
    pub async fn serve(&mut self) -> Result<String, Failure> {
        let url = self.database_url.clone();
        self.serve_from(&url, &[]).await
    }

    /// Starts the service on this database with these flags, and gives where it is.
    pub async fn serve_from(&mut self, database_url: &str, flags: &[&str]) -> Result<String, Failure> {
        let [listen, admin] = free_addresses()?;
        let mut command = Command::new(env!("CARGO_BIN_EXE_onceward"));
        command.args(["serve", "--migrate", "--database-url", database_url]).args(flags);
        command.args(["--listen", &listen.to_string(), "--admin-listen", &admin.to_string()]);
        self.start_service(command, listen).await
    }

    /// Starts the service on a store that does nothing, and gives where it is.
    pub async fn serve_nothing(&mut self) -> Result<String, Failure> {
        let [listen, admin] = free_addresses()?;
        let mut command = Command::new(env::current_exe()?);
        command.args(["serve-nothing", &listen.to_string(), &admin.to_string()]);
        self.start_service(command, listen).await
    }

    async fn start_service(&mut self, mut command: Command, listen: SocketAddr) -> Result<String, Failure> {
        self.services.push(Service(command.env("RUST_LOG", "warn").stdin(Stdio::null()).spawn()?));
        let endpoint = format!("http://{listen}");
        for _ in 0..200 {
            if connect(&endpoint).await.is_ok() {
                return Ok(endpoint);
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Err("the service does not start".into())
    }

    /// The URL of another database of the same server, which is made if it is not there.
    pub async fn database(&self, name: &str) -> Result<String, Failure> {
        let postgres = self.postgres.as_ref().ok_or("only a Postgres of its own gets further databases")?;
        let mut connection = <sqlx::PgConnection as sqlx::Connection>::connect(&postgres.url("postgres")).await?;
        sqlx::raw_sql(sqlx::AssertSqlSafe(format!("CREATE DATABASE {name}"))).execute(&mut connection).await?;
        Ok(postgres.url(name))
    }

    /// The memory of the service that was started as the n-th, in bytes: now, and at its highest.
    pub fn memory(&self, n: usize) -> Result<(u64, u64), Failure> {
        let Service(child) = self.services.get(n).ok_or("there is no such service")?;
        let status = fs::read_to_string(format!("/proc/{}/status", child.id()))?;
        let field = |name| {
            let line = status.lines().find(|line| line.starts_with(name))?;
            line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kibibytes| kibibytes << 10)
        };
        Ok((field("VmRSS:").ok_or("no VmRSS")?, field("VmHWM:").ok_or("no VmHWM")?))
    }

    /// The processor time of the service that was started as the n-th.
    pub fn service_cpu(&self, n: usize) -> Result<Duration, Failure> {
        let Service(child) = self.services.get(n).ok_or("there is no such service")?;
        cpu(child.id())
    }

    /// The processor time of Postgres, of all its processes that run.
    pub fn postgres_cpu(&self) -> Result<Duration, Failure> {
        let postgres = self.postgres.as_ref().ok_or("only a Postgres of its own is looked at")?;
        let main = postgres.pid()?;
        // With that of its processes that have ended.
        let mut total = cpu_of(main, &[11, 12, 13, 14])?;
        for process in fs::read_dir("/proc")?.flatten() {
            let Some(pid) = process.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
            let status = fs::read_to_string(process.path().join("status")).unwrap_or_default();
            if status.lines().any(|line| line == format!("PPid:\t{main}")) {
                total += cpu(pid).unwrap_or_default();
            }
        }
        Ok(total)
    }
}

/// The processor time of this process.
pub fn own_cpu() -> Result<Duration, Failure> {
    cpu(std::process::id())
}

fn cpu(pid: u32) -> Result<Duration, Failure> {
    cpu_of(pid, &[11, 12])
}

/// The sum of these fields of its statistics.
fn cpu_of(pid: u32, fields_of_time: &[usize]) -> Result<Duration, Failure> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The name, in parentheses, may contain anything.
    let fields = stat.rsplit(')').next().unwrap_or_default();
    let ticks = |n: &usize| fields.split_whitespace().nth(*n)?.parse::<u64>().ok();
    let ticks = fields_of_time.iter().map(ticks).sum::<Option<u64>>().ok_or("no processor times")?;
    // Linux counts in hundredths of a second.
    Ok(Duration::from_millis(ticks * 10))
}

fn free_addresses() -> Result<[SocketAddr; 2], Failure> {
    let free = || TcpListener::bind(("127.0.0.1", 0));
    let (first, second) = (free()?, free()?);
    Ok([first.local_addr()?, second.local_addr()?])
}
