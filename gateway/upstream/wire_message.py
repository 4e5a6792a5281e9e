"""The two directions of an exchange as values: the pieces of a request to write, the headers of an answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat

#: Pieces of a body from this size on are written as they are; copying smaller ones saves system calls.
LARGE_PIECE_BYTES = 16 << 10


def headers_of(lines: Sequence[bytes]) -> dict[str, str]:
    """Headers by lower-case name, from names and values in turns. Repeated ones are joined by ", "."""
    # A line break cannot stand in any of them, so that all are decoded at once.
    names = b"\n".join(lines[::2]).lower().decode("latin-1").split("\n")
    sent = b"\n".join(lines[1::2]).decode("latin-1").split("\n")
    values = list(map(str.rstrip, sent, repeat(" \t")))  # llhttp strips only the left
    headers = dict(zip(names, values, strict=True))
    if len(headers) == len(names):
        return headers
    joined: dict[str, str] = {}
    for name, value in zip(names, values, strict=True):
        joined[name] = f"{joined[name]}, {value}" if name in joined else value
    return joined


def runs(head: bytes, body: Sequence[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """The request in order: small neighbours joined, large pieces as they are."""
    small: list[bytes | memoryview] = [head]
    for piece in body:
        if len(piece) < LARGE_PIECE_BYTES:
            small.append(piece)
            continue
        if small:
            yield b"".join(small)
            small = []
        yield piece
    if small:
        yield b"".join(small)
