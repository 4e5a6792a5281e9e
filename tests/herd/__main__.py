"""`make herd [HERDS=n]`: n herds of each size on one gateway process and on three. Exit code 1 if one admits wrongly.

All calls of a herd are sent at once, under a new key whose budget has room for k of them. The provider answers nobody
before every call was either sent to it or refused, so nothing is released meanwhile: exactly what fits must be
admitted. Then it answers, and the ledger must say the same. Ends with `n herds: 0 admitted more or less than fits`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import aiohttp

from gateway.core.entry import Unit
from gateway.storage.accounts import Accounts
from gateway.storage.database import Database, open_database
from gateway.storage.schema import migrate
from tests.conftest import create_database
from tests.crash.site import demo_at
from tests.herd.provider import WaitingProvider
from tests.storage.worlds import rows
from tests.support.running import Serving, Tollhouse
from tests.support.servers import ServerMissing, free_port, postgres_server

SIZES = (1, 32, 256, 1_000)
PEPPER = "pepper-of-the-herds"
PATIENCE_S = 60.0
_ENTRIES = "SELECT attempt_id, kind, hold_nano_usd, replica_id FROM ledger WHERE key_id = $1"
_PLENTY = 10**15


@dataclass(frozen=True, slots=True)
class Herd:
    """What became of one."""

    store: str
    replicas: int
    calls: int
    unit: str
    fits: int
    admitted: int
    by_replica: tuple[int, ...]
    decided_ms: float  # until the last call was sent on or refused
    wrong: str  # "" = nothing


class Place:
    """Gateways on one store, and the provider behind them."""

    def __init__(self, name: str, database: Database, provider: WaitingProvider, gateways: Sequence[Serving]):
        self.name = name
        self.gateways = gateways
        self.provider = provider
        self._database = database
        self._accounts = Accounts(database, actor="herd")
        self._number = 0

    async def prepare(self) -> None:
        await self._accounts.ensure_defaults()

    async def herd(self, calls: int, k: int, unit: Unit) -> Herd:
        """One herd under a key of its own, with room for `k` of its calls."""
        each = await self._hold_of_one_call() if unit is Unit.USD else 1
        limit = k * each + each // 2
        key_id, key = await self._key(limit, unit)
        self.provider.hold_back()
        began_s = time.monotonic()
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            sent = [
                asyncio.create_task(self._call(http, self.gateways[n % len(self.gateways)], key))
                for n in range(calls)
            ]
            undecided = await self._undecided(sent)
            decided_ms = (time.monotonic() - began_s) * 1_000
            arrived = list(self.provider.arrived)
            self.provider.let_go()
            statuses = Counter(await asyncio.gather(*sent))
        entries = await self._entries(key_id, len(arrived))
        wrong = _wrong(k, limit, unit, arrived, entries, statuses)
        if undecided:
            wrong = f"{undecided} calls were neither sent nor refused within {PATIENCE_S:.0f} s"
        by = Counter(replica for *_, replica in entries)
        return Herd(
            *(self.name, len(self.gateways), calls, unit.value, k, len(arrived)),
            tuple(sorted(by.values(), reverse=True)),
            round(decided_ms, 1),
            wrong,
        )

    async def _key(self, limit: int, unit: Unit) -> tuple[str, str]:
        record, text = await self._accounts.create_key(pepper=PEPPER.encode(), name="herd")
        await self._accounts.set_budget(f"key:{record.key_id}", limit, unit=unit)
        return record.key_id, text

    async def _hold_of_one_call(self) -> int:
        key_id, key = await self._key(_PLENTY, Unit.USD)
        self.provider.let_go()
        async with aiohttp.ClientSession() as http:
            if await self._call(http, self.gateways[0], key) != 200:
                raise RuntimeError("a call under a budget of plenty was not served")
        ((_, _, held, _),) = await self._entries(key_id, 1)
        return int(held)

    async def _call(self, http: aiohttp.ClientSession, gateway: Serving, key: str) -> int:
        # All equally long, and no two alike.
        self._number += 1
        ask = {"role": "user", "content": f"call {self._number:09}"}
        body = {"model": "demo-fast", "max_completion_tokens": 16, "messages": [ask]}
        headers = {"Authorization": f"Bearer {key}"}
        async with http.post(f"{gateway.url}/v1/chat/completions", json=body, headers=headers) as answer:
            await answer.read()
            return answer.status

    async def _undecided(self, sent: Sequence[asyncio.Task[int]]) -> int:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            left = len(sent) - len(self.provider.arrived) - sum(1 for t in sent if t.done())
            if left <= 0 or time.monotonic() > deadline:
                return max(0, left)
            await asyncio.sleep(0.005)

    async def _entries(self, key_id: str, least: int) -> list[tuple[str, str, int, str]]:
        """The ledger's, once there are as many as were sent, or patience is at its end."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            found = await rows(self._database, _ENTRIES, key_id)
            if len(found) >= least or time.monotonic() > deadline:
                return [(str(a), str(kind), int(held), str(r)) for a, kind, held, r in found]
            await asyncio.sleep(0.02)


