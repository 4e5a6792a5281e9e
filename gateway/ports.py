"""What the pipeline needs from the world. Adapters implement these; `app.py` chooses which.

Each method says what happens when its store is down.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from gateway.core.catalog import Deployment, Operation
from gateway.core.entry import Amounts, Attempt, Granted, Outcome, Refused, Settled
from gateway.core.identity import Caller, KeyRecord
from gateway.core.learned import Known, ToldNote, Unknown


class Clock(Protocol):
    def now_ms(self) -> int:
        """Wall clock, milliseconds since 1970 UTC."""
        ...

    def monotonic(self) -> float:
        """Seconds; only differences mean anything."""
        ...


class KeyStore(Protocol):
    async def find(self, key_id: str) -> KeyRecord | None:
        """The key with that id, from memory when it can; a revocation shows within one second.

        Store down: keys already in memory keep working for at most 60 s, others raise `Unavailable`.
        """
        ...


class TaskOwners(Protocol):
    async def owner(self, task_id: str) -> str | None:
        """The id of the key that owns the task; None if there is no such task.

        Store down: tasks that were asked for before are known, others raise `Unavailable`.
        """
        ...


class Ledger(Protocol):
    """The authority for money: SQLite or Postgres, behind one batcher. All methods are idempotent by attempt id."""

    async def reserve(
        self,
        attempt: Attempt,
        scopes: Sequence[str],
        ask: Amounts,
        least: Amounts,
        *,
        landing: bool = False,
    ) -> Granted | Refused:
        """Commit a hold in all budgets of all scopes and of all tasks above the attempt's, or nothing at all: of
        dollars and output tokens at most `ask` and at least `least`, of input tokens and calls as asked.

        None = the attempt cannot be bounded in that unit: refused by any hard budget in it, else held as 0.
        `landing`: the last answer of a task whose budget is used up; it may use what the budget keeps back for it.

        Store down: raises `LedgerUnavailable`; nothing may be sent upstream.
        """
        ...

    @property
    def changes(self) -> int:
        """Counts what may have undone a refusal that stands until somebody acts, as far as this process has heard."""
        ...

    def post(self, attempt: Attempt, outcome: Outcome) -> None:
        """`settle` without waiting: from now on the ledger has it. Cannot fail for the caller."""
        ...

    async def settle(self, attempt: Attempt, outcome: Outcome) -> Settled:
        """End the hold with its one terminal entry (post, void or charge_unknown).

        Store down: the entry goes to the journal and is replayed; never raises for that.
        """
        ...


class UpstreamAnswer(Protocol):
    """A provider's answer whose headers have arrived. Whoever opened it closes it."""

    @property
    def status(self) -> int: ...

    @property
    def headers(self) -> Mapping[str, str]:
        """Lower-case names."""
        ...

    async def read(self, limit: int) -> bytes:
        """The whole body; `UpstreamMalformed` above `limit` bytes, `UpstreamLost`/`UpstreamTimeout` as they come."""
        ...

    def chunks(self) -> AsyncIterator[bytes]:
        """Body bytes as they arrive; raises `UpstreamLost` if the body ends before its framing says so."""
        ...

    async def close(self) -> None:
        """Give the connection back if the body was read to its end, else stop the provider at once."""
        ...


class UpstreamCall(msgspec.Struct, frozen=True):
    """One attempt, ready to send. `body` is in the dialect of `operation`, in pieces to be written in order."""

    attempt_id: str
    deployment: Deployment
    operation: Operation
    body: tuple[bytes | memoryview, ...]
    #: headers of the client that may go upstream (allow-list already applied)
    headers: tuple[tuple[str, str], ...]
    stream: bool
    slow: bool  # reasoning or a very long prompt: the longer first-byte time-out applies
    query: str = ""
    address: str = ""  # base URL of the replica that is to serve it; "" = the provider's


class Unsent(asyncio.CancelledError):
    """`Upstream.open` was cancelled before any byte of the request had left: proof that nothing is billed."""


class Upstream(Protocol):
    async def open(self, call: UpstreamCall) -> UpstreamAnswer:
        """Send and wait for the answer's headers. Raises only `UpstreamError`s, with `billed` set; `Unsent` or a
        plain CancelledError when it is cancelled.

        An adapter of one wire returns HTTP errors as answers; `upstream.http.Upstreams`, which the pipeline is
        given, raises them classified.
        """
        ...


