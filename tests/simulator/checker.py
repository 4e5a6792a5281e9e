"""What must hold, looked at after every commit and at the end, by arithmetic of its own.

I1  posted + held <= limit in every window, whenever something is admitted
I2  an attempt that reaches the provider has a committed hold that covers it; it ends in one terminal entry, and is
    corrected at most once
I3  totals are the sums of entries and open holds
I4  nothing is posted above its hold, unless the provider billed more
I5  what was refused reached no provider, and was refused for a reason
and: nobody holds anything without a lease, nothing is charged as lost while its owner may come back, no key works after
its revocation, and everything that was begun ends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gateway.core.entry import Refused
from tests.simulator import calls, view
from tests.simulator.calls import NOTHING, UNITS, Amounts, Wish
from tests.simulator.store import Session, Store
from tests.simulator.view import Entry, Hold, Place, Window

_HOUR_MS = 3_600_000
#: A refusal may be repeated from memory for a second, after a transaction of up to three.
_REFUSED_BEFORE_MS = 5_000


class Violation(NamedTuple):
    rule: str
    text: str


_RUNS = ("running", "alerted")


@dataclass
class AttemptFacts:
    """What the world knows of an attempt, independently of the ledger."""

    scopes: tuple[str, ...]
    task: str
    parent: str | None = None  # as its client names it
    request: str = ""
    landing: bool = False
    granted: Amounts | None = None
    refused: bool = False
    bill: Amounts | None = None
    breach: bool = False
    #: amounts that the gateway was told, each by an outcome that it may have posted
    told: list[Amounts] = field(default_factory=list)
    #: settle() returned after it was told this, exactly
    acknowledged: Amounts | None = None


@dataclass
class _Account:
    """What the ledger says of an attempt."""

    hold: Hold | None = None
    kind: str = ""
    error: str = ""
    corrections: list[str] = field(default_factory=list)
    net: Amounts = NOTHING
    posted_ms: float = float("-inf")  # of the last entry


class _Room(NamedTuple):
    """What a budget has left, from a time on, as of one commit: an override ends without another one."""

    scope: str
    unit: str
    room: int
    from_ms: int


class _State(NamedTuple):
    at_ms: int
    rooms: list[_Room]


@dataclass
class _Lease:
    epoch: int
    started_ms: int
    expires_ms: int
    until_ms: float = float("inf")  # when the row changed


class Checker:
    def __init__(self, store: Store, grace_ms: int, task_limits: Iterable[int] = ()) -> None:
        self.violations: list[Violation] = []
        self.attempts: dict[str, AttemptFacts] = {}
        self.reaped = 0
        self.corrected = 0
        self._store = store
        self._grace_ms = grace_ms
        self._task_limits = frozenset(task_limits)
        self._accounts: dict[str, _Account] = defaultdict(_Account)
        self._open: set[str] = set()
        self._held: dict[Place, list[int]] = defaultdict(lambda: [0] * len(UNITS))
        self._posted: dict[Place, list[int]] = defaultdict(lambda: [0] * len(UNITS))
        self._admitted: dict[str, list[tuple[int, str]]] = defaultdict(list)  # budget -> (when, attempt)
        self._budget_since: dict[str, int] = {}
        self._parents: dict[str, tuple[str, int]] = {}  # task -> the parent in its row, since which commit
        self._highest: dict[str, int] = defaultdict(int)  # limit that a budget ever had
        self._states: list[_State] = [_State(0, [])]
        self._states_before: dict[str, str] = {}
        #: task -> (request, attempt) whose landing was granted since it was paused, and was not voided
        self._landed: dict[str, tuple[str, str]] = {}
        #: (task, budget, stop of that budget) -> the same, for tasks that run
        self._landed_under: dict[tuple[str, str, tuple[int, int]], tuple[str, str]] = {}
        self._leases: dict[str, list[_Lease]] = defaultdict(list)
        self._last_hold = 0
        self._last_entry = 0
        store.on_commit = self.committed

    def violated(self, rule: str, text: str) -> None:
        self.violations.append(Violation(rule, text))

    # --- after every commit ----------------------------------------------------------------------------

    def committed(self, session: Session) -> None:
        now_ms = self._store.clock_ms()
        for replica_id, epoch, started_ms, expires_ms in view.leases(self._store):
            self._lease(replica_id, _Lease(epoch, started_ms, expires_ms), now_ms)
        if session.changed == {"replica"}:
            return
        windows = view.windows(self._store)
        holds = view.new_holds(self._store, self._last_hold)
        for number, hold in holds:
            self._last_hold = number
            account = self._accounts[hold.attempt_id]
            account.hold = hold
            self._open.add(hold.attempt_id)
            self._add(self._held, hold.places, hold.amounts, 1)
            for budget_id, start_ms in hold.places:
                self._admitted[budget_id].append((max(hold.created_ms, start_ms), hold.attempt_id))
            for budget_id in hold.above:
                self._admitted[budget_id].append((hold.created_ms, hold.attempt_id))
        touched: set[Place] = set()
        for number, entry in view.new_entries(self._store, self._last_entry):
            self._last_entry = number
            self._entry(entry, now_ms, session)
            touched.update(entry.places)
        still_open = view.open_holds(self._store)
        for attempt_id in sorted(self._open - still_open):
            self._ended(attempt_id, touched)
        for attempt_id in sorted(still_open - self._open):
            self.violated("I2", f"the hold of {attempt_id} was opened again after its end")
        self._open = still_open
        self._check_sums(windows, touched)
        self._check_slices(windows, session)
        for (budget_id, _), w in windows.items():
            self._highest[budget_id] = max(self._highest[budget_id], w.base_limit)
        for _, hold in holds:
            self._check_admission(hold, windows, session)
        for budget_id, _ in windows:
            self._budget_since.setdefault(budget_id, self._store.counts.commits)
        self._states_before = view.task_states(self._store)
        for task in [t for t in self._landed if self._states_before.get(t) != "paused_budget"]:
            del self._landed[task]
        # A pause of its own ends that as well: whoever lets the task go on gives it another last answer.
        for stop in [s for s in self._landed_under if self._states_before.get(s[0]) not in _RUNS]:
            del self._landed_under[stop]
        for task, parent in view.named_parents(self._store):
            self._parents.setdefault(task, (parent, self._store.counts.commits))
        rooms = self._rooms(windows, now_ms)
        if holds:
            rooms += self._rooms_decided_on(rooms, session.began_ms)
        self._states.append(_State(now_ms, rooms))

    def _rooms_decided_on(self, rooms: Sequence[_Room], began_ms: int) -> list[_Room]:
        """What was left while a batch was decided, with its own holds taken: earlier buckets of a rolling window are read
        without a lock, and may have been given back before the batch is committed.
        """
        before, after = _tightest(self._states[-1].rooms), _tightest(rooms)
        seen: dict[tuple[str, str], int] = {}
        for state in reversed(self._states):
            for budget, room in _tightest(state.rooms).items():
                seen[budget] = min(room, seen.get(budget, room))
            if state.at_ms < began_ms:
                break
        taken = {budget: before[budget] - room for budget, room in after.items() if budget in before}
        return [
            _Room(*budget, seen[budget] - amount, began_ms) for budget, amount in taken.items() if amount > 0
        ]

    def _lease(self, replica_id: str, lease: _Lease, now_ms: int) -> None:
        known = self._leases[replica_id]
        if known and (known[-1].epoch, known[-1].expires_ms) == (lease.epoch, lease.expires_ms):
            return
        if known:
            known[-1].until_ms = now_ms
        known.append(lease)

    def _entry(self, entry: Entry, now_ms: int, session: Session) -> None:
        a = entry.attempt_id
        account = self._accounts[a]
        self._add(self._posted, entry.places, entry.amounts, 1)
        account.net = _sum(account.net, entry.amounts)
        account.posted_ms = now_ms
        if entry.kind == "correct":
            self.corrected += 1
            account.corrections.append(entry.quality)
            if not account.kind:
                self.violated("I2", f"{a} is corrected before it ended")
            if len(account.corrections) > 1:
                self.violated("I2", f"{a} is corrected twice")
            return
        if account.kind:
            self.violated("I2", f"{a} ended twice: {account.kind}, then {entry.kind}")
        account.kind, account.error = entry.kind, entry.error
        if entry.kind == "void":
            self._landed = {task: had for task, had in self._landed.items() if had[1] != a}
            self._landed_under = {stop: had for stop, had in self._landed_under.items() if had[1] != a}
        if account.hold is None:
            return
        if entry.places != account.hold.places and any(entry.amounts):
            self.violated("I3", f"{a} was held in {account.hold.places} and posted in {entry.places}")
        facts = self.attempts.get(a)
        over = any(x > y for x, y in zip(entry.amounts, account.hold.amounts, strict=True))
        if over and not (facts and facts.breach):
            self.violated("I4", f"{a} held {account.hold.amounts} and was charged {entry.amounts}")
        if entry.error == "replica_lost":
            self.reaped += 1
            self._check_reaping(account.hold, session)

    def _ended(self, attempt_id: str, touched: set[Place]) -> None:
        account = self._accounts[attempt_id]
        if account.hold is None:
            return
        self._add(self._held, account.hold.places, account.hold.amounts, -1)
        touched.update(account.hold.places)
        if not account.kind:
            self.violated("I2", f"the hold of {attempt_id} ended without an entry")

    def _add(
        self, sums: dict[Place, list[int]], places: Iterable[Place], amounts: Amounts, sign: int
    ) -> None:
        for place in places:
            for i, n in enumerate(amounts):
                sums[place][i] += sign * n

    def _check_sums(self, windows: Mapping[Place, Window], touched: Iterable[Place]) -> None:
        ended = view.closed_windows(self._store, sorted(p for p in touched if p not in windows))
        below: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        for w in windows.values():
            if w.ancestors:
                # What a child has spent is spent in its parent; what is left of its slice is held there.
                below[w.ancestors[0]][0] += w.posted
                below[w.ancestors[0]][1] += max(w.held, w.carved - w.posted)
        for place, w in [*windows.items(), *ended.items()]:
            unit = UNITS.index(w.unit)
            posted, held = below[place[0]]
            expected = self._posted[place][unit] + posted, self._held[place][unit] + held
            if (w.posted, w.held) != expected:
                self.violated(
                    "I3",
                    f"{w.scope} from {place[1]}: posted, held {w.posted}, {w.held}; the sums are {expected}",
                )

    def _check_slices(self, windows: Mapping[Place, Window], session: Session) -> None:
        """A new slice fits its parent."""
        for (budget_id, _), w in windows.items():
            if budget_id in self._budget_since or not w.ancestors:
                continue
            parent = windows[w.ancestors[0], 0]
            if parent.hard and parent.posted + parent.held > parent.limit(session.began_ms):
                self.violated("I1", f"{w.scope} takes more of {parent.scope} than it has left: {parent}")

    def _check_admission(self, hold: Hold, windows: Mapping[Place, Window], session: Session) -> None:
        a = hold.attempt_id
        lease = self._leases[hold.replica_id][-1]
        if lease.epoch != hold.epoch or lease.expires_ms <= hold.created_ms:
            self.violated("lease", f"{a} is held by {hold.replica_id} run {hold.epoch}; its lease is {lease}")
        facts = self.attempts.get(a)
        if facts and self._states_before.get(facts.task, "running") not in _RUNS and not facts.landing:
            self.violated(
                "task", f"{a} was admitted to {facts.task}, which is {self._states_before[facts.task]}"
            )
        shared = [
            (place[0], w.stop) for place in hold.places if (w := windows.get(place)) and w.stop is not None
        ]
        if facts and facts.landing and shared and self._states_before.get(facts.task) in _RUNS:
            if len(shared) == 1:  # of several it is the one that is used up the most
                stop = (facts.task, *shared[0])
                first, _ = self._landed_under.setdefault(stop, (facts.request, a))
                self._landed_under[stop] = facts.request, a
                if first != facts.request:
                    self.violated("task", f"{a} is a landing of {facts.task} under {stop}; {first} had it")
        elif facts and facts.landing:
            state = self._states_before.get(facts.task, "running")
            first, _ = self._landed.get(facts.task, (facts.request, a))
            self._landed[facts.task] = facts.request, a
            if state != "paused_budget" or first != facts.request:
                self.violated("task", f"{a} is a landing of {facts.task}, which is {state}; {first} had it")
        for place in hold.places:
            w = windows.get(place)
            if w is None or not w.hard:
                continue
            unit = UNITS.index(w.unit)
            if not hold.amounts[unit]:
                continue
            at_ms = max(hold.created_ms, place[1])
            within = self._counted(place[0], unit, w, at_ms, since_ms=session.began_ms)
            if within > w.limit(hold.created_ms):
                self.violated(
                    "I1",
                    f"{w.scope} per {w.window} has {within} of {w.limit(hold.created_ms)} {w.unit} with {a}",
                )
            start_ms = _window_start(w, at_ms)
            if start_ms is not None and start_ms != place[1]:
                self.violated(
                    "I1", f"{a}, admitted at {at_ms}, is in the window of {w.scope} from {place[1]}"
                )
        for budget_id in hold.above:
            # A slice stays what it is when its parent's limit is lowered, and when the provider bills another more
            # than was held.
            w = windows[budget_id, 0]
            within = self._counted(budget_id, UNITS.index(w.unit), w, hold.created_ms, up_to_hold=True)
            if w.hard and within > self._highest[budget_id]:
                self.violated("I1", f"{w.scope} and what is below it has {within} {w.unit} with {a}")
        if facts:
            scopes = {*facts.scopes, *self._line(facts, session)}
            expected = {
                place
                for place, w in windows.items()
                if w.scope in scopes
                and self._budget_since.get(place[0], session.began_after + 1) <= session.began_after
            }
            missing = expected - set(hold.places)
            if missing:
                self.violated("I1", f"{a} of {sorted(scopes)} is not held in {sorted(missing)}")

    def _line(self, facts: AttemptFacts, session: Session) -> set[str]:
        """The scopes of all tasks above the attempt's that were known when its transaction began."""
        known = {t: parent for t, (parent, since) in self._parents.items() if since <= session.began_after}
        above: set[str] = set()
        level = {facts.parent, known.get(facts.task)}
        while level := {t for t in level if t and t not in above}:
            above |= level
            level = {known.get(t) for t in level}
        return {f"task:{t}" for t in above}

    def _counted(
        self,
        budget_id: str,
        unit: int,
        w: Window,
        at_ms: int,
        up_to_hold: bool = False,
        since_ms: float = float("inf"),
    ) -> int:
        """What is posted and held in the window as it is at that time, attempt by attempt.

        `since_ms`: what was posted above its hold since then counts up to it. Earlier buckets of a rolling window are not
        locked, so who admits need not have seen it: it comes after the admission as well as before.
        """
        from_ms = at_ms - _rolling_ms(w) if _rolling_ms(w) else _window_start(w, at_ms)
        assert from_ms is not None
        total = 0
        for when_ms, attempt_id in self._admitted[budget_id]:
            if from_ms < when_ms <= at_ms if _rolling_ms(w) else from_ms <= when_ms:
                amount, account = self._amount(attempt_id)[unit], self._accounts[attempt_id]
                late = _rolling_ms(w) and account.posted_ms >= since_ms
                held = account.hold if up_to_hold or late else None
                total += min(amount, held.amounts[unit]) if held else amount
        return total

    def _amount(self, attempt_id: str) -> Amounts:
        account = self._accounts[attempt_id]
        if account.hold is not None and attempt_id in self._open:
            return _sum(account.hold.amounts, account.net)
        return account.net

    def _check_reaping(self, hold: Hold, session: Session) -> None:
        """By the lease as it was at some moment of the transaction that charged it."""
        shortest_ms: int | None = None
        leases = self._leases[hold.replica_id]
        for row in [r for r in leases if r.until_ms >= session.began_ms]:
            later = [r.started_ms for r in leases if r.epoch > hold.epoch]
            dead_since_ms = min(later) if row.epoch > hold.epoch else row.expires_ms
            dead_ms = self._store.clock_ms() - dead_since_ms
            shortest_ms = dead_ms if shortest_ms is None else max(shortest_ms, dead_ms)
        if shortest_ms is None or shortest_ms < self._grace_ms:
            self.violated(
                "lease", f"{hold.attempt_id} was charged as lost {shortest_ms} ms after its owner's end"
            )

    def _rooms(self, windows: Mapping[Place, Window], now_ms: int) -> list[_Room]:
        rooms = []
        for (budget_id, start_ms), w in windows.items():
            if not w.hard:
                continue
            used = w.posted + w.held
            if length := _rolling_ms(w):
                size = -(-length // 60)
                oldest_ms = (now_ms - length) // size * size
                unit = UNITS.index(w.unit)
                for place in {p: None for p in (*self._held, *self._posted) if p[0] == budget_id}:
                    if oldest_ms <= place[1] != start_ms:
                        used += self._held[place][unit] + self._posted[place][unit]
            if w.override_limit is None:
                rooms.append(_Room(w.scope, w.unit, w.base_limit - used, now_ms))
            else:
                # It counts by the time at which a transaction began, which may have read it after its end.
                rooms.append(_Room(w.scope, w.unit, w.override_limit - used, now_ms))
                rooms.append(_Room(w.scope, w.unit, w.base_limit - used, w.override_until_ms))
        return rooms

    # --- when the world says so ------------------------------------------------------------------------

    def arrived(self, attempt_id: str, bill: Amounts | None) -> None:
        """An attempt reached the provider."""
        account, facts = self._accounts[attempt_id], self.attempts[attempt_id]
        if facts.refused or facts.granted is None:
            self.violated("I5", f"{attempt_id} reached the provider, and was not granted")
        if account.hold is None:
            self.violated("I2", f"{attempt_id} reached the provider without a committed hold")
        elif not facts.breach and any(
            x > y for x, y in zip(bill or NOTHING, account.hold.amounts, strict=True)
        ):
            self.violated("I2", f"{attempt_id} is billed {bill} and holds {account.hold.amounts}")

    def refused(self, attempt_id: str, answer: Refused, wish: Wish, asked_ms: int) -> None:
        """I5's other half: at some moment since it was asked, or a little before, there was no room."""
        self.attempts[attempt_id].refused = True
        if answer.state:
            return  # the task waits for a person, whatever it has left
        needed = max(1, calls.least_of(wish, answer.unit)) + answer.kept_back
        now_ms = self._store.clock_ms()
        lowest: int | None = None
        for state in reversed(self._states):
            for scope, unit, room, from_ms in state.rooms:
                if (scope, unit) == (answer.scope, answer.unit) and from_ms <= now_ms:
                    lowest = room if lowest is None else min(room, lowest)
            if lowest is not None and lowest < needed:
                return
            if state.at_ms < asked_ms - _REFUSED_BEFORE_MS:
                break
        if lowest is None and answer.scope.startswith("task:") and answer.limit in self._task_limits:
            lowest = (
                answer.limit
            )  # the transaction that made this budget and refused was lost, and it with it
            if lowest < needed:
                return
        self.violated("I5", f"{attempt_id} needed {needed}, of which {answer.scope} had {lowest}: {answer}")

    def left_open(self) -> list[Hold]:
        """Holds that have not ended."""
        return [h for a in sorted(self._open) if (h := self._accounts[a].hold) is not None]

    def final(self, first_tries: Mapping[str, set[str]]) -> None:
        """After everything was healed, replayed and reaped. `first_tries`: task -> first attempts of its requests."""
        for a in sorted(self._open):
            self.violated("I2", f"{a} is held for ever")
        for difference in view.sums_that_differ(self._store):
            self.violated("I3", f"derived sums differ: {difference}")
        self._check_sums(view.windows(self._store), view.all_closed(self._store))
        steps = view.steps(self._store)
        for task_id, attempts in sorted(first_tries.items()):
            held = sum(1 for a in attempts if self._accounts[a].hold is not None)
            if steps.get(task_id, 0) != held:
                self.violated(
                    "I3", f"{task_id} has {steps.get(task_id, 0)} steps, and {held} requests were held"
                )
        for attempt_id, facts in self.attempts.items():
            self._check_attempt(attempt_id, facts)

    def _check_attempt(self, a: str, facts: AttemptFacts) -> None:
        account = self._accounts[a]
        if account.hold is not None and not account.kind:
            self.violated("I2", f"{a} has no terminal entry")
        if facts.bill is None:
            lost = account.error == "replica_lost" and not account.corrections
            if any(account.net) and not lost and account.net not in facts.told:
                self.violated("I3", f"{a} cost nothing and is charged {account.net} ({account.kind})")
            return
        if not account.kind:
            self.violated("I2", f"{a} was billed {facts.bill} and has no entry")
            return
        # A process that dies before it can say that more was billed than it held leaves a charge at the hold.
        bound = facts.breach and account.hold is not None and account.net == account.hold.amounts
        if not bound and any(x < y for x, y in zip(account.net, facts.bill, strict=True)):
            self.violated("I2", f"usage is lost: {a} was billed {facts.bill}, and charged {account.net}")
        allowed = [*facts.told]
        if account.error == "replica_lost" and account.hold is not None:
            allowed.append(account.hold.amounts)
        if account.net not in allowed:
            self.violated("I2", f"{a} was billed {facts.bill}, and charged {account.net}, which nobody said")
        proven = facts.acknowledged
        if proven is not None and account.net != proven and account.corrections[:1] != ["estimated"]:
            self.violated("I2", f"{a} was settled at {proven}, acknowledged, and is charged {account.net}")


def _sum(a: Amounts, b: Amounts) -> Amounts:
    return a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3]


def _rolling_ms(w: Window) -> int:
    return {"60s": 60_000, "2m": 120_000}.get(w.window, 0)


def _window_start(w: Window, at_ms: int) -> int | None:
    if w.window == "lifetime":
        return 0
    if w.window == "hour":
        return at_ms // _HOUR_MS * _HOUR_MS
    if w.window == "day":
        offset_ms = 5 * _HOUR_MS + _HOUR_MS // 2 if w.zone == "Asia/Kolkata" else 0
        return (at_ms + offset_ms) // (24 * _HOUR_MS) * 24 * _HOUR_MS - offset_ms
    return None


def _tightest(rooms: Iterable[_Room]) -> dict[tuple[str, str], int]:
    found: dict[tuple[str, str], int] = {}
    for scope, unit, room, _ in rooms:
        found[scope, unit] = min(room, found.get((scope, unit), room))
    return found


def summary(violations: Sequence[Violation]) -> str:
    return "\n".join(f"  {v.rule}: {v.text}" for v in violations)