def _wrong(
    k: int,
    limit: int,
    unit: Unit,
    arrived: Sequence[str],
    entries: Sequence[tuple[str, str, int, str]],
    statuses: Counter[int],
) -> str:
    if set(statuses) - {200, 402}:
        return f"answers {dict(statuses)}"
    if statuses[200] != len(arrived):
        return f"{statuses[200]} answers of {len(arrived)} calls that were sent"
    if Counter(arrived) != Counter(attempt_id for attempt_id, *_ in entries):
        return f"{len(entries)} entries for {len(arrived)} calls that were sent"
    if any(kind != "post" for _, kind, *_ in entries):
        return f"entries {dict(Counter(kind for _, kind, *_ in entries))}"
    if unit is Unit.USD:
        held = [held for _, _, held, _ in entries]
        return (
            ""
            if sum(held) <= limit < sum(held) + min(held, default=limit + 1) or not k
            else _admitted(arrived, k)
        )
    return "" if len(arrived) == k else _admitted(arrived, k)


def _admitted(arrived: Sequence[str], k: int) -> str:
    return f"admitted {len(arrived)}, and {k} fit"


# --- places --------------------------------------------------------------------------------------------------


@asynccontextmanager
async def place(name: str, url: str, directory: Path, replicas: int) -> AsyncIterator[Place]:
    async with AsyncExitStack() as stack:
        provider = await stack.enter_async_context(WaitingProvider())
        gateways = []
        await migrate(url)
        for number in range(replicas):
            own = directory / f"gateway-{number}"
            own.mkdir(parents=True)
            tollhouse = Tollhouse(
                own,
                url,
                {"TOLLHOUSE_PEPPER": PEPPER},
                listen=f"127.0.0.1:{free_port()}",  # which is part of a replica's name
                log_level="error",
                discover_providers="false",
                providers=json.dumps({"demo": demo_at(provider.base_url)}),
            )
            gateways.append(await stack.enter_async_context(tollhouse.serve()))
        database = open_database(url)
        stack.push_async_callback(database.close)
        here = Place(name, database, provider, gateways)
        await here.prepare()
        yield here


async def run(options: argparse.Namespace) -> list[Herd]:
    herds: list[Herd] = []
    rnd = random.Random(options.seed)

    async def all_sizes(here: Place) -> None:
        for calls in SIZES:
            for number in range(options.herds):
                k = rnd.choice((0, 1, calls - 1, calls, *[rnd.randint(0, calls)] * 4))
                herds.append(await here.herd(calls, k, (Unit.USD, Unit.CALLS)[number % 2]))
            if not options.json:
                _say(herds[-options.herds :])

    with tempfile.TemporaryDirectory(prefix="tollhouse-herd-") as name, postgres_server() as postgres:
        directory = Path(name)
        async with place("sqlite", f"sqlite:///{directory / 'herd.db'}", directory / "sqlite", 1) as here:
            await all_sizes(here)
        for replicas in (1, 3):
            await create_database(postgres, f"herd_{replicas}")
            url = postgres.url(f"herd_{replicas}")
            async with place("postgres", url, directory / f"postgres-{replicas}", replicas) as here:
                await all_sizes(here)
    return herds


def _say(herds: Sequence[Herd]) -> None:
    first = herds[0]
    slowest = max(h.decided_ms for h in herds)
    what = ", ".join(f"{h.admitted}/{h.fits}" for h in herds[:8])
    print(
        f"{first.store}, {first.replicas} replica{'s'[: first.replicas - 1]}, {first.calls} calls at once: "
        f"admitted/fits {what}{' ...' * (len(herds) > 8)}; decided within {slowest:.0f} ms",
        flush=True,
    )
    for herd in herds:
        if herd.wrong:
            print(f"  !! {herd}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.herd", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--herds", type=int, default=10, help="of each size, at each place")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    options = parser.parse_args()
    try:
        herds = asyncio.run(run(options))
    except ServerMissing as why:
        print(f"herd: {why}", file=sys.stderr)
        return 2
    wrong = sum(1 for h in herds if h.wrong)
    if options.json:
        print(json.dumps({"herds": len(herds), "wrong": wrong, "all": list(map(asdict, herds))}, indent=1))
    else:
        print(f"{len(herds)} herds: {wrong} admitted more or less than fits")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
