"""The two directions of an exchange as values: the pieces of a request to write, the headers of an answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar, overload

#: Pieces of a body from this size on are written as they are; copying smaller ones saves system calls.
LARGE_PIECE_BYTES = 16 << 10

T = TypeVar("T")


class Headers(Mapping[str, str]):
    """Headers of an answer: any case finds them, lower-case names come out. Repeated ones are joined by ", "."""

    __slots__ = ("_raw",)

    def __init__(self) -> None:
        self._raw: dict[bytes, bytes] = {}

    def add(self, name: bytes, value: bytes) -> None:
        name, value = name.lower(), value.rstrip(b" \t")  # llhttp strips only the left
        before = self._raw.get(name)
        self._raw[name] = value if before is None else before + b", " + value

    def raw(self, name: bytes) -> bytes | None:
        return self._raw.get(name)

    def __getitem__(self, name: str) -> str:
        return self._raw[name.lower().encode()].decode("latin-1")

    @overload
    def get(self, name: str, /) -> str | None: ...
    @overload
    def get(self, name: str, /, default: str | T) -> str | T: ...
    def get(self, name: str, /, default: object = None) -> object:
        value = self._raw.get(name.lower().encode())
        return default if value is None else value.decode("latin-1")

    def __iter__(self) -> Iterator[str]:
        return (name.decode("latin-1") for name in self._raw)

    def __len__(self) -> int:
        return len(self._raw)


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
