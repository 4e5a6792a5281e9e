"""Structured logs: one JSON object a line, redacted as a whole just before it is written.

Ordinary log lines are rare and go through `logging`. The access log has a line for every request, so a request
only appends to a queue; one thread redacts, encodes and writes (`logging.info` inline costs 8 us, and a full
pipe would stop the event loop).
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Protocol

import msgspec

from gateway.telemetry.redact import Json, redact, redact_field

_encode = msgspec.json.Encoder().encode
#: What `logging` itself puts on a record; everything else came from `extra`.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class TextOut(Protocol):
    """Where lines go: `sys.stderr`, or an `io.StringIO` in tests."""

    def write(self, text: str, /) -> object: ...

    def flush(self) -> object: ...


def _stamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _line(fields: Mapping[str, Json]) -> str:
    return _encode(fields).decode() + "\n"


class JsonFormatter(logging.Formatter):
    """A record as one JSON line. Message, arguments, extras, exception and stack are redacted alike."""

    def format(self, record: logging.LogRecord) -> str:
        out: dict[str, Json] = {
            "time": _stamp(record.created),
            "level": record.levelname.lower(),
            "logger": redact(record.name),
            "message": redact(_message(record)),
        }
        for name, value in vars(record).items():
            if name not in _STANDARD:
                out[redact(name)] = redact_field(name, value)
        if record.exc_info:
            out["exception"] = redact(self.formatException(record.exc_info))
        elif record.exc_text:
            out["exception"] = redact(record.exc_text)
        if record.stack_info:
            out["stack"] = redact(record.stack_info)
        return _line(out).rstrip("\n")


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except (TypeError, ValueError, KeyError):
        # Arguments that do not fit the format: keep both rather than lose the line.
        return f"{record.msg} {record.args!r}"


class _Stream(logging.Handler):
    """Writes lines to a stream. An error while logging is counted, not printed: its traceback may hold a secret."""

    def __init__(self, out: TextOut) -> None:
        super().__init__()
        self._out = out
        self.failed = 0

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._out.write(self.format(record) + "\n")
            self._out.flush()
        except (OSError, ValueError, RecursionError):
            self.failed += 1


def configure(level: str = "INFO", stream: TextOut | None = None) -> logging.Handler:
    """Send all of `logging`, and Python's warnings, to `stream` (standard error) as redacted JSON.

    Replaces the root logger's handlers; returns the new one. `ValueError` for an unknown level.
    """
    handler = _Stream(stream or sys.stderr)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.setLevel(level.upper())
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    logging.captureWarnings(True)
    # The chatter of libraries about their own connections and steps helps nobody at INFO.
    for name in ("aiohttp.access", "alembic", "asyncio", "urllib3", "LiteLLM"):
        logging.getLogger(name).setLevel(max(root.level, logging.WARNING))
    return handler


class AccessLog:
    """One line per request, queued at no cost to the request and written by one thread.

    Full queue: the line is dropped and counted in `dropped`; requests never wait for a log.
    """

    def __init__(
        self,
        stream: TextOut,
        *,
        capacity: int = 10_000,
        flush_interval_s: float = 0.2,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._out = stream
        self._queue: deque[tuple[float, Mapping[str, object]]] = deque()
        self._capacity = capacity
        self._interval_s = flush_interval_s
        self._wall_clock = wall_clock
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self.dropped = 0
        self.failed = 0

    def start(self) -> None:
        """Start the writing thread; lines written before wait in the queue."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="access-log", daemon=True)
            self._thread.start()

    def write(self, fields: Mapping[str, object]) -> None:
        """Queue a line. The mapping belongs to the log from now on."""
        if len(self._queue) >= self._capacity:
            self.dropped += 1
            return
        self._queue.append((self._wall_clock(), fields))

    def close(self) -> None:
        """Write what is queued and stop the thread; blocks until done."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._drain()

    def _run(self) -> None:
        while not self._closing.wait(self._interval_s):
            self._drain()

    def _drain(self) -> None:
        lines = []
        while self._queue:
            at_s, fields = self._queue.popleft()
            out: dict[str, Json] = {"time": _stamp(at_s), "log": "access"}
            for name, value in fields.items():
                out[name] = redact_field(name, value)
            lines.append(_line(out))
        if not lines:
            return
        try:
            self._out.write("".join(lines))
            self._out.flush()
        except (OSError, ValueError):
            self.failed += len(lines)
