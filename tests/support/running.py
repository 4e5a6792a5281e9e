"""A whole gateway on a real store in front of a demo provider: in this process, or as processes of its own."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import os
import re
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from gateway import settings as config
from gateway.app import App
from gateway.core.catalog import Catalog
from gateway.demo.faults import FaultPlan
from gateway.demo.provider import DemoProvider
from gateway.demo.report import Comparison, LedgerLine, compare
from gateway.settings import Listen, Settings, ensure_pepper
from gateway.storage import reports
from gateway.storage.accounts import Accounts
from gateway.storage.transact import Fetch, Sql, Tx

_OPEN_HOLDS = Sql("SELECT count(*) FROM hold WHERE state = 'held'")
#: In tests the periodic turn stays out of the way: they call `app.reconcile.once()` themselves.
_NEVER_S = 86_400.0


@functools.cache
def _defaults() -> Settings:
    """The embedded default, blind to this machine's environment: one demo provider, nothing else."""
    return config.load(config.shipped("config/gateway.yaml"), {})


def settings_for(store_url: str, state_dir: Path, provider_url: str, **provider_changes: Any) -> Settings:
    """The embedded default on a store, with its demo provider at `provider_url` and changed as told."""
    settings = _defaults()
    demo = dataclasses.replace(settings.providers["demo"], base_url=provider_url, **provider_changes)
    deployments = tuple(dataclasses.replace(d, provider=demo) for d in settings.catalog.deployments)
    return dataclasses.replace(
        settings,
        listen=Listen("127.0.0.1", 0),
        admin_listen=Listen("127.0.0.1", 0),
        state_dir=state_dir,
        database_url=store_url,
        providers={"demo": demo},
        catalog=Catalog.of(deployments, settings.catalog.default_tier),
    )


@dataclass(slots=True)
class Running:
    """A gateway that serves on `url`; `http` is a client of it that has the key."""

    app: App
    provider: DemoProvider
    key: str
    url: str
    http: aiohttp.ClientSession

    async def settle_all(self) -> None:
        """Returns when nothing is under way and every guess that the provider can correct is corrected."""
        await self.app.quiet()
        await self.provider.settled()
        await self.app.reconcile.once()
        assert await self.app.reconcile.once() == 0, "what is proven must not be asked again"

    async def entries(self) -> list[dict[str, Any]]:
        return await reports.entries(self.app.database, limit=1_000_000)

    async def ledger_equals_bill(self) -> Comparison:
        """Entry by entry, once all is settled."""
        await self.settle_all()
        return compare([LedgerLine.of(e) for e in await self.entries()], self.provider.bill())

    async def open_holds(self) -> int:
        def tx() -> Tx[int]:
            return int((yield Fetch(_OPEN_HOLDS))[0][0])

        return await self.app.database.read(tx)


@asynccontextmanager
async def running(
    store_url: str,
    *,
    faults: FaultPlan | None = None,
    provider: DemoProvider | None = None,
    bills_after_disconnect: str = "drain",
    first_token_delay_s: float = 0.0,
    chunk_delay_s: float = 0.0,
    drain_s: float = 5.0,
    configured: Mapping[str, Any] | None = None,
    **provider_changes: Any,
) -> AsyncIterator[Running]:
    """A gateway on a migrated store. `provider_changes` are fields of `core.catalog.Provider`.

    `configured`: fields of `Settings`. `bills_after_disconnect`: what the demo provider bills of a stream whose reader left ("stop" or "drain").
    """
    provider = provider or DemoProvider(
        faults=faults,
        on_disconnect=bills_after_disconnect,
        first_token_delay_s=first_token_delay_s,
        chunk_delay_s=chunk_delay_s,
    )
    with tempfile.TemporaryDirectory(prefix="tollhouse-test-") as directory:
        async with provider:
            settings = settings_for(store_url, Path(directory), provider.base_url, **provider_changes)
            settings = dataclasses.replace(settings, drain_s=drain_s, **(configured or {}))
            app = App(
                settings,
                replica_id="test",
                reconcile_every_s=_NEVER_S,
                access_log=False,
                webhook_loopback=True,
            )
            async with app:
                accounts = Accounts(app.database, actor="test")
                await accounts.ensure_defaults()
                _, key = await accounts.create_key(pepper=ensure_pepper(settings), name="test")
                url = f"http://127.0.0.1:{app.edge.port}"
                async with aiohttp.ClientSession(url, headers={"Authorization": f"Bearer {key}"}) as http:
                    yield Running(app, provider, key, url, http)


