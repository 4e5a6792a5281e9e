"""The shipped lists: what is written is what would be generated, complete, and consistent with the cache rules."""

from __future__ import annotations

from datetime import date
from decimal import Decimal
from fnmatch import fnmatchcase
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import yaml

from config import build_prices
from config.build_prices import Refused
from gateway.core.catalog import OnDisconnect, Operation, Wire
from gateway.core.prices import PriceRow, listed_models, load_price_book

CONFIG = Path(build_prices.__file__).parent
PRICES = yaml.safe_load((CONFIG / "prices.yaml").read_text())
PROVIDERS = yaml.safe_load((CONFIG / "providers.yaml").read_text())
LISTED = yaml.safe_load((CONFIG / "listed_models.yaml").read_text())
NOW_MS = 1_795_996_800_000  # 2026-11-30


def test_prices_are_what_would_be_generated() -> None:
    doc, open_ones = build_prices.build(LISTED, PRICES)
    assert list(build_prices.table(open_ones))[1:] == []
    assert build_prices.written(doc) == (CONFIG / "prices.yaml").read_text()


def test_each_listed_model_has_a_price_now_with_source_and_date() -> None:
    book, models = load_price_book(PRICES), listed_models(PRICES)
    assert len(models) > 90
    assert [m.price for m in models if book.find(m.price, NOW_MS) is None] == []
    assert [m.price for m in models if m.price != f"{m.provider}/{m.model}" or m.tier is None] == []
    assert [r.version for r in book.rows() if not (r.source and date.fromisoformat(r.checked_on))] == []
    names = [(m.provider, n) for m in models for n in (m.model, *m.aliases)]
    assert sorted(n for n in set(names) if names.count(n) > 1) == []


@pytest.mark.parametrize(
    ("version", "rates"),
    [
        ("openai/gpt-6.1-sol@1970-01-01", (2_000_000, 10_000_000, 100_000, 2_500_000, None, None)),
        (
            "anthropic/claude-opus-5-5@1970-01-01",
            (4_000_000, 20_000_000, 200_000, 5_000_000, 8_000_000, None),
        ),
        ("deepseek/deepseek-v4-flash@2026-09-10", (150_000, 600_000, 3_000, None, None, None)),
        ("gemini/gemini-4-argon@1970-01-01", (2_000_000, 10_000_000, 100_000, None, None, None)),
        ("openai/text-embedding-3-small@1970-01-01", (20_000, 0, None, None, None, None)),
        ("demo/demo-large@1970-01-01", (3_000_000, 15_000_000, 300_000, 3_750_000, 6_000_000, None)),
        ("demo/demo-fast@1970-01-01", (2_500_000, 10_000_000, 250_000, 3_125_000, None, None)),
    ],
)
def test_prices_as_the_vendors_have_them(version: str, rates: tuple[int | None, ...]) -> None:
    row = load_price_book(PRICES).find(version.partition("@")[0], NOW_MS)
    assert row is not None
    got = row.rates
    assert row.version == version
    assert rates == (
        got.input,
        got.output,
        got.cache_read,
        got.cache_write_5m,
        got.cache_write_1h,
        got.cache_write_12h,
    )


def test_deepseek_is_dearer_in_its_peak_hours() -> None:
    row = load_price_book(PRICES).find("deepseek/deepseek-v4-flash", NOW_MS)
    assert row is not None
    assert [(w.start_min, w.end_min, w.price.rates.input) for w in row.hours] == [
        (60, 240, 300_000),
        (360, 600, 300_000),
    ]


def test_an_announced_price_is_a_row_that_has_not_begun() -> None:
    book = load_price_book(PRICES)
    row: PriceRow | None = book.find("gemini/gemini-4-argon", NOW_MS + 86_400_000)
    assert row is not None
    assert (row.version, row.rates.input) == ("gemini/gemini-4-argon@2026-12-01", 4_000_000)


# --- the generator ---------------------------------------------------------------------------------------


def with_models(*models: dict[str, Any]) -> dict[str, Any]:
    return {**LISTED, "models": list(models)}


DEEPSEEK: dict[str, Any] = {"provider": "deepseek", "model": "deepseek-flash"}


