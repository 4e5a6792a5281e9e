"""An answer whose bytes are all there: head and body leave in one write.

aiohttp's own Response builds a header dictionary, prepares it, and serialises it again; for an answer of a kilobyte
that costs as much as reading the request.
"""

from __future__ import annotations

from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

from aiohttp import web
from aiohttp.helpers import rfc822_formatted_time

#: Up to here one copy is cheaper than a second write.
JOIN_BYTES_MAX = 64 << 10
_REASONS = {status.value: status.phrase for status in HTTPStatus}


class Whole(web.StreamResponse):
    """`headers` are written as they are, in order, with Content-Length and Date added."""

    def __init__(self, status: int, headers: Iterable[tuple[str, str]], body: bytes) -> None:
        # Without StreamResponse's own, which makes a dictionary of headers that nobody would read.
        self._status = status
        self._lines = headers
        self._whole = body
        self._sent = False

    @property
    def prepared(self) -> bool:
        return self._sent

    async def prepare(self, request: web.BaseRequest) -> Any:
        """Write everything. Raises ConnectionResetError if the client is gone."""
        if self._sent:
            return None
        transport = request.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client is gone")
        self._sent = True
        self._keep_alive = request.keep_alive if self._keep_alive is None else self._keep_alive
        head = self._head()
        body = self._whole if request.method != "HEAD" else b""
        if len(body) <= JOIN_BYTES_MAX:
            transport.write(head + body)
        else:
            transport.write(head)
            transport.write(body)
        return None

    async def write_eof(self, data: bytes = b"") -> None:  # noqa: ARG002
        """Nothing is left to write."""
        self._eof_sent = True

    def _head(self) -> bytes:
        status = self._status
        lines = [
            f"HTTP/1.1 {status} {_REASONS.get(status, 'Status')}",
            *map(": ".join, self._lines),
            f"Content-Length: {len(self._whole)}",
            f"Date: {rfc822_formatted_time()}",
        ]
        if not self._keep_alive:
            lines.append("Connection: close")
        text = "\r\n".join(lines)
        if text.count("\n") != len(lines) - 1 or text.count("\r") != len(lines) - 1 or "\0" in text:
            raise ValueError("a response header has a line break in it")
        return f"{text}\r\n\r\n".encode("utf-8", "surrogateescape")
