"""From the command line to a running gateway: first run, one process or several, and the demo."""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import gc
import json
import os
import shutil
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path

import uvloop

from gateway import app, workers
from gateway import settings as config
from gateway.commands.database import declare
from gateway.core.config_overlay import Documents
from gateway.core.errors import Unavailable
from gateway.overlay import Read
from gateway.reload import told
from gateway.settings import Listen, Settings, ensure_pepper
from gateway.storage import replica_names, schema
from gateway.storage.accounts import Accounts
from gateway.storage.database import open_database
from gateway.storage.lockfile import AlreadyServing, ServingLock
from gateway.telemetry.logs import configure

#: Beyond the drain, how long a worker may take to close its stores.
GRACE_S = 45.0
_ASK_WORKERS_S = 0.05


class CannotStart(Exception):
    """The gateway cannot start; the message says why and what to do."""


def main(settings: Settings, *, config_path: Path | None, first_run: bool) -> int:
    """Serve until SIGTERM or SIGINT. Raises `ConfigError`, `SchemaMismatch`, `CannotStart`, `Unavailable`."""
    if settings.workers > 1:
        return uvloop.run(_serve_many(settings, config_path, first_run))
    read = partial(config.load, config_path, config.environment())
    with replica_names.taken(settings.state_dir, settings.listen.port) as name:
        return uvloop.run(_serve_one(settings, read, first_run, replica=f"{name}-0"))


def demo(settings: Settings, *, steps: int, json_out: bool) -> int:
    """A simulated agent through a gateway of its own; 0 if its ledger equals the provider's bill."""
    from gateway.demonstration import demonstrate

    return uvloop.run(demonstrate(settings, steps, json_out))


async def _serve_one(
    settings: Settings,
    read: Read,
    first_run: bool,
    *,
    replica: str,
    worker: tuple[Path, int] | None = None,
) -> int:
    """Serve until a signal; SIGHUP reads the configuration anew. `worker`: one of several on one port (`App`)."""
    shared_port = worker is not None
    configure(settings.log_level.value.upper())
    keep_large_blocks()
    _refuse_to_be_second(settings)
    async with _with_demo(settings) as ready:
        key = await prepare(ready, first_run)
        ending = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, ending.set)
        reloads = _Reloads()
        loop.add_signal_handler(signal.SIGHUP, reloads.ask)
        if shared_port:
            _listen_to_parent(reloads.ask, ending.set)
        try:
            async with app.App(
                ready,
                replica_id=replica,
                reuse_port=shared_port,
                worker=worker,
                read=read,
                siblings=partial(_hang_up, os.getppid()) if shared_port else lambda: None,
            ) as running:
                # What is loaded now stays: no collection ever looks at it again.
                gc.collect()
                gc.freeze()
                # A request makes hundreds of short-lived objects, and few cycles.
                gc.set_threshold(20_000, 20, 50)
                reloads.begin(partial(_reload, running))
                if not shared_port:
                    say_hello(ready, running.edge.port, running.admin_port, key)
                await ending.wait()
        except AlreadyServing as e:
            raise CannotStart(str(e)) from e
        except OSError as e:
            raise CannotStart(
                f"cannot listen on {ready.listen} or {ready.admin_listen}: {e.strerror or e}"
            ) from e
    return 0


class _Reloads:
    """Wishes to read the configuration anew. One that comes while the gateway starts waits until it has started."""

    def __init__(self) -> None:
        self._asked = False
        self._reload: Callable[[], None] | None = None

    def ask(self) -> None:
        self._asked = True
        if self._reload is not None:
            self._reload()

    def begin(self, reload: Callable[[], None]) -> None:
        self._reload = reload
        if self._asked:
            reload()


def _reload(running: app.App) -> None:
    try:
        told(running.overlay.reread())
    except config.ConfigError as error:
        told(error)


def _hang_up(parent: int) -> None:
    """Have the parent tell all workers to reload, this one once more. One whose parent has died is ending itself."""
    if os.getppid() == parent:
        os.kill(parent, signal.SIGHUP)


def _refuse_to_be_second(settings: Settings) -> None:
    """Before anything is touched that belongs to the first: its ledger, and its demo provider's bill."""
    path = open_database(settings.database_url).sqlite_path
    if path is None:
        return
    try:
        ServingLock.take(path).release()
    except AlreadyServing as e:
        raise CannotStart(str(e)) from e


