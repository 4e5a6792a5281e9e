"""The turns of a task as its requests showed them, and repetitions among them.

A client may shorten its history (compaction, sliding windows), go back in it, or run several threads under one
task. So each thread has a ring of turns of its own, and a request's tail is laid against it by the marks of its
turns: what was seen before counts once, whatever is shown again, and what is hidden stays counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

import msgspec

from gateway.core.breakers.policy import TURNS_KEPT, Polling
from gateway.core.tail import Turn

#: Threads of one task that are told apart: the last ones to go on.
THREADS_KEPT = 4
_MARK, _FAILED = attrgetter("turn.mark"), attrgetter("turn.failed")


class Seen(msgspec.Struct, frozen=True, gc=False):
    """A turn, and when its results first came (wall clock; None = before this task was watched here)."""

    turn: Turn
    at_ms: int | None
    forgiven: bool = False  # somebody has looked at it and let the task go on


Ring = tuple[Seen, ...]  # oldest first
Threads = tuple[Ring, ...]  # last to go on first


def extend(threads: Threads, turns: Sequence[Turn], now_ms: int) -> Threads:
    """Lay a request's turns against what is known; the thread that it belongs to comes first."""
    if not turns:
        return threads
    marks = [turn.mark for turn in turns]
    for i, ring in enumerate(threads):
        # Most rings end in another turn than any that is shown.
        if ring[-1].turn.mark in marks and (same := _overlap([*map(_MARK, ring[-len(marks) :])], marks)):
            grown = (*ring, *_dated(turns[same:], ring[-1].at_ms, now_ms))
            return (grown[-TURNS_KEPT:], *threads[:i], *threads[i + 1 :])
    shown = set(marks)
    for i, ring in enumerate(threads):
        if not shown.isdisjoint([seen.turn.mark for seen in ring]):
            return (_went_back(ring, turns, now_ms)[-TURNS_KEPT:], *threads[:i], *threads[i + 1 :])
    last = threads[0] if threads else ()
    # Clients that give their calls new ids each time, and the first turn after a compaction.
    same = _overlap([seen.turn.sign for seen in last], [turn.sign for turn in turns])
    if same:
        renamed = tuple(
            Seen(turn, seen.at_ms, seen.forgiven)
            for turn, seen in zip(turns[:same], last[-same:], strict=True)
        )
        grown = (*last[:-same], *renamed, *_dated(turns[same:], last[-1].at_ms, now_ms))
        return (grown[-TURNS_KEPT:], *threads[1:])
    # Another thread, or a compacted history: what came before still counts, if this goes on with it.
    begun = (*last, *_dated(turns, None, now_ms))
    return (begun[-TURNS_KEPT:], *threads)[:THREADS_KEPT]


def _overlap(known: Sequence[bytes], shown: Sequence[bytes]) -> int:
    """How many of the last known are the first shown."""
    for n in range(min(len(known), len(shown)), 0, -1):
        if known[-n:] == shown[:n]:
            return n
    return 0


def _went_back(ring: Ring, turns: Sequence[Turn], now_ms: int) -> Ring:
    """The client has changed its history: what it shows is what happened, and what came before it."""
    known = {seen.turn.mark: i for i, seen in enumerate(ring)}
    kept = [ring[known[turn.mark]] if turn.mark in known else None for turn in turns]
    before = ring[: known[turns[0].mark]] if kept[0] is not None else ()
    last = len(turns) - 1
    return (
        *before,
        *(seen or Seen(turns[i], now_ms if i == last else None) for i, seen in enumerate(kept)),
    )


def _dated(turns: Sequence[Turn], since_ms: int | None, now_ms: int) -> Ring:
    """New turns. Several at once were seen elsewhere; they came evenly since `since_ms`, as far as anyone knows."""
    n = len(turns)
    if since_ms is None:
        return tuple(Seen(turn, now_ms if i == n else None) for i, turn in enumerate(turns, 1))
    return tuple(Seen(turn, since_ms + (now_ms - since_ms) * i // n) for i, turn in enumerate(turns, 1))


def forgiven(threads: Threads) -> Threads:
    """The same turns, none of which counts as the beginning of a repetition any more."""
    return tuple(tuple(Seen(seen.turn, seen.at_ms, True) for seen in ring) for ring in threads)


class Cycle(NamedTuple):
    """A repetition at the end of a ring: `turns` of it in all; `sure` if some of it was seen to come quickly."""

    turns: int
    first: Seen
    sure: bool


def cycle(ring: Ring, period: int, pending: bytes, polling: Polling) -> Cycle | None:
    """How long the last `period` turns have been repeating; None if they do not, or somebody has just spoken.

    `pending`: what was said to the model after the last turn. The same words each time are a client's nudge, others
    are a person's: whoever is spoken to has something new to do.
    """
    n = len(ring)
    if n <= period or ring[-1].turn.sign != ring[-1 - period].turn.sign:
        return None  # as of almost every request
    if pending and pending != ring[n - period].turn.prompted:
        return None
    if any(_waits(seen, polling) or seen.forgiven for seen in ring[-period:]):
        return None
    turns, sure = period, False
    for i in range(n - 1, period - 1, -1):
        again, before = ring[i], ring[i - period]
        if again.turn.sign != before.turn.sign or before.forgiven or _waits(before, polling):
            break
        if i + period < n and again.turn.prompted != ring[i + period].turn.prompted:
            break
        if again.at_ms is not None and before.at_ms is not None:
            if again.at_ms - before.at_ms >= polling.gap_s * 1_000:
                break
            sure = True
        turns += 1
    return Cycle(turns, ring[n - turns], sure) if turns > period else None


def _waits(seen: Seen, polling: Polling) -> bool:
    return any(call.tool in polling.tools for call in seen.turn.calls)


class Failures(NamedTuple):
    """Among the turns with calls: failures at the end, and failures among the last `of`; 0 of 0 if nothing failed."""

    in_row: int
    failed: int
    of: int
    since: Seen | None  # the first of those in a row


_NO_FAILURES = Failures(0, 0, 0, None)


def failures(ring: Ring, window: int) -> Failures:
    if True not in map(_FAILED, ring):
        return _NO_FAILURES  # as of almost every request
    in_row = failed = of = 0
    since: Seen | None = None
    for seen in reversed(ring):
        turn = seen.turn
        if not turn.calls or seen.forgiven:
            continue
        if turn.failed and in_row == of:  # nothing has worked since
            in_row, since = in_row + 1, seen
        elif of >= window:
            break
        of += 1
        if turn.failed and of <= window:
            failed += 1
    return Failures(in_row, failed, min(of, window), since)
