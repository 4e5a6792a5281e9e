"""Where requests go: rules, virtual models, the guard over warm caches, and what clients are told of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.core.catalog import Deployment, Order, Tier
from gateway.core.policies import Bills
from gateway.core.prices import PriceRow, Rates
from gateway.core.rules import Caps, Decision, RuleContext, RuleSet, RuleText, Switch, TaskFacts
from gateway.pipeline.runs import labels_of
from tests.support.recorder import Recorder, Script
from tests.support.small_world import SmallWorld, key_record, provider

CHAT = "/v1/chat/completions"
SMALL_RATES = Rates(1_000_000, 5_000_000, 100_000, 1_250_000)
NEAR_RATES = Rates(2_500_000, 12_000_000, 250_000, 3_125_000)
STANDARD, SMALL = Tier.STANDARD, Tier.SMALL
ASK = {"role": "user", "content": "do it"}
CALLS = {
    "role": "assistant",
    "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "Read", "arguments": "{}"}}],
}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "text"}


def tiers(base_url: str) -> list[Deployment]:
    up = provider(base_url)
    return [
        Deployment("big", up, "big", "big", "up/m", STANDARD),
        Deployment("tiny", up, "tiny", "tiny", "up/tiny", SMALL),
    ]


def world(upstream: Recorder, rules: list[RuleText], rates: Rates = SMALL_RATES, **more: Any) -> SmallWorld:
    prices = [PriceRow("up/tiny", "up/tiny@1", 0, rates)]
    return SmallWorld(tiers(upstream.base_url), rules=rules, more_prices=prices, **more)


async def ask(gw: SmallWorld, *messages: object, model: str = "auto", **more: Any) -> dict[str, str]:
    """The answer's headers about its route."""
    headers = more.pop("headers", {"x-task-id": "t"})
    doc = {"model": model, "max_tokens": 100, "messages": messages or [ASK], **more}
    async with gw.http.post(CHAT, json=doc, headers=headers) as answer:
        assert answer.status == 200, await answer.text()
        names = ("x-tier", "x-deployment", "x-rule", "x-route-reason", "x-route-instead-of")
        return {name: answer.headers[name] for name in names if name in answer.headers}


