"""What one process remembers of each run for routing: its pace, its threads, and which deployment holds what.

Bounded, in memory, without IO. What is forgotten, or what another replica has seen, costs a worse choice and never
a guarantee. A thread is named by the run's id and the link of its prefix chain behind tools and first message, so
that title calls and sub-agents, which share a task's id, have a warmth of their own.
"""

from __future__ import annotations

import functools
import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from gateway.core.policies import Bills, Choice, Imagined, Policy, unrest
from gateway.core.rules import TaskFacts
from gateway.core.switching import Habits, Lengths, Pace, Side, Terms, Warm, weigh

RUNS_MAX = 20_000
THREADS_MAX = 8
KINDS_MAX = 10_000
_SCOPES_MAX = 50_000
#: A person who spoke this lately is waiting.
INTERACTIVE_MS = 600_000
#: Weight of the newest observation in a moving average.
_NEW = 0.3
_START_OUTPUT = 400.0
_START_GROWTH = 800.0
_START_GAP_S = 10.0
_PAUSE_S = 240.0
_RATIO_MAX = 4.0  # tokenizers and scripts differ by no more

#: First or last words of the names of tools that change nothing (clients captured November 2026).
_READING_FIRST = frozenset(
    {"cat", "fetch", "find", "get", "glob", "grep", "list", "ls", "open", "read", "search", "view"}
)
_READING_LAST = frozenset({"fetch", "grep", "list", "read", "search"})
_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")


@functools.lru_cache(maxsize=4_096)
def _reads(tool: str) -> bool:
    words = [word.lower() for word in _WORDS.findall(tool)]
    return bool(words) and (words[0] in _READING_FIRST or words[-1] in _READING_LAST)


def only_reads(tools: Iterable[str]) -> bool:
    """All of the tools read or list, as far as their names tell; False for none."""
    names = tuple(tools)
    return bool(names) and all(map(_reads, names))


class Held(msgspec.Struct, frozen=True, gc=False):
    """What one deployment holds of a thread: the first `segments`, the last of which ends in `link`."""

    tokens: int
    until_s: float
    segments: int
    link: bytes


