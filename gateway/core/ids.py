"""Ids: a prefix and the 32 hex digits of a UUIDv7, so that an id carries its own time and sorts by it."""

from __future__ import annotations

RANDOM_BYTES = 10
_MAX_MS = 2**48 - 1


def new_id(prefix: str, now_ms: int, random_bytes: bytes) -> str:
    """`prefix`, "_", then a UUIDv7 (RFC 9562) of `now_ms` (milliseconds since 1970 UTC) and 10 random bytes."""
    if len(random_bytes) != RANDOM_BYTES:
        raise ValueError(f"an id needs {RANDOM_BYTES} random bytes, not {len(random_bytes)}")
    if not 0 <= now_ms <= _MAX_MS:
        raise ValueError(f"no UUIDv7 can carry the time {now_ms}")
    noise = int.from_bytes(random_bytes, "big")
    rand_a = (noise >> 62) & 0xFFF
    rand_b = noise & (2**62 - 1)
    return f"{prefix}_{now_ms << 80 | 0x7 << 76 | rand_a << 64 | 0b10 << 62 | rand_b:032x}"


def ms_of(id_: str) -> int:
    """Milliseconds since 1970 UTC inside an id made by `new_id`; ValueError for anything else."""
    digits = id_.rpartition("_")[2]
    if len(digits) != 32 or digits[12] != "7":
        raise ValueError(f"not an id of this gateway: {id_!r}")
    return int(digits[:12], 16)
