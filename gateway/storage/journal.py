"""Settlements that the store could not take: an append-only file per replica, fsynced before it is believed.

A file is a row of frames: length and CRC32 of the payload (two little-endian u32), then the payload, msgpack of an
`Ending`. The last frame of a file may be torn, because the machine died in the middle of writing it; it was then
never believed. Appends go to the newest segment; replay closes it, and once a segment is posted it is only kept for a
day (`storage.kept`), beside a copy of all other settlements.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import struct
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from gateway.storage.kept import Kept
from gateway.storage.settlement import Ending

_FRAME = struct.Struct("<II")
_FRAME_BYTES_MAX = 1 << 20
_SEGMENT = re.compile(r"(.+)\.(\d{8})\.journal")
_log = logging.getLogger(__name__)
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Ending)


class Journal:
    """One replica's journal. Files of former runs of the same replica are its oldest segments."""

    def __init__(self, directory: Path, replica_id: str) -> None:
        self._directory = directory
        self._replica_id = re.sub(r"[^A-Za-z0-9_-]", "_", replica_id)
        self._kept = Kept(directory, self._replica_id)
        self._lock = asyncio.Lock()
        self._fd: int | None = None
        self._end = 0  # of the segment being written
        directory.mkdir(parents=True, exist_ok=True)
        self._segments = sorted(
            path
            for path in directory.iterdir()
            if (m := _SEGMENT.fullmatch(path.name)) and m[1] == self._replica_id
        )
        self._next = 1 + max((int(p.name.split(".")[-2]) for p in self._segments), default=0)
        self._appended: dict[Path, int] = {}  # by this run, to each segment

    @property
    def pending(self) -> bool:
        """True while anything waits for replay."""
        return bool(self._segments)

    @property
    def records(self) -> int:
        """How many that this run appended wait for replay; those of former runs are posted before a ledger opens."""
        return sum(self._appended.values())

    async def append(self, endings: Sequence[Ending]) -> None:
        """Durable when it returns; one fsync for all. Raises OSError if the disk does not take it."""
        frames = b"".join(_frame(e) for e in endings)
        async with self._lock:
            await asyncio.to_thread(self._append, frames)
            segment = self._segments[-1]
            self._appended[segment] = self._appended.get(segment, 0) + len(endings)

    async def close_segment(self) -> list[Path]:
        """End the segment being written, and return all that wait for replay, oldest first."""
        async with self._lock:
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None
            return list(self._segments)

    def keep(self, endings: Sequence[Ending]) -> None:
        """What the store has taken, for the day on which it loses it. Written by the next `write_kept`."""
        self._kept.add(map(_frame, endings))

    async def write_kept(self) -> None:
        """Write what was kept since the last time. A disk that does not take it loses the copy, and only that."""
        if not self._kept.due:
            return
        try:
            await asyncio.to_thread(self._kept.flush)
        except OSError as e:
            _log.warning("settlements are posted, but no copy of them is kept: %s", e)

    async def drop(self, segment: Path) -> None:
        """A closed segment whose endings are all in the store waits no more."""
        async with self._lock:
            await asyncio.to_thread(self._drop, segment)

    async def set_aside(self, ending: Ending) -> None:
        """Keep an ending that the store refuses for what it is, out of the way of all others, for a person to see."""
        path = self._directory / f"{self._replica_id}.rejected"
        async with self._lock:
            with path.open("ab") as file:
                file.write(_frame(ending))
                file.flush()
                os.fdatasync(file.fileno())

    async def close(self) -> None:
        await self.close_segment()
        if self._kept.waiting:
            await self.write_kept()

    def _append(self, frames: bytes) -> None:
        if self._fd is None:
            path = self._directory / f"{self._replica_id}.{self._next:08d}.journal"
            self._fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_APPEND, 0o600)
            self._end = 0
            self._next += 1
            self._segments.append(path)
            _sync_directory(self._directory)
        fd, end = self._fd, self._end
        try:
            view = memoryview(frames)
            while view:
                view = view[os.write(fd, view) :]
            os.fdatasync(fd)
            self._end += len(frames)
        except OSError:
            # Nothing may follow a half-written frame: reading would stop in front of it. After a failed
            # fsync the kernel may have dropped the pages. So this segment is not written to again.
            self._fd = None
            with suppress(OSError):
                os.ftruncate(fd, end)
            with suppress(OSError):
                os.close(fd)
            raise

    def _drop(self, segment: Path) -> None:
        self._kept.adopt(segment)
        _sync_directory(self._directory)
        self._segments.remove(segment)
        self._appended.pop(segment, None)


def read_segment(path: Path) -> list[Ending]:
    """The endings in a segment, up to a torn tail, which is reported and left out."""
    content = path.read_bytes()
    endings = []
    at = 0
    while at + _FRAME.size <= len(content):
        length, crc = _FRAME.unpack_from(content, at)
        payload = content[at + _FRAME.size : at + _FRAME.size + length]
        if length > _FRAME_BYTES_MAX or len(payload) < length or zlib.crc32(payload) != crc:
            break
        endings.append(_decoder.decode(payload))
        at += _FRAME.size + length
    if at < len(content):
        _log.warning("journal %s ends in %d torn bytes", path, len(content) - at)
    return endings


def _frame(ending: Ending) -> bytes:
    payload = _encoder.encode(ending)
    return _FRAME.pack(len(payload), zlib.crc32(payload)) + payload


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
