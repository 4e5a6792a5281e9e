"""Three gateway processes on one Postgres and one Redis, with a demo provider behind them; and how each of them dies."""

from __future__ import annotations

import asyncio
import json
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

from redis.asyncio import Redis
from redis.exceptions import RedisError

from gateway.crash import Point
from gateway.demo.provider import DemoProvider
from gateway.storage.accounts import Accounts
from gateway.storage.database import Database, open_database
from gateway.storage.schema import migrate
from tests.conftest import create_database
from tests.crash.plan import GATEWAYS
from tests.support.commit_cutter import CommitCutter
from tests.support.relay import Relay
from tests.support.running import Serving, Tollhouse
from tests.support.servers import PostgresServer, RedisServer, free_port, postgres_server, redis_server

PEPPER = "pepper-of-the-crash-campaign"
#: The least that may be configured: a dead replica's holds are charged a second after its next start.
GRACE_S = 1
#: What the demo provider bills (gateway/demo/models.py), as an operator would write it.
_PRICES = {
    "demo-large": {
        "input": "3",
        "output": "15",
        "cache_read": "0.3",
        "cache_write_5m": "3.75",
        "cache_write_1h": "6",
    },
    "demo-fast": {"input": "2.5", "output": "10", "cache_read": "0.25", "cache_write_5m": "3.125"},
    "demo-small": {
        "input": "1",
        "output": "5",
        "cache_read": "0.1",
        "cache_write_5m": "1.25",
        "cache_write_1h": "2",
    },
    "demo-embed": {"input": "0.02", "output": "0"},
}


class Gateway:
    """One of the three: a place for its files, a process that lives in it, and its own ways to all others."""

    def __init__(
        self,
        number: int,
        directory: Path,
        way: CommitCutter,
        to_postgres: Relay,
        to_redis: Relay,
        to_provider: Relay,
    ) -> None:
        self.number = number
        self.way = way
        self.to_postgres, self.to_redis, self.to_provider = to_postgres, to_redis, to_provider
        self.paused = False
        self._order = directory / "crash"
        self.port = free_port()
        directory.mkdir()
        self._tollhouse = Tollhouse(
            directory,
            f"postgresql://postgres@127.0.0.1:{to_postgres.port}/crash",
            {"TOLLHOUSE_CRASH_FILE": str(self._order), "TOLLHOUSE_PEPPER": PEPPER},
            listen=f"127.0.0.1:{self.port}",
            redis_url=f"redis://127.0.0.1:{to_redis.port}/0",
            reaper_grace_s=GRACE_S,
            task_budget_usd="'0.6'",
            log_level="warning",
            discover_providers="false",
            providers=json.dumps({"demo": demo_at(f"http://127.0.0.1:{to_provider.port}/v1")}),
        )
        self._serving: Serving | None = None
        self._stack = AsyncExitStack()
        self.said: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def config(self) -> Path:
        return self._tollhouse.config

    @property
    def alive(self) -> bool:
        return self._serving is not None and self._serving.process.returncode is None

    @property
    def ordered(self) -> bool:
        """Its death is ordered and has not come yet."""
        return self._order.exists()

    @property
    def journalled(self) -> bool:
        """Settlements wait in its journal."""
        return any((self._tollhouse.state / "journal").glob("*.journal"))

    async def start(self, order: Point | None = None) -> None:
        """Returns when it is ready; from then on `order` stands."""
        self.cancel_order()
        await self._forget()
        self._serving = await self._stack.enter_async_context(self._tollhouse.serve())
        if order:
            self.order_death(order)

    async def kill(self) -> None:
        if self._serving is not None and self.alive:
            self._serving.process.kill()
            self.paused = False
            await self._serving.process.wait()

    def pause(self) -> None:
        if self._serving is not None and self.alive:
            self._serving.process.send_signal(signal.SIGSTOP)
            self.paused = True

    def resume(self) -> None:
        self.paused = False
        if self._serving is not None and self.alive:
            self._serving.process.send_signal(signal.SIGCONT)

    def order_death(self, point: Point) -> None:
        draft = self._order.with_suffix(".draft")
        draft.write_text(point)
        draft.rename(self._order)

    def cancel_order(self) -> None:
        self._order.unlink(missing_ok=True)

    async def close(self) -> None:
        await self.kill()
        await self._forget()

    async def _forget(self) -> None:
        if self._serving is not None:
            await self._stack.aclose()
            self.said.append(self._serving.said)
            self._serving = None


