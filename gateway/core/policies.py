"""Three ways to treat a rule that wants a cheaper tier than the one that holds the cache, and what each would have cost.

    stay    never leave home for a cheaper tier
    follow  always do as the rules say
    weigh   compare what a switch saves with what it costs (`core.switching`)

From the first step at which they part, all three are played along with a thread, in imagination: each has deployments
that hold what it would have left there, and pays for every answer by the same formula and with the tokens that were
counted. Kept for all runs of a kind, these bills say which policy a run of it starts with. Within a run they say what
staying has passed up so far: stay's bill over follow's, since it was last lowest. That counts for a switch, as the rent
paid so far does for buying skis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from gateway.core.switching import PICO_PER_NANO, Arithmetic, Pace, Side, Terms, Warm, turn_saving, weigh

_SETTLES = 4.0  # turns after which a switch no longer counts as recent
#: What was passed up counts half: it is known in hindsight only, and the run may have changed since.
_RENT = 0.5
_HELD_MAX = 16
#: Another policy than weighing has to be cheaper by this share, over one more than the runs in which they parted.
_CHANCE = 0.1


class Policy(StrEnum):
    WEIGH = "weigh"
    STAY = "stay"
    FOLLOW = "follow"


@dataclass(slots=True)
class Bills:
    """What the policies would have cost from where they parted, in nano-dollars, and in how many runs they did. Sums
    only, so what two processes have seen may be added."""

    weigh: int = 0
    stay: int = 0
    follow: int = 0
    runs: int = 0

    def observe(self, more: Bills) -> None:
        self.weigh += more.weigh
        self.stay += more.stay
        self.follow += more.follow
        self.runs += more.runs

    def counts(self) -> dict[str, int]:
        """By "parted" (runs) and "paid <policy>"; `set_counts` takes the same."""
        paid = {"weigh": self.weigh, "stay": self.stay, "follow": self.follow}
        return (
            {"parted": self.runs, **{f"paid {policy}": n for policy, n in paid.items()}} if self.runs else {}
        )

    def set_counts(self, counts: Mapping[str, int]) -> None:
        """What all replicas have counted."""
        self.runs = counts.get("parted", 0)
        self.weigh, self.stay, self.follow = (
            counts.get(f"paid {policy}", 0) for policy in ("weigh", "stay", "follow")
        )

    @property
    def best(self) -> Policy:
        """Weighing, unless another would have cost less by more than a few runs may show by chance."""
        least = min(self.stay, self.follow)
        if self.weigh <= least * (1.0 + _CHANCE / (self.runs + 1)):
            return Policy.WEIGH
        return Policy.STAY if self.stay == least else Policy.FOLLOW

    @property
    def text(self) -> str:
        if not self.weigh:
            return "nothing is known of such runs yet"
        return (
            f"in {self.runs} such runs weighing would have cost {_usd(self.weigh)}, staying {_usd(self.stay)}, "
            f"following the rules {_usd(self.follow)}"
        )


@dataclass(frozen=True, slots=True)
class Choice:
    """What is done about a cheaper target, by which policy and why."""

    goes: bool
    policy: Policy
    why: str  # the bills by which the policy was chosen
    arithmetic: Arithmetic

    @property
    def text(self) -> str:
        return f"{self.arithmetic.text}; policy {self.policy}: {self.why}"


class Place:
    """Where a thread is under one policy, and what is warm for it."""

    __slots__ = ("held", "home", "low_pico_usd", "since_switch", "terms")

    def __init__(self, home: str, terms: Terms, held: dict[str, Warm], low_pico_usd: int = 0) -> None:
        self.home, self.terms, self.held = home, terms, held
        self.since_switch = 1e9
        #: the least by which stay's bill was over follow's since the last switch
        self.low_pico_usd = low_pico_usd

    def goes(self, name: str, terms: Terms, now_s: float, input_tokens: int, output_tokens: int) -> int:
        """An answer comes from there; pico-dollars."""
        held = min(input_tokens, self.held.get(name, Warm()).at(now_s))
        self.held[name] = Warm(input_tokens, now_s + terms.life_s)
        while len(self.held) > _HELD_MAX:
            self.held.pop(next(iter(self.held)))
        self.since_switch = self.since_switch + 1.0 if name == self.home else 0.0
        self.home, self.terms = name, terms
        return held * terms.read + (input_tokens - held) * terms.write + output_tokens * terms.output


class Imagined:
    """One thread under each policy. `asked` decides for each, `answered` charges them."""

    __slots__ = ("_ahead_pico_usd", "_home", "_low_pico_usd", "_next", "_now_s", "_places")

    def __init__(self, home: str, terms: Terms, held: dict[str, Warm]) -> None:
        self._places = {policy: Place(home, terms, dict(held)) for policy in Policy}
        self._ahead_pico_usd = 0  # stay's bill over follow's
        self._home, self._low_pico_usd = home, 0  # of the thread as it really goes
        self._next: dict[Policy, tuple[str, Terms]] = {}
        self._now_s = 0.0

    @property
    def rent_nano_usd(self) -> int:
        """What staying has passed up since the thread's last switch."""
        return self._rent(self._low_pico_usd)

    def _rent(self, low_pico_usd: int) -> int:
        return round(_RENT * (self._ahead_pico_usd - low_pico_usd) / PICO_PER_NANO)

    def asked(
        self,
        names: Sequence[str],
        terms: Terms,
        pace: Pace,
        now_s: float,
        *,
        always: bool = False,
        rewritten: bool = False,
    ) -> None:
        """The rules want the first of `names` (at these terms) now, or any other of them that is home already.
        `always`: whatever it costs. `rewritten`: no cache holds the thread any more."""
        self._now_s = now_s
        for policy, place in self._places.items():
            if rewritten:
                place.held.clear()
            away = place.home not in names
            if away and (always or self._leaves(policy, place, names[0], terms, pace)):
                self._next[policy] = (names[0], terms)
            else:
                self._next[policy] = (place.home, place.terms)

    def bound(self, now_s: float) -> None:
        """Nobody may go anywhere with this request."""
        self._now_s = now_s
        self._next = {policy: (place.home, place.terms) for policy, place in self._places.items()}

    def _leaves(self, policy: Policy, place: Place, name: str, terms: Terms, pace: Pace) -> bool:
        if policy is Policy.FOLLOW or turn_saving(place.terms, terms, pace) <= 0:
            return True
        if policy is Policy.STAY:
            return False
        home, target = (
            Side(t, place.held.get(n, Warm())) for n, t in ((place.home, place.terms), (name, terms))
        )
        rent = self._rent(place.low_pico_usd)
        return weigh(
            home, target, pace, self._now_s, rent_nano_usd=rent, unrest=unrest(place.since_switch)
        ).pays

    def answered(self, home: str, input_tokens: int, output_tokens: int) -> Bills:
        """What the answer that really came from `home` would have cost. Nothing for what no rule was asked about."""
        if not self._next:
            return Bills()
        paid = {
            policy: place.goes(*self._next[policy], self._now_s, input_tokens, output_tokens)
            for policy, place in self._places.items()
        }
        self._next.clear()
        self._ahead_pico_usd += paid[Policy.STAY] - paid[Policy.FOLLOW]
        stays, weighs = self._places[Policy.STAY].home, self._places[Policy.WEIGH]
        weighs.low_pico_usd = self._low(weighs.low_pico_usd, weighs.home != stays or not weighs.since_switch)
        self._low_pico_usd = self._low(self._low_pico_usd, home != stays or home != self._home)
        self._home = home
        return Bills(
            *(paid[policy] // PICO_PER_NANO for policy in (Policy.WEIGH, Policy.STAY, Policy.FOLLOW))
        )

    def _low(self, before: int, away: bool) -> int:
        """Nothing is passed up by who has gone; it counts from the least since the return."""
        return self._ahead_pico_usd if away else min(before, self._ahead_pico_usd)


def unrest(turns_since_switch: float) -> float:
    """1 right after a switch, and less with every turn."""
    return max(0.0, 1.0 - turns_since_switch / _SETTLES)


def _usd(nano_usd: int) -> str:
    return f"${nano_usd / 1e9:.4f}"
