"""A seed -> what happens when. Pure: the same seed is the same schedule, and a part of one is one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from random import Random
from typing import Any

#: 2030-01-07, a Monday: an edge of hour, day and week in UTC.
EDGE_MS = 1_893_974_400_000
SKEW_MS = 300_000
TEAMS = ("red", "blue")
#: (name, team)
KEYS = (("k1", "red"), ("k2", "red"), ("k3", "blue"))
#: Tasks that nobody declares; higher numbers are declared ones.
TASKS = 3


class Ends(StrEnum):
    """How a call ends at the provider, and what the gateway learns of it."""

    EXACT = "exact"  # billed, and the bill is known
    ESTIMATED = "estimated"  # billed, and the gateway's guess is at least the bill
    CUT = "cut"  # billed, and nothing is known: charged at the hold
    BREACH = "breach"  # billed more than was held
    TURNED_AWAY = "turned_away"  # it arrived, was not billed, and that is known; another attempt follows
    UNSENT = "unsent"  # nothing left the gateway, and that is known


@dataclass(frozen=True, slots=True)
class Op:
    at_s: float
    number: int  # stays when other ops are taken out of the schedule


@dataclass(frozen=True, slots=True)
class Call(Op):
    """One request. `least` <= `most` is what it may hold; the provider bills `share` of what was held."""

    replica: int
    key: int
    task: int
    below: int  # levels below the task: a child that the client names, or a child of that
    names_parent: bool  # if it is below
    most: int
    least: int
    share: float
    ends: Ends
    takes_s: float
    settles: bool  # waits for its settlement (else it is posted)
    leaves_after_s: float | None  # the client goes away, if the hold is not answered by then
    asked_twice: bool  # the same reserve comes twice
    again: tuple[tuple[int, float], ...]  # the same settlement comes again: replica, seconds after the end
    proof_after_s: float | None  # the true bill turns up
    landing: bool  # the last answer of a task whose money is used up


@dataclass(frozen=True, slots=True)
class Crash(Op):
    replica: int
    down_s: float
    term: bool = False  # asked to stop, and drained


@dataclass(frozen=True, slots=True)
class Pause(Op):
    replica: int
    for_s: float
    succeeded: bool = False  # another process is started under its name meanwhile


@dataclass(frozen=True, slots=True)
class Leap(Op):
    """All replicas stand still, and the clock goes on."""

    for_s: float


@dataclass(frozen=True, slots=True)
class Outage(Op):
    for_s: float
    stall: bool  # the store does not answer, instead of breaking connections


@dataclass(frozen=True, slots=True)
class Storm(Op):
    """The store's weather for a while: fields of `store.Weather`."""

    for_s: float
    weather: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class BadDisk(Op):
    replica: int
    for_s: float
    full: bool


@dataclass(frozen=True, slots=True)
class SetLimit(Op):
    budget: int
    limit: int
    for_s: float | None  # None = for good


@dataclass(frozen=True, slots=True)
class Remove(Op):
    budget: int


@dataclass(frozen=True, slots=True)
class Revoke(Op):
    key: int


@dataclass(frozen=True, slots=True)
class Declare(Op):
    """A task with a key of its own; `parent`: a slice of that one's budgets."""

    parent: int | None
    budgets: tuple[tuple[str, int], ...]  # unit, limit


@dataclass(frozen=True, slots=True)
class Steer(Op):
    """Something happens to a declared task."""

    task: int
    how: str  # end | pause | resume | limit
    limit: int


@dataclass(frozen=True, slots=True)
class BudgetPlan:
    scope: str
    unit: str
    window: str
    zone: str
    limit: int
    on_exceed: str
    mode: str


@dataclass(frozen=True, slots=True)
class Schedule:
    seed: int
    replicas: int
    embedded: bool  # one process that owns its database (SQLite)
    start_ms: int
    skews_ms: tuple[int, ...]
    budgets: tuple[BudgetPlan, ...]
    tasks: tuple[Declare, ...]
    task_limit: int | None
    team_task_limit: int | None
    keys_checked: bool  # replicas keep a key store
    grace_s: float
    reap_every_s: float
    spread: float  # share of transactions whose statements are spread over time
    ops: tuple[Op, ...]

    def with_ops(self, ops: Sequence[Op]) -> Schedule:
        return replace(self, ops=tuple(ops))


