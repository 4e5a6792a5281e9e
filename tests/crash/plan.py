"""What goes wrong in a round, from its seed. A round is a second or two of load on three gateways."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from gateway.crash import Point
from tests.support.commit_cutter import Cut
from tests.support.relay import Break

GATEWAYS = 3
POINTS = tuple(Point)
#: It takes a lease, which is half a minute. So do the two that come back after theirs.
STAYS_AWAY_EVERY = 2 * len(POINTS)
PAUSED_AT, APART_AT = 3, 3 + len(POINTS)
_JOURNAL = frozenset(p for p in Point if p.startswith(("journal", "replay")))
REAP = frozenset(p for p in Point if p.startswith("reap"))


class What(StrEnum):
    KILL = "kill -9"
    KILL_AT = "kill -9 at"
    RESTART_POSTGRES = "postgres stopped"
    CUT = "connection cut at COMMIT"
    FLUSH_REDIS = "redis flushed"
    KILL_REDIS = "redis killed"
    PAUSE = "SIGSTOP"
    POSTGRES_WAY = "way to postgres"
    REDIS_WAY = "way to redis"


@dataclass(frozen=True, slots=True)
class Fault:
    """`after_s` from the start of the load; `lasts_s` until what stopped comes back, where it does by itself."""

    what: What
    after_s: float
    gateway: int = 0
    point: Point | None = None
    cut: Cut = Cut.LOST
    times: int = 1
    lasts_s: float = 0.0
    #: It lasts until the gateway's lease has run out and the others have charged what it held.
    past_lease: bool = False
    how: Break = Break.CUT

    def __str__(self) -> str:
        said = f"{self.after_s:.2f} s: {self.what}"
        match self.what:
            case What.KILL:
                return f"{said}, gateway {self.gateway}"
            case What.KILL_AT:
                return f"{said} {self.point}, gateway {self.gateway}"
            case What.CUT:
                return f"{said}, gateway {self.gateway}, {self.times} times, {self.cut}"
            case What.RESTART_POSTGRES:
                return f"{said} for {self.lasts_s:.2f} s"
            case What.PAUSE | What.POSTGRES_WAY | What.REDIS_WAY:
                way = "" if self.what is What.PAUSE else f" {self.how}"
                lasts = "past its lease" if self.past_lease else f"for {self.lasts_s:.2f} s"
                return f"{said}{way}, gateway {self.gateway}, {lasts}"
            case _:
                return said


@dataclass(frozen=True, slots=True)
class Round:
    seed: int
    faults: tuple[Fault, ...]
    calls: int
    at_once: int
    leaving: float  # the share of clients that do not stay to the end
    #: This gateway is not started again before its lease has run out and the others have charged what it held.
    stays_away: int | None = None

    @property
    def reaping(self) -> Point | None:
        """The point in the reaper at which whoever reaps dies."""
        return next((f.point for f in self.faults if f.point in REAP), None)


def plan(seed: int) -> Round:
    """Successive seeds go through all named points; each has a death at one of them, and most have more."""
    rnd = random.Random(f"crash {seed}")
    point = POINTS[seed % len(POINTS)]
    victim = rnd.randrange(GATEWAYS)
    faults = [Fault(What.KILL_AT, rnd.uniform(0.1, 0.7), victim, point)]
    if point in _JOURNAL:  # nothing reaches the journal while the store is well
        faults.append(Fault(What.RESTART_POSTGRES, faults[0].after_s + 0.05, lasts_s=rnd.uniform(0.5, 1.2)))
    elif point in REAP:  # there must be something to reap
        faults.append(Fault(What.KILL, rnd.uniform(0.3, 0.8), (victim + 1) % GATEWAYS))
    for _ in range(rnd.randrange(3)):
        faults.append(_another(rnd))
    faults += _standstill(seed, {f.gateway for f in faults if f.what in (What.KILL, What.KILL_AT)})
    faults.sort(key=lambda f: f.after_s)
    away = seed % STAYS_AWAY_EVERY == POINTS.index(Point.AMID_STREAM)
    return Round(
        seed,
        tuple(faults),
        calls=rnd.randrange(120, 240),
        at_once=rnd.choice((8, 16, 32)),
        leaving=rnd.choice((0.1, 0.3)),
        stays_away=victim if away else None,
    )


def _standstill(seed: int, killed: Collection[int]) -> list[Fault]:
    """A process that stands still and wakes, or one whose network is broken for a while."""
    rnd = random.Random(f"standstill {seed}")
    gateway = rnd.randrange(GATEWAYS)
    at = seed % STAYS_AWAY_EVERY
    if at == PAUSED_AT:
        return [Fault(What.PAUSE, rnd.uniform(0.1, 0.5), gateway, past_lease=True)]
    if at == APART_AT:
        # One that lives on: a gateway that died has nothing to settle late.
        gateway = next((g for g in range(GATEWAYS) if g not in killed), gateway)
        how = Break.SILENT
        return [Fault(What.POSTGRES_WAY, rnd.uniform(0.1, 0.5), gateway, how=how, past_lease=True)]
    what = rnd.choice((None, What.PAUSE, What.POSTGRES_WAY, What.REDIS_WAY))
    if what is None:
        return []
    lasts_s, how = rnd.uniform(0.2, 3.0), rnd.choice(tuple(Break))
    return [Fault(what, rnd.uniform(0.05, 1.0), gateway, lasts_s=lasts_s, how=how)]


def _another(rnd: random.Random) -> Fault:
    what = rnd.choice(
        (What.KILL, What.RESTART_POSTGRES, What.CUT, What.CUT, What.FLUSH_REDIS, What.KILL_REDIS)
    )
    return Fault(
        what,
        rnd.uniform(0.05, 1.5),
        gateway=rnd.randrange(GATEWAYS),
        cut=rnd.choice(tuple(Cut)),
        times=rnd.randrange(1, 4),
        lasts_s=rnd.uniform(0.1, 1.0),
    )
