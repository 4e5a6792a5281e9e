"""Requests sent straight to the demo provider's cache, as they are or shaped, on a clock of the test's own."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import msgspec

from gateway.core import dialects
from gateway.core.cache_rules import CacheRule, CacheRules
from gateway.core.catalog import Operation
from gateway.core.dialects import Edits, Facts
from gateway.core.prefix import chain
from gateway.core.shaping import Level, Request, Shaped, Shaper, Transform
from gateway.demo.cache import PromptCache, Split, render
from gateway.demo.models import find_model
from gateway.demo.read import read_ask
from gateway.demo.tokens import TokenCounts
from gateway.settings import load, shipped

RULES: CacheRules = load(shipped("config/gateway.yaml"), {}).cache_rules
_COUNTS = TokenCounts()


def rule_of(model: str, now_ms: int = 1_796_000_000_000) -> CacheRule:
    rule = RULES.find(model, now_ms)
    assert rule is not None, model
    return rule


def compact(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def spliced(facts: Facts, body: bytes, shaped: Shaped) -> bytes:
    """The body as it leaves."""
    edits = Edits(splices=shaped.splices, members=shaped.members)
    return b"".join(dialects.render(facts, body, edits))


@dataclass(slots=True)
class Played:
    """One demo model with a cache of its own, reached at a level."""

    model: str  # demo-large | demo-small | demo-fast
    level: Level = Level.OBSERVE
    off: frozenset[Transform] = frozenset()
    shaper: Shaper = field(default_factory=Shaper)
    cache: PromptCache = field(default_factory=PromptCache)
    now_s: float = 0.0
    last: Shaped | None = None
    sent: bytes = b""

    def send(self, operation: Operation, body: bytes, *, scope: tuple[str, ...] = ("key",)) -> Split:
        """How the provider bills `body`, whose model it plays whatever it names."""
        facts = dialects.read(operation, body)
        request = Request(
            operation=operation,
            facts=facts,
            body=body,
            links=chain(facts.segments),
            scope=scope,
            rule=rule_of(f"demo/{self.model}"),
            level=self.level,
            off=self.off,
            now_s=self.now_s,
        )
        self.last = self.shaper.shape(request)
        self.sent = spliced(facts, body, self.last)
        return self.bill(operation, self.sent)

    def bill(self, operation: Operation, body: bytes) -> Split:
        model = find_model(self.model)
        assert model is not None
        ask = read_ask(operation, {**msgspec.json.decode(body), "model": self.model}, model)
        now_ms = round(self.now_s * 1_000)
        split = self.cache.split(ask, render(ask, b"k", _COUNTS), now_ms)
        self.cache.begin(split, now_ms)
        return split


def cost(split: Split, rule: CacheRule) -> Fraction:
    """Input cost in tokens at the input price."""
    lives = {life.name: life.write_milli for life in rule.lives}
    read = Fraction(rule.read_milli or 0, 1_000)
    short = Fraction(rule.lives[0].write_milli, 1_000)
    long = Fraction(lives.get("1h", 0), 1_000)
    return (
        split.input_uncached
        + split.cache_read * read
        + split.cache_write_5m * short
        + split.cache_write_1h * long
    )
