"""What doctor finds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

_CLOCK_SKEW_MS = 2_000


class State(StrEnum):
    OK = "ok"
    WARN = "warn"  # works, but you should know
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    subject: str
    state: State
    found: str
    to_do: str = ""


def clock_skew(database_ms: int, began_ms: int, ended_ms: int) -> Finding:
    """The database's clock against ours, read between `began` and `ended`."""
    skew_ms = max(0, began_ms - database_ms, database_ms - ended_ms)
    found = f"differs from ours by {skew_ms} ms"
    if skew_ms > _CLOCK_SKEW_MS:
        return Finding(
            "database clock", State.WARN, found, "synchronise both; the database's clock decides windows"
        )
    return Finding("database clock", State.OK, found)