def used(cached: int, fresh: int, output: int = 50) -> Script:
    usage = {
        "prompt_tokens": cached + fresh,
        "completion_tokens": output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    doc = {
        "id": "c",
        "object": "chat.completion",
        "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "ok"}}],
        "usage": usage,
    }
    return Script(200, [json.dumps(doc).encode()])


async def test_a_rule_decides_and_everybody_can_read_which_and_why() -> None:
    rules = [RuleText("no tools", "request.tools == 0", SMALL, why="nothing to call", switch=Switch.ALWAYS)]
    async with Recorder() as upstream, world(upstream, rules) as gw:
        assert await ask(gw) == {
            "x-tier": "small",
            "x-deployment": "tiny",
            "x-rule": "no tools",
            "x-route-reason": "nothing to call",
        }
        await gw.settled()
        attempt, outcome = gw.ledger.entries[0]
        assert (attempt.tier, attempt.deployment, attempt.rule, outcome.note) == (
            "small",
            "tiny",
            "no tools",
            "route: nothing to call",
        )


async def test_a_tiers_name_and_a_pinned_model_are_taken_at_their_word() -> None:
    rules = [RuleText("all", "true", SMALL)]
    async with Recorder() as upstream, world(upstream, rules) as gw:
        assert await ask(gw, model="standard") == {
            "x-tier": "standard",
            "x-deployment": "big",
            "x-route-reason": "the client asked for tier standard",
        }
        assert await ask(gw, model="big") == {
            "x-tier": "standard",
            "x-deployment": "big",
            "x-route-reason": "the client asked for big",
        }


async def test_a_virtual_model_has_rules_of_its_own_and_may_lead_to_another() -> None:
    virtual = {
        "coder": RuleSet.compile(
            [
                RuleText("short", "request.context_tokens < 100", SMALL, switch=Switch.ALWAYS),
                RuleText("rest", "true", STANDARD, model="looker"),
            ]
        ),
        "looker": RuleSet.compile([], default_model="big"),
    }
    async with Recorder() as upstream, world(upstream, [], virtual=virtual) as gw:
        short = await ask(gw, model="coder")
        assert (short["x-deployment"], short["x-rule"]) == ("tiny", "short")
        long = await ask(gw, {"role": "user", "content": "x" * 1_000}, model="coder", headers={})
        assert (long["x-deployment"], long["x-route-reason"]) == ("big", "true; looker: no rules")
        assert long["x-rule"] == "rest"
        async with gw.http.get("/v1/models") as answer:
            assert [row["id"] for row in (await answer.json())["data"]] == ["big", "tiny", "coder", "looker"]


async def test_what_the_rule_that_leads_to_a_virtual_model_asks_for_holds_there_too() -> None:
    virtual = {
        "cheap": RuleSet.compile(
            [RuleText("tools", "request.tools > 5", STANDARD, Caps(max_output_tokens=9))], SMALL
        )
    }
    caps = Caps(max_output_tokens=64, reasoning_effort="low")
    rules = [RuleText("late", "task.step > 1", SMALL, caps, switch=Switch.ALWAYS, model="cheap")]
    async with Recorder() as upstream, world(upstream, rules, virtual=virtual) as gw:
        assert (await ask(gw))["x-deployment"] == "big"
        assert await ask(gw, ASK, CALLS, RESULT) == {
            "x-tier": "small",
            "x-deployment": "tiny",
            "x-rule": "late",
            "x-route-reason": "task.step > 1; cheap: no rule matched",
        }
        assert json.loads(upstream.received[-1].body)["max_tokens"] == 64
    first, second = rules[0], RuleText("tools", "true", STANDARD, Caps(max_output_tokens=9))
    led = RuleSet.compile([first]).decide(RuleContext(task=TaskFacts(step=2)))
    assert led.then(RuleSet.compile([second]).decide(RuleContext())) == Decision(
        "tools",
        STANDARD,
        Caps(max_output_tokens=9, reasoning_effort="low"),
        "task.step > 1; cheap: true",
        switch=Switch.ALWAYS,
    )


async def test_a_virtual_model_is_for_keys_that_may_use_it_or_what_it_leads_to() -> None:
    virtual = {"coder": RuleSet.compile([], SMALL)}
    for allowed, status in ((("coder",), 200), (("tiny",), 200), (("other",), 404)):
        async with (
            Recorder() as upstream,
            world(upstream, [], virtual=virtual, record=key_record(models=frozenset(allowed))) as gw,
            gw.http.post(CHAT, json={"model": "coder", "messages": [ASK]}) as answer,
        ):
            assert answer.status == status


async def test_shadow_rules_are_recorded_and_do_nothing() -> None:
    rules = [RuleText("all", "true", SMALL)]
    async with Recorder() as upstream, world(upstream, rules, shadow=True) as gw:
        assert await ask(gw) == {
            "x-tier": "standard",
            "x-deployment": "big",
            "x-rule": "shadow:all",
            "x-route-reason": "the default; would be small",
        }


async def test_a_rule_that_fails_is_told_of_and_does_not_match() -> None:
    rules = [RuleText("labelled", "request.labels.env == 'ci'", SMALL, switch=Switch.ALWAYS)]
    async with Recorder() as upstream, world(upstream, rules) as gw:
        assert (await ask(gw))["x-deployment"] == "big"
        assert gw.failed_rules == ["labelled"]
        labelled = {"x-task-id": "t2", "x-labels": "team=a, env=ci"}
        assert (await ask(gw, headers=labelled))["x-deployment"] == "tiny"
        assert gw.failed_rules == ["labelled"]


def test_labels_come_from_one_header() -> None:
    assert labels_of({"x-labels": "a=1, b = 2,c,=x,d="}) == {"a": "1", "b": "2", "d": ""}
    assert labels_of({}) == {}


async def test_what_a_rule_caps_is_written_into_the_request() -> None:
    caps = Caps(max_output_tokens=64, reasoning_effort="low", service_tier="flex")
    rules = [RuleText("cheap", "true", SMALL, caps, switch=Switch.ALWAYS)]
    async with Recorder() as upstream, world(upstream, rules) as gw:
        await ask(gw, reasoning_effort="high")
        await ask(gw, reasoning_effort="minimal", service_tier="auto", max_tokens=10)
        sent = [json.loads(r.body) for r in upstream.received]
        names = ("max_tokens", "reasoning_effort", "service_tier")
        assert [[doc[name] for name in names] for doc in sent] == [
            [64, "low", "flex"],
            [10, "minimal", "flex"],
        ]
        await gw.settled()
        assert [o.service_tier for _, o in gw.ledger.entries] == ["flex", "flex"]


READING = [RuleText("reading", "task.reading", SMALL)]


async def test_a_large_warm_history_is_not_left_for_one_step() -> None:
    async with Recorder() as upstream, world(upstream, READING, NEAR_RATES) as gw:
        upstream.scripts = [used(0, 100_000), used(100_000, 500)]
        long = {"role": "user", "content": "x" * 400_000}
        assert (await ask(gw, long))["x-deployment"] == "big"
        await gw.settled()
        second = await ask(gw, long, CALLS, RESULT)
        assert (second["x-deployment"], second["x-rule"], second["x-route-instead-of"]) == (
            "big",
            "reading",
            "small",
        )
        assert second["x-route-reason"].startswith("task.reading; stays: ")
        assert "to go and" in second["x-route-reason"]
        assert second["x-route-reason"].endswith("; policy weigh: nothing is known of such runs yet")


async def test_what_runs_of_a_kind_would_have_cost_is_told_to_the_next_one_and_decides() -> None:
    async with Recorder() as upstream, world(upstream, READING, NEAR_RATES) as gw:
        long = {"role": "user", "content": "x" * 400_000}
        found = []
        for task in ("t1", "t2", "t3"):
            headers = {"x-task-id": task}
            upstream.scripts = [used(0, 100_000), used(100_000, 500)]
            await ask(gw, long, headers=headers)
            await gw.settled()
            if task == "t3":
                run = gw.world.runs.known(gw.world.runs.tasks()[0])
                assert run is not None
                gw.world.runs.bills(run).observe(Bills(weigh=1_000_000_000, stay=1_000_000_000))
            second = await ask(gw, long, CALLS, RESULT, headers=headers)
            await gw.settled()
            found.append((second["x-deployment"], second["x-route-reason"].partition("; policy ")[2]))
        assert found == [
            ("big", "weigh: nothing is known of such runs yet"),
            (
                "big",
                "weigh: in 2 such runs weighing would have cost $0.0326, staying $0.0326, following the rules $0.3147",
            ),
            (
                "tiny",
                "follow: in 3 such runs weighing would have cost $1.0653, staying $1.0653, following the rules $0.6293",
            ),
        ]


async def test_a_small_history_is() -> None:
    async with Recorder() as upstream, world(upstream, READING) as gw:
        upstream.scripts = [used(0, 1_500, 900)]
        short = {"role": "user", "content": "x" * 6_000}
        assert (await ask(gw, short))["x-deployment"] == "big"
        await gw.settled()
        assert (await ask(gw, short, CALLS, RESULT))["x-deployment"] == "tiny"


@pytest.mark.parametrize(("seal", "deployment"), [({}, "tiny"), ({"signature": "sealed"}, "big")])
async def test_no_other_model_gets_thoughts_that_only_one_can_take_up(
    seal: dict[str, str], deployment: str
) -> None:
    rules = [RuleText("rescue", "task.step > 1", SMALL, switch=Switch.ALWAYS)]
    async with Recorder() as upstream, world(upstream, rules) as gw:
        assert (await ask(gw))["x-deployment"] == "big"
        await gw.settled()
        found = await ask(gw, ASK, CALLS | seal, RESULT)
        assert found["x-deployment"] == deployment
        if seal:
            assert found["x-route-reason"].endswith("a tool call is open that only this model can go on with")


async def test_among_equals_the_cheapest_or_the_quickest_is_asked_first() -> None:
    async with Recorder() as upstream:
        up = provider(upstream.base_url)
        pair = [Deployment("dear", up, "m", "m", "up/m"), Deployment("cheap", up, "m", "m", "up/tiny")]
        cheap = [PriceRow("up/tiny", "up/tiny@1", 0, SMALL_RATES)]
        async with SmallWorld(pair, more_prices=cheap, order=Order.PRICE) as gw:
            assert (await ask(gw, model="m", headers={}))["x-deployment"] == "cheap"
        async with SmallWorld(pair, more_prices=cheap, order=Order.LATENCY) as gw:
            gw.world.latency.update(dear=0.5, cheap=2.0)
            assert (await ask(gw, model="m", headers={}))["x-deployment"] == "dear"
            assert gw.world.latency["dear"] < 0.5, "it was quicker than that"


async def test_the_deployment_that_holds_the_cache_is_asked_first_and_the_binding_moves_on_fallback() -> None:
    async with Recorder() as upstream:
        up = provider(upstream.base_url)
        pair = [
            Deployment(name, up, "m", "m", "up/m", weight=weight) for name, weight in (("a", 1), ("b", 0))
        ]
        async with SmallWorld(pair) as gw:
            upstream.scripts = [
                used(0, 5_000),
                Script(503, [b'{"error": {"message": "busy"}}']),
                used(0, 5_100),
            ]
            assert (await ask(gw, model="m"))["x-deployment"] == "a"
            await gw.settled()
            assert (await ask(gw, ASK, CALLS, RESULT, model="m"))["x-deployment"] == "b"  # a was busy
            await gw.settled()
            more = (ASK, CALLS, RESULT, CALLS, RESULT)
            assert (await ask(gw, *more, model="m"))["x-deployment"] == "b"
