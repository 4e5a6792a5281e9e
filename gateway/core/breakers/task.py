"""What is known about one task, and what its breakers say about each of its requests.

    Asked  a request wants to go out        -> every breaker may speak; a stop refuses it
    Ended  an attempt of it has ended       -> steps, money and upstream errors are counted; only news is said
    Child  a task below it wants to go out  -> the number of children is counted

All times are milliseconds since 1970 UTC. A state is what one process has seen of a task; losing it loses no more
than the counts so far, because each request shows the last turns anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from gateway.core.breakers.history import Ring, Threads, cycle, extend, failures, forgiven
from gateway.core.breakers.policy import Breaker, BreakerPolicy, Errors, Mode, Repeats, SpendSlope, Verdict
from gateway.core.money import usd_text
from gateway.core.tail import Tail

_EPISODES_KEPT = 32
_MIN_MS = 60_000
_HOUR_MS = 3_600_000


class Asked(msgspec.Struct, frozen=True):
    """A request of the task, before anything is spent on it."""

    tail: Tail = Tail()
    began_ms: int | None = None  # when the task began, as the ledger knows it
    running: int = 0  # attempts of the task that are under way, without this one
    depth: int = 0  # tasks above it


class Ended(msgspec.Struct, frozen=True):
    """An attempt of the task has ended. `failed`: the provider failed, not the caller.

    `step` is the number that the ledger gave the request, None if it gave none.
    """

    failed: bool
    cost_nano_usd: int
    step: int | None = None


class Child(msgspec.Struct, frozen=True):
    """A request of a child task."""

    task_id: str


Fact = Asked | Ended | Child


class Upstream(msgspec.Struct, frozen=True):
    """The last results of attempts, one bit each (1 = failed), the newest lowest; and whether the breaker is open."""

    bits: int = 0
    results: int = 0
    in_row: int = 0
    opened_ms: int | None = None
    probed_ms: int | None = None


class Spend(msgspec.Struct, frozen=True):
    """Money by minute: the last ones, newest last, and the sum over all minutes before that had any."""

    recent: tuple[tuple[int, int], ...] = ()  # (minutes since 1970, nano-dollars)
    most_nano_usd: int = 0  # no run of `recent` sums up to more
    earlier_minutes: int = 0
    earlier_nano_usd: int = 0


class TaskState(msgspec.Struct, frozen=True):
    """Everything that the breakers of one task remember."""

    threads: Threads = ()
    steps: int = 0
    began_ms: int | None = None
    upstream: Upstream = Upstream()
    spend: Spend = Spend()
    children: frozenset[str] = frozenset()
    told: tuple[str, ...] = ()  # episodes that a verdict has spoken of


def observe(
    state: TaskState, fact: Fact, policy: BreakerPolicy, now_ms: int
) -> tuple[TaskState, tuple[Verdict, ...]]:
    """The state after `fact`, and what is to be said about it. A stop is repeated with every request it refuses."""
    match fact:
        case Asked():
            return _asked(state, fact, policy, now_ms)
        case Ended():
            return _ended(state, fact, policy, now_ms)
        case Child():
            return _child(state, fact, policy, now_ms)


class Signs(NamedTuple):
    """What rules may ask about a task: how often its last turn came in a row, and its failed calls in a row."""

    repeats: int
    tool_errors: int


def signs(state: TaskState, policy: BreakerPolicy) -> Signs:
    """As of the last request; (0, 0) for a task that has done nothing yet."""
    ring = state.threads[0] if state.threads else ()
    if not ring:
        return Signs(0, 0)
    found = cycle(ring, 1, b"", policy.polling)
    return Signs(1 if found is None else found.turns, failures(ring, policy.tool_errors.window).in_row)


def forgive(state: TaskState) -> TaskState:
    """Somebody has looked at the task and lets it go on: what it did so far trips nothing any more.

    Caps on steps and on the wall clock stay: they are raised in the policy.
    """
    return replace(state, threads=forgiven(state.threads), upstream=Upstream(), spend=Spend(), told=())


def _asked(
    state: TaskState, asked: Asked, policy: BreakerPolicy, now_ms: int
) -> tuple[TaskState, tuple[Verdict, ...]]:
    began_ms = now_ms if state.began_ms is None else state.began_ms
    if asked.began_ms is not None and asked.began_ms < began_ms:
        began_ms = asked.began_ms
    upstream, open_for_s = state.upstream, None
    if upstream.opened_ms is not None:
        upstream, open_for_s = _admitted(upstream, policy.upstream_errors, now_ms)
    turns = asked.tail.turns
    threads = extend(state.threads, turns, now_ms) if turns else state.threads
    if turns or began_ms != state.began_ms or upstream is not state.upstream:
        state = TaskState(threads, state.steps, began_ms, upstream, state.spend, state.children, state.told)
    # A request without a past (a title, a new beginning) repeats nothing, whatever came before it.
    ring = threads[0] if turns else ()
    found: list[Verdict] = []
    if _beyond_caps(state, asked, policy, now_ms):
        found += _caps(state, asked, policy, now_ms)
    if ring:
        found += _repetitions(ring, asked.tail.pending, policy)
    if _spends_much(state.spend, policy.spend_slope):
        found += _slope(state.spend, policy.spend_slope, now_ms)
    if open_for_s is not None:
        found.append(_upstream_verdict(upstream, policy.upstream_errors.mode, open_for_s))
    return _tell(state, found) if found else (state, ())


def _ended(
    state: TaskState, ended: Ended, policy: BreakerPolicy, now_ms: int
) -> tuple[TaskState, tuple[Verdict, ...]]:
    upstream = _result(state.upstream, ended.failed, policy.upstream_errors, now_ms)
    state = TaskState(
        state.threads,
        state.steps + 1 if ended.step is None else max(state.steps, ended.step),
        state.began_ms,
        upstream,
        _spent(state.spend, ended.cost_nano_usd, policy.spend_slope.over_min, now_ms),
        state.children,
        state.told,
    )
    found: list[Verdict] = []
    if _spends_much(state.spend, policy.spend_slope):
        found = _slope(state.spend, policy.spend_slope, now_ms)
    if upstream.opened_ms is not None:
        errors = policy.upstream_errors
        found.append(_upstream_verdict(upstream, errors.mode, errors.probe_after_s))
    if not found:
        return state, ()
    state, verdicts = _tell(state, found)
    return state, tuple(v for v in verdicts if v.fresh)


def _tell(state: TaskState, found: list[Verdict]) -> tuple[TaskState, tuple[Verdict, ...]]:
    """Mark what was said before, and forget what is off."""
    told = list(state.told)
    verdicts = []
    for verdict in found:
        if verdict.action is Mode.OFF:
            continue
        fresh = verdict.episode not in told
        if fresh:
            told.append(verdict.episode)
        verdicts.append(replace(verdict, fresh=fresh))
    if len(told) != len(state.told):
        state = replace(state, told=tuple(told[-_EPISODES_KEPT:]))
    return state, tuple(verdicts)


def _verdict(
    breaker: Breaker,
    mode: Mode,
    episode: str,
    evidence: dict[str, str | int],
    message: str,
    *,
    tripped: bool = True,
    retry_after_s: int | None = None,
) -> Verdict:
    action = mode if tripped or mode is not Mode.STOP else Mode.ALERT
    kind = "trip" if tripped else "warn"
    return Verdict(
        breaker, action, tripped, True, f"{breaker}/{kind}/{episode}", evidence, message, retry_after_s
    )


# --- caps ---------------------------------------------------------------------------------------------


def _beyond_caps(state: TaskState, asked: Asked, policy: BreakerPolicy, now_ms: int) -> bool:
    """Whether `_caps` has anything to say: asked for every request, and almost always no."""
    began_ms = now_ms if state.began_ms is None else state.began_ms
    fan = policy.fan_out
    return (
        state.steps >= policy.steps.most
        or asked.running >= fan.concurrent
        or asked.depth > fan.depth
        or (now_ms - began_ms) // 1_000 > policy.wall_clock.most_s
    )


def _caps(state: TaskState, asked: Asked, policy: BreakerPolicy, now_ms: int) -> Iterator[Verdict]:
    cap = policy.steps
    if state.steps >= cap.most:
        yield _verdict(
            Breaker.STEPS,
            cap.mode,
            str(cap.most),
            {"steps": state.steps, "most": cap.most},
            f"this task has made {state.steps} model calls, and its limit is {cap.most}",
        )
    clock = policy.wall_clock
    age_s = (now_ms - (state.began_ms if state.began_ms is not None else now_ms)) // 1_000
    if age_s > clock.most_s:
        yield _verdict(
            Breaker.WALL_CLOCK,
            clock.mode,
            str(clock.most_s),
            {"age_s": age_s, "most_s": clock.most_s},
            f"this task is {age_s} seconds old, and its limit is {clock.most_s}",
        )
    fan = policy.fan_out
    if asked.running >= fan.concurrent:
        yield _verdict(
            Breaker.CONCURRENCY,
            fan.mode,
            str(now_ms // _HOUR_MS),
            {"running": asked.running, "most": fan.concurrent},
            f"this task has {asked.running} model calls under way, and its limit is {fan.concurrent} at once",
            retry_after_s=1,
        )
    if asked.depth > fan.depth:
        yield _verdict(
            Breaker.DEPTH,
            fan.mode,
            str(fan.depth),
            {"depth": asked.depth, "most": fan.depth},
            f"this task is {asked.depth} tasks below the first one, and the limit is {fan.depth}",
        )


def _child(
    state: TaskState, child: Child, policy: BreakerPolicy, now_ms: int
) -> tuple[TaskState, tuple[Verdict, ...]]:
    fan = policy.fan_out
    if child.task_id in state.children:
        return state, ()
    if len(state.children) < fan.children:
        return replace(state, children=state.children | {child.task_id}), ()
    verdict = _verdict(
        Breaker.CHILDREN,
        fan.mode,
        str(now_ms // _HOUR_MS),
        {"children": len(state.children), "most": fan.children, "refused": child.task_id},
        f"the task above this one has {len(state.children)} child tasks, and its limit is {fan.children}",
    )
    return _tell(state, [verdict])


# --- repetitions --------------------------------------------------------------------------------------


def _repetitions(ring: Ring, pending: bytes, policy: BreakerPolicy) -> Iterator[Verdict]:
    if not ring:
        return
    speaks = not ring[-1].turn.calls
    yield from _cycle_verdict(
        Breaker.MONOLOGUE if speaks else Breaker.LOOP,
        policy.monologue if speaks else policy.loop,
        ring,
        1,
        pending,
        policy,
    )
    if len(ring) > 1 and ring[-1].turn.sign != ring[-2].turn.sign:
        yield from _cycle_verdict(Breaker.PING_PONG, policy.ping_pong, ring, 2, pending, policy)
    errors = policy.tool_errors
    seen = failures(ring, errors.window)
    crowded = seen.of == errors.window and seen.failed * 100 > errors.percent * seen.of
    # A person who has just spoken, or a client that compacts, is what a streak of failures needs.
    spoken = bool(pending) and pending != ring[-1].turn.prompted
    if (seen.in_row >= errors.in_row or crowded) and not spoken:
        since_ms = seen.since.at_ms if seen.since else None
        yield _verdict(
            Breaker.TOOL_ERRORS,
            errors.mode,
            f"{since_ms or 0}",
            {
                "in_row": seen.in_row,
                "failed": seen.failed,
                "of": seen.of,
                **({} if since_ms is None else {"since_ms": since_ms}),
            },
            f"the tool calls of this task keep failing: {seen.in_row} in a row, {seen.failed} of the last {seen.of}",
        )


def _cycle_verdict(
    breaker: Breaker, numbers: Repeats, ring: Ring, period: int, pending: bytes, policy: BreakerPolicy
) -> Iterator[Verdict]:
    found = cycle(ring, period, pending, policy.polling)
    least = numbers.stop if numbers.warn is None else numbers.warn
    if found is None or found.turns < least:
        return
    turn = ring[-1].turn
    tools = [_printable(" + ".join(seen.turn.tools)) for seen in ring[-period:] if seen.turn.calls]
    evidence: dict[str, str | int] = {"turns": found.turns, "sign": turn.sign.hex()}
    if tools:
        evidence["tools"] = ", ".join(tools)
    if turn.failed:
        evidence["failed"] = "yes"
    if found.first.at_ms is not None:
        evidence["since_ms"] = found.first.at_ms
    # Only the sight of a quick repetition proves that it is none of polling.
    tripped = found.turns >= numbers.stop and found.sure
    yield _verdict(
        breaker,
        numbers.mode,
        f"{found.first.turn.mark.hex()}/{turn.sign.hex()}/{found.first.at_ms or 0}",
        evidence,
        _said_of(breaker, found.turns, tools),
        tripped=tripped,
    )


def _printable(text: str) -> str:
    """A client's word, fit for one line of a message."""
    return "".join(c for c in text if c.isprintable()) or "a tool"


