"""Rules in CEL: what they see, which one wins, and which are refused at load."""

from __future__ import annotations

import pytest

from gateway.core.catalog import Tier
from gateway.core.rules import (
    CacheFacts,
    Caps,
    Decision,
    OwnerFacts,
    RequestFacts,
    RuleContext,
    RuleError,
    RuleSet,
    RuleText,
    TaskFacts,
    TimeFacts,
    Verdict,
    Warmth,
)

FAST, STANDARD, SMALL = Tier.FAST, Tier.STANDARD, Tier.SMALL


def test_the_first_match_wins_and_says_why() -> None:
    rules = RuleSet.compile(
        [
            RuleText(
                "titles", "request.purpose == 'title'", SMALL, Caps(max_output_tokens=64), "titles are easy"
            ),
            RuleText("stuck", "task.tool_errors >= 3 || task.repeats > 2", FAST),
            RuleText("short", "request.context_tokens < 1000", SMALL),
        ]
    )
    title = RuleContext(request=RequestFacts(purpose="title"))
    assert rules.decide(title) == Decision("titles", SMALL, Caps(max_output_tokens=64), "titles are easy")
    stuck = RuleContext(task=TaskFacts(tool_errors=3))
    assert rules.decide(stuck) == Decision("stuck", FAST, Caps(), "task.tool_errors >= 3 || task.repeats > 2")
    long = RuleContext(request=RequestFacts(context_tokens=1000))
    assert rules.decide(long) == Decision("", STANDARD, Caps(), "no rule matched")


def test_without_rules_the_default_tier_decides() -> None:
    assert RuleSet.compile([], SMALL).decide(RuleContext()) == Decision("", SMALL, Caps(), "no rules")


CONTEXT = RuleContext(
    request=RequestFacts(model="gpt-5", stream=True, tools=3, labels={"env": "prod"}),
    task=TaskFacts(step=12, spent_usd=0.75, budget_used=0.8, interactive=True),
    team=OwnerFacts(id="research", labels={"cost": "low"}),
    key=OwnerFacts(budget_used=0.5),
    cache=CacheFacts(fast=Warmth(200_000, 120.5)),
    time=TimeFacts.at(1_796_040_183_011),  # Monday, 30 November 2026, 12:03:03 UTC
)


@pytest.mark.parametrize(
    "when",
    [
        "request.model.startsWith('gpt') && request.stream && request.tools == 3",
        "request.model in ['gpt-5', 'gpt-6']",
        "request.labels.env == 'prod' && team.labels.cost == 'low' && team.id == 'research'",
        "'env' in request.labels && !('env' in key.labels)",
        "has(request.labels.env) && !has(request.labels.other)",
        "task.step > 10 && task.spent_usd > 0.5 && task.spent_usd < 1 && task.budget_used >= 0.8",
        "task.interactive && key.budget_used == 0.5",
        "cache.fast.warm_tokens > 100000 && cache.fast.expires_in_s > 60 && cache.small.warm_tokens == 0",
        "time.hour == 12 && time.minute == 3 && time.weekday == 1 && time.unix_s == 1796040183",
        "['a', 'b'].exists(x, x != request.model)",
    ],
)
def test_a_rule_sees_the_whole_context(when: str) -> None:
    assert RuleSet.compile([RuleText("r", when, FAST)]).decide(CONTEXT).rule == "r"
    assert RuleSet.compile([RuleText("r", f"!({when})", FAST)]).decide(CONTEXT).rule == ""


def test_a_rule_that_fails_does_not_match_and_is_named() -> None:
    rules = RuleSet.compile(
        [
            RuleText("by label", "request.labels.env == 'prod'", FAST),
            RuleText("fine", "task.step == 1", SMALL),
        ]
    )
    assert rules.decide(RuleContext()) == Decision(
        "fine", SMALL, Caps(), "task.step == 1", failed=("by label",)
    )
    labelled = RuleContext(request=RequestFacts(labels={"env": "prod"}))
    assert rules.decide(labelled).failed == ()


@pytest.mark.parametrize(
    ("when", "message", "column"),
    [
        ("request.model ==", "mismatched input", 17),
        ("request.model == 'a' &&& task.step", "token recognition error", 24),
        ("", "mismatched input", 1),
        ("request.modle == 'gpt'", "request has no 'modle'; it has client, context_tokens,", 9),
        ("task.step > 3 && reqest.stream", "there is no 'reqest'; there are cache, key, request,", 18),
        ("'request.modle' == request.model && time.day == 1", "time has no 'day'", 42),
        ("cache.fast.tokens > 3", "cache.fast has no 'tokens'; it has expires_in_s, warm_tokens", 12),
        ("cache.fast > 3", "cache.fast has members: expires_in_s, warm_tokens", 1),
        ("request.model > 3", "can never match: string > int", 17),
        ("task.spent_usd + 1 > 3.0", "can never match: double + int; write double(...) around the int", 16),
        ("request.model.size > 3", "a string has no members", 15),
        ("task.step > 3 && request.tools", "&& needs true or false on both sides, not int", 18),
        ("cheap(request.model)", "can never match: Undefined variable or function: 'cheap'", None),
        ("request.context_tokens", "must be true or false, not int", 1),
        ("1 > 2", "can never match: it is always false", 1),
        ("task.step > 5 && task.step < 6", "can never match: it asks for what cannot be", 1),
        ("task.budget_used > 1", "can never match: it asks for what cannot be", 1),
        ("request.client == 'codecs'", "can never match: it asks for what cannot be", 1),
    ],
)
def test_a_rule_that_cannot_work_is_refused_with_its_place(
    when: str, message: str, column: int | None
) -> None:
    with pytest.raises(RuleError) as caught:
        RuleSet.compile([RuleText("bad", when, FAST)])
    assert caught.value.name == "bad"
    assert caught.value.message.startswith(message)
    assert caught.value.column == column
    assert str(caught.value).startswith("rule 'bad'" + (f" at column {column}: " if column else ": "))


