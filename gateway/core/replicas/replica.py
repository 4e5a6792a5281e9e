"""What a gateway knows of one replica: its index, what is in flight, its health."""

from __future__ import annotations

from gateway.core.replicas.index import PrefixIndex
from gateway.core.replicas.scrape import Scrape
from gateway.core.replicas.terms import FleetPolicy, Health, ReplicaShown

#: The start time is told in whole or hundredth seconds.
_START_SLACK_S = 1.0
_MISSES_TO_DOUBT = 2


class Replica:
    """One address. All times are of one monotonic clock."""

    def __init__(self, address: str, policy: FleetPolicy, returning_from_s: float | None) -> None:
        self.address = address
        self._policy = policy
        capacity = self._blocks(policy.default_capacity_tokens, 4.0)
        self.index = PrefixIndex(capacity)
        #: what it will hold when all that was sent to it has been computed
        self.expected = PrefixIndex(capacity)
        self.active = self.prefilling = self.backlog = 0
        self.peer_active = self.peer_backlog = 0
        self.sessions = 0
        self.drained = False
        self.reachable = True
        #: no handicap, and no requests of others: what is in flight is all there is to its load
        self.plain = returning_from_s is None
        self.gone_s: float | None = None
        self._failures = self._aborts = self._refusals = self._restarts = self._lies = 0
        self._failed_s = float("-inf")
        self.cooled_until_s = float("-inf")
        self._returning_from_s = returning_from_s
        self._scrape = Scrape()
        self._scraped_s: float | None = None
        self._foreign = 0  # requests that others sent, when last looked
        self._foreign_waiting = 0
        self._notes: dict[str, None] = {}
        #: it may have been restarted since: a prompt of which nothing was cached will tell
        self.suspect = False
        self._misses = 0
        self._missed_thread = ""
        self.prefill_queue_until_s = 0.0  # by the peak rate; for requests that do not stream
        self.prompt_tokens = self.predicted_tokens = self.reported_tokens = 0
        self.predictions = self.predictions_close = 0

    @property
    def block_tokens(self) -> int | None:
        return self._scrape.block_size

    def _blocks(self, tokens: int, chars_per_token: float) -> int:
        blocks = int(tokens * chars_per_token) // self._policy.block_bytes
        return max(1, min(self._policy.index_blocks_max, blocks))

    @property
    def index_bytes(self) -> int:
        return self.index.size_bytes + self.expected.size_bytes

    # --- load --------------------------------------------------------------------------------------------

    def handicap(self, now_s: float) -> float:
        """How much busier it counts than it is: 1 when it has just come back, 0 after the slow start; 1 more if full."""
        slow = self._policy.slow_start_s
        since_s = self._returning_from_s
        found = 0.0
        if since_s is not None:
            if now_s - since_s >= slow:
                self._returning_from_s = None
            else:
                found = 1.0 - max(0.0, now_s - since_s) / slow
        return found + self.full(now_s)

    def full(self, now_s: float) -> bool:
        seen = self._scrape
        return (
            bool(seen.waiting) and (seen.kv_usage or 0.0) >= self._policy.full_kv_usage and self._fresh(now_s)
        )

    def _fresh(self, now_s: float) -> bool:
        return self._scraped_s is not None and now_s - self._scraped_s <= self._policy.scrape_life_s

    def foreign(self, now_s: float) -> tuple[int, int]:
        """(waiting, in flight): requests of others. What peers tell of themselves is in `peer_*`, and no less exact."""
        if not self._foreign or not self._fresh(now_s):
            return 0, 0
        others = max(0, self._foreign - self.peer_active)
        return min(others, self._foreign_waiting), others

    # --- health ------------------------------------------------------------------------------------------

    def failed(self, sent_s: float, now_s: float, *, aborted: bool) -> None:
        """An attempt that was sent at `sent_s` failed. Those that fail together count once."""
        self._aborts += aborted
        self.suspect = True
        if sent_s <= self._failed_s:
            return
        self._failures += 1
        self._failed_s = now_s
        rest_s = self._policy.cooldown_s * 2.0 ** min(30, self._failures - 1)
        self._cool(now_s + min(self._policy.cooldown_max_s, rest_s))

    def refused(self, retry_after_s: float | None, now_s: float) -> None:
        """It is full, and healthy."""
        self._refusals += 1
        rest_s = self._policy.refused_s if retry_after_s is None else retry_after_s
        self._cool(now_s + min(self._policy.cooldown_max_s, max(0.0, rest_s)))

    def _cool(self, until_s: float) -> None:
        self.cooled_until_s = max(self.cooled_until_s, until_s)
        self._returning_from_s = self.cooled_until_s
        self.plain = False

    def answered(self, sent_s: float, now_s: float) -> None:
        if sent_s > self._failed_s:
            self._failures = 0
            self._reached(now_s)

    def unreachable(self) -> None:
        self.reachable = False
        self.suspect = True

    def drain(self, on: bool, now_s: float) -> None:
        if self.drained and not on:
            self.returns(now_s)
        self.drained = on

    def returns(self, now_s: float) -> None:
        self._returning_from_s = max(now_s, self.cooled_until_s)
        self.plain = False

    def _reached(self, now_s: float) -> None:
        if not self.reachable:
            self.reachable = True
            self.returns(now_s)

    # --- what it tells -----------------------------------------------------------------------------------

    def scraped(self, seen: Scrape, chars_per_token: float, now_s: float) -> bool:
        """True if it turns out to have been restarted: its cache is empty."""
        self._reached(now_s)
        before = self._scrape
        restarted = self._scraped_s is not None and self._is_another(before, seen)
        if restarted:
            self._restarts += 1
            self.forget()
            self.returns(now_s)
        if before.models and seen.models != before.models:
            self.note(f"model changed from {', '.join(before.models)} to {', '.join(seen.models) or 'none'}")
        if seen.older_names:
            self.note("metrics in an older naming")
        in_flight = (seen.running or 0) + (seen.waiting or 0)
        self._foreign = max(0, in_flight - self.active)
        self._foreign_waiting = max(0, (seen.waiting or 0) - self.prefilling)
        self._scrape, self._scraped_s = seen, now_s
        self.plain = not self._foreign and not seen.waiting and not self.handicap(now_s)
        tokens = seen.kv_cache_size_tokens or self._policy.default_capacity_tokens
        for index in (self.index, self.expected):
            index.resize(self._blocks(tokens, chars_per_token))
        return restarted

    def _is_another(self, before: Scrape, seen: Scrape) -> bool:
        if (
            before.process_start_s is not None
            and seen.process_start_s is not None
            and abs(seen.process_start_s - before.process_start_s) > _START_SLACK_S
        ):
            return True
        if before.block_size is not None and seen.block_size not in (None, before.block_size):
            self.note(f"block size changed from {before.block_size} to {seen.block_size}")
            return True
        return any(
            new < old
            for old, new in zip(before.counters, seen.counters, strict=True)
            if old is not None and new is not None
        )

    def forget(self) -> None:
        """Its cache is empty."""
        self.index.clear()
        self.expected.clear()
        self.suspect = False
        self._misses = 0

    def lied(self, what: str) -> None:
        self._lies += 1
        self.note(what)

    def note(self, what: str) -> None:
        self._notes.setdefault(what[:200])
        while len(self._notes) > 8:
            del self._notes[next(iter(self._notes))]

    def missed(self, thread: str) -> bool:
        """Less was cached than predicted; True if other threads were missed right before, too."""
        if thread != self._missed_thread or not self._misses:
            self._misses += 1
        self._missed_thread = thread
        return self._misses >= _MISSES_TO_DOUBT

    def hit(self) -> None:
        self._misses = 0
        self.suspect = False

    # --- showing -----------------------------------------------------------------------------------------

    def health(self, now_s: float) -> Health:
        if self.gone_s is not None:
            return Health.GONE
        if self.drained:
            return Health.DRAINED
        if not self.reachable:
            return Health.UNREACHABLE
        if now_s < self.cooled_until_s:
            return Health.COOLING
        if self.full(now_s):
            return Health.FULL
        return Health.RETURNING if self.handicap(now_s) else Health.READY

    def shown(self, now_s: float) -> ReplicaShown:
        return ReplicaShown(
            address=self.address,
            health=self.health(now_s),
            drained=self.drained,
            active=self.active,
            backlog_tokens=self.backlog,
            peer_active=self.peer_active,
            peer_backlog_tokens=self.peer_backlog,
            sessions=self.sessions,
            prompt_tokens=self.prompt_tokens,
            predicted_cached_tokens=self.predicted_tokens,
            reported_cached_tokens=self.reported_tokens,
            predictions=self.predictions,
            predictions_close=self.predictions_close,
            index_blocks=self.index.blocks,
            index_capacity_blocks=self.index.capacity,
            index_bytes=self.index_bytes,
            failures=self._failures,
            aborts=self._aborts,
            refusals=self._refusals,
            restarts=self._restarts,
            lies=self._lies,
            notes=tuple(self._notes),
            seen=self._scrape,
            seen_age_s=None if self._scraped_s is None else max(0.0, now_s - self._scraped_s),
        )
