//! A real API server and its etcd, on loopback addresses of this host or of a node, and `kubectl` to talk to it.

use std::{
    env, fs,
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};

use crate::{objects::Object, place::Place, skip, wait::eventually};

/// From the start of the process until it answers, on a busy machine.
const START: Duration = Duration::from_secs(90);

/// Programs that are built, by `cargo xtask kubernetes`.
const PROGRAMS: [&str; 3] = ["etcd", "kube-apiserver", "kubectl"];

/// An API server; everything of it ends and goes when it is dropped.
#[derive(Debug)]
pub struct ApiServer {
    programs: PathBuf,
    folder: PathBuf,
    place: Option<Place>,
    port: u16,
    etcd_port: u16,
    etcd: Option<Child>,
    server: Option<Child>,
}

impl ApiServer {
    /// Starts one in a place, else on this host; it has the namespace of the tests. `None` when its programs are not
    /// there; the running test is then skipped.
    ///
    /// # Errors
    /// When it does not answer in time; with its last words.
    pub fn start(place: Option<&Place>) -> Result<Option<Self>> {
        static NUMBER: AtomicUsize = AtomicUsize::new(0);
        let programs = programs()?;
        if let Some(missing) = PROGRAMS.iter().find(|name| !programs.join(name).exists()) {
            skip(&format!("{missing} is not in {}: run `cargo xtask kubernetes`", programs.display()));
            return Ok(None);
        }
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let folder = env::temp_dir().join(format!("sheave-api-{}-{number}", std::process::id()));
        fs::create_dir_all(&folder)?;
        let place = place.cloned();
        let mut api = Self { programs, folder, place, port: 0, etcd_port: 0, etcd: None, server: None };
        api.write_credentials()?;
        api.start_etcd()?;
        api.port = api.free_port()?;
        api.resume()?;
        api.kubectl(&["create", "namespace", crate::objects::NAMESPACE], "")?;
        Ok(Some(api))
    }

    /// A second API server of the same cluster.
    ///
    /// # Errors
    /// As for the first.
    pub fn second(&self) -> Result<Self> {
        let folder = self.folder.join("second");
        fs::create_dir_all(&folder)?;
        for file in ["tokens.csv", "sa.key"] {
            fs::copy(self.folder.join(file), folder.join(file))?;
        }
        let (programs, place) = (self.programs.clone(), self.place.clone());
        let mut second = Self { programs, folder, place, port: 0, etcd_port: self.etcd_port, etcd: None, server: None };
        second.port = second.free_port()?;
        second.resume()?;
        Ok(second)
    }

    /// Where clients find it and its credentials.
    #[must_use]
    pub fn kubeconfig(&self) -> PathBuf {
        self.folder.join("kubeconfig")
    }

    /// Ends the API server, at once; etcd goes on.
    pub fn stop(&mut self) {
        end(&mut self.server);
    }

    /// Starts the API server, again if it was stopped; returns when it is ready.
    ///
    /// # Errors
    /// When it is not ready in time; with its last words.
    pub fn resume(&mut self) -> Result<()> {
        self.begin()?;
        let ready = eventually("the API server is ready", START, || self.kubectl(&["get", "--raw", "/readyz"], ""));
        ready.map(drop).map_err(|error| error.context(self.last_words("kube-apiserver")))
    }

    /// Starts the API server and does not wait.
    ///
    /// # Errors
    /// When the program cannot be started.
    pub fn begin(&mut self) -> Result<()> {
        let folder = self.folder.display();
        let flags = [
            format!("--etcd-servers=http://127.0.0.1:{}", self.etcd_port),
            "--bind-address=127.0.0.1".into(),
            format!("--secure-port={}", self.port),
            format!("--cert-dir={folder}/pki"),
            format!("--token-auth-file={folder}/tokens.csv"),
            "--authorization-mode=RBAC".into(),
            "--service-cluster-ip-range=10.96.0.0/16,2001:db8:96::/112".into(),
            "--endpoint-reconciler-type=none".into(), // its own address is a loopback one, which Endpoints may not hold
            "--service-account-issuer=https://kubernetes.default.svc.cluster.local".into(),
            format!("--service-account-key-file={folder}/sa.key"),
            format!("--service-account-signing-key-file={folder}/sa.key"),
        ];
        self.server = Some(self.spawn("kube-apiserver", &flags)?);
        let kubeconfig = format!(
            "apiVersion: v1\nkind: Config\ncurrent-context: c\n\
             clusters: [{{name: c, cluster: {{server: 'https://127.0.0.1:{}', certificate-authority: '{folder}/pki/apiserver.crt'}}}}]\n\
             users: [{{name: u, user: {{token: secret}}}}]\n\
             contexts: [{{name: c, context: {{cluster: c, user: u}}}}]\n",
            self.port
        );
        fs::write(self.kubeconfig(), kubeconfig)?;
        Ok(())
    }