class Unanswered(Exception):
    """Nobody could say where replicas are, or how one is; the message says why. `slow`: it may only be busy."""

    def __init__(self, message: str, *, slow: bool = False) -> None:
        super().__init__(message)
        self.slow = slow


class ServedModel(msgspec.Struct, frozen=True):
    """What a replica says that it serves. `context_tokens`: None if it does not say."""

    name: str
    context_tokens: int | None


class Replicas(Protocol):
    """Asks about the replicas of a deployment, never on the way of a request. All raise `Unanswered`."""

    async def find(self, deployment: Deployment) -> tuple[str, ...]:
        """Their addresses (base URLs): at least one, at most 256, each once."""
        ...

    async def metrics(self, deployment: Deployment, address: str) -> str:
        """The text of its metrics, "" if it has none; `Unanswered` if its health says no."""
        ...

    async def models(self, deployment: Deployment, address: str) -> tuple[ServedModel, ...]: ...

    async def version(self, address: str) -> str:
        """Of its engine; "" if it does not say."""
        ...

    def forget(self, address: str) -> None:
        """It is gone, and what is kept for calls to it can go, too."""
        ...


class Limits(Protocol):
    async def take(self, buckets: Sequence[tuple[str, int, int]], now_ms: int) -> tuple[str, float] | None:
        """Take `(name, cost, capacity per minute)` from all buckets or none.

        Names go from the narrow to the wide, "key:<id>:requests" before "team:<id>:requests", and a narrow one
        always comes with the same wide ones: a store may keep them together by the last.
        Returns None when taken, else (name of the empty bucket, seconds until it fits).
        Store down: falls back to this replica's share; never refuses because of the store.
        """
        ...

    async def enter(self, names: Sequence[tuple[str, int]], request_id: str) -> str | None:
        """Count the request as inside of all `(name, how many may be inside at once)`, or of none.

        Names as "key:<id>", then "team:<id>". Returns None when it is in, else the name that is full. However
        this ends, by cancellation too, `leave` is due. A place that a dead process took is free within 60 s.
        Store down: as `take`.
        """
        ...

    def leave(self, request_id: str) -> None:
        """Give its places back, if it has any. Returns at once and never fails."""
        ...

    @property
    def degraded(self) -> bool:
        """The store is down: limits are this replica's share."""
        ...


class PrefixIndex(Protocol):
    """Losing it costs lineage only; store down: what this process knows."""

    async def find(self, key_id: str, chain: Sequence[bytes]) -> tuple[int, str] | None:
        """The longest known prefix: (number of segments, task id)."""
        ...

    def put(self, key_id: str, chain: Sequence[bytes], task_id: str) -> None:
        """Remember a request of this task. Returns at once; other processes know it a moment later."""
        ...


class Bindings(Protocol):
    """Losing it costs a cold cache; store down: nothing is found."""

    async def find(self, task_id: str, thread: bytes) -> bytes | None:
        """What was put last for this thread of the task, by any process."""
        ...

    def put(self, task_id: str, thread: bytes, binding: bytes) -> None:
        """Returns at once; other processes know it a moment later."""
        ...


class Learned(Protocol):
    """What all processes have learned of runs; store down: nothing is found, and each learns by itself."""

    async def ask(self, key_id: str, unknown: Unknown) -> Known:
        """What others know of it. What was asked is known to them from now on."""
        ...

    def tell(self, key_id: str, note: ToldNote) -> None:
        """Others know it in a moment. Returns at once."""
        ...


T = TypeVar("T")


class Spawn(Protocol):
    """Start a task that may outlive its request; the name shows up in logs. `app.py` owns and drains them all."""

    def __call__(self, coro: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]: ...


class Incoming(msgspec.Struct, frozen=True):
    """One model call as it came in, its caller proven. `headers` is case-insensitive."""

    request_id: str
    operation: Operation
    caller: Caller
    headers: Mapping[str, str]
    body: bytes
    query: str
    path_task: str | None


class Answer(msgspec.Struct):
    """What goes back: a whole body, or a stream of whole events that the edge must close.

    Closing the stream before its end says that the client is gone.
    """

    status: int
    headers: list[tuple[str, str]]
    content_type: str
    task_id: str
    client: str
    deployment: str
    body: bytes = b""
    stream: AsyncGenerator[bytes, None] | None = None
    first_token_s: float | None = None
    error: str = ""  # kind of the error that this answer stands for


class Observer(Protocol):
    """Counts what happens; never fails, never blocks."""

    def attempt(self, attempt: Attempt, outcome: Outcome) -> None: ...