def schedule_of(seed: int, hostile: bool | None = None) -> Schedule:
    """`hostile`: everything goes wrong all the time (None = the seed decides)."""
    rng = Random(f"schedule {seed}")
    hostile = rng.random() < 0.2 if hostile is None else hostile
    embedded = rng.random() < 0.15 and not hostile
    replicas = 1 if embedded else rng.choice((2, 2, 3))
    length_s = rng.choice((1.0, 3.0, 6.0, 12.0))
    task_limit = rng.choice((None, None, None, _limit(rng)))
    schedule = Schedule(
        seed=seed,
        replicas=replicas,
        embedded=embedded,
        start_ms=EDGE_MS - rng.choice((3_600_000 * 5, int(length_s * 500), int(length_s * 200))),
        skews_ms=tuple(rng.randint(-SKEW_MS, SKEW_MS) for _ in range(replicas)),
        budgets=_budgets(rng),
        tasks=_tasks(rng) if rng.random() < 0.4 else (),
        task_limit=task_limit,
        team_task_limit=rng.choice((None, None, None, _limit(rng))),
        keys_checked=rng.random() < 0.4,
        grace_s=rng.choice((0.5, 5.0, 30.0)),
        reap_every_s=rng.choice((1.0, 5.0, 20.0)),
        spread=1.0 if hostile else rng.choice((0.0, 0.1, 0.5, 1.0)),
        ops=(),
    )
    count = 30 if hostile else rng.choice((30, 30, 45, 45, 60, 60, 90, 120, 200))
    hostility = 0.3 if hostile else rng.choice((0.0, 0.05, 0.1, 0.2))
    ops: list[Op] = []
    if hostile:
        ops.append(Storm(0.0, 0, length_s, _TEMPEST))
    elif rng.random() < 0.4:
        ops.append(Storm(0.0, 0, length_s, _weather(rng)))
    while len(ops) < count:
        at_s = round(rng.random() * length_s, 4)
        if rng.random() < hostility:
            ops.append(_fault(rng, schedule, at_s, len(ops), length_s))
        elif rng.random() < 0.08:
            ops.append(_change(rng, schedule, at_s, len(ops)))
        elif rng.random() < 0.05:
            ops += _herd(rng, schedule, at_s, len(ops), min(40, count - len(ops)))
        else:
            ops.append(_call(rng, schedule, at_s, len(ops)))
    return schedule.with_ops(sorted(ops, key=lambda op: op.at_s))


def _limit(rng: Random, unit: str = "usd") -> int:
    return rng.choice((3, 10, 30) if unit == "calls" else (300, 1_000, 3_000, 10_000))


def _budgets(rng: Random) -> tuple[BudgetPlan, ...]:
    scopes = rng.sample(
        ("tenant:default", "team:red", "team:red", "key:k1", "task:t0", "task:t1"), rng.randint(1, 3)
    )
    windows = (
        ("lifetime", "UTC"),
        ("lifetime", "UTC"),
        ("hour", "UTC"),
        ("day", "UTC"),
        ("day", "Asia/Kolkata"),
        ("60s", "UTC"),
        ("2m", "UTC"),
    )
    plans: dict[tuple[str, ...], BudgetPlan] = {}
    for scope in scopes:
        window, zone = ("lifetime", "UTC") if scope.startswith("task:") else rng.choice(windows)
        unit = rng.choice(("usd", "usd", "usd", "input_tokens", "output_tokens", "calls"))
        on_exceed = rng.choice(("error", "error", "error", "error", "summarize", "warn"))
        mode = "shadow" if rng.random() < 0.05 else "enforce"
        plans[scope, unit, window, zone] = BudgetPlan(
            scope, unit, window, zone, _limit(rng, unit), on_exceed, mode
        )
    return tuple(plans.values())