class Thread:
    """One conversation of a run. `home` names the deployment that answered it last."""

    __slots__ = (
        "context", "gap_s", "growth", "guess", "habits", "held", "home", "imagined", "last_s", "output", "policy",
        "since_switch", "tokens_per_guess", "wanted",
    )  # fmt: skip

    def __init__(self) -> None:
        self.home = ""
        self.held: dict[str, Held] = {}
        self.habits = Habits()
        self.wanted = ""  # what the rules wanted last
        self.policy = Policy.WEIGH
        self.imagined: Imagined | None = None  # from the first step at which policies part
        self.since_switch = 1e9
        self.last_s = 0.0
        self.context, self.guess = 0, 0  # tokens of the last request, and what was guessed from its bytes
        self.output, self.growth, self.gap_s = _START_OUTPUT, _START_GROWTH, _START_GAP_S
        self.tokens_per_guess = 1.0  # what the provider counted, over what was guessed from bytes

    def warm(self, deployment: str, chain: Sequence[bytes]) -> Warm:
        """Nothing if the history has been rewritten since."""
        held = self.held.get(deployment)
        if held is None or len(chain) < held.segments or chain[held.segments - 1] != held.link:
            return Warm()
        return Warm(held.tokens, held.until_s)

    @property
    def seen_to(self) -> int:
        """Segments of the longest request that this process has seen answered."""
        return max((held.segments for held in self.held.values()), default=0)

    def take_over(self, home: str, held: dict[str, Held], context: int, guess: int) -> None:
        """What another process knows better."""
        self.home, self.held, self.context, self.guess = home, held, context, guess

    def came(self, now_s: float) -> None:
        """A request has come."""
        # A long pause makes all caches cold alike, so it says nothing for or against a switch.
        if self.last_s and now_s - self.last_s < _PAUSE_S:
            self.gap_s += _NEW * (now_s - self.last_s - self.gap_s)
        self.last_s = now_s

    def pace(self, guessed_tokens: int, habit: tuple[float, float], remaining: float) -> Pace:
        grown = max(0, guessed_tokens - self.guess) if self.context else guessed_tokens
        context = self.context + round(grown * self.tokens_per_guess)
        return Pace(context, self.growth, self.output, self.gap_s, remaining, *habit)

    def imagine(self, bills: Bills, terms: Terms, home: str) -> None:
        """Begin to play the thread along under each policy: the rules want something cheaper than `home`. The policy
        that has cost least for its kind is in force from now on."""
        held = {name: Warm(held.tokens, held.until_s) for name, held in self.held.items()}
        self.imagined = Imagined(home, terms, held)
        self.policy = bills.best
        bills.runs += 1

    def choose(self, home: Side, target: Side, pace: Pace, now_s: float, bills: Bills) -> Choice:
        """Whether to leave `home` for a cheaper target, by the policy in force."""
        rent = self.imagined.rent_nano_usd if self.imagined is not None else 0
        found = weigh(home, target, pace, now_s, rent_nano_usd=rent, unrest=unrest(self.since_switch))
        goes = found.pays if self.policy is Policy.WEIGH else self.policy is Policy.FOLLOW
        return Choice(goes, self.policy, bills.text, found)

    def answered(
        self, deployment: str, held: Held | None, input_tokens: int, guessed_tokens: int, output_tokens: int
    ) -> None:
        """A deployment has answered, and holds `held` from now on (None = it keeps nothing)."""
        if self.home and self.home != deployment:
            self.since_switch = 0.0
        else:
            self.since_switch += 1.0
        self.home = deployment
        if held is None:
            self.held.pop(deployment, None)
        else:
            self.held[deployment] = held
        if guessed_tokens and input_tokens:
            ratio = min(_RATIO_MAX, max(1 / _RATIO_MAX, input_tokens / guessed_tokens))
            self.tokens_per_guess += (_NEW if self.context else 1.0) * (ratio - self.tokens_per_guess)
        if self.context and input_tokens > self.context:
            self.growth += _NEW * (input_tokens - self.context - self.growth)
        self.context, self.guess = input_tokens, guessed_tokens
        self.output += _NEW * (output_tokens - self.output)


class Run:
    """One task, all threads of it."""

    __slots__ = ("began_ms", "kind", "spent_nano_usd", "spoken_ms", "step", "threads")

    def __init__(self, began_ms: int, kind: str) -> None:
        self.began_ms = began_ms
        self.kind = kind
        self.step = 0
        self.spent_nano_usd = 0
        self.spoken_ms = 0
        self.threads: OrderedDict[bytes, Thread] = OrderedDict()

    def thread(self, name: bytes) -> Thread:
        found = self.threads.get(name)
        if found is None:
            found = self.threads[name] = Thread()
            while len(self.threads) > THREADS_MAX:
                self.threads.popitem(last=False)
        else:
            self.threads.move_to_end(name)
        return found


class Known:
    """What is learned of all runs of one kind: counts and sums."""

    __slots__ = ("bills", "habits", "lengths")

    def __init__(self) -> None:
        self.lengths, self.habits, self.bills = Lengths(), Habits(), Bills()


