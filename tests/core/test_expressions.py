"""Compiled expressions against the CEL library: whatever one says of an expression, the other says too."""

from __future__ import annotations

import cel
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.core import expressions
from gateway.core.catalog import Tier
from gateway.core.expressions import Beyond, ExpressionError, parse
from gateway.core.rules import (
    FIELDS,
    CacheFacts,
    OwnerFacts,
    RequestFacts,
    RuleContext,
    RuleError,
    RuleSet,
    RuleText,
    TaskFacts,
    TimeFacts,
    Warmth,
)

TEXTS = ["", "a", "codex", "it's", 'say "x"', "back\\slash", "new\nline", "é😀"]
LABELS = st.dictionaries(st.sampled_from(["env", "team"]), st.sampled_from(TEXTS), max_size=2)
COUNTS = st.sampled_from([0, 1, 2, 7, 8_000])
AMOUNTS = st.sampled_from([0.0, 0.5, 1.0, 2.5])


def quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
    return f"'{escaped}'"


def joined(*parts: st.SearchStrategy[str], form: str) -> st.SearchStrategy[str]:
    return st.tuples(*parts).map(lambda found: form.format(*found))


STRINGS = st.one_of(
    st.sampled_from(TEXTS).map(quoted),
    st.sampled_from(
        ["request.model", "request.client", "team.id", "request.labels.env", "key.labels['team']"]
    ),
)
INTS = st.recursive(
    st.sampled_from(["0", "3", "-2", "request.context_tokens", "task.step", "request.tools", "time.hour"]),
    lambda inner: (
        joined(inner, st.sampled_from("+-*/%"), inner, form="({} {} {})") | inner.map("-({})".format)
    ),
    max_leaves=4,
)
DOUBLES = st.one_of(
    st.sampled_from(["0.5", "2.0", "1e3", "task.budget_used", "task.spent_usd", "cache.fast.expires_in_s"]),
    INTS.map("double({})".format),
)
DOUBLES |= joined(DOUBLES, st.sampled_from("+-*"), DOUBLES, form="({} {} {})")
COMPARED = st.sampled_from(["==", "!=", "<", "<=", ">", ">="])
ATOMS = st.one_of(
    st.sampled_from(["request.stream", "task.interactive", "true", "false"]),
    joined(STRINGS, COMPARED, STRINGS, form="{} {} {}"),
    joined(INTS | DOUBLES, COMPARED, INTS | DOUBLES, form="{} {} {}"),
    joined(STRINGS, STRINGS, STRINGS, form="{} in [{}, {}]"),
    joined(INTS, INTS, form="{} in [{}]"),
    joined(STRINGS, st.sampled_from(["request.labels", "team.labels"]), form="{} in {}"),
    joined(STRINGS, st.sampled_from(["startsWith", "endsWith", "contains"]), STRINGS, form="{}.{}({})"),
    st.just("has(request.labels.env)"),
)
EXPRESSIONS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        joined(inner, st.sampled_from(["&&", "||"]), inner, form="({} {} {})"),
        inner.map("!({})".format),
        joined(inner, inner, inner, form="({} ? {} : {})"),
        joined(inner, inner, form="({}) == ({})"),
    ),
    max_leaves=6,
)
CONTEXTS = st.builds(
    RuleContext,
    request=st.builds(
        RequestFacts,
        model=st.sampled_from(TEXTS),
        client=st.sampled_from(["codex", "other"]),
        stream=st.booleans(),
        context_tokens=COUNTS,
        tools=COUNTS,
        labels=LABELS,
    ),
    task=st.builds(
        TaskFacts,
        step=COUNTS.filter(bool),
        budget_used=st.sampled_from([0.0, 0.5, 1.0]),
        spent_usd=AMOUNTS,
        interactive=st.booleans(),
    ),
    team=st.builds(OwnerFacts, id=st.sampled_from(TEXTS), labels=LABELS),
    key=st.builds(OwnerFacts, labels=LABELS),
    cache=st.just(CacheFacts(fast=Warmth(5, 2.5))),
    time=st.just(TimeFacts.at(1_796_040_183_011)),
)


@given(EXPRESSIONS, CONTEXTS)
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_compiled_expression_says_what_the_library_says(when: str, context: RuleContext) -> None:
    (expected,) = library(when, context)
    try:
        rules = RuleSet.compile([RuleText("r", when, Tier.FAST)])
    except RuleError:  # it can never match
        assert expected is not True
        return
    assert rules.rules[0].node is not None, "the library would have to evaluate it"
    decided = rules.decide(context)
    assert (decided.rule == "r", decided.failed == ("r",)) == (expected is True, expected is None)


def library(when: str, context: RuleContext) -> tuple[bool | None]:
    """The library's own verdict; None if it fails."""
    plain = {
        name: {
            k: dict(v)
            if k == "labels"
            else {m: getattr(v, m) for m in v.__struct_fields__}
            if name == "cache"
            else v
            for k in part.__struct_fields__
            for v in [getattr(part, k)]
        }
        for name in FIELDS
        for part in [getattr(context, name)]
    }
    try:
        return (cel.compile(when).execute(cel.Context(variables=plain)) is True,)
    except (KeyError, TypeError, RuntimeError, ValueError, ArithmeticError):
        return (None,)


@pytest.mark.parametrize(
    "when",
    [
        "request.model.matches('a')",
        "size(request.model) > 3",
        "['a'].exists(x, x == request.model)",
        "request.model == r'a'",
        "request.model == '''a'''",
        "task.step == 3u",
        "task.step == 0x10",
        "task.step == 9223372036854775808",
        "request.labels == {}",
        "request.model == '\\u00e9'",
        "task.spent_usd / 2.0 > 1.0",
    ],
)
def test_what_is_not_compiled_says_so(when: str) -> None:
    with pytest.raises(Beyond):
        parse(when, FIELDS)


def test_integers_have_64_bits() -> None:
    rules = RuleSet.compile([RuleText("r", "9223372036854775807 - 1 + task.step > 0", Tier.FAST)])
    assert rules.decide(RuleContext(task=TaskFacts(step=1))).rule == "r"
    assert rules.decide(RuleContext(task=TaskFacts(step=2))).failed == ("r",)


def test_the_text_of_a_rule_cannot_leave_its_literal() -> None:
    node = parse("request.model == 'a\\') or (__import__(\\'os\\')'", FIELDS)
    assert expressions.python(node) == """(request.model == ("a') or (__import__('os')"))"""
    with pytest.raises(ExpressionError, match="there is no '__import__'"):
        parse("__import__.os == 'a'", FIELDS)
