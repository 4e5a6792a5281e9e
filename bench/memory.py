#!/usr/bin/env python3
"""How much memory a worker holds: idle, and again after many requests (a leak shows as growth between the halves)."""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.contestant import KEY
from bench.machine import group_rss_mb

HERE = Path(__file__).resolve().parent
SHARED = HERE.parent.parent / "shared" / "bench"
START_S = 60
#: Long enough for everything that start-up defers.
SETTLE_S = 3.0


class NotStarted(Exception):
    """The gateway did not come up; the message holds the end of its log."""


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextmanager
def running(state: Path, mock: str) -> Iterator[tuple[int, int]]:
    """A gateway as in the benchmark: (its port, its process group)."""
    port = free_port()
    state.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable,
        str(HERE / "contestant.py"),
        "--port",
        str(port),
        "--mock",
        mock,
        "--state",
        str(state),
    ]
    with open(state / "log", "wb") as log:
        child = subprocess.Popen(
            command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
        )
    try:
        _wait_listening(port, child, state / "log")
        yield port, child.pid
    finally:
        child.terminate()
        try:
            child.wait(30)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def _wait_listening(port: int, child: subprocess.Popen[bytes], log: Path) -> None:
    until_s = time.monotonic() + START_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            if child.poll() is not None or time.monotonic() > until_s:
                raise NotStarted(f"the gateway did not start: {log.read_text()[-500:]}") from None
            time.sleep(0.1)


def idle_mb(state: Path) -> float:
    """Resident MB of a gateway that has started and served nothing."""
    with running(state, "127.0.0.1:1") as (_, pgid):
        time.sleep(SETTLE_S)
        return group_rss_mb(pgid)


def main() -> int:
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--shared", type=Path, default=SHARED)
    ap.add_argument("--requests", type=int, default=100_000)
    ap.add_argument("--json", action="store_true")
    args = ap.parse_args()
    if not (args.shared / "load.c").is_file():
        print(
            f"memory: {args.shared} is not there; give the folder of the yardsticks with --shared",
            file=sys.stderr,
        )
        return 2
    with tempfile.TemporaryDirectory(prefix="tollhouse-memory-") as name:
        measured = _measure(Path(name), args.shared, args.requests)
    if args.json:
        print(json.dumps(measured))
    else:
        for what, value in measured.items():
            print(f"{what:24} {value:10.1f}")
    return 0


def _measure(work: Path, shared: Path, requests: int) -> dict[str, float]:
    subprocess.run(["make", "-s", "-C", str(shared), f"OUT={work / 'bin'}"], check=True)
    subprocess.run([sys.executable, str(shared / "bodies"), str(work)], check=True)
    mock_port = free_port()
    mock = subprocess.Popen([str(work / "bin" / "mock_upstream"), "-p", str(mock_port)])
    try:
        with running(work / "state", f"127.0.0.1:{mock_port}") as (port, pgid):
            time.sleep(SETTLE_S)
            measured = {"idle_mb": group_rss_mb(pgid)}
            for label in ("half_mb", "end_mb"):
                _load(work, port, requests // 2)
                measured[label] = group_rss_mb(pgid)
            return measured | {"requests": requests}
    finally:
        mock.terminate()
        mock.wait()


def _load(work: Path, port: int, requests: int) -> None:
    command = [str(work / "bin" / "load"), "-u", f"http://127.0.0.1:{port}/v1/chat/completions"]
    command += [
        "-b",
        str(work / "chat_1k.json"),
        "-n",
        str(requests),
        "-c",
        "32",
        "-H",
        f"Authorization: Bearer {KEY}",
    ]
    done = json.loads(subprocess.run(command, capture_output=True, check=True, env=dict(os.environ)).stdout)
    if done["ok"] != requests:
        raise SystemExit(f"memory: {done['ok']} of {requests} requests were answered: {done['status']}")


if __name__ == "__main__":
    sys.exit(main())