def _listen_to_parent(reload: Callable[[], None], end: Callable[[], None]) -> None:
    """The parent holds the other end of standard input: what it writes there asks for a reload, and its death, however
    it dies, is the end of input.

    A worker without a parent would go on for ever, under a name that the next one of its kind takes over.
    """
    loop = asyncio.get_running_loop()

    def readable() -> None:
        if os.read(sys.stdin.fileno(), 1024):
            reload()
        else:
            loop.remove_reader(sys.stdin.fileno())
            end()

    loop.add_reader(sys.stdin.fileno(), readable)


async def _serve_many(settings: Settings, config_path: Path | None, first_run: bool) -> int:
    with _claimed(settings) as claimed:
        async with _with_demo(claimed) as ready:
            key = await prepare(ready, first_run)
            with (
                replica_names.taken(ready.state_dir, settings.listen.port) as name,
                _met(ready, name) as meeting,
            ):
                command = partial(_worker_command, ready, config_path, name, meeting)
                async with asyncio.TaskGroup() as group:
                    hello = group.create_task(_hello_when_served(ready, key), name="hello")
                    try:
                        return await workers.supervise(command, ready.workers, ready.drain_s + GRACE_S)
                    finally:
                        hello.cancel()


async def _hello_when_served(ready: Settings, key: str | None) -> None:
    """Who tries at once what is printed is answered: one worker listens."""
    while True:
        try:
            _, writer = await asyncio.open_connection(ready.listen.host, ready.listen.port)
        except OSError:
            await asyncio.sleep(_ASK_WORKERS_S)
            continue
        writer.close()
        say_hello(ready, ready.listen.port, ready.admin_listen.port, key)
        return


@contextmanager
def _met(settings: Settings, name: str) -> Iterator[Path]:
    """An empty directory where the workers of this gateway tell one another what they count."""
    path = settings.state_dir / "workers" / name
    shutil.rmtree(path, ignore_errors=True)  # of a parent that was killed
    path.mkdir(mode=0o700, parents=True)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _claimed(settings: Settings) -> Iterator[Settings]:
    """Both addresses, ours while this lasts: one that is taken is told now and not by each worker for ever, and a
    port of 0 becomes the same for all of them. A socket that does not listen gets no connection."""
    with ExitStack() as stack:
        moved = []
        for listen in (settings.listen, settings.admin_listen):
            claim = stack.enter_context(
                socket.socket(socket.AF_INET6 if ":" in listen.host else socket.AF_INET)
            )
            claim.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                claim.bind((listen.host, listen.port))
            except OSError as e:
                raise CannotStart(f"cannot listen on {listen}: {e.strerror or e}") from e
            # Not before: it would let us share the port of another gateway's workers.
            claim.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            moved.append(Listen(listen.host, claim.getsockname()[1]))
        yield dataclasses.replace(settings, listen=moved[0], admin_listen=moved[1])


def _worker_command(
    ready: Settings, config_path: Path | None, name: str, meeting: Path, index: int
) -> workers.Command:
    spec = {
        "config": str(config_path) if config_path else None,
        "listen": [ready.listen.host, ready.listen.port],
        "admin": [ready.admin_listen.host, ready.admin_listen.port],
        "index": index,
        "name": name,
        "meeting": str(meeting),
        "demo_url": next((p.base_url for p in ready.providers.values() if p.wire == "demo"), ""),
    }
    return workers.Command(
        [sys.executable, "-m", "gateway.start", json.dumps(spec)], dict(config.environment())
    )


def worker(spec_text: str) -> int:
    """One of several processes; started by `_serve_many` only, which starts it again if it cannot."""
    spec = json.loads(spec_text)
    try:
        path = Path(spec["config"]) if spec["config"] else None
        listen, admin = Listen(*spec["listen"]), Listen(*spec["admin"])

        def read(overlay: Documents) -> Settings:
            """With what the parent has decided, so that a reload finds no change where there is none."""
            found = config.load(path, config.environment(), overlay)
            return dataclasses.replace(found, listen=listen, admin_listen=admin, workers=1)

        settings = read(())
        if spec["demo_url"]:
            settings = settings.with_demo_at(spec["demo_url"])
        index = spec["index"]
        replica, here = f"{spec['name']}-{index}", (Path(spec["meeting"]), index)
        return uvloop.run(_serve_one(settings, read, False, replica=replica, worker=here))
    except (CannotStart, config.ConfigError, schema.SchemaMismatch, Unavailable) as e:
        print(f"worker {spec['index']} cannot start: {e}", file=sys.stderr, flush=True)
        return 1


