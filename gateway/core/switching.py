"""Whether to leave a warm cache: what a switch saves in the turns to come against what it costs to go and to return.

    saving  of one turn at the target, both sides being warm
    going   what the target does not hold yet is written there; home is spared writing what it does not hold
    return  home writes what was added meanwhile, all that it did not hold before, and everything if it has gone cold
    later   further stays, if the target is still warm by then: each catches up with what was added at home

A switch pays when (turns of this stay) x saving + later > going + return, by a margin. Savings that were passed up
(`core.policies`) count in its favour, as the rent paid so far does against the price of skis: a run that outlives what
was expected of it switches in the end.

All rates are pico-dollars per token, amounts nano-dollars, times seconds of one clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import exp

from gateway.core.cache_rules import CacheRule, CacheRules
from gateway.core.catalog import Deployment
from gateway.core.prices import PriceBook

DEFAULT_LIFE_S = 300.0
PICO_PER_NANO = 1_000
#: A switch must pay by this much more than it costs: two estimates that differ by less are the same.
MARGIN = 0.1
#: After a switch the next one has to pay its way there by this factor more, fading with every turn. What the return
#: costs is not counted again: a run that a rule brought home for one turn would stay there for want of it.
RESTLESS = 1.0
#: Tasks have this many turns as far as nobody knows better: one run's weight against what is seen.
PRIOR_TURNS = 12.0
RANGES_MAX = 64  # of steps: runs of 100,000 turns
#: What is usual for a kind of run weighs as much as this many turns, and stretches, of the run itself.
HABIT_TURNS = 10.0
HABIT_STRETCHES = 3.0
TARGETS_MAX = 16


@dataclass(frozen=True, slots=True)
class Terms:
    """What a deployment takes per token, and how long it keeps a prefix after its last use."""

    input: int
    read: int
    write: int
    output: int
    life_s: float = 300.0


def cache_rule_of(known: CacheRules, deployment: Deployment, now_ms: int) -> CacheRule | None:
    provider = deployment.provider
    return known.find(f"{provider.cache_rules or provider.name}/{deployment.upstream_model}", now_ms)


def life_of(rule: CacheRule | None) -> float:
    """Seconds for which a prefix is kept after its last use."""
    lives = rule.lives if rule is not None else ()
    return float(lives[0].life_s) if lives and lives[0].life_s else DEFAULT_LIFE_S


def terms_of(prices: PriceBook, known: CacheRules, deployment: Deployment, now_ms: int) -> Terms | None:
    """What a deployment takes; None without a price."""
    row = prices.find(deployment.price, now_ms)
    if row is None:
        return None
    rates = row.rates
    write = rates.write_5m if rates.prices_writes else rates.input
    life_s = life_of(cache_rule_of(known, deployment, now_ms))
    return Terms(rates.input, rates.read, write, rates.output, life_s)


@dataclass(frozen=True, slots=True)
class Warm:
    """The prefix of one thread that one deployment holds."""

    tokens: int = 0
    until_s: float = 0.0

    def at(self, now_s: float) -> int:
        return self.tokens if now_s < self.until_s else 0


@dataclass(frozen=True, slots=True)
class Side:
    """A deployment as one thread sees it."""

    terms: Terms
    warm: Warm = Warm()


@dataclass(frozen=True, slots=True)
class Pace:
    """How a thread goes on: of one turn, how many are expected after this one, and how often the rule wants what
    it wants now (`share` of the turns, `stretch` turns in a row)."""

    context_tokens: int
    growth_tokens: float
    output_tokens: float
    gap_s: float
    remaining_turns: float
    share: float = 1.0
    stretch_turns: float = 200.0

    def after(self, turns: float) -> Pace:
        return replace(self, context_tokens=self.context_tokens + round(turns * self.growth_tokens))

    @property
    def break_turns(self) -> float:
        """Turns between two stretches."""
        return self.stretch_turns * (1.0 - self.share) / self.share


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """The decision with its numbers, for people and the ledger. `later` is what further stays are worth now, `rent`
    the savings passed up so far."""

    pays: bool
    turns: float  # of this stay
    saving_nano_usd: int  # of one turn
    going_nano_usd: int
    return_nano_usd: int
    later_nano_usd: int = 0
    rent_nano_usd: int = 0

    @property
    def net_nano_usd(self) -> int:
        """What the switch is expected to save, all in all; negative: to cost."""
        gained = round(self.turns * self.saving_nano_usd) + self.later_nano_usd
        return gained - self.going_nano_usd - self.return_nano_usd

    @property
    def text(self) -> str:
        later = f" + {_usd(self.later_nano_usd)} later" if self.later_nano_usd else ""
        rent = f" + {_usd(self.rent_nano_usd)} passed up" if self.rent_nano_usd else ""
        return (
            f"{self.turns:.1f} turns x {_usd(self.saving_nano_usd)}{later}{rent} against "
            f"{_usd(self.going_nano_usd)} to go and {_usd(self.return_nano_usd)} to return"
        )


def weigh(
    home: Side, target: Side, pace: Pace, now_s: float, *, rent_nano_usd: int = 0, unrest: float = 0.0
) -> Arithmetic:
    """Compare staying at `home` with this turn, and those like it to come, at `target`.

    `unrest` is 1 right after a switch and fades: hysteresis.
    """
    old = max(0.0, pace.context_tokens - pace.growth_tokens)
    missing_here = max(0.0, old - home.warm.at(now_s))
    missing_there = max(0.0, old - target.warm.at(now_s))
    going = missing_there * _premium(target.terms) - missing_here * _premium(home.terms)
    more, goes_on = pace.stretch_turns - 1.0, pace.remaining_turns
    turns = 1.0 + (goes_on * more / (goes_on + more) if goes_on + more else 0.0)
    # The history grows while the task is away, and with it what each turn saves.
    saving = turn_saving(home.terms, target.terms, pace.after(turns / 2))
    comes_back = goes_on / (goes_on + pace.stretch_turns)
    back = missing_here * home.terms.write + turns * pace.growth_tokens * home.terms.write
    back += (old - missing_here) * _premium(home.terms) * _cold(home.terms, turns * pace.gap_s)
    back *= comes_back
    turns_later = pace.share * max(0.0, goes_on - turns)
    still_warm = 1.0 - _cold(target.terms, pace.break_turns * pace.gap_s)
    later = (
        still_warm * turns_later * max(0.0, visit_saving(home.terms, target.terms, pace.after(goes_on / 2)))
    )
    cost = going + back
    gained = turns * saving + later + rent_nano_usd * PICO_PER_NANO
    margin = MARGIN * max(cost, 0.0) + RESTLESS * unrest * max(going, 0.0)
    return Arithmetic(
        saving > 0 and gained > cost + margin,
        turns,
        round(saving / PICO_PER_NANO),
        round(going / PICO_PER_NANO),
        round(back / PICO_PER_NANO),
        round(later / PICO_PER_NANO),
        rent_nano_usd,
    )


def turn_saving(home: Terms, target: Terms, pace: Pace) -> float:
    """Pico-dollars that one turn costs less at the target, both being warm."""
    old = max(0.0, pace.context_tokens - pace.growth_tokens)
    return (
        old * (home.read - target.read)
        + pace.growth_tokens * (home.write - target.write)
        + pace.output_tokens * (home.output - target.output)
    )


def visit_saving(home: Terms, target: Terms, pace: Pace) -> float:
    """The same for a run that goes to and fro: both sides catch up with what was added at the other."""
    old = max(0.0, pace.context_tokens - pace.growth_tokens)
    apart = pace.break_turns / pace.stretch_turns
    saving = turn_saving(home, target, pace) - pace.growth_tokens * (home.write + apart * target.write)
    gone_cold = _cold(home, pace.stretch_turns * pace.gap_s)
    return saving - gone_cold * old * _premium(home) / pace.stretch_turns


def _cold(terms: Terms, away_s: float) -> float:
    """The chance that a prefix is forgotten before one is back, when stays are `away_s` on average: of stretches that
    may end with any turn, some last much longer than their mean."""
    return exp(-terms.life_s / away_s) if away_s > 0.0 else 0.0


def _premium(terms: Terms) -> int:
    """What a token costs more that is written instead of read."""
    return max(0, terms.write - terms.read)


@dataclass(frozen=True, slots=True)
class Habit:
    """How often the rules want one target, in one run or over all runs of a kind: counted, with a prior."""

    asked: int = 0
    wanted: int = 0
    ended: int = 0  # stretches that the rules ended, not the run

    def beside(self, kind: Habit) -> tuple[float, float]:
        """(share of the turns, turns in a row) of this run, with what is usual for its kind as a prior."""
        share = (kind.wanted + 1.0) / (kind.asked + 2.0)
        stretch = (kind.wanted + 3.0) / (kind.ended + 1.0)
        return (
            (self.wanted + HABIT_TURNS * share) / (self.asked + HABIT_TURNS),
            (self.wanted + HABIT_STRETCHES * stretch) / (self.ended + HABIT_STRETCHES),
        )


class Habits:
    """The habits of one run, or of all runs of a kind, by target: a tier or a model."""

    __slots__ = ("_asked", "_ended", "_wanted")

    def __init__(self) -> None:
        self._asked = 0
        self._wanted: dict[str, int] = {}
        self._ended: dict[str, int] = {}

    def saw(self, target: str, before: str) -> None:
        """The rules want `target` now; `before` is what they wanted last, "" at the beginning."""
        self._asked += 1
        if target in self._wanted or len(self._wanted) < TARGETS_MAX:
            self._wanted[target] = self._wanted.get(target, 0) + 1
        if before != target and before in self._wanted:
            self._ended[before] = self._ended.get(before, 0) + 1

    def of(self, target: str) -> Habit:
        return Habit(self._asked, self._wanted.get(target, 0), self._ended.get(target, 0))

    def counts(self) -> dict[str, int]:
        """By "asked", "wanted <target>" and "ended <target>"; `set_counts` takes the same."""
        wanted = {f"wanted {target}": n for target, n in self._wanted.items()}
        return {"asked": self._asked, **wanted, **{f"ended {target}": n for target, n in self._ended.items()}}

    def set_counts(self, counts: Mapping[str, int]) -> None:
        """What all replicas have counted; of other names than those of `counts` nothing is taken."""
        self._asked = counts.get("asked", 0)
        for name, n in counts.items():
            what, _, target = name.partition(" ")
            of = self._wanted if what == "wanted" else self._ended if what == "ended" else None
            if of is not None and (target in of or len(of) < TARGETS_MAX):
                of[target] = n


class Lengths:
    """How far the runs of one kind (of a key and client) go: by ranges of steps, each a quarter of an octave, how many
    runs came into a range and how many turns they had there. Counts only, so those of two processes may be added."""

    __slots__ = ("reached", "turns")

    def __init__(self) -> None:
        self.reached: list[int] = []
        self.turns: list[int] = []

    def saw(self, step: int) -> None:
        """A run has its turn `step` (1 = its first)."""
        at = _range(step)
        if at >= RANGES_MAX:
            return
        missing = at + 1 - len(self.turns)
        if missing > 0:
            self.turns += [0] * missing
            self.reached += [0] * missing
        self.turns[at] += 1
        self.reached[at] += step == _first(at)

    def remaining(self, step: int) -> float:
        """Turns expected after turn `step`, which has been counted: as many as other runs had that came as far, and one
        more run by the prior. Runs that have come far tend to go on, so the prior does not fall below a third of what
        is done."""
        prior = max(PRIOR_TURNS - 1.0, step / 3.0)
        at = _range(step)
        if at >= len(self.turns):
            return prior
        done = step + 1 - _first(at)
        others = max(0, self.reached[at] - 1)
        here = max(0, self.turns[at] - done - others * done)
        return (here + sum(self.turns[at + 1 :]) + prior) / (others + 1.0)

    def counts(self) -> dict[str, int]:
        """By "turns" (all of them), "turns <range>" and "reached <range>"; `set_counts` takes the same."""
        turns = {f"turns {at}": n for at, n in enumerate(self.turns) if n}
        return {
            "turns": sum(self.turns),
            **turns,
            **{f"reached {at}": n for at, n in enumerate(self.reached) if n},
        }

    def set_counts(self, counts: Mapping[str, int]) -> None:
        """What all replicas have counted."""
        for what, of in (("turns", self.turns), ("reached", self.reached)):
            of[:] = [counts.get(f"{what} {at}", 0) for at in range(RANGES_MAX)]


def _range(step: int) -> int:
    """1 to 7 for themselves, then four ranges between powers of two."""
    if step < 8:
        return step
    octave = step.bit_length()
    return 8 + 4 * (octave - 4) + (step >> (octave - 3) & 3)


def _first(at: int) -> int:
    """The first step of a range."""
    if at < 8:
        return at
    octave, quarter = divmod(at - 8, 4)
    return (4 + quarter) << (octave + 1)


def _usd(nano_usd: int) -> str:
    return f"${nano_usd / 1e9:.6f}"