def _said_of(breaker: Breaker, turns: int, tools: list[str]) -> str:
    if breaker is Breaker.LOOP:
        return f"this task has called {tools[0]} {turns} times in a row with the same arguments and the same result"
    if breaker is Breaker.PING_PONG:
        named = " and ".join(tools) or "the same two turns"
        return f"this task has gone back and forth between {named} for {turns} turns, with the same results"
    return f"the model has said the same {turns} times in a row without calling a tool"


# --- upstream errors ----------------------------------------------------------------------------------


def _result(seen: Upstream, failed: bool, errors: Errors, now_ms: int) -> Upstream:
    """After one more result. Any success closes the breaker: something works again."""
    if not failed and seen.opened_ms is not None:
        return Upstream()
    if not (failed or seen.bits) and seen.results == errors.window:
        return seen  # nothing has failed for long, as with most
    mask = (1 << errors.window) - 1
    after = Upstream(
        bits=(seen.bits << 1 | failed) & mask,
        results=min(seen.results + 1, errors.window),
        in_row=seen.in_row + 1 if failed else 0,
        opened_ms=seen.opened_ms,
        probed_ms=seen.probed_ms,
    )
    if not failed:
        return after
    crowded = after.results == errors.window and after.bits.bit_count() * 100 > errors.percent * errors.window
    if after.opened_ms is not None:
        # The probe has failed, or one that was under way before: wait anew.
        return replace(after, opened_ms=now_ms, probed_ms=None)
    return replace(after, opened_ms=now_ms) if crowded or after.in_row >= errors.in_row else after