async def prepare(settings: Settings, first_run: bool) -> str | None:
    """On a first run, migrate and mint a key (returned, never to be seen again); always declare what is configured."""
    settings.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    if first_run:
        await schema.migrate(settings.database_url)
    database = open_database(settings.database_url)
    try:
        await schema.check(database)
        accounts = Accounts(database, actor="configuration")
        await declare(accounts, settings)
        if not first_run or await accounts.list_keys():
            return None
        _, text = await accounts.create_key(pepper=ensure_pepper(settings), name="first")
        return text
    finally:
        await database.close()


@asynccontextmanager
async def _with_demo(settings: Settings) -> AsyncIterator[Settings]:
    """Start the demo provider as a process of its own if one is wanted; it ends when we do, however we end."""
    if not settings.demo:
        yield settings
        return
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "gateway.demo.provider",
        "--state",
        str(settings.state_dir / "demo"),
        "--on-disconnect",
        "drain",
        "--until-stdin-closes",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for us: it answers until our last stream has ended
    )
    try:
        if child.stdout is None:
            raise CannotStart("the demo provider has no output")
        line = (await child.stdout.readline()).decode().strip()
        if not line:
            raise CannotStart("the demo provider did not start")
        yield settings.with_demo_at(line.rpartition(" ")[2])
    finally:
        if child.stdin is not None:
            child.stdin.close()
        await child.wait()


def say_hello(settings: Settings, port: int, admin_port: int, key: str | None) -> None:
    """What a person needs to begin: base URL, key, and something to paste."""
    base = f"http://{settings.listen.host}:{port}"
    model = settings.catalog.deployments[0].model if settings.catalog.deployments else "auto"
    shown = key or "$TOLLHOUSE_KEY"
    lines = ["", f"Tollhouse listens on {base}  (admin: http://{settings.admin_listen.host}:{admin_port})"]
    if settings.providers and all(p.wire == "demo" for p in settings.providers.values()):
        lines.append(
            "No provider key was found, so a built-in DEMO provider answers; its texts mean nothing."
        )
        lines.append("Set OPENAI_API_KEY, ANTHROPIC_API_KEY, ... and start again for real models.")
    if key:
        lines += [
            "",
            f"  base URL  {base}/v1",
            f"  key       {key}   (shown once; more: tollhouse keys create)",
        ]
    else:
        lines += [
            "",
            f"  base URL  {base}/v1",
            "  key       made earlier; another one: tollhouse keys create NAME",
        ]
    lines += [
        "",
        "Try it:",
        f"  curl {base}/v1/chat/completions -H 'Authorization: Bearer {shown}' \\",
        "    -H 'Content-Type: application/json' \\",
        f'    -d \'{{"model": "{model}", "messages": [{{"role": "user", "content": "Hello"}}]}}\'',
        "",
        "From Python:",
        "  from openai import OpenAI",
        f'  client = OpenAI(base_url="{base}/v1", api_key="{shown}")',
        f'  print(client.chat.completions.create(model="{model}", messages=[',
        '      {"role": "user", "content": "Hello"}]).choices[0].message.content)',
        "",
    ]
    print("\n".join(lines), file=sys.stderr, flush=True)


def keep_large_blocks() -> None:
    """Keep freed request bodies in the heap instead of giving them back to the kernel and faulting them in again.

    Measured on 2 MB bodies: a quarter of the gateway's CPU time (design/performance). glibc only; elsewhere this
    does nothing.
    """
    try:
        libc = ctypes.CDLL(None)
        mallopt = libc.mallopt
    except (OSError, AttributeError):
        return
    # mmap threshold (32 MiB is the most that glibc takes), trim threshold, top pad
    for option, value in ((-3, 32 << 20), (-1, 256 << 20), (-2, 16 << 20)):
        mallopt(option, value)


if __name__ == "__main__":
    sys.exit(worker(sys.argv[1]))
