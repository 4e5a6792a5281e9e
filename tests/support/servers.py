"""Real servers for tests, in directories of their own: Postgres and Redis on 127.0.0.1, ended with the session."""

from __future__ import annotations

import contextlib
import functools
import os
import pwd
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tests.support.untested import untested

T = TypeVar("T")
START_TIMEOUT_S = 30


class ServerMissing(Exception):
    """A server that the tests need is not installed and could not be installed."""


@dataclass(frozen=True, slots=True)
class PostgresServer:
    """A running cluster. `pause`, `stop` and `start` are for tests of outages."""

    bin: Path
    directory: Path
    port: int

    def url(self, database: str) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/{database}"

    def start(self) -> None:
        # A log file, not a pipe: the server would keep a pipe of ours open.
        self._pg_ctl("start", "-w", "-t", str(START_TIMEOUT_S), "-l", str(self.directory / "log"))

    def stop(self) -> None:
        """As a crash: what was not committed is lost."""
        self._pg_ctl("stop", "-m", "immediate")

    def _pg_ctl(self, *args: str) -> None:
        _run([self.bin / "pg_ctl", "-D", self.directory / "cluster", *args], self.directory)


@contextmanager
def postgres_server() -> Iterator[PostgresServer]:
    """A cluster of its own. Raises `ServerMissing` with what to do about it."""
    bin_directory = postgres_binaries()
    if bin_directory is None:
        raise ServerMissing(POSTGRES_MISSING)
    directory = Path(tempfile.mkdtemp(prefix="tollhouse-pg-"))
    server = PostgresServer(bin_directory, directory, free_port())
    if os.geteuid() == 0:
        user = pwd.getpwnam(_unprivileged())
        os.chown(directory, user.pw_uid, user.pw_gid)
    cluster = directory / "cluster"
    try:
        options = ("-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync")
        _run([bin_directory / "initdb", "-D", cluster, *options], directory)
        with (cluster / "postgresql.conf").open("a") as conf:
            conf.write(
                f"port = {server.port}\nlisten_addresses = '127.0.0.1'\nunix_socket_directories = '{directory}'\n"
                # The machine does not lose power during the tests; crashes of Postgres itself are survived.
                "fsync = off\nfull_page_writes = off\nshared_buffers = 32MB\nmax_connections = 60\n"
                "autovacuum = off\n"
            )
        server.start()
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@dataclass(slots=True)
class RedisServer:
    """A running Redis that keeps nothing on disk. `kill`, `start` and `pause` are for tests of outages."""

    binary: str
    directory: Path
    port: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Empty, whatever was there before."""
        where = ("--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.directory))
        self.process = subprocess.Popen(
            [self.binary, *where, "--save", ""], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        _wait_for_port(self.port, self.process)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(timeout=10)
            self.process = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Alive, connectable, and silent."""
        if self.process is None:
            raise RuntimeError("there is nothing to pause")
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)