def test_a_disagreement_forbids_writing() -> None:
    _, open_ones = build_prices.build(with_models(DEEPSEEK), {})
    assert [" ".join(line.split()) for line in build_prices.table(open_ones)] == [
        "price path genai-prices litellm",
        "deepseek/deepseek-flash rates.cache_read 0.003 0.006",
        "deepseek/deepseek-flash rates.input 0.15 0.3",
        "deepseek/deepseek-flash rates.output 0.6 1.2",
    ]


def test_a_note_settles_what_it_names_and_nothing_else() -> None:
    note = {"fields": {"rates.input": "0.15", "rates.output": "0.6"}, "source": "s", "reason": "r"}
    _, open_ones = build_prices.build(with_models({**DEEPSEEK, "resolved": [note]}), {})
    assert [d.path for d in open_ones] == ["rates.cache_read"]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            {**DEEPSEEK, "resolved": [{"fields": {"rates.cache_write_5m": "1"}, "source": "s", "reason": "r"}]},
            "the resolved note for rates.cache_write_5m settles nothing any more",
        ),
        ({**DEEPSEEK, "resolved": [{"fields": {"rates.input": "1"}, "source": "s"}]}, "needs a source and a reason"),
        ({"provider": "openai", "model": "gpt-0"}, "openai/gpt-0: genai-prices does not know openai 'gpt-0'"),
        ({"provider": "openai", "model": "gpt-6.1-terra"}, "litellm does not know 'gpt-6.1-terra'; see `single_source`"),
        ({"provider": "openai", "model": "gpt-4o", "single_source": "x"}, "litellm knows 'gpt-4o'; see `single_source`"),
        ({"provider": "deepseek", "model": "deepseek-v4-pro"}, "deepseek-v4-pro has daily windows and dated prices"),
    ],
)  # fmt: skip
def test_what_cannot_be_generated_is_refused(model: dict[str, Any], message: str) -> None:
    with pytest.raises(Refused, match=message):
        build_prices.build(with_models(model), {})


def test_a_changed_price_becomes_a_new_row_and_the_old_one_stays() -> None:
    model = {"provider": "openai", "model": "gpt-4o"}
    first, _ = build_prices.build(with_models(model), {})
    old = first["models"][0]["rows"][0]
    dearer = {**old, "rates": {**old["rates"], "input_usd_per_mtok": "5"}, "checked_on": "2026-01-02"}
    second, _ = build_prices.build(with_models(model), {"models": [{**first["models"][0], "rows": [dearer]}]})
    assert second["models"][0]["rows"] == [dearer, {**old, "valid_from": "2026-11-30"}]
    third, _ = build_prices.build(with_models(model), second)
    assert third == second


def test_gaps_of_a_service_tier_are_filled_from_the_dear_side() -> None:
    d = Decimal
    flat = {
        "rates.input": d(2), "rates.output": d(10), "rates.cache_write_5m": d("2.5"),
        "size_tiers.1.above": d(1000), "size_tiers.1.input": d(4), "size_tiers.1.output": d(15),
        "service_tiers.flex.rates.input": d(1), "service_tiers.flex.rates.output": d(5),
        "service_tiers.half.rates.input": d(1),
    }  # fmt: skip
    assert {p: str(v) for p, v in build_prices.filled(flat).items() if p not in flat} == {
        "size_tiers.1.cache_write_5m": "5",
        "service_tiers.flex.rates.cache_write_5m": "1.25",
        "service_tiers.flex.size_tiers.1.above": "1000",
        "service_tiers.flex.size_tiers.1.input": "4",
        "service_tiers.flex.size_tiers.1.output": "15",
        "service_tiers.flex.size_tiers.1.cache_write_5m": "5",
    }
    assert not any("half" in p for p in build_prices.filled(flat))


# --- providers.yaml --------------------------------------------------------------------------------------

RULE_KEYS = {
    "models", "valid_from", "valid_until", "same_as", "style", "markers", "implicit_breakpoints", "min_prefix_tokens", "granularity_tokens", "max_breakpoints",
    "lookback", "lookback_unit", "explicit_lookup", "ttls", "read", "key", "key_header", "key_means", "isolation",
    "mid_conversation_system", "mid_conversation_tools", "billing_header", "contested", "mark", "source", "checked_on",
}  # fmt: skip
RULES: list[dict[str, Any]] = PROVIDERS["cache_rules"]