class Runs:
    """The runs that this process serves, least recently used first out."""

    def __init__(self, *, runs_max: int = RUNS_MAX, kinds_max: int = KINDS_MAX) -> None:
        self._runs: OrderedDict[str, Run] = OrderedDict()
        self._kinds: OrderedDict[str, Known] = OrderedDict()
        self._runs_max, self._kinds_max = runs_max, kinds_max
        self._used: OrderedDict[str, int] = OrderedDict()

    def asked(self, task_id: str, kind: str, now_ms: int, *, spoken: bool = False) -> Run:
        """A request of a run; `kind` is its key and client. `spoken`: a person says something in it."""
        known = self._kinds.get(kind)
        if known is None:
            known = self._kinds[kind] = Known()
            while len(self._kinds) > self._kinds_max:
                self._kinds.popitem(last=False)
        else:
            self._kinds.move_to_end(kind)
        run = self._runs.get(task_id)
        if run is None:
            run = self._runs[task_id] = Run(now_ms, kind)
            while len(self._runs) > self._runs_max:
                self._runs.popitem(last=False)
        else:
            self._runs.move_to_end(task_id)
            # The first words are the task; whoever speaks later is watching.
            if spoken and run.step:
                run.spoken_ms = now_ms
        run.step += 1
        known.lengths.saw(run.step)
        return run

    def take_over(self, task_id: str, kind: str, began_ms: int, step: int, spent_nano_usd: int) -> Run:
        """A run that has gone on elsewhere, as it stands there."""
        run = self._runs.get(task_id)
        if run is None:
            run = self._runs[task_id] = Run(began_ms, kind)
            while len(self._runs) > self._runs_max:
                self._runs.popitem(last=False)
        run.began_ms = min(run.began_ms, began_ms)
        run.step = max(run.step, step)
        run.spent_nano_usd = max(run.spent_nano_usd, spent_nano_usd)
        return run

    def learn_budgets(self, used: Sequence[tuple[str, int]]) -> None:
        """What the ledger said last of (scope, percent used); a scope that it does not name is not near its limit."""
        for scope, percent in used:
            self._used[scope] = percent
            self._used.move_to_end(scope)
        while len(self._used) > _SCOPES_MAX:
            self._used.popitem(last=False)

    def forget_budgets(self, scopes: Iterable[str]) -> None:
        if self._used:
            for scope in scopes:
                self._used.pop(scope, None)

    def budget_used(self, scope: str) -> float:
        """The tightest budget's share, 0.0 below a half."""
        return self._used.get(scope, 0) / 100

    def tasks(self) -> tuple[str, ...]:
        return tuple(self._runs)

    def known(self, task_id: str) -> Run | None:
        return self._runs.get(task_id)

    def habit(self, run: Run, thread: Thread, target: str) -> tuple[float, float]:
        """(share of the turns, turns in a row) on which the rules want `target`, now included."""
        before, thread.wanted = thread.wanted, target
        usual = self._kind(run).habits
        usual.saw(target, before)
        thread.habits.saw(target, before)
        return thread.habits.of(target).beside(usual.of(target))

    def kinds(self) -> Iterator[str]:
        """Those that are known here, beginning with the one that was asked last."""
        return reversed(self._kinds)

    def counts(self, kind: str) -> dict[str, int]:
        """What is counted of it: "turns", and what `Lengths`, `Habits` and `Bills` count; {} if it is not known here."""
        known = self._kinds.get(kind)
        if known is None:
            return {}
        return {**known.lengths.counts(), **known.habits.counts(), **known.bills.counts()}

    def set_counts(self, kind: str, counts: Mapping[str, int]) -> None:
        """What all replicas have counted of a kind (`storage.redis_runs`), if it is still known here."""
        known = self._kinds.get(kind)
        if known is not None:
            known.lengths.set_counts(counts)
            known.habits.set_counts(counts)
            known.bills.set_counts(counts)

    def remaining(self, run: Run) -> float:
        """Turns expected after the one under way."""
        return self._kind(run).lengths.remaining(run.step)

    def bills(self, run: Run) -> Bills:
        """What each policy would have cost for runs of this kind."""
        return self._kind(run).bills

    def _kind(self, run: Run) -> Known:
        return self._kinds.get(run.kind) or Known()

    def facts(
        self, run: Run, now_ms: int, *, budget_used: float, tool_errors: int, repeats: int, reading: bool
    ) -> TaskFacts:
        return TaskFacts(
            max(1, run.step),
            (now_ms - run.began_ms) / 1_000,
            run.spent_nano_usd / 1e9,
            budget_used,
            tool_errors,
            repeats,
            bool(run.spoken_ms) and now_ms - run.spoken_ms < INTERACTIVE_MS,
            reading,
        )