@contextmanager
def redis_server() -> Iterator[RedisServer]:
    """An empty Redis of its own. Raises `ServerMissing` with what to do about it."""
    binary = redis_binary()
    if binary is None:
        raise ServerMissing(REDIS_MISSING)
    directory = Path(tempfile.mkdtemp(prefix="tollhouse-redis-"))
    server = RedisServer(binary, directory, free_port())
    try:
        server.start()
        yield server
    finally:
        server.kill()
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def prometheus_server(target: str) -> Iterator[str]:
    """The address of a Prometheus that scrapes `target` (host:port) every second. Raises `ServerMissing`."""
    binary = prometheus_binary()
    if binary is None:
        raise ServerMissing(PROMETHEUS_MISSING)
    directory, port = Path(tempfile.mkdtemp(prefix="tollhouse-prometheus-")), free_port()
    (directory / "prometheus.yml").write_text(
        "global: {scrape_interval: 1s}\n"
        f"scrape_configs: [{{job_name: tollhouse, static_configs: [{{targets: ['{target}']}}]}}]\n"
    )
    command = (binary, f"--config.file={directory}/prometheus.yml", f"--storage.tsdb.path={directory}/data")
    process = subprocess.Popen(
        [*command, f"--web.listen-address=127.0.0.1:{port}", "--enable-feature=exemplar-storage"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait_for_port(port, process)
        url = f"http://127.0.0.1:{port}"
        _wait_until_ready(f"{url}/-/ready")
        yield url
    finally:
        process.kill()
        process.wait(timeout=10)
        shutil.rmtree(directory, ignore_errors=True)


POSTGRES_MISSING = (
    "Postgres is not installed and could not be installed: the tests of the Postgres store did not run. "
    "Install it (Debian: apt-get install postgresql) or put initdb and pg_ctl on the PATH."
)
REDIS_MISSING = (
    "Redis is not installed and could not be installed: the tests of the Redis limits did not run. "
    "Install it (Debian: apt-get install redis-server) or put redis-server on the PATH."
)
PROMETHEUS_MISSING = (
    "Prometheus is not installed and could not be installed: no panel's query and no rule was tried on the real one. "
    "Install it (Debian: apt-get install prometheus) or put prometheus and promtool on the PATH."
)


@functools.cache
def postgres_binaries() -> Path | None:
    """The directory with initdb and pg_ctl; installs the Debian package if that is possible and needed."""
    return _found(_postgres_directory, "postgresql", POSTGRES_MISSING)


@functools.cache
def redis_binary() -> str | None:
    """None where it neither is nor can be installed, as the next."""
    return _found(lambda: shutil.which("redis-server"), "redis-server", REDIS_MISSING)


@functools.cache
def prometheus_binary() -> str | None:
    """promtool comes with it."""
    return _found(lambda: shutil.which("prometheus"), "prometheus", PROMETHEUS_MISSING)


def _found(look: Callable[[], T | None], package: str, missing: str) -> T | None:
    found = look() or (look() if _apt_install(package) else None)
    if found is None:
        untested(missing)
    return found


def free_port() -> int:
    """One that the kernel gives to nobody who asks for any: a server may go and come back at it."""
    try:
        first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        first_given = 32_768  # no Linux
    while True:
        port = random.randrange(10_000, first_given)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port


def _postgres_directory() -> Path | None:
    on_path = shutil.which("pg_ctl")
    candidates = [Path(on_path).parent] if on_path else []
    candidates += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((d for d in candidates if (d / "initdb").exists() and (d / "pg_ctl").exists()), None)


def _apt_install(package: str) -> bool:
    # A worker of pytest-xdist finds what its controller could install (tests/conftest.py).
    if os.geteuid() != 0 or "PYTEST_XDIST_WORKER" in os.environ or shutil.which("apt-get") is None:
        return False
    # RUNLEVEL 1: what is installed is not started as a service of the machine.
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    for command in (
        ["apt-get", "update", "-q"],
        ["apt-get", "install", "-qy", "--no-install-recommends", package],
    ):
        done = subprocess.run(command, env=environment, capture_output=True, timeout=300, check=False)
        if done.returncode:
            return False
    return True


def _unprivileged() -> str:
    """Postgres refuses to run as root."""
    try:
        pwd.getpwnam("postgres")
    except KeyError:
        return "nobody"
    return "postgres"


def _run(command: list[str | Path], directory: Path) -> None:
    account = pwd.getpwnam(_unprivileged()) if os.geteuid() == 0 else None
    with tempfile.TemporaryFile() as output:
        done = subprocess.run(
            command,
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            user=account.pw_uid if account else None,
            group=account.pw_gid if account else None,
            extra_groups=[] if account else None,
            timeout=START_TIMEOUT_S + 30,
            check=False,
        )
        if done.returncode:
            output.seek(0)
            raise ServerMissing(f"{command[0]} failed: {output.read().decode(errors='replace')}")


def _wait_until_ready(url: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(url, timeout=1) as answer:
                if answer.status == 200:
                    return
        except OSError:
            pass  # it listens before it answers
        time.sleep(0.05)
    raise ServerMissing(f"{url} did not say so")


def _wait_for_port(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        with socket.socket() as s:
            s.settimeout(0.2)
            if s.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    raise ServerMissing(f"the server on port {port} did not start")
