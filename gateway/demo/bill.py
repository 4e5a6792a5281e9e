"""The provider's own bill: one line per request, in integers, append-only.

Deliberately not the gateway's arithmetic (see `models.py`): the ledger is compared with these lines.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

import msgspec

from gateway.demo.cache import Split
from gateway.demo.models import Rates


class State(StrEnum):
    COMPLETE = "complete"
    INTERRUPTED = "interrupted"  # the connection ended first: input and the output produced until then
    REFUSED = "refused"  # an error before any token: nothing is charged


@dataclass(frozen=True, slots=True)
class Tokens:
    """Disjoint counts, as billed."""

    input_uncached: int = 0
    cache_read: int = 0
    cache_write_5m: int = 0
    cache_write_1h: int = 0
    output: int = 0

    @classmethod
    def of(cls, split: Split, output: int) -> Tokens:
        return cls(split.input_uncached, split.cache_read, split.cache_write_5m, split.cache_write_1h, output)

    @property
    def input_total(self) -> int:
        return self.input_uncached + self.cache_read + self.cache_write_5m + self.cache_write_1h


def price(rates: Rates, tokens: Tokens) -> int:
    """Nano-dollars: pico-dollars per token times tokens, summed, then rounded up once."""
    if tokens.cache_write_1h and not rates.cache_write_1h:
        raise ValueError("this model has no 1h cache writes")
    pico = (
        rates.input_uncached * tokens.input_uncached
        + rates.cache_read * tokens.cache_read
        + rates.cache_write_5m * tokens.cache_write_5m
        + rates.cache_write_1h * tokens.cache_write_1h
        + rates.output * tokens.output
    )
    nano, rest = divmod(pico, 1_000)
    return nano + 1 if rest else nano


@dataclass(frozen=True, slots=True)
class BillLine:
    bill_id: int  # 1, 2, 3 ...
    client_request_id: str  # the caller's x-client-request-id, "" without one
    request_id: str  # ours: response header and body id
    at_ms: int
    model: str  # the demo model that played
    requested_model: str
    operation: str
    status: int  # HTTP status sent, 0 if the connection was closed before one
    input_uncached: int
    cache_read: int
    cache_write_5m: int
    cache_write_1h: int
    output: int
    nano_usd: int
    state: State
    finish: str
    stream: bool

    @property
    def tokens(self) -> Tokens:
        return Tokens(
            self.input_uncached, self.cache_read, self.cache_write_5m, self.cache_write_1h, self.output
        )

    def generation(self) -> dict[str, object]:
        """In the shape of OpenRouter's GET /generation (`data`), with our classes beside it."""
        return {
            "id": self.request_id,
            "upstream_id": self.request_id,
            "client_request_id": self.client_request_id,
            "model": self.model,
            "created_at_ms": self.at_ms,
            "streamed": self.stream,
            "cancelled": self.state is State.INTERRUPTED,
            "finish_reason": self.finish,
            "provider_name": "demo",
            "tokens_prompt": self.tokens.input_total,
            "tokens_completion": self.output,
            "native_tokens_prompt": self.tokens.input_total,
            "native_tokens_completion": self.output,
            "native_tokens_cached": self.cache_read,
            "native_tokens_reasoning": 0,
            "total_cost": self.nano_usd / 1e9,
            "usage": self.nano_usd / 1e9,
            "input_uncached": self.input_uncached,
            "cache_read": self.cache_read,
            "cache_write_5m": self.cache_write_5m,
            "cache_write_1h": self.cache_write_1h,
            "output": self.output,
            "nano_usd": self.nano_usd,
            "state": self.state.value,
        }


def read_lines(rows: Iterable[Mapping[str, object]]) -> list[BillLine]:
    """Bill lines from the JSON of GET /demo/bill (`data`). Raises msgspec.ValidationError."""
    return [msgspec.convert(row, BillLine) for row in rows]


class BillFile:
    """All lines, in memory and, with a path, appended to a JSON lines file that a restart reads back."""

    def __init__(self, path: Path | None, *, fsync: bool = False) -> None:
        self._lines: list[BillLine] = []
        self._by_id: dict[str, BillLine] = {}
        self._fsync = fsync
        self._fd: int | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
            self._read_back(path)

    def _read_back(self, path: Path) -> None:
        kept = path.read_bytes()
        whole = kept[: kept.rfind(b"\n") + 1]
        if len(whole) < len(kept) and self._fd is not None:
            os.ftruncate(self._fd, len(whole))  # the last line was torn by a kill
        for raw in whole.splitlines():
            self._keep(msgspec.json.decode(raw, type=BillLine))

    def _keep(self, line: BillLine) -> None:
        self._lines.append(line)
        self._by_id[line.request_id] = line
        if line.client_request_id:
            self._by_id[line.client_request_id] = line

    @property
    def next_id(self) -> int:
        return len(self._lines) + 1

    def append(self, line: BillLine) -> None:
        if line.bill_id != self.next_id:
            raise ValueError(f"bill line {line.bill_id} is not the next one ({self.next_id})")
        if self._fd is not None:
            os.write(self._fd, msgspec.json.encode(asdict(line)) + b"\n")
            if self._fsync:
                os.fsync(self._fd)
        self._keep(line)

    def after(self, bill_id: int) -> list[BillLine]:
        return self._lines[max(0, bill_id) :]

    def find(self, any_id: str) -> BillLine | None:
        """By our request id or the caller's; of several with one caller's id, the latest."""
        return self._by_id.get(any_id)

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