def demo_at(base_url: str) -> dict[str, object]:
    """The demo provider at an address of its own, as `providers.demo` of a configuration."""
    return {
        "wire": "demo",
        "base_url": base_url,
        "usage_lookup": "/generation?id=",
        "on_disconnect": "drain",
        "deployments": [
            {
                "model": model,
                "max_output_tokens": 32_000,
                "price": {f"{name}_usd_per_mtok": usd for name, usd in price.items()},
            }
            | ({"operations": ["embeddings"]} if model == "demo-embed" else {})
            for model, price in _PRICES.items()
        ],
    }


class Site:
    """Everything that is running. `accounts` and `database` go to Postgres without a proxy."""

    def __init__(
        self,
        directory: Path,
        postgres: PostgresServer,
        redis: RedisServer,
        provider: DemoProvider,
        database: Database,
    ) -> None:
        self.directory = directory
        self.postgres = postgres
        self.redis = redis
        self.provider = provider
        self.database = database
        self.accounts = Accounts(database, actor="campaign")
        self.gateways: list[Gateway] = []
        self._postgres = asyncio.Lock()
        self._postgres_up = True

    async def stop_postgres(self) -> None:
        async with self._postgres:
            if self._postgres_up:
                await asyncio.to_thread(self.postgres.stop)
                self._postgres_up = False

    async def start_postgres(self) -> None:
        async with self._postgres:
            if not self._postgres_up:
                await asyncio.to_thread(self.postgres.start)
                self._postgres_up = True

    async def flush_redis(self) -> None:
        client = Redis.from_url(self.redis.url)
        try:
            await client.flushall()
        except RedisError:
            pass  # it is dead already, and then empty
        finally:
            await client.aclose()

    async def revive(self, but: int | None = None, order: Point | None = None) -> None:
        """Start what is dead, `but` this gateway; once they are ready, with this `order` to die."""
        await self.start_postgres()
        if self.redis.process is None:
            await asyncio.to_thread(self.redis.start)
        dead = [g for g in self.gateways if not g.alive and g.number != but]
        await asyncio.gather(*(g.start(order) for g in dead))


@asynccontextmanager
async def site() -> AsyncIterator[Site]:
    """Raises `ServerMissing` where Postgres or Redis cannot be had."""
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tollhouse-crash-")))
        postgres = stack.enter_context(postgres_server())
        redis = stack.enter_context(redis_server())
        provider = DemoProvider(
            directory / "provider",
            chunk_delay_s=0.002,
            first_token_delay_s=0.01,
            on_disconnect="drain",
        )
        await stack.enter_async_context(provider)
        await create_database(postgres, "crash")
        await migrate(postgres.url("crash"))
        database = open_database(postgres.url("crash"))
        stack.push_async_callback(database.close)
        here = Site(directory, postgres, redis, provider, database)
        await here.accounts.ensure_defaults()
        for number in range(GATEWAYS):
            way = await stack.enter_async_context(CommitCutter(postgres.port))
            to_postgres = await stack.enter_async_context(Relay(way.port))
            to_redis = await stack.enter_async_context(Relay(redis.port))
            to_provider = await stack.enter_async_context(Relay(urlsplit(provider.base_url).port or 0))
            place = directory / f"gateway-{number}"
            gateway = Gateway(number, place, way, to_postgres, to_redis, to_provider)
            here.gateways.append(gateway)
            stack.push_async_callback(gateway.close)
        await here.revive()
        yield here