# --- as processes of their own -----------------------------------------------------------------------------

START_S = 60.0


class Tollhouse:
    """`tollhouse` on a configuration of its own in `directory`: commands that end, and gateways that serve.

    Nothing of this machine's environment reaches it, so the built-in demo provider answers. `variables` are the
    environment that it does see.
    """

    def __init__(
        self,
        directory: Path,
        database_url: str = "",
        variables: Mapping[str, str] | None = None,
        **settings: object,
    ) -> None:
        self._variables = dict(variables or {})
        self.state = directory / "state"
        self.config = directory / "gateway.yaml"
        database = {"database_url": database_url} if database_url else {}
        lines = {"state_dir": self.state, "admin_listen": "127.0.0.1:0", **database, **settings}
        self.config.write_text("".join(f"{name}: {value}\n" for name, value in lines.items()))

    async def run(self, *arguments: str) -> tuple[int, str, str]:
        """Exit status, standard output and standard error of a command that ends."""
        process = await self._start(arguments, asyncio.subprocess.PIPE)
        out, err = await process.communicate()
        return process.returncode or 0, out.decode(), err.decode()

    @asynccontextmanager
    async def serve(self, *arguments: str) -> AsyncIterator[Serving]:
        """A gateway that is ready. What is still running at the end is killed."""
        process = await self._start(("serve", *arguments), asyncio.subprocess.STDOUT)
        serving = Serving(process)
        listening = asyncio.create_task(serving.listen())
        try:
            await serving.ready()
            yield serving
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()
            await listening

    async def _start(self, arguments: Sequence[str], stderr: int) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "gateway.cli", *arguments, "--config", str(self.config)),
            env={"PATH": os.defpath, "HOME": str(self.state.parent), "PYTHONUNBUFFERED": "1"}
            | self._variables,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=stderr,
        )


class Serving:
    """A gateway process; `said` is all that it has printed, logs included."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.said = ""
        self.url = ""
        self._over = False
        self._more = asyncio.Condition()

    async def listen(self) -> None:
        """Until the process, and whoever has its output, is gone."""
        assert self.process.stdout is not None
        while not self._over:
            line = await self.process.stdout.readline()
            async with self._more:
                self.said += line.decode()
                self._over = not line
                self._more.notify_all()

    async def says(self, pattern: str) -> str:
        """The first group of the pattern, once that was printed."""
        async with asyncio.timeout(START_S), self._more:
            await self._more.wait_for(lambda: self._over or re.search(pattern, self.said))
        found = re.search(pattern, self.said)
        assert found, f"the process has ended: {self.said}"
        return found[1]

    async def ready(self) -> None:
        """Returns when requests are served. Who tries as soon as the address is told is not turned away."""
        self.url = await self.says(r"listens on (http://\S+)")
        async with asyncio.timeout(START_S), aiohttp.ClientSession() as http:
            while True:
                async with http.get(f"{self.url}/readyz") as answer:
                    if answer.status == 200:
                        return
                await asyncio.sleep(0.05)

    @property
    def key(self) -> str | None:
        """The key that it has shown."""
        found = re.search(r"key +(gw-\S+)", self.said)
        return found[1] if found else None

    async def end(self) -> int:
        """Its exit status after SIGTERM."""
        self.process.terminate()
        async with asyncio.timeout(START_S):
            return await self.process.wait()