def _tasks(rng: Random) -> tuple[Declare, ...]:
    """A tree: a task, its children, and their children."""
    units = ("usd",) if rng.random() < 0.6 else ("usd", "calls")
    whole = {"usd": rng.choice((1_000, 4_000)), "calls": rng.choice((10, 40))}
    return tuple(
        Declare(0.0, -1, parent, tuple((unit, whole[unit] // part) for unit in units))
        for parent, part in ((None, 1), (0, 4), (0, 3), (1, 8))[: rng.randint(2, 4)]
    )


def _call(rng: Random, s: Schedule, at_s: float, number: int) -> Call:
    most = rng.choice((50, 100, 100, 200, 400))
    family = Random(f"{s.seed} family {number}")
    return Call(
        at_s=at_s,
        number=number,
        replica=rng.randrange(s.replicas),
        key=rng.randrange(len(KEYS)),
        task=TASKS + rng.randrange(9) if s.tasks and rng.random() < 0.6 else rng.randrange(TASKS),
        below=(1 + (family.random() < 0.4)) * (rng.random() < 0.2),
        names_parent=family.random() < 0.7,
        most=most,
        least=rng.choice((most, most, most // 2, 1)),
        share=rng.choice((0.0, 0.1, 0.5, 0.9, 1.0)),
        ends=rng.choices(list(Ends), (60, 8, 12, 2, 12, 6))[0],
        takes_s=rng.choice((0.005, 0.05, 0.3, 1.0, 4.0)) * (0.5 + rng.random()),
        settles=rng.random() < 0.3,
        leaves_after_s=rng.random() * 0.01 if rng.random() < 0.08 else None,
        asked_twice=rng.random() < 0.05,
        again=tuple(
            (rng.randrange(s.replicas), rng.choice((0.0, 0.001, 0.02, 1.0)))
            for _ in range(rng.choice((0, 0, 0, 0, 0, 1, 2)))
        ),
        proof_after_s=rng.choice((0.001, 0.1, 3.0)) if rng.random() < 0.25 else None,
        landing=rng.random() < 0.03,
    )


def _herd(rng: Random, s: Schedule, at_s: float, number: int, n: int) -> list[Op]:
    """The same wish from everywhere at once."""
    call = replace(_call(rng, s, at_s, number), leaves_after_s=None)
    return [
        replace(call, number=number + i, replica=rng.randrange(s.replicas), task=rng.randrange(TASKS))
        for i in range(rng.randint(5, max(5, n)))
    ]


def _change(rng: Random, s: Schedule, at_s: float, number: int) -> Op:
    if s.tasks and rng.random() < 0.5:
        task = rng.randrange(9)
        if rng.random() < 0.3:
            return Declare(
                at_s, number, task, tuple((unit, limit // 5) for unit, limit in s.tasks[0].budgets)
            )
        return Steer(
            at_s, number, task, rng.choice(("end", "pause", "resume", "limit")), rng.choice((0, 200, 1_000))
        )
    roll = rng.random()
    if roll < 0.15:
        return Revoke(at_s, number, rng.randrange(len(KEYS)))
    budget = rng.randrange(len(s.budgets))
    if roll < 0.22:
        return Remove(at_s, number, budget)
    limit = rng.choice((0, _limit(rng, s.budgets[budget].unit)))
    return SetLimit(at_s, number, budget, limit, rng.choice((0.2, 1.0, 5.0)) if rng.random() < 0.2 else None)


def _fault(rng: Random, s: Schedule, at_s: float, number: int, length_s: float) -> Op:
    replica = rng.randrange(s.replicas)
    brief = rng.choice((0.05, 0.5, 2.0, 3.0))
    makers: list[tuple[int, Callable[[], Op]]] = [
        (30, lambda: Storm(at_s, number, rng.choice((0.5, 2.0, length_s)), _weather(rng))),
        (
            20,
            lambda: Crash(at_s, number, replica, rng.choice((0.0, 0.1, 1.0, 20.0)), term=rng.random() < 0.15),
        ),
        (
            16,
            lambda: Pause(
                at_s,
                number,
                replica,
                rng.choice((0.2, 2.5, 31.0, 70.0)),
                not s.embedded and rng.random() < 0.5,
            ),
        ),
        (6, lambda: Leap(at_s, number, rng.choice((5.0, 31.0, 62.0, 130.0, 3_700.0)))),
        (14, lambda: Outage(at_s, number, brief, stall=rng.random() < 0.5)),
        (8, lambda: BadDisk(at_s, number, replica, brief, full=rng.random() < 0.5)),
    ]
    return rng.choices([make for _, make in makers], [w for w, _ in makers])[0]()


_TEMPEST = (
    ("broken", 0.03),
    ("conflict", 0.03),
    ("lost_before", 0.1),
    ("lost_after", 0.1),
    ("late", 0.25),
    ("late_s", 5.0),
)


def _weather(rng: Random) -> tuple[tuple[str, float], ...]:
    kinds: dict[str, Callable[[], tuple[tuple[str, float], ...]]] = {
        "broken": lambda: (("broken", rng.choice((0.05, 0.3))),),
        "conflict": lambda: (("conflict", rng.choice((0.05, 0.3, 0.8))),),
        "lost_before": lambda: (("lost_before", rng.choice((0.1, 0.5))),),
        "lost_after": lambda: (("lost_after", rng.choice((0.1, 0.5))),),
        "late": lambda: (("late", rng.choice((0.1, 0.5))), ("late_s", rng.choice((0.01, 0.5, 8.0, 8.0)))),
        "slow": lambda: (("spread", 1.0), ("round_trip_s", rng.choice((0.005, 0.05, 0.3)))),
    }
    names = rng.sample(sorted(kinds), rng.choice((1, 1, 2, 3)))
    return tuple(pair for name in names for pair in kinds[name]())


def text_of(op: Op) -> str:
    """One line, without what is not the case."""
    fields: dict[str, Any] = {name: getattr(op, name) for name in op.__slots__}
    said = ", ".join(f"{k}={v}" for k, v in fields.items() if v not in (None, False, ()))
    return f"#{op.number} {type(op).__name__}({said})"