def _admitted(seen: Upstream, errors: Errors, now_ms: int) -> tuple[Upstream, int | None]:
    """(after a request, seconds until the next probe; None if the request may go)."""
    if seen.opened_ms is None:
        return seen, None
    wait_ms = errors.probe_after_s * 1_000
    due_ms = (seen.opened_ms if seen.probed_ms is None else seen.probed_ms) + wait_ms
    if now_ms >= due_ms:
        return replace(seen, probed_ms=now_ms), None
    return seen, -(-(due_ms - now_ms) // 1_000)


def _upstream_verdict(seen: Upstream, mode: Mode, open_for_s: int) -> Verdict:
    failed = seen.bits.bit_count()
    return _verdict(
        Breaker.UPSTREAM_ERRORS,
        mode,
        str((seen.opened_ms or 0) // _HOUR_MS),
        {"in_row": seen.in_row, "failed": failed, "of": seen.results, "opened_ms": seen.opened_ms or 0},
        f"the model calls of this task keep failing: {seen.in_row} in a row, {failed} of the last {seen.results}",
        retry_after_s=open_for_s,
    )


# --- money --------------------------------------------------------------------------------------------


def _spent(spend: Spend, cost_nano_usd: int, over_min: int, now_ms: int) -> Spend:
    """Corrections may lower a minute; what is too old for the slope becomes history."""
    if not cost_nano_usd:
        return spend
    minute = now_ms // _MIN_MS
    if spend.recent and spend.recent[-1][0] == minute:
        (_, spent), before = spend.recent[-1], spend.recent[:-1]
        return Spend(
            (*before, (minute, spent + cost_nano_usd)),
            spend.most_nano_usd + max(0, cost_nano_usd),
            spend.earlier_minutes,
            spend.earlier_nano_usd,
        )
    by_minute = dict(spend.recent)
    by_minute[minute] = by_minute.get(minute, 0) + cost_nano_usd
    old = [cost for at, cost in by_minute.items() if at <= minute - over_min]
    recent = tuple(sorted((at, cost) for at, cost in by_minute.items() if at > minute - over_min))
    return Spend(
        recent,
        sum(max(0, cost) for _, cost in recent),
        spend.earlier_minutes + len(old),
        spend.earlier_nano_usd + sum(old),
    )


def _spends_much(spend: Spend, slope: SpendSlope) -> bool:
    """Whether `_slope` can have anything to say: asked twice for every request, and almost always no."""
    if slope.limit_nano_usd_per_min is not None:
        return bool(spend.recent)
    if slope.times_own is None or spend.earlier_minutes < slope.history_min:
        return False
    return spend.most_nano_usd >= slope.least_nano_usd_per_min * slope.over_min


def _slope(spend: Spend, slope: SpendSlope, now_ms: int) -> list[Verdict]:
    found: list[Verdict] = []
    minute = now_ms // _MIN_MS
    in_window = sum([cost for at, cost in spend.recent if at > minute - slope.over_min])
    per_min = in_window // slope.over_min
    if per_min < slope.least_nano_usd_per_min and slope.limit_nano_usd_per_min is None:
        return found
    told = f"this task spends ${usd_text(per_min)} per minute"
    evidence: dict[str, str | int] = {"nano_usd_per_min": per_min, "over_min": slope.over_min}
    episode = str(now_ms // _HOUR_MS)
    limit = slope.limit_nano_usd_per_min
    if limit is not None and per_min > limit:
        found.append(
            _verdict(
                Breaker.SPEND_SLOPE,
                slope.mode,
                f"limit/{episode}",
                {**evidence, "limit_nano_usd_per_min": limit},
                f"{told}, and its limit is ${usd_text(limit)}",
                retry_after_s=60,
            )
        )
    if slope.times_own is None or spend.earlier_minutes < slope.history_min:
        return found
    own = spend.earlier_nano_usd // spend.earlier_minutes
    if per_min >= slope.least_nano_usd_per_min and per_min > own * slope.times_own:
        found.append(
            _verdict(
                Breaker.SPEND_SLOPE,
                slope.mode,
                f"own/{episode}",
                {**evidence, "own_nano_usd_per_min": own},
                f"{told}, more than {slope.times_own} times its own average of ${usd_text(own)}",
                retry_after_s=60,
            )
        )
    return found