def test_rules_that_can_never_be_reached_are_refused() -> None:
    always, more = RuleText("rest", "true", SMALL), RuleText("more", "task.step > 3", FAST)
    assert RuleSet.compile([more, always]).decide(RuleContext()).rule == "rest"
    with pytest.raises(
        RuleError, match="rule 'more': can never match, because rule 'rest' before it always does"
    ):
        RuleSet.compile([always, more])
    with pytest.raises(RuleError, match="rule 'more': another rule has the same name"):
        RuleSet.compile([more, more])


@pytest.mark.parametrize(
    ("earlier", "later"),
    [
        (["task.step > 3"], "task.step > 3"),
        (["task.step > 3"], "task.step >= 4 && request.stream"),
        (["request.tools == 0"], "!(request.tools != 0)"),
        (["request.client in ['codex', 'pi']"], "request.client == 'pi' && task.step == 1"),
        (["request.stream", "!request.stream"], "task.step > 3 && (request.stream || !request.stream)"),
        (["'env' in key.labels"], "'env' in key.labels && key.labels.env == 'prod'"),
        (["task.budget_used >= 0.5"], "task.budget_used > 0.8 || task.budget_used == 0.5"),
        (["time.hour >= 0"], "request.model.startsWith('gpt')"),
    ],
)
def test_a_rule_that_earlier_ones_leave_nothing_to_is_refused(earlier: list[str], later: str) -> None:
    before = [RuleText(f"rule {i}", when, FAST) for i, when in enumerate(earlier)]
    RuleSet.compile(before)
    with pytest.raises(RuleError, match="rule 'last': can never match, because rule"):
        RuleSet.compile([*before, RuleText("last", later, SMALL)])


@pytest.mark.parametrize(
    ("earlier", "later"),
    [
        (["task.step > 4"], "task.step > 3"),
        (["request.client in ['codex', 'pi']"], "request.client != 'codex'"),
        (["'env' in key.labels && task.step > 2"], "'env' in key.labels"),
        (["task.budget_used > 0.5"], "task.budget_used >= 0.5"),
        (["request.model.startsWith('gpt')"], "request.model.startsWith('gpt-5')"),  # true, but not seen
    ],
)
def test_a_rule_that_may_still_match_is_not(earlier: list[str], later: str) -> None:
    before = [RuleText(f"rule {i}", when, FAST) for i, when in enumerate(earlier)]
    assert len(RuleSet.compile([*before, RuleText("last", later, SMALL)]).rules) == len(earlier) + 1


def test_what_the_compiler_does_not_know_the_library_evaluates() -> None:
    rules = RuleSet.compile(
        [
            RuleText("pattern", "request.model.matches('^gpt-[0-9]$')", FAST),
            RuleText("absorbed", "request.labels.env == 'prod' || task.step == 2", SMALL),
        ]
    )
    assert rules.decide(RuleContext(request=RequestFacts(model="gpt-5"))).rule == "pattern"
    # the label is missing, and that does not matter
    assert rules.decide(RuleContext(task=TaskFacts(step=2))) == Decision(
        "absorbed", SMALL, Caps(), "request.labels.env == 'prod' || task.step == 2"
    )
    assert rules.decide(RuleContext()).failed == ("absorbed",)


def test_every_rule_can_be_asked_for_its_own_verdict() -> None:
    rules = RuleSet.compile(
        [
            RuleText("late", "task.step > 3", FAST, why="it is late"),
            RuleText("labelled", "request.labels.env == 'prod'", SMALL),
            RuleText("rest", "request.tools == 0", SMALL),
            RuleText("never here", "task.step > 4 && request.client == 'codex' || task.interactive", SMALL),
        ]
    )
    assert rules.verdicts(RuleContext(task=TaskFacts(step=4))) == (
        Verdict("late", True, "it is late"),
        Verdict("labelled", None, "there is no 'env'"),
        Verdict("rest", True, "request.tools == 0"),
        Verdict("never here", False, "task.step is 4, request.client is '', task.interactive is false"),
    )