    /// Creates or changes objects, in order.
    ///
    /// # Errors
    /// When the API server refuses one.
    pub fn apply(&self, objects: &[&dyn Object]) -> Result<()> {
        let texts: Vec<String> = objects.iter().map(|object| object.text()).collect();
        self.kubectl(&["apply", "-f", "-"], &texts.join("\n---\n")).map(drop)
    }

    /// Deletes objects, in order.
    ///
    /// # Errors
    /// When the API server refuses, or one is not there.
    pub fn delete(&self, objects: &[&dyn Object]) -> Result<()> {
        let texts: Vec<String> = objects.iter().map(|object| object.text()).collect();
        self.kubectl(&["delete", "--wait=false", "-f", "-"], &texts.join("\n---\n")).map(drop)
    }

    /// Runs `kubectl` with that input; gives what it printed.
    ///
    /// # Errors
    /// When it fails; with what it said.
    pub fn kubectl(&self, args: &[&str], input: &str) -> Result<String> {
        let file = self.folder.join("input");
        fs::write(&file, input)?;
        let mut command = self.command("kubectl")?;
        command.arg("--kubeconfig").arg(self.kubeconfig()).arg(format!("--cache-dir={}/cache", self.folder.display()));
        let output = command.args(args).stdin(fs::File::open(&file)?).output().context("cannot start kubectl")?;
        let said = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        ensure!(output.status.success(), "kubectl {}: {}", args.join(" "), said(&output.stderr));
        Ok(said(&output.stdout))
    }

    fn write_credentials(&self) -> Result<()> {
        fs::write(self.folder.join("tokens.csv"), "secret,admin,admin,system:masters\n")?;
        let key = self.folder.join("sa.key");
        let made = Command::new("openssl")
            .args(["ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out"])
            .arg(&key)
            .output()
            .context("cannot start openssl, which makes the key of service accounts")?;
        ensure!(made.status.success(), "openssl: {}", String::from_utf8_lossy(&made.stderr));
        Ok(())
    }

    fn start_etcd(&mut self) -> Result<()> {
        self.etcd_port = self.free_port()?;
        let (clients, peers) =
            (format!("http://127.0.0.1:{}", self.etcd_port), format!("http://127.0.0.1:{}", self.free_port()?));
        let flags = [
            format!("--data-dir={}/etcd", self.folder.display()),
            "--unsafe-no-fsync".into(), // nothing here outlives the test
            format!("--listen-client-urls={clients}"),
            format!("--advertise-client-urls={clients}"),
            format!("--listen-peer-urls={peers}"),
            format!("--initial-advertise-peer-urls={peers}"),
            format!("--initial-cluster=default={peers}"),
        ];
        self.etcd = Some(self.spawn("etcd", &flags)?);
        Ok(())
    }

    /// A port that nobody listens on now. Somebody else may take it first; then the start fails and says so.
    fn free_port(&self) -> Result<u16> {
        let probe = || -> Result<u16> { Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port()) };
        match &self.place {
            Some(place) => place.enter(probe)?,
            None => probe(),
        }
    }

    fn spawn(&self, program: &str, flags: &[String]) -> Result<Child> {
        let log = fs::File::options().create(true).append(true).open(self.log(program))?;
        let mut command = self.command(program)?;
        command.args(flags).stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        command.spawn().with_context(|| format!("cannot start {program}"))
    }

    /// A command that does not outlive us.
    fn command(&self, program: &str) -> Result<Command> {
        let path = self.programs.join(program);
        match &self.place {
            Some(place) => place.command(path),
            None => {
                let mut command = Command::new("setpriv");
                command.args(["--pdeathsig", "KILL", "--"]).arg(path);
                Ok(command)
            }
        }
    }

    fn log(&self, program: &str) -> PathBuf {
        self.folder.join(format!("{program}.log"))
    }

    fn last_words(&self, program: &str) -> String {
        let log = fs::read_to_string(self.log(program)).unwrap_or_default();
        let lines: Vec<&str> = log.lines().rev().take(20).collect();
        lines.into_iter().rev().collect::<Vec<_>>().join("\n")
    }
}

impl Drop for ApiServer {
    fn drop(&mut self) {
        end(&mut self.server);
        end(&mut self.etcd);
        let _ = fs::remove_dir_all(&self.folder); // what is left in a temporary folder is no failure
    }
}

fn end(child: &mut Option<Child>) {
    if let Some(mut child) = child.take() {
        let _ = child.kill(); // it may have ended by itself
        let _ = child.wait();
    }
}

/// Where `cargo xtask kubernetes` puts the programs that it builds.
///
/// # Errors
/// When neither `SHEAVE_CACHE` nor `HOME` is set.
pub fn programs() -> Result<PathBuf> {
    let cache = match (env::var_os("SHEAVE_CACHE"), env::var_os("HOME")) {
        (Some(cache), _) => PathBuf::from(cache),
        (None, Some(home)) => Path::new(&home).join(".cache/sheave"),
        (None, None) => bail!("neither SHEAVE_CACHE nor HOME is set"),
    };
    Ok(cache.join("kubernetes-v1.36.3"))
}
