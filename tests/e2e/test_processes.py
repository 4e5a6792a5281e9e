"""The command as people run it: real processes, real signals."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp

from gateway.demo.bill import BillFile, BillLine
from gateway.demo.provider import BILL_NAME
from gateway.demo.report import LedgerLine, compare
from gateway.storage import reports
from gateway.storage.accounts import Accounts
from gateway.storage.database import Database, open_database
from tests.storage.worlds import rows
from tests.support.raw_client import RawClient
from tests.support.running import START_S, Serving, Tollhouse
from tests.support.servers import free_port

CHAT = "/v1/chat/completions"


def body(tokens: int, stream: bool = False) -> bytes:
    """A request whose answer has so many tokens; the demo provider takes 2 ms for each."""
    ask = {"role": "user", "content": f"demo:output={tokens}"}
    return json.dumps({"model": "demo-fast", "stream": stream, "messages": [ask]}).encode()


async def statuses(url: str, key: str | None, requests: int) -> Counter[int]:
    """What so many requests get, each on a connection of its own, so that every worker gets its share."""

    async def one() -> int:
        async with http.post(CHAT, data=body(5)) as answer:
            await answer.read()
            return answer.status

    headers = {"Authorization": f"Bearer {key}"}
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(url, connector=connector, headers=headers) as http:
        return Counter(await asyncio.gather(*(one() for _ in range(requests))))


@asynccontextmanager
async def ledger(url: str) -> AsyncIterator[Database]:
    database = open_database(url)
    try:
        yield database
    finally:
        await database.close()


def bill(tollhouse: Tollhouse) -> list[BillLine]:
    """The demo provider's, after it has ended."""
    file = BillFile(tollhouse.state / "demo" / BILL_NAME)
    lines = file.after(0)
    file.close()
    return lines


async def until(true: Callable[[], bool]) -> None:
    """Ask again and again until it is."""
    async with asyncio.timeout(START_S):
        while not true():
            await asyncio.sleep(0.05)


async def test_one_process_from_the_first_run_to_the_second(tmp_path: Path) -> None:
    tollhouse = Tollhouse(tmp_path, listen="127.0.0.1:0")
    async with tollhouse.serve("--first-run") as first:
        key = first.key
        assert key
        assert await statuses(first.url, key, 3) == {200: 3}
        assert "DEMO provider" in first.said

        refused, out, err = await tollhouse.run("serve")
        assert (refused, out) == (2, "")
        assert f"another gateway (pid {first.process.pid}) already serves from" in err
        assert "Traceback" not in err

        async with RawClient(first.url, key) as client:
            await client.post(CHAT, body(300, stream=True))
            await client.head()
            events = [await client.event()]
            ending = asyncio.create_task(first.end())
            while (event := await client.event()) is not None:
                events.append(event)
        assert events[-1] == b"data: [DONE]\n\n"
        assert await ending == 0
        assert "Traceback" not in first.said

    async with ledger(f"sqlite:///{tollhouse.state / 'ledger.db'}") as database:
        entries = await reports.entries(database)
        assert await rows(database, "SELECT count(*) FROM hold WHERE state = 'held'") == [(0,)]
    assert [(e["kind"], e["quality"], e["output"]) for e in entries] == [
        *[("post", "exact", 5)] * 3,
        ("post", "exact", 300),
    ]
    assert compare(map(LedgerLine.of, entries), bill(tollhouse)).differences == ()

    async with tollhouse.serve("--first-run") as second:
        assert second.key is None
        assert "made earlier" in second.said
        assert await statuses(second.url, key, 1) == {200: 1}
        assert await second.end() == 0


def workers_of(serving: Serving) -> dict[int, int]:
    """Process ids by worker number."""
    pid = serving.process.pid
    found = {}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        index = re.search(r'"index": (\d+)', Path(f"/proc/{child}/cmdline").read_text())
        if index:
            found[int(index[1])] = int(child)
    return found


def listeners(url: str) -> int:
    """How many processes take connections there."""
    port = f":{urlsplit(url).port:04X}"
    lines = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
    return sum(1 for line in lines if line[1].endswith(port) and line[3] == "0A")


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("Z")


