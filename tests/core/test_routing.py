"""From the model that a client names to the deployments to try, in order."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from gateway.core.catalog import Catalog, Deployment, Operation, Provider, Tier, Wire
from gateway.core.errors import InvalidRequest, ModelNotFound
from gateway.core.health import HealthState, Result, observe
from gateway.core.routing import Needs, Route, route
from gateway.core.rules import Caps, Decision

OPENAI = Provider("openai", Wire.OPENAI, "http://127.0.0.1:1/v1", "openai-key")
ANTHROPIC = Provider("anthropic", Wire.ANTHROPIC, "http://127.0.0.1:1/v1", "anthropic-key")


def deployment(name: str, model: str, tier: Tier = Tier.STANDARD, **more: Any) -> Deployment:
    return Deployment(name, more.pop("provider", OPENAI), model, model, f"openai/{model}", tier, **more)


BIG = deployment("big", "gpt-5", Tier.FAST, aliases=("best",))
MID_A = deployment("mid-a", "gpt-5-mini")
MID_B = deployment("mid-b", "gpt-5-mini", priority=1)
NANO = deployment("nano", "gpt-5-nano", Tier.SMALL)
CLAUDE = deployment("claude", "claude-sonnet", provider=ANTHROPIC)
CATALOG = Catalog.of((BIG, MID_A, MID_B, NANO, CLAUDE))


def anything(*_: str) -> bool:
    return True


def only(*allowed: str) -> Any:
    return lambda *names: bool(set(names) & set(allowed))


def ask(model: str, operation: Operation = Operation.CHAT, **more: Any) -> Route:
    options: dict[str, Any] = {"decision": None, "health": {}, "may_use": anything, "pick": 0.0, "now_s": 0.0}
    return route(model, operation, more.pop("catalog", CATALOG), **(options | more))


def names(chosen: Route) -> list[str]:
    return [d.name for d in chosen.candidates]


def decided(tier: Tier) -> Decision:
    return Decision("night", tier, Caps(), "it is night")


def test_a_pinned_model_goes_to_its_deployments_by_priority() -> None:
    assert ask("gpt-5-mini", decision=decided(Tier.SMALL)) == Route(
        None, "", "the client asked for gpt-5-mini", (MID_A, MID_B)
    )
    assert names(ask("best")) == ["big"]


def test_auto_goes_where_the_rule_says_and_else_to_the_default_tier() -> None:
    assert ask("auto", decision=decided(Tier.SMALL)) == Route(Tier.SMALL, "night", "it is night", (NANO,))
    assert ask("auto") == Route(Tier.STANDARD, "", "the default tier", (MID_A, MID_B))


def test_equals_are_ranked_and_what_has_no_rank_goes_first() -> None:
    twins = tuple(deployment(name, "m") for name in ("x", "y", "z"))
    catalog = Catalog.of(twins)
    assert names(ask("m", catalog=catalog, rank={"x": 3.0, "y": 1.0, "z": 2.0})) == ["y", "z", "x"]
    assert names(ask("m", catalog=catalog, rank={"x": 3.0, "z": 2.0})) == ["y", "z", "x"]
    assert names(ask("m", catalog=catalog, rank={"x": 3.0, "y": 1.0}, warm={"x": 9})) == ["x", "z", "y"]
    assert names(ask("gpt-5-mini", rank={"mid-b": 0.5, "mid-a": 9.0})) == ["mid-a", "mid-b"]  # priority first


def test_a_tiers_name_asks_for_that_tier_whatever_the_rules_say() -> None:
    assert ask("fast", decision=decided(Tier.SMALL)) == Route(
        Tier.FAST, "", "the client asked for tier fast", (BIG,)
    )


def test_a_model_of_a_tiers_name_is_that_model() -> None:
    catalog = Catalog.of((deployment("mine", "m", aliases=("fast",)), BIG))
    assert names(ask("fast", catalog=catalog)) == ["mine"]


def test_auto_leaves_a_tier_that_has_nothing_to_offer_and_says_so() -> None:
    chosen = ask("auto", Operation.MESSAGES, decision=decided(Tier.SMALL))
    assert names(chosen) == ["claude"]
    assert (chosen.tier, chosen.why) == (Tier.STANDARD, "it is night; tier small has nothing to offer here")
    # a tier that the client named itself is not left
    with pytest.raises(InvalidRequest, match="is not served at /v1/messages"):
        ask("small", Operation.MESSAGES)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            "gpt-5-mni",
            "The model 'gpt-5-mni' does not exist or this key may not use it. Did you mean 'gpt-5-mini'?",
        ),
        (
            "standrd",
            "The model 'standrd' does not exist or this key may not use it. Did you mean 'standard'?",
        ),
        ("llama", "The model 'llama' does not exist or this key may not use it."),
        ("x" * 500, f"The model '{'x' * 128}...' does not exist or this key may not use it."),
    ],
)
def test_an_unknown_model_is_named_with_the_nearest_known_one(model: str, message: str) -> None:
    with pytest.raises(ModelNotFound) as caught:
        ask(model)
    assert (caught.value.message, caught.value.param) == (message, "model")


def test_what_a_key_may_not_use_does_not_exist_for_it() -> None:
    with pytest.raises(ModelNotFound) as caught:
        ask("gpt-5-min", may_use=only("gpt-5-nano"))
    # the suggestion tells of nothing that is hidden either
    assert caught.value.message.endswith("Did you mean 'gpt-5-nano'?")
    with pytest.raises(ModelNotFound):
        ask("fast", may_use=only("gpt-5-nano"))
    assert names(ask("auto", may_use=only("gpt-5-nano"))) == ["nano"]
    assert names(ask("best", may_use=only("best"))) == ["big"]


def test_a_key_for_a_tier_may_use_what_is_in_it_but_not_by_name() -> None:
    assert names(ask("fast", may_use=only("fast"))) == ["big"]
    assert names(ask("auto", decision=decided(Tier.FAST), may_use=only("auto"))) == ["big"]
    with pytest.raises(ModelNotFound):
        ask("gpt-5", may_use=only("fast"))


def test_a_model_asked_for_at_the_wrong_address_names_the_right_ones() -> None:
    with pytest.raises(InvalidRequest) as caught:
        ask("claude-sonnet", Operation.CHAT)
    assert caught.value.message == (
        "The model 'claude-sonnet' is not served at /v1/chat/completions; "
        "it is served at /v1/messages, /v1/messages/count_tokens."
    )
    assert caught.value.param == "model"


def ejected(*deployments: Deployment) -> dict[str, HealthState]:
    health: dict[str, HealthState] = {}
    for d in deployments:
        for _ in range(5):
            health |= observe(health, d, Result.FAILURE, 0.0)
    return health


def test_what_is_ejected_is_left_out_until_its_time_is_over() -> None:
    assert names(ask("gpt-5-mini", health=ejected(MID_A))) == ["mid-b"]
    assert names(ask("gpt-5-mini", health=ejected(MID_A), now_s=30.0)) == ["mid-a", "mid-b"]


def test_the_last_way_out_is_never_closed() -> None:
    assert names(ask("gpt-5-mini", health=ejected(MID_A, MID_B))) == ["mid-a", "mid-b"]
    refused = observe({}, BIG, Result.AUTH, 0.0)
    assert names(ask("gpt-5", health=refused)) == ["big"]


def test_the_warm_deployment_goes_first_if_it_is_fit() -> None:
    assert names(ask("gpt-5-mini", warm={"mid-b": 9})) == ["mid-b", "mid-a"]
    assert names(ask("gpt-5-mini", warm={"mid-b": 9}, health=ejected(MID_B))) == ["mid-a"]
    assert names(ask("gpt-5-mini", warm={"gone": 9})) == ["mid-a", "mid-b"]


def test_a_context_window_that_is_too_small_is_passed_over_unless_all_are() -> None:
    catalog = Catalog.of(
        (deployment("short", "m", context_tokens=1000), deployment("long", "m", context_tokens=9000))
    )
    assert names(ask("m", catalog=catalog, needs=Needs(1000))) == ["short", "long"]
    assert names(ask("m", catalog=catalog, needs=Needs(1001))) == ["long"]
    assert names(ask("m", catalog=catalog, needs=Needs(10_000))) == ["short", "long"]


def test_weights_share_the_traffic_and_the_rest_of_the_order() -> None:
    catalog = Catalog.of(
        tuple(deployment(n, "m", weight=w) for n, w in (("a", 60), ("b", 30), ("c", 10), ("spare", 0)))
    )
    orders = Counter(
        "".join(d.name[0] for d in ask("m", catalog=catalog, pick=n / 10_000).candidates)
        for n in range(10_000)
    )
    assert Counter({k: round(v / 100) for k, v in orders.items()}) == {
        "abcs": 45, "acbs": 15, "bacs": 26, "bcas": 4, "cabs": 7, "cbas": 3,
    }  # fmt: skip
