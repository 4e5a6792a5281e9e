"""Provider cache rules: what the shipped rows say, and every way in which a row is refused."""

from __future__ import annotations

from datetime import date, timedelta
from pathlib import Path

import pytest

from gateway.core.cache_rules import CacheRule, CacheRules, KeyMeans, Life, RuleFault, Style
from gateway.core.catalog import Operation
from gateway.settings import ConfigError, Settings, load, shipped

TODAY = date(2026, 11, 30)
NOW_MS = (TODAY - date(1970, 1, 1)).days * 86_400_000
KNOWN = CacheRules(load(shipped("config/gateway.yaml"), {}, today=TODAY).cache_rules.rows)


def of(model: str) -> CacheRule:
    rule = KNOWN.find(model, NOW_MS)
    assert rule is not None, model
    return rule


@pytest.mark.parametrize(
    ("model", "minimum", "read_milli", "mid_system"),
    [
        ("anthropic/claude-fable-5-1", 512, 25, True),
        ("anthropic/claude-opus-5-5-20260901", 512, 50, True),
        ("anthropic/claude-sonnet-5-5", 512, 50, True),
        ("anthropic/claude-opus-5", 512, 100, True),
        ("anthropic/claude-opus-4-8", 1_024, 100, True),
        ("anthropic/claude-sonnet-5", 1_024, 100, False),
        ("anthropic/claude-opus-4-7", 2_048, 100, False),
        ("anthropic/claude-haiku-4-5", 4_096, 100, False),
        ("openai/gpt-6.1-sol", 1_024, 50, True),
        ("openai/gpt-5.6-luna", 1_024, 100, True),
        ("openai/gpt-5.5", None, 100, True),
        ("deepseek/deepseek-v4-flash", None, 20, None),
        # what lies between a client and the vendor may rewrite roles
        ("openrouter/anthropic/claude-opus-5.5", 512, 50, None),
    ],
)
def test_what_the_shipped_rows_say(
    model: str, minimum: int | None, read_milli: int, mid_system: bool | None
) -> None:
    rule = of(model)
    said = rule.min_prefix_tokens, rule.read_milli, rule.mid_conversation_system
    assert said == (minimum, read_milli, mid_system)


def test_markers_lives_and_keys_differ_by_generation_and_operation() -> None:
    opus, sol, old = of("anthropic/claude-opus-5"), of("openai/gpt-6-sol"), of("openai/gpt-5.4")
    assert opus.markers == {Operation.MESSAGES: "cache_control", Operation.CHAT: "cache_control"}
    assert [(x.name, x.life_s, x.write_milli) for x in opus.lives] == [
        ("5m", 300, 1_250),
        ("1h", 3_600, 2_000),
    ]
    assert sol.markers[Operation.RESPONSES] == "prompt_cache_breakpoint"
    assert [x.name for x in sol.lives_on(Operation.CHAT)] == ["30m"]
    assert [x.name for x in sol.lives_on(Operation.RESPONSES)] == ["30m", "12h"]
    assert (sol.key_means, old.key_means) == (KeyMeans.ACCOUNTING, KeyMeans.ROUTING)
    assert (old.style, old.markers) == (Style.IMPLICIT, {})
    assert of("xai/grok-5").key_on(Operation.CHAT) == ("", "x-grok-conv-id")
    assert of("xai/grok-5").key_on(Operation.RESPONSES) == ("prompt_cache_key", "")
    assert of("vllm/any").key_on(Operation.CHAT) == ("cache_salt", "")
    assert of("vllm/any").key_on(Operation.MESSAGES) == ("", "")
    assert KNOWN.find("nobody/any", NOW_MS) is None


def test_a_row_holds_on_its_days_only() -> None:
    def row(read_milli: int, begins: date | None, ends: date | None) -> CacheRule:
        return CacheRule(
            ("p/*",), Style.IMPLICIT, "s", TODAY, read_milli=read_milli, valid_from=begins, valid_until=ends
        )

    rules = CacheRules((row(1, None, TODAY), row(2, TODAY + timedelta(days=1), None)))
    found = [rules.find("p/m", NOW_MS + days * 86_400_000) for days in (0, 1, 0)]
    assert [rule and rule.read_milli for rule in found] == [1, 2, 1]


# --- rows that are refused -----------------------------------------------------------------------------------

SOUND = (
    "style: explicit, max_breakpoints: 4, markers: {messages: cache_control}, source: s, "
    'ttls: [{name: 5m, life_s: 300, write: "1.25"}, {name: 1h, life_s: 3600, write: "2"}]'
)


def refusals(tmp_path: Path, *rows: str) -> list[str]:
    """What the loader says about these rows, which begin at line 4."""
    lines = "".join(f"  - {{{row}}}\n" for row in rows)
    (tmp_path / "providers.yaml").write_text(f"version: 1\nproviders: {{}}\ncache_rules:\n{lines}")
    (tmp_path / "prices.yaml").write_text("version: 1\nmodels: []\n")
    (tmp_path / "gateway.yaml").write_text("{}")
    try:
        settings = load(tmp_path / "gateway.yaml", {}, lists=tmp_path, today=TODAY)
    except ConfigError as error:
        return [str(p).removeprefix(f"{tmp_path}/") for p in error.problems]
    assert isinstance(settings, Settings)
    return []


