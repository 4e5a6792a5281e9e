"""Which rules can never match: those that contradict themselves, and those that earlier rules leave nothing to.

A rule is laid out as alternatives, each a set of constraints on fields ("step from 10 on", "client is codex or
pi"); what is no comparison of a field with a constant is kept as it is, and only equals itself. So the answer is
one-sided: what is reported can never match, and what is not reported may.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.core.expressions import BOOL, DOUBLE, INT, STRING, Node, python

#: More alternatives than this are not looked through.
_ALTERNATIVES_MAX = 64
_FLIPPED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "==": "==", "!=": "!="}
_COMPARE: Mapping[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">=": operator.ge,
    ">": operator.gt,
}
_NEGATED = {"<": ">=", "<=": ">", ">": "<=", ">=": "<", "==": "!=", "!=": "=="}

Path = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Span:
    """Numbers from `low` to `high`, the ends included unless open, without those in `but`."""

    low: float = -math.inf
    high: float = math.inf
    low_open: bool = False
    high_open: bool = False
    but: frozenset[float] = frozenset()
    whole: bool = False  # integers only

    def met(self, other: Span) -> Span:
        low, low_open = max((self.low, self.low_open), (other.low, other.low_open))
        high, shut = min((self.high, not self.high_open), (other.high, not other.high_open))
        whole = self.whole or other.whole
        if whole:
            low, low_open = (
                (low if low == -math.inf else math.floor(low) + 1 if low_open else math.ceil(low)),
                False,
            )
            high, shut = (
                (high if high == math.inf else math.floor(high) if shut else math.ceil(high) - 1),
                True,
            )
        return Span(low, high, low_open, not shut, self.but | other.but, whole)

    @property
    def empty(self) -> bool:
        if self.low > self.high or (self.low == self.high and (self.low_open or self.high_open)):
            return True
        if self.whole and self.high - self.low < len(self.but):
            return all(n in self.but for n in range(int(self.low), int(self.high) + 1))
        return self.low == self.high and self.low in self.but

    def within(self, other: Span) -> bool:
        met = self.met(other)
        same = (met.low, met.high, met.low_open, met.high_open) == (
            self.low,
            self.high,
            self.low_open,
            self.high_open,
        )
        return same and all(n in self.but or n < self.low or n > self.high for n in other.but)


@dataclass(frozen=True, slots=True)
class Choice:
    """One of `only` (None = of all values), and none of `but`."""

    only: frozenset[object] | None = None
    but: frozenset[object] = frozenset()

    def met(self, other: Choice) -> Choice:
        only = (
            self.only if other.only is None else other.only if self.only is None else self.only & other.only
        )
        but = self.but | other.but
        return Choice(only, but) if only is None else Choice(only - but)

    @property
    def empty(self) -> bool:
        return self.only is not None and not self.only

    def within(self, other: Choice) -> bool:
        if self.only is None:
            return other.only is None and other.but <= self.but
        return self.only.isdisjoint(other.but) and (other.only is None or self.only <= other.only)


Constraint = Span | Choice
Domains = Mapping[Path, Constraint]


@dataclass(frozen=True, slots=True)
class _Case:
    """All of these at once. `opaque` are pieces as Python text, with whether they hold."""

    fields: Mapping[Path, Constraint] = field(default_factory=dict)
    opaque: frozenset[tuple[str, bool]] = frozenset()

    def met(self, other: _Case) -> _Case:
        fields = dict(self.fields)
        for path, limit in other.fields.items():
            fields[path] = _met(fields[path], limit) if path in fields else limit
        return _Case(fields, self.opaque | other.opaque)

    def possible(self) -> bool:
        return not any(limit.empty for limit in self.fields.values()) and not any(
            (text, not holds) in self.opaque for text, holds in self.opaque
        )

    def within(self, other: _Case, domains: Domains) -> bool:
        def inside(path: Path, limit: Constraint) -> bool:
            own = self.fields.get(path) or domains.get(path)
            return own is not None and _within(own, limit)

        return other.opaque <= self.opaque and all(inside(p, limit) for p, limit in other.fields.items())


def _met(a: Constraint, b: Constraint) -> Constraint:
    if isinstance(a, Span):
        return a.met(b) if isinstance(b, Span) else a
    return a.met(b) if isinstance(b, Choice) else a


def _within(a: Constraint, b: Constraint) -> bool:
    if isinstance(a, Span):
        return isinstance(b, Span) and a.within(b)
    return isinstance(b, Choice) and a.within(b)


Cases = tuple[_Case, ...]


def cases(node: Node, domains: Domains) -> Cases | None:
    """The alternatives under which an expression can be true; () = never, None = too many to look through."""
    found = _cases(node, True, domains)
    return None if found is None else tuple(case for case in found if case.possible())


def hidden_by(own: Cases | None, earlier: Sequence[tuple[str, Cases | None]], domains: Domains) -> list[str]:
    """Names of the earlier rules that together match whenever this one does; [] if something is left to it."""
    names: list[str] = []
    for case in own or ():
        cover = next(
            (name for name, others in earlier for other in others or () if case.within(other, domains)), None
        )
        if cover is None:
            return []
        names.append(cover)
    return list(dict.fromkeys(names))


def _cases(node: Node, holds: bool, domains: Domains) -> Cases | None:
    match node.op:
        case "literal":
            return (_Case(),) if node.value is holds else ()
        case "!":
            return _cases(node.args[0], not holds, domains)
        case "&&" | "||":
            parts = [_cases(arg, holds, domains) for arg in node.args]
            known = [part for part in parts if part is not None]
            if len(known) < len(parts):
                return None
            return _all(known) if (node.op == "&&") is holds else _any(known)
    if node.op in _COMPARE and all(arg.op == "literal" for arg in node.args):
        return (_Case(),) if _COMPARE[node.op](*(arg.value for arg in node.args)) is holds else ()
    limit = _constraint(node, holds)
    if limit is None:
        return (_Case({}, frozenset({(python(node), holds)})),)
    path, constraint = limit
    if path in domains:
        constraint = _met(domains[path], constraint)
    return (_Case({path: constraint}),)


def _any(parts: Sequence[Cases]) -> Cases | None:
    found = tuple(case for part in parts for case in part)
    return found if len(found) <= _ALTERNATIVES_MAX else None


def _all(parts: Sequence[Cases]) -> Cases | None:
    found: Cases = (_Case(),)
    for part in parts:
        found = tuple(met for one in found for other in part if (met := one.met(other)).possible())
        if len(found) > _ALTERNATIVES_MAX:
            return None
    return found


def _constraint(node: Node, holds: bool) -> tuple[Path, Constraint] | None:
    """What a comparison of a field with constants says of the field."""
    if node.op == "field" and node.type == BOOL:
        return _path(node), Choice(frozenset({holds}))
    if node.op == "in" and node.args[0].op == "field" and node.args[1].op == "list":
        members = node.args[1].args
        if not all(m.op == "literal" for m in members):
            return None
        values = frozenset(m.value for m in members)
        if node.args[0].type != STRING:
            return None
        return _path(node.args[0]), Choice(values) if holds else Choice(None, values)
    if node.op not in _FLIPPED:
        return None
    left, right = node.args
    op = node.op
    if left.op == "literal":
        left, right, op = right, left, _FLIPPED[op]
    if left.op != "field" or right.op != "literal":
        return None
    if not holds:
        op = _NEGATED[op]
    if left.type in (INT, DOUBLE) and isinstance(right.value, int | float):
        return _path(left), _span(op, right.value, left.type == INT)
    if op not in ("==", "!="):
        return None
    values = frozenset({right.value})
    return _path(left), Choice(values) if op == "==" else Choice(None, values)


def _span(op: str, n: float, whole: bool) -> Span:
    everything = Span(whole=whole)
    match op:
        case "<":
            return everything.met(Span(high=n, high_open=True))
        case "<=":
            return everything.met(Span(high=n))
        case ">":
            return everything.met(Span(low=n, low_open=True))
        case ">=":
            return everything.met(Span(low=n))
        case "==":
            return everything.met(Span(n, n))
    return Span(but=frozenset({n}), whole=whole)


def _path(node: Node) -> Path:
    assert isinstance(node.value, tuple)
    return node.value
