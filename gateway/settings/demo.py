"""The demo provider: stands in while no real one is configured, so that a first run answers without a key."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from gateway.core.catalog import Deployment, OnDisconnect, Operation, Provider, Tier, Wire
from gateway.core.prices import Rates
from gateway.settings.providers import OWN_PRICE, Found, own_price

DEMO = "demo"
_CALLS = frozenset(Operation) - {Operation.EMBEDDINGS}
_EMBEDDINGS = frozenset({Operation.EMBEDDINGS})
#: Model, tier, operations, context and prices: what the demo provider bills, which is written apart from this
#: (gateway/demo/models.py), so that its bill can be held against the ledger.
_MODELS = (
    (
        "demo-large",
        Tier.STANDARD,
        _CALLS,
        1_000_000,
        Rates(3_000_000, 15_000_000, 300_000, 3_750_000, 6_000_000),
    ),
    ("demo-fast", Tier.FAST, _CALLS, 1_000_000, Rates(2_500_000, 10_000_000, 250_000, 3_125_000)),
    ("demo-small", Tier.SMALL, _CALLS, 1_000_000, Rates(1_000_000, 5_000_000, 100_000, 1_250_000, 2_000_000)),
    ("demo-embed", Tier.SMALL, _EMBEDDINGS, 8_192, Rates(20_000, 0)),
)
_MAX_OUTPUT_TOKENS = 32_000
#: Which demo model plays a maker's models: the one that follows that maker's cache rules.
_PLAYS = {"demo-fast": ("gpt-", "o3"), "demo-large": ("claude-",), "demo-embed": ("text-embedding-",)}
#: Names that clients, examples and old scripts ask for and the price list no longer has.
_OLD_NAMES = (
    "gpt-3.5-turbo",
    "gpt-4",
    "gpt-4-turbo",
    "gpt-5-codex",
    "claude-sonnet-4-5",
    "claude-sonnet-4-5-20250929",
    "claude-sonnet-4-20250514",
    "claude-3-5-sonnet-latest",
    "claude-3-5-haiku-latest",
    "text-embedding-ada-002",
)
_USAGE_LOOKUP = "/generation?id="
#: It counts every image alike (`demo.prompt.IMAGE_TOKENS`).
_IMAGE_TOKENS_MAX = 765


class DemoMode(StrEnum):
    """When the demo provider is there: `auto` = if nothing else is."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"

    def wanted(self, something_else: bool) -> bool:
        return self is DemoMode.ON or (self is DemoMode.AUTO and not something_else)


def add_demo(found: Found, stand_in_for: Sequence[str] = ()) -> None:
    """One provider whose address the application fills in when it has started it, and its four models.

    `stand_in_for`: listed models of other providers. Those of OpenAI and Anthropic, and a few old names, become
    aliases of the demo models, so that a client works under the model's name that it has built in. Only for a
    demo that is alone: the name of a real model must never be answered by the demo in its place.
    """
    names = tuple(dict.fromkeys((*stand_in_for, *_OLD_NAMES))) if stand_in_for else ()
    provider = Provider(
        DEMO,
        Wire.DEMO,
        "",
        "",
        OnDisconnect.DRAIN,
        usage_lookup=_USAGE_LOOKUP,
        image_tokens_max=_IMAGE_TOKENS_MAX,
    )
    found.providers[DEMO] = provider
    for model, tier, operations, context_tokens, rates in _MODELS:
        name = f"{DEMO}/{model}"
        row = own_price(f"{OWN_PRICE}{name}", rates)
        found.own_prices[row.price] = row
        found.deployments[name] = Deployment(
            name=name,
            provider=provider,
            model=model,
            upstream_model=model,
            price=row.price,
            tier=tier,
            operations=operations,
            context_tokens=context_tokens,
            max_output_tokens=_MAX_OUTPUT_TOKENS,
            aliases=(name, *(n for n in names if n.startswith(_PLAYS.get(model, ())))),
        )