async def test_three_workers_on_one_port(tmp_path: Path, postgres_url: str) -> None:
    tollhouse = Tollhouse(tmp_path, postgres_url, listen="127.0.0.1:0", workers=3, log_level="warning")
    async with tollhouse.serve("--first-run") as serving, ledger(postgres_url) as database:
        key = serving.key or ""
        await until(lambda: listeners(serving.url) == 3)
        assert await statuses(serving.url, key, 60) == {200: 60}

        port = urlsplit(serving.url).port
        refused, _, err = await tollhouse.run("serve", "--port", str(port))
        assert (refused, f"cannot listen on 127.0.0.1:{port}" in err, "Traceback" in err) == (2, True, False)

        accounts = Accounts(database, actor="test")
        pepper = (tollhouse.state / "pepper").read_text().strip().encode()
        _, second = await accounts.create_key(pepper=pepper, name="second")
        assert await statuses(serving.url, second, 30) == {200: 30}
        assert (await tollhouse.run("keys", "revoke", second[3:11]))[0] == 0
        await asyncio.sleep(1.0)  # what is promised
        assert await statuses(serving.url, second, 30) == {401: 30}

        victim, its_attempts = await kill_one_of_many_streams(serving, database, key)
        await until(lambda: listeners(serving.url) == 3)
        back_ms = time.time_ns() // 1_000_000
        assert await statuses(serving.url, key, 60) == {200: 60}, serving.said
        assert "Traceback" not in serving.said
        pids = workers_of(serving)
        assert await serving.end() == 0
        assert [gone(pid) for pid in pids.values()] == [True, True, True]
        entries = await reports.entries(database)
        assert len({e["replica_id"] for e in entries}) == 3
        assert victim in {e["replica_id"] for e in entries if e["at_ms"] >= back_ms}
        assert await rows(database, HELD) == [(victim, attempt_id) for attempt_id in its_attempts]
        compared = compare(map(LedgerLine.of, entries), bill(tollhouse))
        assert {d.attempt_id for d in compared.differences} == set(its_attempts)


HELD = "SELECT replica_id, attempt_id FROM hold WHERE state = 'held' ORDER BY attempt_id"


async def kill_one_of_many_streams(serving: Serving, database: Database, key: str) -> tuple[str, list[str]]:
    """Twelve clients read streams while one worker is killed. Returns its name and its attempts, which stay held."""
    begun = asyncio.Semaphore(0)

    async def ends_well() -> bool:
        async with RawClient(serving.url, key) as client:
            await client.post(CHAT, body(1_500, stream=True))
            await client.head()
            await client.event()
            begun.release()
            try:
                while await client.event() is not None:
                    pass
            except (ConnectionError, asyncio.IncompleteReadError):
                return False
            return True

    async with asyncio.TaskGroup() as group:
        streams = [group.create_task(ends_well()) for _ in range(12)]
        for _ in streams:
            await begun.acquire()
        held = await rows(database, HELD)
        victim = held[0][0]
        its_attempts = [attempt_id for replica_id, attempt_id in held if replica_id == victim]
        os.kill(workers_of(serving)[int(victim.rpartition("-")[2])], signal.SIGKILL)
        await until(lambda: listeners(serving.url) == 2)
    ended = Counter(stream.result() for stream in streams)
    assert ended == {True: 12 - len(its_attempts), False: len(its_attempts)}
    return victim, its_attempts


async def test_a_worker_does_not_outlive_its_parent_and_says_why_it_cannot_start(
    tmp_path: Path, sqlite_url: str
) -> None:
    tollhouse = Tollhouse(tmp_path, sqlite_url)
    port = free_port()
    spec = {
        "config": str(tollhouse.config),
        "listen": ["127.0.0.1", port],
        "admin": ["127.0.0.1", 0],
        "index": 0,
        "name": "test",
        "meeting": str(tmp_path),
        "demo_url": "http://127.0.0.1:9/v1",
    }
    first = await start_worker(spec)
    try:
        await until(lambda: listeners(f"http://127.0.0.1:{port}") == 1)
        second = await start_worker(spec)
        _, err = await second.communicate()
        assert (second.returncode, err.decode()) == (
            1,
            f"worker 0 cannot start: another gateway (pid {first.pid}) already serves from "
            f"{sqlite_url.removeprefix('sqlite:///')}; stop it, or use Postgres for more than one process\n",
        )
        assert first.stdin is not None
        first.stdin.close()  # as the death of a parent does
        async with asyncio.timeout(START_S):
            assert await first.wait() == 0
    finally:
        if first.returncode is None:
            first.kill()
        await first.communicate()


async def start_worker(spec: dict[str, object]) -> asyncio.subprocess.Process:
    """As the parent of several does."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway.start", json.dumps(spec)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
