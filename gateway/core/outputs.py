"""How many tokens answers have, by who asks and of what: below what is usual, an answer would be cut.

Agents ask for 32,000 tokens of output and use a few hundred. A budget may lower what they ask for to what it can pay,
but not below the 99th percentile of what they were seen to use: an answer that is cut inside of a tool call makes
agents ask for it again and again.
"""

from __future__ import annotations

from collections.abc import Hashable

#: Of the 99th percentile, because the next answer may be a little longer.
MARGIN_PERCENT = 150
#: Then all counts are halved, so that the percentile follows what a client does now.
_HALVE_AT = 4_096
_SHARE = 100
_LOOK_EVERY = 64


class _Histogram:
    """Counts by length, four classes to each doubling; `p99` is the upper edge of a class."""

    __slots__ = ("_counts", "_known", "_total", "_until")

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._total = 0
        self._known = -1  # the percentile as it was last looked up; -1 = look again
        self._until = 0  # answers after which it is

    def add(self, tokens: int) -> None:
        at = _class_of(tokens)
        self._counts[at] = self._counts.get(at, 0) + 1
        self._total += 1
        self._until -= 1
        # Shorter answers only lower it, and that may wait.
        if tokens > self._known or not self._until:
            self._known = -1
        if self._total >= _HALVE_AT:
            self._counts = {at: n // 2 for at, n in self._counts.items() if n > 1}
            self._total = sum(self._counts.values())

    def p99(self) -> int:
        if self._known < 0:
            self._known, self._until = self._looked_up(), _LOOK_EVERY
        return self._known

    def _looked_up(self) -> int:
        above = self._total // _SHARE
        for at in sorted(self._counts, reverse=True):
            above -= self._counts[at]
            if above < 0:
                return _edge_of(at)
        return 0


class Outputs:
    """Bounded: the last `most` askers to be seen for the first time stay, about 1 kB each."""

    def __init__(self, most: int = 4_096) -> None:
        self._most = most
        self._seen: dict[Hashable, _Histogram] = {}

    def note(self, who: Hashable, tokens: int) -> None:
        """An answer of that many tokens, as the provider counted."""
        seen = self._seen.get(who)
        if seen is None:
            if len(self._seen) >= self._most:
                del self._seen[next(iter(self._seen))]
            seen = self._seen[who] = _Histogram()
        seen.add(tokens)

    def comfort(self, who: Hashable, prior: int) -> int:
        """Output tokens below which no request of theirs is lowered; `prior` at least, and for those never seen."""
        seen = self._seen.get(who)
        return prior if seen is None else max(prior, seen.p99() * MARGIN_PERCENT // 100)


def _class_of(tokens: int) -> int:
    if tokens < 8:
        return tokens
    shift = tokens.bit_length() - 3
    return 4 * shift + (tokens >> shift)


def _edge_of(at: int) -> int:
    """The most tokens that are in this class."""
    if at < 8:
        return at
    shift = at // 4 - 1
    return ((at - 4 * shift + 1) << shift) - 1
