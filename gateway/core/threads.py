"""The last request of each thread of each task: what the next one is compared with. Bounded, in memory, digests only.

A task has threads: its main run, sub-agents that share its id, title calls, compactions. A request belongs to the
thread that it extends; else to the one of its kind with which it shares its beginning; else it begins a new one.

What a process has forgotten, or another one has seen, costs an explanation and nothing else.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from gateway.core.dialects.facts import Facts, Segment
from gateway.core.explanation import Explanation
from gateway.core.misses import (
    DIGEST,
    Pieces,
    Place,
    Prior,
    Rules,
    blocks_between,
    explain,
    extends,
    head_of,
    is_hit,
    locate,
    own_digests,
    pieces_of,
    reach_of,
    settings_of,
)
from gateway.core.prefix import digest
from gateway.core.prices import PriceRow
from gateway.core.usage import Usage

TASKS_MAX = 20_000
THREADS_MAX = 8
#: Of all threads together: `THREAD_BYTES` each, and `DIGEST` bytes per message.
BYTES_MAX = 32 << 20
THREAD_BYTES = 1_024
#: Tools and lines of system prompts that are remembered, about 120 bytes each.
PIECES_TOTAL_MAX = 200_000
_COMPACTION = "compaction"
_HOUR_MS = 3_600_000


class Answered(msgspec.Struct, frozen=True, gc=False):
    """An attempt whose usage is known."""

    request_id: str
    facts: Facts
    body: bytes
    chain: tuple[bytes, ...]
    kind: str  # what sort of thread it belongs to: the purpose of the call and the sub-agent's id, "" for a turn
    deployment: str  # its name and the upstream model
    usage: Usage
    rules: Rules
    row: PriceRow | None
    service_tier: str
    started_at_ms: int
    task_step: int = 1  # which of its task's requests this is
    level: str = ""  # of shaping
    applied: tuple[str, ...] = ()  # the transforms that changed it
    restored: frozenset[str] = frozenset()  # "tools", "system": sent as in the request before, whatever came


class _Thread:
    __slots__ = (
        "deployment",
        "head",
        "kind",
        "last",
        "own",
        "prior_at_ms",
        "reach",
        "request_id",
        "restored",
        "rules",
        "settings",
        "usage",
    )

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.own = bytearray()
        self.head = 0
        self.last = b""
        self.settings: tuple[tuple[str, int], ...] = ()
        self.deployment = self.request_id = ""
        self.reach = self.prior_at_ms = 0
        self.usage = Usage()
        self.rules = Rules()
        self.restored: frozenset[str] = frozenset()

    def extended_by(self, chain: Sequence[bytes]) -> bool:
        count = len(self.own) // DIGEST
        return 0 < count <= len(chain) and chain[count - 1] == self.last

    def prior(self) -> Prior:
        life_ms = self.rules.life_ms
        if self.usage.cache_write_12h:
            life_ms = 12 * _HOUR_MS
        elif self.usage.cache_write_1h:
            life_ms = _HOUR_MS
        return Prior(
            self.request_id,
            bytes(self.own),
            self.head,
            self.settings,
            self.deployment,
            self.reach,
            life_ms,
            self.prior_at_ms,
            not self.rules.explicit or self.usage.cache_read + self.usage.cache_write > 0,
        )


class _Task:
    __slots__ = ("compacted", "threads")

    def __init__(self) -> None:
        self.threads: list[_Thread] = []  # the latest last
        self.compacted = False  # a compaction was asked for since the last turn


class Threads:
    """All times are milliseconds since 1970 UTC."""

    def __init__(
        self,
        *,
        tasks_max: int = TASKS_MAX,
        bytes_max: int = BYTES_MAX,
        pieces_max: int = PIECES_TOTAL_MAX,
    ) -> None:
        self._tasks: OrderedDict[str, _Task] = OrderedDict()
        self._pieces: OrderedDict[bytes, Pieces] = OrderedDict()
        self._tasks_max = tasks_max
        self._bytes_max = bytes_max
        self._pieces_max = pieces_max
        self._bytes = self._pieces_count = 0

    def answered(self, task_id: str, a: Answered, now_ms: int) -> Explanation | None:
        """Remember an attempt as its thread's last, and say why it read less than it could have, if it did.

        `now_ms`: when its answer began; from then on the provider's cache has what it wrote.
        """
        task = self._tasks.get(task_id)
        unseen = task is None and a.task_step > 1
        if task is None:
            if a.usage.input_total < a.rules.min_tokens:
                return None  # too short for any cache: most calls that are no agent's
            task = self._tasks[task_id] = _Task()
        else:
            self._tasks.move_to_end(task_id)
        thread = self._extended(task, a)
        if thread is not None:
            expected = min(thread.reach, a.usage.input_total)
            if thread.deployment == a.deployment and is_hit(a.usage, expected, a.rules):
                self._remember(task, thread, a, now_ms, extended=True)
                self._forget()
                return None
        explanation = self._compared(task, thread, a)
        extended = thread is not None
        if thread is None:
            thread = self._like(task, a) or self._begun(task, a.kind)
        self._remember(task, thread, a, now_ms, extended=extended)
        self._forget()
        if explanation is None:
            return None
        return msgspec.structs.replace(
            explanation, unseen=unseen, level=str(a.level), applied=tuple(map(str, a.applied))
        )

    def knows(self, task_id: str) -> bool:
        """A request of the task is remembered."""
        return task_id in self._tasks

    def forget(self, task_id: str) -> None:
        """A task is over."""
        task = self._tasks.pop(task_id, None)
        if task is not None:
            self._bytes -= sum(THREAD_BYTES + len(thread.own) for thread in task.threads)

    @property
    def size_bytes(self) -> int:
        """Of all threads, about."""
        return self._bytes

    # --- which thread ------------------------------------------------------------------------------------

    def _extended(self, task: _Task, a: Answered) -> _Thread | None:
        """The thread that this request goes on with: the longest, if several share its beginning."""
        found = None
        for thread in task.threads:
            extended = thread.kind == a.kind and thread.extended_by(a.chain)
            if extended and (found is None or len(thread.own) > len(found.own)):
                found = thread
        return found

    def _like(self, task: _Task, a: Answered) -> _Thread | None:
        """The thread of this kind that most of this request was in, if it was there at all beyond its head."""
        own = own_digests(_segments(a))
        new = {own[i : i + DIGEST] for i in range(head_of(_segments(a)) * DIGEST, len(own), DIGEST)}
        best, most = None, 0
        for thread in reversed(task.threads):
            if thread.kind != a.kind:
                continue
            start = thread.head * DIGEST
            old = bytes(thread.own)
            common = sum(old[i : i + DIGEST] in new for i in range(start, len(old), DIGEST))
            if not common and task.compacted and not a.kind:
                common = 1  # a new window after a compaction may share nothing with the one before
            if common > most:
                best, most = thread, common
        return best

    def _begun(self, task: _Task, kind: str) -> _Thread:
        thread = _Thread(kind)
        task.threads.append(thread)
        self._bytes += THREAD_BYTES
        if len(task.threads) > THREADS_MAX:
            self._bytes -= THREAD_BYTES + len(task.threads.pop(0).own)
        return thread

    # --- comparing ---------------------------------------------------------------------------------------

    def _compared(self, task: _Task, thread: _Thread | None, a: Answered) -> Explanation | None:
        prior, place, blocks = None, Place(None), 0
        if thread is not None:
            prior = thread.prior()
            count = len(prior.own) // DIGEST
            place = extends(prior, a.facts.segments.sizes()[: len(a.chain)], settings_of(a.facts, a.body))
            if place.cause is None and a.rules.lookback_blocks is not None:
                blocks = blocks_between(a.facts.segments, count, len(a.chain))
        elif (thread := self._like(task, a)) is not None:
            prior = thread.prior()
            segments = _segments(a)
            place = locate(
                prior,
                segments,
                _as_sent(a, segments, thread),
                settings_of(a.facts, a.body),
                self._pieces,
                compacted=task.compacted,
            )
            if place.cause is None and a.rules.lookback_blocks is not None:
                blocks = blocks_between(segments, len(prior.own) // DIGEST, len(segments))
        return explain(
            prior,
            place,
            a.usage,
            a.rules,
            deployment=a.deployment,
            started_at_ms=a.started_at_ms,
            row=a.row,
            service_tier=a.service_tier,
            blocks_since=blocks,
        )

    # --- remembering -------------------------------------------------------------------------------------

    def _remember(self, task: _Task, thread: _Thread, a: Answered, now_ms: int, *, extended: bool) -> None:
        chain, segments = a.chain, a.facts.segments
        count, kept = len(chain), len(thread.own)
        if not extended:
            self._bytes -= kept
            thread.own, kept = bytearray(_as_sent(a, _segments(a), thread)), 0
            thread.head = head_of(_segments(a))
            self._keep_pieces(segments[: thread.head])
        elif kept < count * DIGEST:
            for i in range(kept // DIGEST, count):
                thread.own += digest(segments[i])[:DIGEST]
        self._bytes += len(thread.own) - kept
        thread.last = chain[-1] if chain else b""
        thread.settings = settings_of(a.facts, a.body)
        thread.deployment, thread.request_id = a.deployment, a.request_id
        thread.reach = reach_of(a.usage, a.rules)
        thread.prior_at_ms = now_ms
        thread.usage, thread.rules, thread.restored = a.usage, a.rules, a.restored
        if a.kind or task.compacted:
            task.compacted = a.kind.startswith(_COMPACTION) or (task.compacted and bool(a.kind))
        if task.threads[-1] is not thread:
            task.threads.remove(thread)
            task.threads.append(thread)

    def _keep_pieces(self, head: Sequence[Segment]) -> None:
        for segment in head:
            own = own_digests((segment,))
            if own in self._pieces:
                self._pieces.move_to_end(own)
                continue
            self._pieces[own] = pieces = pieces_of(segment)
            self._pieces_count += len(pieces.digests)
            while self._pieces_count > self._pieces_max:
                _, dropped = self._pieces.popitem(last=False)
                self._pieces_count -= len(dropped.digests)

    def _forget(self) -> None:
        while len(self._tasks) > self._tasks_max or (self._bytes > self._bytes_max and len(self._tasks) > 1):
            self.forget(next(iter(self._tasks)))


def _as_sent(a: Answered, segments: Sequence[Segment], thread: _Thread) -> bytes:
    """The segments' digests, with those of the request before where the gateway has restored what was in it.

    Tools are restored to what was seen first, and a system prompt only to what was sent of it in the same way before.
    """
    own, before = own_digests(segments), thread.own
    if not a.restored:
        return own
    restored = a.restored if "system" in thread.restored else a.restored - {"system"}
    pieces = [own[i : i + DIGEST] for i in range(0, len(own), DIGEST)]
    for i, segment in enumerate(segments[: min(head_of(segments), len(before) // DIGEST)]):
        if ("tools" if segment.kind == "tools" else "system") in restored:
            pieces[i] = bytes(before[i * DIGEST : (i + 1) * DIGEST])
    return b"".join(pieces)


def _segments(a: Answered) -> Sequence[Segment]:
    """Those that the next step keeps: without a client's trailing reminder."""
    return a.facts.segments[: len(a.chain)]