def decimal_text(value: object) -> bool:
    return isinstance(value, str) and value.replace(".", "", 1).isdigit()


def test_providers_are_reachable_as_settings_reads_them() -> None:
    keys = {
        "wire",
        "base_url",
        "key_env",
        "litellm_provider",
        "on_disconnect",
        "bridge",
        "stream_usage",
        "usage_lookup",
        "cache_rules",
    }
    for name, p in PROVIDERS["providers"].items():
        assert set(p) <= keys, name
        assert p["key_env"], name
        assert OnDisconnect(p["on_disconnect"]), name
        if Wire(p["wire"]) is not Wire.LITELLM:
            assert p["base_url"].startswith("https://"), name
            assert not p["base_url"].endswith("/"), name
    listed = {m.provider for m in listed_models(PRICES)}
    assert listed == set(PROVIDERS["providers"]) | {"demo"}


def test_listed_operations_are_served_by_the_providers_wire() -> None:
    bridged = {Operation.CHAT, Operation.MESSAGES, Operation.EMBEDDINGS}
    for m in listed_models(PRICES):
        provider = PROVIDERS["providers"].get(m.provider, {})
        native = {
            "openai": {Operation.CHAT, Operation.RESPONSES, Operation.EMBEDDINGS},
            "anthropic": {Operation.MESSAGES, Operation.COUNT_TOKENS},
        }.get(provider.get("wire", ""), set())
        assert set(m.operations) <= native | bridged, m.price


def test_cache_rules_are_well_formed() -> None:
    patterns = [p for rule in RULES for p in rule["models"]]
    assert len(patterns) == len(set(patterns))
    for rule in RULES:
        name = rule["models"][0]
        assert set(rule) <= RULE_KEYS, name
        assert rule["source"], name
        assert isinstance(rule["checked_on"], date), name
        assert ("same_as" in rule) != (rule.get("style") in ("explicit", "implicit", "both")), name
        assert all(decimal_text(ttl["write"]) for ttl in rule.get("ttls", [])), name
        assert "read" not in rule or decimal_text(rule["read"]), name
        assert rule.get("lookback_unit") in (None, "content_block", "message_end"), name
        assert rule.get("key_means") in (None, "routing", "accounting", "isolation"), name
        assert all({"field", "value", "source", "checked_on"} <= set(c) for c in rule.get("contested", [])), (
            name
        )


def rule_for(price: str) -> dict[str, Any] | None:
    return next((r for r in RULES if any(fnmatchcase(price, p) for p in r["models"])), None)


#: Servers that only a configuration can name: `cache_rules: vllm` on a provider.
DECLARED = ("qwen", "minimax", "zai", "vllm", "sglang", "llamacpp")


def test_each_rule_is_reached_by_a_listed_model_or_a_declared_provider() -> None:
    reached = [rule_for(m.price) for m in listed_models(PRICES)]
    reached += [rule_for(f"{name}/any") for name in DECLARED]
    assert [r["models"] for r in RULES if r not in reached] == []


def test_multipliers_of_the_rules_are_those_of_the_prices() -> None:
    book = load_price_book(PRICES)
    differ: list[tuple[str, str, str]] = []
    for m in listed_models(PRICES):
        rule, row = rule_for(m.price), book.find(m.price, NOW_MS)
        if rule is None or row is None or Operation.EMBEDDINGS in m.operations:
            continue
        lives = {ttl["name"]: ttl["write"] for ttl in rule.get("ttls", [])}
        default = next(iter(lives.values()), None)
        for what, said, rate in (
            ("read", rule.get("read"), row.rates.read),
            ("default write", default, row.rates.write_5m),
            ("1h write", lives.get("1h"), row.rates.write_1h),
            ("12h write", lives.get("12h"), row.rates.write_12h),
        ):
            ratio = Fraction(rate, row.rates.input)
            if said is not None and abs(ratio - Fraction(said)) > Fraction(3, 1000):
                differ.append((m.price, what, f"{said} but {rate}/{row.rates.input}"))
    assert differ == []
