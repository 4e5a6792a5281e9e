"""One connection to Redis that is never waited for longer than told, and not at all while it is down.

Redis holds nothing here that cannot be lost: whoever asks has an answer of its own for `StoreLost`. Scripts that are
asked for in one turn of the loop go out in one write, and answers are read as they come, so a request pays for a
share of a round trip and never queues behind one (measured: 11 us of our CPU a call with 50 at once, 29 one by one;
redis-py's own client 53 and 72). redis-py reads the URL and makes the TLS context, hiredis the wire's format.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import random
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import hiredis
from redis.asyncio.connection import SSLConnection, parse_url
from redis.exceptions import RedisError

CONNECT_TIMEOUT_S = 1.0
#: Pauses between attempts to come back, doubling; a connection that lived for `STEADY_S` starts from the first again.
PAUSE_MIN_S = 0.1
PAUSE_MAX_S = 2.0
STEADY_S = 5.0

_NOTHING = object()
_log = logging.getLogger(__name__)

Arg = str | bytes | int


class StoreLost(Exception):
    """Redis is down, did not answer in time, or refused to."""


@dataclass(frozen=True, slots=True)
class Script:
    """Lua that runs as one step of the server. All its keys have the same hash tag, so it touches one slot."""

    text: str
    sha: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sha", hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest())


@dataclass(slots=True)
class _Call:
    answer: asyncio.Future[Any]
    #: what to send instead if the server does not know the script (it was restarted or told to forget)
    whole: tuple[Arg, ...]
    sent_s: float = math.inf  # not yet


class _Wire(asyncio.Protocol):
    """Commands out, answers in, in order. Ends once, with a reason: closed, silent for too long, or an error."""

    def __init__(self, timeout_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._timeout_s = timeout_s
        self._reader = hiredis.Reader(notEnoughData=_NOTHING)
        self._waiting: deque[_Call] = deque()
        self._out: list[tuple[bytes, _Call]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None
        self.ended = asyncio.Event()
        self.reason = ""

    def send(self, command: tuple[Arg, ...], whole: tuple[Arg, ...] = ()) -> asyncio.Future[Any]:
        """The answer, or `StoreLost` when the time-out has passed since it was written."""
        call = _Call(self._loop.create_future(), whole)
        if self.ended.is_set():
            call.answer.set_exception(StoreLost(self.reason))
        else:
            self._write(command, call)
        return call.answer

    def hurry(self, timeout_s: float) -> None:
        """The time-out of what is sent from now on. Nothing may be waiting."""
        self._timeout_s = timeout_s
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def end(self, reason: str) -> None:
        if self.ended.is_set():
            return
        self.reason = reason
        self.ended.set()
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._transport.abort()
        for call in self._waiting:
            if not call.answer.done():
                call.answer.set_exception(StoreLost(reason))
        self._waiting.clear()
        self._out.clear()

    def _write(self, command: tuple[Arg, ...], call: _Call) -> None:
        if not self._out:
            self._loop.call_soon(self._flush)
        packed = hiredis.pack_command(command)  # type: ignore[arg-type]  # its stub knows tuples of one
        self._out.append((packed, call))
        self._waiting.append(call)

    def _flush(self) -> None:
        if self._transport is None or not self._out:
            return
        now_s = self._loop.time()
        for _, call in self._out:
            call.sent_s = min(call.sent_s, now_s)
        self._transport.write(b"".join([packed for packed, _ in self._out]))
        self._out.clear()
        if self._timer is None:
            self._timer = self._loop.call_at(now_s + self._timeout_s, self._look)

    def _look(self) -> None:
        """End the wire if the oldest call has waited too long.

        If this process was held up meanwhile, answers that lay in the socket are read by now: both loops (asyncio's
        and uvloop's) look at sockets before timers.
        """
        self._timer = None
        due_s = min((call.sent_s for call in self._waiting), default=math.inf) + self._timeout_s
        if due_s == math.inf:  # nothing is due; what is not written yet sets the timer when it is
            return
        if self._loop.time() < due_s:
            self._timer = self._loop.call_at(due_s, self._look)
        else:
            self.end(f"no answer within {self._timeout_s * 1_000:.0f} ms")

    # --- asyncio.Protocol ----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class

    def connection_lost(self, exc: Exception | None) -> None:
        self.end(f"the connection was closed{f': {exc}' if exc else ''}")

    def data_received(self, data: bytes) -> None:
        try:
            self._reader.feed(data)
            while (answer := self._reader.gets()) is not _NOTHING:
                self._take(answer)
        except hiredis.HiredisError as e:
            self.end(f"what it sends is not Redis's protocol: {e}")

    def _take(self, answer: Any) -> None:
        if not self._waiting:
            return  # ended, or something that nobody asked for
        call = self._waiting.popleft()
        if not isinstance(answer, hiredis.ReplyError):
            if not call.answer.done():
                call.answer.set_result(answer)
        elif call.whole and str(answer).startswith("NOSCRIPT"):
            self._write(call.whole, _Call(call.answer, (), call.sent_s))
        else:
            self._waiting.appendleft(call)
            self.end(str(answer))  # READONLY, LOADING, OOM, MOVED, WRONGPASS: of no use as it is


class RedisLine:
    """The wire to one server, made anew when it ends.

    `on_up` is called on each new wire before anyone else can use it. `without` says what the loss means, for the log.
    """

    def __init__(
        self,
        url: str,
        scripts: Sequence[Script],
        *,
        timeout_s: float,
        without: str,
        on_up: Callable[[], None] = lambda: None,
    ) -> None:
        """Raises `ValueError` if the URL or what it says of TLS cannot be used."""
        self._address: dict[str, Any] = dict(parse_url(url))
        self._tls = _tls_of(self._address)
        self._scripts = scripts
        self._timeout_s = timeout_s
        self._without = without
        self._on_up = on_up
        self._wire: _Wire | None = None
        self._up = asyncio.Event()
        self._tried = asyncio.Event()
        self._said_down = False
        self._keeper: asyncio.Task[None] | None = None

    @property
    def up(self) -> bool:
        return self._wire is not None and not self._wire.ended.is_set()

    async def start(self) -> None:
        """Returns when the first attempt to connect has succeeded or failed; either way it goes on from there."""
        self._keeper = asyncio.create_task(self._keep(), name="redis")
        await self._tried.wait()

    async def returned(self) -> None:
        """Wait until it is up."""
        await self._up.wait()

    async def close(self) -> None:
        """Wait for the answers that are due, then hang up."""
        await self.idle()
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait((self._keeper,))
        if self._wire is not None:
            self._wire.end("closed")

    async def idle(self) -> None:
        """Returns when all that was asked so far is answered, or lost."""
        if self._wire is not None:
            try:
                await self._wire.send(("PING",))
            except StoreLost:
                pass

    def run(self, script: Script, keys: Sequence[Arg], args: Sequence[Arg]) -> asyncio.Future[Any]:
        """The script's answer, within the time-out. `StoreLost` is raised here if it is down, else in the future."""
        wire = self._wire
        if wire is None:
            raise StoreLost("down")
        rest = (len(keys), *keys, *args)
        return wire.send(("EVALSHA", script.sha, *rest), ("EVAL", script.text, *rest))

    def tell(
        self,
        script: Script,
        keys: Sequence[Arg],
        args: Sequence[Arg],
        then: Callable[[Any], None] = lambda _: None,
    ) -> None:
        """The same for those who do not wait: `then` gets the answer, and is not called if there is none."""

        def answered(future: asyncio.Future[Any]) -> None:
            if not future.cancelled() and future.exception() is None:
                then(future.result())

        if self.up:
            self.run(script, keys, args).add_done_callback(answered)

    async def _keep(self) -> None:
        loop = asyncio.get_running_loop()
        pause_s = PAUSE_MIN_S
        while True:
            began_s = loop.time()
            try:
                self._wire = wire = await self._connect()
                self._on_up()
                self._say_up()
                self._tried.set()
                await wire.ended.wait()
                reason = wire.reason
            except (OSError, TimeoutError, StoreLost) as e:
                reason = str(e) or type(e).__name__
            self._wire = None
            self._say_down(reason)
            self._tried.set()
            pause_s = PAUSE_MIN_S if loop.time() - began_s > STEADY_S else min(PAUSE_MAX_S, pause_s * 2)
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))

    async def _connect(self) -> _Wire:
        """A wire that has logged in and knows the scripts."""
        to = self._address
        loop = asyncio.get_running_loop()
        wire = _Wire(CONNECT_TIMEOUT_S)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                if "path" in to:
                    await loop.create_unix_connection(lambda: wire, to["path"])
                else:
                    host, port = to.get("host", "localhost"), to.get("port", 6379)
                    await loop.create_connection(lambda: wire, host, port, ssl=self._tls)
                if "password" in to:
                    user = (to["username"],) if "username" in to else ()
                    await wire.send(("AUTH", *user, to["password"]))
                if to.get("db"):
                    await wire.send(("SELECT", to["db"]))
                for script in self._scripts:
                    await wire.send(("SCRIPT", "LOAD", script.text))
        except BaseException:
            wire.end("not connected")
            raise
        wire.hurry(self._timeout_s)
        return wire

    def _say_up(self) -> None:
        self._up.set()
        if self._said_down:
            self._said_down = False
            _log.info("Redis is back")

    def _say_down(self, reason: str) -> None:
        self._up.clear()
        if not self._said_down:
            self._said_down = True
            _log.warning("Redis is lost (%s); %s", reason, self._without)


class OnRedis:
    """What has a line of its own: `start` before use, `close` after."""

    _line: RedisLine

    async def start(self) -> None:
        """Does not wait for a Redis that is down."""
        await self._line.start()

    async def close(self) -> None:
        await self._line.close()

    async def returned(self) -> None:
        """Wait until Redis answers."""
        await self._line.returned()

    async def idle(self) -> None:
        """Returns when others can know what was told so far, and what they answered is taken over."""
        await self._line.idle()


def _tls_of(address: dict[str, Any]) -> ssl.SSLContext | None:
    if address.get("connection_class") is not SSLConnection:
        return None
    options = {name: value for name, value in address.items() if name.startswith("ssl_")}
    try:
        context: ssl.SSLContext = SSLConnection(**options).ssl_context.get()
    except (RedisError, OSError, TypeError) as e:
        raise ValueError(f"TLS to Redis cannot be set up: {e}") from e
    return context
