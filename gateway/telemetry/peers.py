"""What the workers of one gateway count, told as one page by whichever of them is asked.

The kernel hands a scrape to any worker. It asks the others, each on a loopback port of its own that the worker's
announcement in a common directory names, and adds to the memory of what was told before (`crowd`), which lies in the
same directory: without it a scrape after the death of a worker would show less than the one before, and Prometheus
would take all the rest for new.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import re
import secrets
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from gateway.telemetry.crowd import Page, Told, told, total
from gateway.telemetry.page import Family

#: A worker that does not answer in this time is shown with what it told last, and without its gauges.
ANSWER_S = 1.0
_ANNOUNCED = re.compile(r"worker-(\d+)\.json")
_HELLO_BYTES = 32
_log = logging.getLogger(__name__)


class _Announcement(msgspec.Struct, frozen=True):
    port: int
    hello: str  # what its answers begin with: the port may belong to somebody else by now
    born_ns: int


_page = msgspec.json.Decoder(Page)
_memory = msgspec.json.Decoder(dict[int, Told])
_announcement = msgspec.json.Decoder(_Announcement)


class Peers:
    """This worker among the others in `directory`, which they share and nobody else uses. `read`: its own families."""

    def __init__(self, directory: Path, index: int, read: Callable[[], list[Family]]) -> None:
        self._directory = directory
        self._index = index
        self._read = read
        self._born_ns = time.monotonic_ns()  # one clock for all processes of a machine
        self._hello = secrets.token_hex(_HELLO_BYTES // 2)
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        said = msgspec.json.encode(_Announcement(port, self._hello, self._born_ns))
        await asyncio.to_thread(_put, self._directory / f"worker-{self._index}.json", said)

    async def close(self) -> None:
        """What it has counted goes into the memory: the others tell it for as long as they live."""
        if self._server is None:
            return
        self._server.close()
        self._server = None
        try:
            await asyncio.to_thread(self._tell, [self._own()])
        except OSError as error:
            _log.warning("the last counts of worker %d are lost: %s", self._index, error)

    async def families(self) -> list[Family]:
        """All workers as one, those that have died included. What cannot be read of them is left out."""
        own = self._own()
        others = await asyncio.gather(*(self._ask(each) for each in self._others()))
        pages = [own, *(page for page in others if page is not None)]
        try:
            memory = await asyncio.to_thread(self._tell, pages)
        except OSError as error:
            # Better no page than one on which counters fall.
            raise PeersLost(f"{self._directory} cannot be used: {error.strerror or error}") from error
        return total(memory, pages)

    def _own(self) -> Page:
        return Page(self._index, self._born_ns, tuple(self._read()))

    async def _answer(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            writer.write(self._hello.encode() + msgspec.json.encode(self._own()))
            await writer.drain()
        except ConnectionError:
            return  # who asked has gone
        finally:
            writer.close()

    def _others(self) -> list[_Announcement]:
        found = []
        for path in self._directory.iterdir():
            named = _ANNOUNCED.fullmatch(path.name)
            if named and int(named[1]) != self._index:
                found.append(_announcement.decode(path.read_bytes()))
        return found

    async def _ask(self, other: _Announcement) -> Page | None:
        try:
            async with asyncio.timeout(ANSWER_S):
                reader, writer = await asyncio.open_connection("127.0.0.1", other.port)
                try:
                    said = await reader.read(-1)
                finally:
                    writer.close()
        except (OSError, TimeoutError):
            return None
        if not said.startswith(other.hello.encode()):
            return None
        return _page.decode(memoryview(said)[_HELLO_BYTES:])

    def _tell(self, pages: list[Page]) -> dict[int, Told]:
        """Add the pages to the memory, which two scrapes may want to do at once; blocks. Raises OSError."""
        with (self._directory / "lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            path = self._directory / "told.json"
            memory = _memory.decode(path.read_bytes()) if path.exists() else {}
            for page in pages:
                memory[page.index] = told(memory.get(page.index), page)
            _put(path, msgspec.json.encode(memory))
            return memory


class PeersLost(Exception):
    """The totals of all workers cannot be told."""


def _put(path: Path, content: bytes) -> None:
    """The whole file or the one before, whoever reads it."""
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_bytes(content)
    draft.replace(path)
