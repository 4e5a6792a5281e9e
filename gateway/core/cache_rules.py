"""How providers cache prompt prefixes: the rules of config/providers.yaml as values. No fact about a provider is in code.

Multipliers are in thousandths of the input price: `write_milli` 1250 = a write costs 1.25 times what input costs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import date, timedelta
from enum import StrEnum
from fnmatch import fnmatchcase
from itertools import pairwise

from gateway.core.catalog import Operation

_DAY_MS = 86_400_000
_EPOCH = date(1970, 1, 1)
_LONGEST_LIFE_S = 30 * 86_400
#: What may hold a marker: members of a content block that end a cacheable prefix.
MARKERS = ("cache_control", "prompt_cache_breakpoint")


class Style(StrEnum):
    """Who decides where a prompt may be cut for the cache."""

    EXPLICIT = "explicit"  # only at markers
    IMPLICIT = "implicit"  # the provider decides
    BOTH = "both"


class LookbackUnit(StrEnum):
    CONTENT_BLOCK = "content_block"
    MESSAGE_END = "message_end"


class KeyMeans(StrEnum):
    """What a cache key does."""

    ROUTING = "routing"  # sends requests of one key to one server: a stable one raises the hit rate
    ACCOUNTING = "accounting"  # separates reuse: another key per request destroys it
    ISOLATION = "isolation"  # is hashed with the prefix, so that nobody else can probe for it


class Mark(StrEnum):
    """How well a row is founded."""

    VENDOR = "P"  # the vendor's own page
    TWO = "2"  # two independent sources
    SINGLE = "S"
    OWN = ""  # the built-in demo provider


class RuleFault(ValueError):
    """A rule contradicts itself; `field` is the key of the row that is to blame."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True, slots=True)
class Life:
    """One entry of a provider's menu of lives (TTLs)."""

    name: str  # as requests name it: "5m"
    life_s: int | None  # None = best effort
    refreshed: bool  # a hit starts it anew
    write_milli: int
    surface: Operation | None = None  # offered on this one only

    def __post_init__(self) -> None:
        if self.life_s is not None and not 0 < self.life_s <= _LONGEST_LIFE_S:
            raise RuleFault("ttls", f"life_s must be from 1 to {_LONGEST_LIFE_S} seconds, not {self.life_s}")
        if not 0 < self.write_milli <= 10_000:
            raise RuleFault("ttls", f"a write at {self.write_milli / 1000} times the input price is no price")


@dataclass(frozen=True, slots=True)
class Contested:
    """Another value that a source gives. `value` and `models` as they are written."""

    field: str
    value: str | None
    source: str
    checked_on: date
    models: str = ""


