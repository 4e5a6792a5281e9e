"""Whether a first request without tools is the beginning of a run: learned from what came after earlier ones. Pure.

A marker on it costs the write: `write - 1` of its prompt, if nothing follows; if a second step follows, that one reads what
it would else have paid for: `1 - read`. So marking pays if more than (write - 1) / (write - read) of such requests of a key
and client went on: a fifth at 1.25 and 0.1.
"""

from __future__ import annotations

from collections import OrderedDict

from gateway.core.cache_rules import CacheRule
from gateway.core.lineages import Scope

#: Fewer first requests than this say nothing.
LEAST_SEEN = 8
#: After so many the older ones count half.
_HALVED_AT = 64
#: A prompt of which nobody knows the price of reading it is read at this: better than to take it for free.
_READ_MILLI = 100


class Beginnings:
    """By key and client, in this process, bounded."""

    def __init__(self, capacity: int = 10_000) -> None:
        self._capacity = capacity
        self._seen: OrderedDict[Scope, tuple[int, int]] = OrderedDict()  # first requests, second steps

    def saw(self, who: Scope, steps: int, answered: bool) -> None:
        """A request without tools has come, the `steps`-th of its run; `answered`: there is an answer in its history."""
        began, went_on = steps == 1 and not answered, steps == 2 and answered
        if not (began or went_on):
            return
        first, second = self._seen.pop(who, (0, 0))
        first, second = first + began, min(first, second + went_on)
        if first >= _HALVED_AT:
            first, second = first // 2, second // 2
        self._seen[who] = first, second
        if len(self._seen) > self._capacity:
            self._seen.popitem(last=False)

    def go_on(self, who: Scope, rule: CacheRule) -> bool:
        """So many went on that a marker on the first one pays."""
        first, second = self._seen.get(who, (0, 0))
        if first < LEAST_SEEN or not rule.lives:
            return False
        write = rule.lives[0].write_milli
        read = _READ_MILLI if rule.read_milli is None else rule.read_milli
        return second * (write - read) > first * (write - 1_000)
