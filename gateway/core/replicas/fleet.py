"""Sticky until saturated: each request goes to a replica that holds its prefix, unless that one is too far behind.

The unit of load is a prompt's uncached tokens: a replica's backlog is the sum over the requests sent to it whose first
chunk has not come. Warm are the replicas that hold at least `warm_ratio` of the prompt; among them the one with the
least backlog, what this prompt adds included, is picked. If the least backlog among the warm exceeds the least among
the cold by more than tau, all are candidates for this one request. A new thread has little to lose and may go anywhere.

A prompt that computes its beginning anew also costs those after it: their turn comes later, and what it displaces they
compute anew. So that work weighs more than its own wait where everybody waits, and where the cache is full.

What has been sent but not yet computed counts as load, never as a hit: of fifty prompts with one beginning that come in
one instant, none finds it cached, so they spread. Only that second loss, for all, looks at what will be there by then.

No clock, no chance, no IO of its own: times are seconds of one monotonic clock, and `chance` is in [0, 1).
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Collection, Sequence

from gateway.core.replicas.estimates import DEFAULT_BLOCK_TOKENS, Estimates, thread_id
from gateway.core.replicas.replica import Replica
from gateway.core.replicas.scrape import Scrape
from gateway.core.replicas.terms import (
    Ask,
    Digest,
    End,
    EndKind,
    FleetPolicy,
    Membership,
    Pick,
    Placed,
    ReplicaShown,
    Why,
)

#: Of one digest, and of the peers that are remembered.
DIGEST_MAX = 512
PEERS_MAX = 64
_GONE_MAX = 64
#: A prompt has at most as many tokens as bytes; what a template adds, and images that are named by an address.
_TEMPLATE_TOKENS_MAX = 16_384
_MEAN_RATE = 0.05
#: What a handicap of 1 counts as where load is requests in flight.
_HANDICAP_REQUESTS = 64
#: Beside the wait for what this prompt computes anew, the same work counts as a loss for all: a little where it fits,
#: more where it displaces what others will then compute anew, and the more the longer everybody waits (by _SATURATION
#: when the least busy replica is tau behind). Weights were chosen with bench/gpu_routing.py.
_FORESIGHT, _SATURATION = 0.5, 16.0
_THREAD_BYTES = 420
_SESSION_BYTES = 200

#: ((score, requests in flight, blocks in the index), matched blocks, replica)
_Choice = tuple[tuple[float, float, int], int, Replica]


class _Attempt:
    """A request in flight."""

    __slots__ = ("ask", "older_than", "past", "pick", "prefilling", "replica", "sent_s")

    def __init__(
        self, replica: Replica, ask: Ask, pick: Pick, past: Placed | None, older_than: int, sent_s: float
    ) -> None:
        self.replica, self.ask, self.pick, self.past = replica, ask, pick, past
        self.older_than = older_than  # when the index had last used this prompt
        self.sent_s = sent_s
        self.prefilling = True


class Fleet:
    """The replicas of one deployment. Everything is bounded; nothing raises for what a replica or a client says."""

    def __init__(self, policy: FleetPolicy) -> None:
        self._policy = policy
        self._tau = policy.tau
        self._members: dict[str, Replica] = {}
        self._gone: OrderedDict[str, Replica] = OrderedDict()
        self._attempts: OrderedDict[str, _Attempt] = OrderedDict()
        self._estimates = Estimates(policy.block_bytes, policy.threads_max)
        self._sessions: OrderedDict[str, Replica] = OrderedDict()
        self._unshared: OrderedDict[int, None] = OrderedDict()  # threads, since the last digest
        self._told: OrderedDict[int, str] = (
            OrderedDict()
        )  # threads that another process has placed, and where
        self._peers_until_s = float("inf")
        self._peers: OrderedDict[str, tuple[float, tuple[tuple[str, int, int], ...]]] = OrderedDict()
        self._due: list[tuple[float, str]] = []  # when prefill is probably over, of those that do not stream
        self._mean_uncached = 1_000.0
        self._seen_s = 0.0  # the latest time that was told
        self.kept = False  # the last look-up found nothing, so the replicas known before stay

    # --- who is there ------------------------------------------------------------------------------------

    def members(self, addresses: Sequence[str], now_s: float) -> Membership:
        """What discovery found. Those gone leave at once, new ones start slowly; an empty list changes nothing."""
        self._pass(now_s)
        found = list(dict.fromkeys(addresses))
        over = len(found) - self._policy.members_max
        if over > 0:
            # Those in use stay, so that a name with ever-changing answers does not move every session.
            found.sort(key=lambda address: (address not in self._members, address))
            del found[self._policy.members_max :]
        self.kept = not found and bool(self._members)
        if not found:
            return Membership(kept=self.kept)
        first = not self._members
        joined = tuple(address for address in found if address not in self._members)
        left = tuple(address for address in self._members if address not in set(found))
        for address in left:
            self._leave(address, now_s)
        for address in joined:
            self._join(address, now_s, first)
        while self._gone:
            oldest = next(iter(self._gone.values()))
            if len(self._gone) <= _GONE_MAX and now_s - (oldest.gone_s or 0.0) <= self._policy.gone_keep_s:
                break
            self._gone.popitem(last=False)
        return Membership(joined, left, over=max(0, over))

    def _join(self, address: str, now_s: float, first: bool) -> None:
        replica = self._gone.pop(address, None)
        if replica is None or now_s - (replica.gone_s or 0.0) > self._policy.gone_keep_s:
            replica = Replica(address, self._policy, None if first else now_s)
        else:
            replica.gone_s = None
            replica.suspect = True  # another pod may have the address
            replica.returns(now_s)
        self._members[address] = replica

    def _leave(self, address: str, now_s: float) -> None:
        replica = self._members.pop(address)
        replica.gone_s = now_s
        self._gone[address] = replica

    # --- picking -----------------------------------------------------------------------------------------

    def pick(self, ask: Ask, now_s: float, chance: float, avoid: Collection[str] = ()) -> Pick | None:
        """The replica for a request; None if there is none that is neither drained nor to be avoided."""
        self._pass(now_s)
        links = ask.chain.links
        past = self._estimates.before(ask)
        prompt_tokens = self._estimates.prompt_tokens(ask, past)
        share = self._policy.block_bytes / max(1, ask.chain.chars)
        per_block, warm_from = prompt_tokens * share, self._policy.warm_ratio / share
        decode_bound = self._policy.decode_bound
        # Runs for every replica of every request, so nothing is called that need not be.
        loads: list[tuple[float, float, Replica]] = []
        for r in self._members.values():
            if r.drained or not r.reachable or now_s < r.cooled_until_s or r.address in avoid:
                continue
            if r.plain:
                loads.append((r.backlog + r.peer_backlog, r.active + r.peer_active, r))
            else:
                loads.append((*self._load(r, now_s), r))
        if not loads:
            return self._last_resort(ask, past, prompt_tokens, now_s, avoid)
        saturation = _SATURATION * min(load for load, _, _ in loads) / max(1, self._tau)
        told = self._told_of(past)
        best: list[_Choice | None] = [None, None]  # of the cold, of the warm
        least = [float("inf"), float("inf")]
        for load, active, replica in loads:
            index = replica.index
            blocks = index.match(links)
            if told is not None and blocks < told.blocks and told.address == replica.address:
                blocks = told.blocks
            if decode_bound:
                score = active
            else:
                anew = prompt_tokens - blocks * per_block
                later = anew
                if replica.prefilling:
                    later -= max(0, replica.expected.match(links) - blocks) * per_block
                weight = _FORESIGHT + saturation
                if index.blocks >= index.pressed_from:
                    weight += _FORESIGHT
                score = load + anew + weight * later
            warm = blocks > 0 and blocks >= warm_from
            if load < least[warm]:
                least[warm] = load
            rank = (score, active, index.blocks)
            choice = best[warm]
            if choice is None or rank < choice[0]:
                best[warm] = (rank, blocks, replica)
        cold, warmest = best
        saturated = least[True] - least[False] > self._tau
        if warmest is None or cold is None:
            choice, why = (warmest, Why.WARM) if warmest is not None else (cold, Why.LEAST_LOADED)
        elif chance < self._policy.exploration:
            choice, why = cold, Why.EXPLORED
        elif (saturated or not self._estimates.knows(ask.thread)) and cold[0] < warmest[0]:
            choice, why = cold, Why.RELEASED if saturated else Why.LEAST_LOADED
        else:
            choice, why = warmest, Why.WARM
        assert choice is not None, "one of the two is there"
        return self._picked(ask, past, prompt_tokens, choice[2], choice[1], why)

    def _told_of(self, past: Placed | None) -> Placed | None:
        """A thread that another process has placed: the index of its replica has it there, and not here."""
        return past if past is not None and past.thread in self._told else None

    def _load(self, replica: Replica, now_s: float) -> tuple[float, float]:
        """(uncached tokens before it, requests in flight), own counts first."""
        load: float = replica.backlog + replica.peer_backlog
        active: float = replica.active + replica.peer_active
        if replica.plain:
            return load, active
        waiting, others = replica.foreign(now_s)
        handicap = replica.handicap(now_s)
        return (
            load + waiting * self._mean_uncached + handicap * self._tau,
            active + others + handicap * _HANDICAP_REQUESTS,
        )

    def _last_resort(
        self, ask: Ask, past: Placed | None, prompt_tokens: int, now_s: float, avoid: Collection[str]
    ) -> Pick | None:
        """All have failed: better the one that is due first than none."""
        left = [r for r in self._members.values() if not r.drained and r.address not in avoid]
        if not left:
            return None
        replica = min(left, key=lambda r: (not r.reachable, r.cooled_until_s, self._load(r, now_s)))
        told = self._told_of(past)
        blocks = replica.index.match(ask.chain.links)
        if told is not None and told.address == replica.address:
            blocks = max(blocks, told.blocks)
        return self._picked(ask, past, prompt_tokens, replica, blocks, Why.LAST_RESORT)

    def _picked(
        self, ask: Ask, past: Placed | None, prompt_tokens: int, replica: Replica, blocks: int, why: Why
    ) -> Pick:
        cached = self._estimates.cached_tokens(
            ask, past, prompt_tokens, blocks, replica.block_tokens or DEFAULT_BLOCK_TOKENS
        )
        return Pick(replica.address, prompt_tokens, cached, prompt_tokens - cached, why, blocks)

    # --- attempts ----------------------------------------------------------------------------------------

    def sent(self, attempt_id: str, ask: Ask, pick: Pick, now_s: float) -> None:
        """An attempt is on its way to the replica that was picked."""
        replica = self._members.get(pick.address) or self._gone.get(pick.address)
        if replica is None:
            return
        if attempt_id in self._attempts:
            self.ended(attempt_id, End(EndKind.CANCELLED), now_s)
        past = self._estimates.before(ask)
        attempt = _Attempt(replica, ask, pick, past, replica.index.used_at(ask.chain.links), now_s)
        self._attempts[attempt_id] = attempt
        replica.expected.add(ask.chain.links)
        replica.active += 1
        replica.prefilling += 1
        replica.backlog += pick.uncached_tokens
        self._mean_uncached += _MEAN_RATE * (pick.uncached_tokens - self._mean_uncached)
        if not ask.streams:
            begins_s = max(now_s, replica.prefill_queue_until_s)
            replica.prefill_queue_until_s = begins_s + pick.uncached_tokens / self._policy.r_peak_tokens_per_s
            heapq.heappush(self._due, (replica.prefill_queue_until_s, attempt_id))
        self._belongs(ask.session or ask.thread, replica)
        while len(self._attempts) > self._policy.in_flight_max:
            self.ended(next(iter(self._attempts)), End(EndKind.CANCELLED), now_s)

    def first_chunk(self, attempt_id: str, now_s: float) -> None:
        """Prefill is over: the backlog is released, and what was planned is cached."""
        attempt = self._attempts.get(attempt_id)
        if attempt is not None and attempt.prefilling:
            self._release(attempt)
            attempt.replica.index.add(attempt.ask.chain.links)
            self._place(attempt, 0, 0)
        self._pass(now_s)

    def ended(self, attempt_id: str, end: End, now_s: float) -> None:
        """An attempt is over, however it went. Of one that is not known, nothing is learned."""
        attempt = self._attempts.pop(attempt_id, None)
        if attempt is None:
            return
        replica = attempt.replica
        computed = not attempt.prefilling
        if attempt.prefilling:
            self._release(attempt)
        replica.active -= 1
        if not computed and end.kind is not EndKind.OK:
            replica.expected.drop(attempt.ask.chain.links, attempt.pick.matched_blocks)
        if end.kind is EndKind.FAILED or end.kind is EndKind.ABORTED:
            replica.failed(attempt.sent_s, now_s, aborted=end.kind is EndKind.ABORTED)
            return
        if end.kind is EndKind.REFUSED:
            replica.refused(end.retry_after_s, now_s)
            return
        if end.kind is EndKind.OK:
            replica.answered(attempt.sent_s, now_s)
            self._learn(attempt, end)
        if computed or end.kind is EndKind.OK:
            # The engine frees a request's blocks at its end, so that is when they were last used.
            replica.index.add(attempt.ask.chain.links)

    def _release(self, attempt: _Attempt) -> None:
        attempt.prefilling = False
        attempt.replica.prefilling -= 1
        attempt.replica.backlog -= attempt.pick.uncached_tokens

    def _pass(self, now_s: float) -> None:
        """Time has passed: peers fall silent, and those that do not stream are probably past their prefill."""
        self._seen_s = max(self._seen_s, now_s)
        if now_s > self._peers_until_s:
            self._count_peers(now_s)
        while self._due and self._due[0][0] <= now_s:
            attempt = self._attempts.get(heapq.heappop(self._due)[1])
            if attempt is not None and attempt.prefilling:
                self._release(attempt)
                attempt.replica.index.add(attempt.ask.chain.links)

    def _learn(self, attempt: _Attempt, end: End) -> None:
        """What the answer reports about tokens, held against what was predicted."""
        ask, pick, replica, cached = attempt.ask, attempt.pick, attempt.replica, end.cached_tokens
        tokens = end.prompt_tokens
        if tokens is None:
            return
        lie = _lie(ask, end)
        if lie:
            replica.lied(lie)
            return
        replica.prompt_tokens += tokens
        replica.predicted_tokens += pick.predicted_cached_tokens
        block = replica.block_tokens or DEFAULT_BLOCK_TOKENS
        self._estimates.learn(ask, attempt.past, pick.matched_blocks, tokens, cached, block)
        self._place(attempt, tokens, end.output_tokens or 0, calls=end.calls)
        if cached is None:
            return
        replica.reported_tokens += cached
        replica.predictions += 1
        replica.predictions_close += abs(cached - pick.predicted_cached_tokens) < block
        block_chars = self._policy.block_bytes
        slack = block + 2 * block_chars / self._estimates.chars_per_token
        if cached + slack >= pick.predicted_cached_tokens:
            replica.hit()
            return
        if replica.suspect and cached < slack:
            replica.forget()
            return
        doubted = replica.missed(ask.thread)
        replica.index.drop(ask.chain.links, cached * ask.prompt_chars // (tokens * block_chars))
        if doubted:
            replica.index.drop_older(attempt.older_than)

    # --- where threads are -------------------------------------------------------------------------------

    def _place(self, attempt: _Attempt, tokens: int, output_tokens: int, *, calls: bool = False) -> None:
        ask = attempt.ask
        if not ask.thread or not ask.chain.links:
            return
        links = ask.chain.links
        thread = thread_id(ask.thread)
        self._estimates.place(
            Placed(
                *(thread, attempt.replica.address, links[-1], len(links), ask.prompt_chars),
                *(tokens or attempt.pick.prompt_tokens, output_tokens, calls),
            )
        )
        self._told.pop(thread, None)
        self._unshared[thread] = None
        self._unshared.move_to_end(thread)
        if len(self._unshared) > DIGEST_MAX:
            self._unshared.popitem(last=False)

    def _belongs(self, session: str, replica: Replica) -> None:
        if not session:
            return
        before = self._sessions.pop(session, None)
        if before is not None:
            before.sessions -= 1
        self._sessions[session] = replica
        replica.sessions += 1
        if len(self._sessions) > self._policy.threads_max:
            self._sessions.popitem(last=False)[1].sessions -= 1

    # --- what is read and done from outside --------------------------------------------------------------

    def scraped(self, address: str, seen: Scrape, now_s: float) -> None:
        """Its metrics were read; if they tell of a restart, its index is cleared."""
        replica = self._members.get(address)
        if replica is not None and replica.scraped(seen, self._estimates.chars_per_token, now_s):
            for thread in [t for t, told in self._told.items() if told == address]:
                del self._told[thread]

    def unreachable(self, address: str, now_s: float) -> None:
        """It did not answer when it was looked at. It is back, slowly, when it next does."""
        replica = self._members.get(address)
        if replica is not None:
            replica.unreachable()
        self._pass(now_s)

    def drain(self, address: str, on: bool) -> bool:
        """Send it nothing more, or again, slowly at first. False if it is not known."""
        replica = self._members.get(address) or self._gone.get(address)
        if replica is None:
            return False
        replica.drain(on, self._seen_s)
        return True

    def shown(self, now_s: float) -> tuple[ReplicaShown, ...]:
        """By address; those that have gone lately are there, too."""
        self._pass(now_s)
        everyone = [*self._members.values(), *self._gone.values()]
        return tuple(r.shown(now_s) for r in sorted(everyone, key=lambda r: r.address))

    def backlog_tokens(self) -> int:
        """Uncached tokens that this process has in flight."""
        return sum(r.backlog for r in (*self._members.values(), *self._gone.values()))

    @property
    def size_bytes(self) -> int:
        """Of all indexes and memories, about."""
        indexes = sum(r.index_bytes for r in (*self._members.values(), *self._gone.values()))
        return indexes + len(self._estimates.threads) * _THREAD_BYTES + len(self._sessions) * _SESSION_BYTES

    @property
    def chars_per_token(self) -> float:
        return self._estimates.chars_per_token

    # --- sharing -----------------------------------------------------------------------------------------

    def digest(self, now_s: float) -> Digest:
        """What the other gateway processes should know: what is in flight, and where threads went since last asked."""
        self._pass(now_s)
        threads = self._estimates.threads
        placed = tuple(threads[thread] for thread in self._unshared if thread in threads)
        self._unshared.clear()
        load = tuple((r.address, r.backlog, r.active) for r in self._members.values() if r.active)
        return Digest(placed, load)

    def merge(self, peer: str, digest: Digest, now_s: float) -> None:
        """What another process tells. Its load counts for `peer_life_s`; of nonsense, nothing is taken."""
        load = tuple(
            each for each in digest.load[: self._policy.members_max] if each[1] >= 0 and each[2] >= 0
        )
        self._peers[peer] = (now_s + self._policy.peer_life_s, load)
        self._peers.move_to_end(peer)
        if len(self._peers) > PEERS_MAX:
            self._peers.popitem(last=False)
        self._count_peers(now_s)
        for placed in digest.placed[:DIGEST_MAX]:
            own = self._estimates.threads.get(placed.thread)
            known = placed.address in self._members and placed.blocks > 0 and placed.chars > 0
            if known and placed.tokens > 0 and (own is None or own.blocks < placed.blocks):
                self._estimates.place(placed)
                self._told[placed.thread] = placed.address
                self._told.move_to_end(placed.thread)
                if len(self._told) > self._policy.threads_max:
                    self._told.popitem(last=False)

    def _count_peers(self, now_s: float) -> None:
        for replica in self._members.values():
            replica.peer_active = replica.peer_backlog = 0
        for peer in [peer for peer, (until_s, _) in self._peers.items() if until_s < now_s]:
            del self._peers[peer]
        self._peers_until_s = min((until_s for until_s, _ in self._peers.values()), default=float("inf"))
        for _, load in self._peers.values():
            for address, backlog, active in load:
                if (known := self._members.get(address)) is not None:
                    known.peer_backlog += backlog
                    known.peer_active += active


def _lie(ask: Ask, end: End) -> str:
    """What of the reported usage cannot be; "" if all can."""
    tokens = end.prompt_tokens or 0
    if not 0 < tokens <= ask.prompt_chars + _TEMPLATE_TOKENS_MAX:
        return f"prompt_tokens {tokens} for a prompt of {ask.prompt_chars} bytes"
    if not 0 <= (end.cached_tokens or 0) <= tokens:
        return f"cached_tokens {end.cached_tokens} of {tokens} prompt_tokens"
    return "" if (end.output_tokens or 0) >= 0 else f"output_tokens {end.output_tokens}"