@dataclass(frozen=True, slots=True)
class CacheRule:
    """One row: how the models that it names cache. None = unknown, never "no".

    `lives`: the menu, the default one first. `markers`: the member that marks a block, by operation; empty = a
    request cannot mark. `lookback`: how many `lookback_unit`s a marker looks at to find earlier entries, itself
    included.
    """

    models: tuple[str, ...]
    style: Style
    source: str
    checked_on: date
    mark: Mark = Mark.OWN
    min_prefix_tokens: int | None = None
    granularity_tokens: int | None = None
    max_breakpoints: int | None = None
    implicit_breakpoints: int = (
        0  # of these, what the provider places itself at the end of the latest message
    )
    lookback: int | None = None
    lookback_unit: LookbackUnit | None = None
    #: of the marked blocks of a request, the first and the latest are looked up
    explicit_first: int | None = None
    explicit_latest: int | None = None
    lives: tuple[Life, ...] = ()
    read_milli: int | None = None
    markers: Mapping[Operation, str] = field(default_factory=dict)
    key: str = ""
    key_header: str = ""  # on chat, instead of `key`
    key_means: KeyMeans | None = None
    isolation: str = ""
    billing_header: bool = False  # reads Claude Code's billing line, so it is no nonce there
    mid_conversation_system: bool | None = None
    mid_conversation_tools: bool | None = None
    valid_from: date | None = None
    valid_until: date | None = None
    contested: tuple[Contested, ...] = ()

    def __post_init__(self) -> None:
        self._refuse_bad_markers()
        self._refuse_bad_lives()
        if (self.lookback is None) != (self.lookback_unit is None):
            raise RuleFault("lookback", "lookback and lookback_unit come together")
        if bool(self.key or self.key_header) != (self.key_means is not None):
            raise RuleFault("key_means", "a key needs key_means, and key_means a key")
        if self.valid_from and self.valid_until and self.valid_until < self.valid_from:
            raise RuleFault("valid_until", f"ends before it begins ({self.valid_from})")
        for name in ("min_prefix_tokens", "granularity_tokens", "max_breakpoints", "lookback"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise RuleFault(name, f"must be at least 1, not {value}")
        for other in self.contested:
            own = getattr(self, other.field, None)
            if other.value is not None and not other.models and str(own).lower() == other.value.lower():
                raise RuleFault("contested", f"{other.field} is contested by its own value {other.value}")

    def _refuse_bad_markers(self) -> None:
        if self.style is Style.IMPLICIT and (self.markers or self.max_breakpoints is not None):
            raise RuleFault(
                "style", "implicit caching takes no markers, but markers or max_breakpoints are given"
            )
        if self.style is Style.EXPLICIT and (not self.markers or self.max_breakpoints is None):
            raise RuleFault("style", "explicit caching needs markers and max_breakpoints")
        if self.implicit_breakpoints and self.implicit_breakpoints > (self.max_breakpoints or 0):
            raise RuleFault("implicit_breakpoints", "the provider places more of them than there may be")
        if self.markers and self.max_breakpoints is None:
            raise RuleFault("markers", "markers need max_breakpoints")
        for marker in self.markers.values():
            if marker not in MARKERS:
                raise RuleFault("markers", f"{marker!r} is none of {', '.join(MARKERS)}")

    def _refuse_bad_lives(self) -> None:
        names = [life.name for life in self.lives]
        if len(set(names)) < len(names):
            raise RuleFault("ttls", "two lives have one name")
        if self.style is Style.EXPLICIT and not self.lives:
            raise RuleFault("ttls", "explicit caching needs a life to ask for")
        if self.read_milli is not None:
            if not 0 <= self.read_milli <= 1_000:
                raise RuleFault(
                    "read", f"a hit at {self.read_milli / 1000} times the input price saves nothing"
                )
            if any(life.write_milli < self.read_milli for life in self.lives):
                raise RuleFault("read", "a hit is dearer than a write")
        known = sorted((life.life_s, life.write_milli) for life in self.lives if life.life_s is not None)
        if any(longer[1] < shorter[1] for shorter, longer in pairwise(known)):
            raise RuleFault("ttls", "a longer life is cheaper to write than a shorter one")

    @property
    def reads_cheaper(self) -> bool:
        """A hit is known, or at least not known not, to cost less than input."""
        return self.read_milli is None or self.read_milli < 1_000

    def lives_on(self, operation: Operation) -> tuple[Life, ...]:
        """The menu as it is offered there."""
        return tuple(life for life in self.lives if life.surface in (None, operation))

    def key_on(self, operation: Operation) -> tuple[str, str]:
        """(member of the request, header) that carries the cache key; "" = none. The messages API has no such member."""
        if operation is Operation.MESSAGES:
            return "", ""
        if self.key_header and operation is Operation.CHAT:
            return "", self.key_header
        return self.key, ""


@dataclass(frozen=True, slots=True)
class Alias:
    """Models that another provider serves, and that cache as its own do: "openrouter/anthropic/*"."""

    models: tuple[str, ...]
    same_as: str  # that provider's name
    source: str
    checked_on: date


@dataclass(frozen=True, slots=True)
class CacheRules:
    """All rows, in order: the first that matches a model on a day holds."""

    rows: tuple[CacheRule | Alias, ...] = ()
    _found: dict[str, tuple[int, CacheRule | None]] = field(default_factory=dict, compare=False, repr=False)

    def find(self, model: str, now_ms: int) -> CacheRule | None:
        """The rule for "provider/model"; None if nothing is known. Remembered for the day."""
        day = now_ms // _DAY_MS
        known = self._found.get(model)
        if known is None or known[0] != day:
            if len(self._found) > 10_000:  # only names of deployments are looked up; a bound all the same
                self._found.clear()
            known = self._found[model] = (day, self.on(model, _EPOCH + timedelta(days=day)))
        return known[1]

    def on(self, model: str, day: date) -> CacheRule | None:
        for row in self.rows:
            if not any(fnmatchcase(model, pattern) for pattern in row.models):
                continue
            if isinstance(row, Alias):
                own = self.on(f"{row.same_as}/{model.rsplit('/', 1)[-1]}", day)
                # What lies between may rewrite roles, so it is unknown whether a system turn stays where it is.
                return own and replace(own, mid_conversation_system=None, mid_conversation_tools=None)
            if (row.valid_from is None or row.valid_from <= day) and (
                row.valid_until is None or day <= row.valid_until
            ):
                return row
        return None


def covering(rows: tuple[CacheRule | Alias, ...], later: CacheRule | Alias) -> CacheRule | Alias | None:
    """The earlier row that leaves `later` nothing to match at any time; None if there is none."""
    for row in rows:
        dated = isinstance(row, CacheRule) and (row.valid_from or row.valid_until)
        if not dated and all(any(fnmatchcase(p, q) for q in row.models) for p in later.models):
            return row
    return None