def test_a_sound_row_is_taken(tmp_path: Path) -> None:
    assert refusals(tmp_path, f'models: ["p/a*"], {SOUND}, checked_on: 2026-11-30') == []
    # the last day of a row is one of its days
    assert (
        refusals(tmp_path, f'models: ["p/*"], {SOUND}, checked_on: 2026-01-01, valid_until: 2026-11-30') == []
    )


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (
            [f'models: ["p/*"], {SOUND}, checked_on: 2026-01-01, valid_until: 2026-11-29'],
            "providers.yaml:4: cache_rules[0].valid_until: this row expired on 2026-11-29 "
            "(look the facts up again, or remove it)",
        ),
        (
            [
                f'models: ["p/*"], {SOUND}, checked_on: 2026-11-30',
                f'models: ["p/m-1*"], {SOUND}, checked_on: 2026-11-30',
            ],
            "providers.yaml:5: cache_rules[1].models: can never match: line 4 names these models already "
            "(the first row that matches holds, so put the narrower one first)",
        ),
        (
            [f'models: ["p/*"], {SOUND}, checked_on: 2026-12-01'],
            "providers.yaml:4: cache_rules[0].checked_on: is in the future: 2026-12-01",
        ),
        (
            ['models: ["p/*"], style: implicit, max_breakpoints: 4, source: s, checked_on: 2026-11-30'],
            "providers.yaml:4: cache_rules[0].style: implicit caching takes no markers, but markers or "
            "max_breakpoints are given",
        ),
        (
            ['models: ["p/*"], style: explicit, source: s, checked_on: 2026-11-30'],
            "providers.yaml:4: cache_rules[0].style: explicit caching needs markers and max_breakpoints",
        ),
        (
            [f'models: ["p/*"], {SOUND}, checked_on: 2026-11-30, implicit_breakpoints: 5'],
            "providers.yaml:4: cache_rules[0].implicit_breakpoints: the provider places more of them than there may be",
        ),
        (
            [f'models: ["p/*"], {SOUND}, checked_on: 2026-11-30, lookback: 20'],
            "providers.yaml:4: cache_rules[0].lookback: lookback and lookback_unit come together",
        ),
        (
            [f'models: ["p/*"], {SOUND}, checked_on: 2026-11-30, key: k'],
            "providers.yaml:4: cache_rules[0].key_means: a key needs key_means, and key_means a key",
        ),
        (
            [f'models: ["p/*"], {SOUND}, checked_on: 2026-11-30, read: "1.5"'],
            "providers.yaml:4: cache_rules[0].read: a hit at 1.5 times the input price saves nothing",
        ),
        (
            [f'models: ["p/*"], {SOUND}, checked_on: 2026-11-30, read: "0.0255"'],
            "providers.yaml:4: cache_rules[0].read: must be a multiple of the input price with at most 3 decimals, "
            "not '0.0255'",
        ),
        (
            [
                'models: ["p/*"], style: both, source: s, checked_on: 2026-11-30, '
                'ttls: [{name: a, life_s: 300, write: "2"}, {name: b, life_s: 900, write: "1"}]'
            ],
            "providers.yaml:4: cache_rules[0].ttls: a longer life is cheaper to write than a shorter one",
        ),
        (
            [
                f'models: ["p/*"], {SOUND}, checked_on: 2026-11-30, min_prefix_tokens: 512, '
                "contested: [{field: min_prefix_tokens, value: 512, source: s, checked_on: 2026-11-30}]"
            ],
            "providers.yaml:4: cache_rules[0].contested: min_prefix_tokens is contested by its own value 512",
        ),
        (
            ['models: ["p/*"], same_as: q, source: s, checked_on: 2026-11-30'],
            "providers.yaml:4: cache_rules[0].same_as: there are no cache rules of 'q'",
        ),
        (
            [f'models: ["p/*"], {SOUND}, checked_on: 2026-11-30, minimum: 5'],
            "providers.yaml:4: cache_rules[0].minimum: there is no such setting",
        ),
        (
            [f'models: ["p/*"], {SOUND}'],
            "providers.yaml:4: cache_rules[0].checked_on: is required (the day on which the source was looked at)",
        ),
    ],
)
def test_a_bad_row_is_refused_with_its_line_and_key(tmp_path: Path, rows: list[str], said: str) -> None:
    found = refusals(tmp_path, *rows)
    assert [line for line in found if line.startswith(said)] == found[:1], found


def test_an_impossible_life_cannot_be_built() -> None:
    for life_s, write_milli in ((0, 1_000), (300, 0), (10**9, 1_000)):
        with pytest.raises(RuleFault):
            Life("x", life_s, True, write_milli)
