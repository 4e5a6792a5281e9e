"""A throw-away Postgres for benchmarks: a new cluster in a temporary folder, gone afterwards."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

START_S = 60


class NoPostgres(Exception):
    """No server can be started here; the message says why."""


def _program(name: str) -> str:
    """The newest installed one; distributions keep them out of PATH."""
    installed = sorted(
        Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), key=lambda p: int(p.parts[4].split(".")[0])
    )
    found = str(installed[-1]) if installed else shutil.which(name)
    if not found:
        raise NoPostgres(f"{name} is not installed (apt-get install postgresql)")
    return found


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _wait_ready(probe: list[str], server: subprocess.Popen[bytes], log: Path) -> None:
    until_s = time.monotonic() + START_S
    while subprocess.run(probe).returncode:
        if server.poll() is not None or time.monotonic() > until_s:
            raise NoPostgres(f"the server did not start: {log.read_text()[-300:]}")
        time.sleep(0.1)


@contextmanager
def throwaway_postgres(cores: set[int] | None = None) -> Iterator[str]:
    """The URL of an empty database; `cores` pins the server. Durable as shipped: fsync and synchronous_commit on."""
    initdb, postgres, pg_isready = _program("initdb"), _program("postgres"), _program("pg_isready")
    # Postgres refuses to run as root: then its own account runs it.
    user = "postgres" if os.geteuid() == 0 else None
    folder = Path(tempfile.mkdtemp(prefix="bench-postgres-"))
    server = None
    try:
        if user:
            try:
                shutil.chown(folder, user)
            except LookupError:
                raise NoPostgres(
                    "this is root, and there is no account 'postgres' to run the server"
                ) from None
        cluster = folder / "cluster"
        made = subprocess.run(
            [initdb, "-D", str(cluster), "-U", "tollhouse", "--auth=trust", "-E", "UTF8", "--no-locale"],
            user=user, cwd=folder, capture_output=True, text=True,
        )  # fmt: skip
        if made.returncode:
            raise NoPostgres(f"initdb failed: {made.stderr.strip()[-300:]}")
        port = _free_port()
        with open(folder / "log", "wb") as log:
            server = subprocess.Popen(
                [postgres, "-D", str(cluster), "-p", str(port), "-h", "127.0.0.1", "-k", str(folder)],
                user=user, cwd=folder, stdout=log, stderr=log,
            )  # fmt: skip
        if cores:
            os.sched_setaffinity(server.pid, cores)
        _wait_ready([pg_isready, "-q", "-h", "127.0.0.1", "-p", str(port)], server, folder / "log")
        yield f"postgresql://tollhouse@127.0.0.1:{port}/postgres"
    finally:
        if server is not None:
            server.send_signal(signal.SIGINT)  # "fast": SIGTERM would wait for every client to leave
            try:
                server.wait(10)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
        shutil.rmtree(folder, ignore_errors=True)
