"""A configuration is read whole: what it amounts to, and everything that is wrong with it, by line."""

from __future__ import annotations

import dataclasses
import re
import stat
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from gateway.core.breakers import BreakerPolicy, Errors, Polling, Repeats, SpendSlope, StepCap
from gateway.core.breakers import Mode as BreakerMode
from gateway.core.budget import BudgetMode, OnExceed
from gateway.core.catalog import OnDisconnect, Operation, Tier, Wire
from gateway.core.entry import Unit
from gateway.core.identity import RateLimit
from gateway.core.rates import Rates
from gateway.core.rules import Caps, RuleText
from gateway.core.shaping import CachingPolicy, Level, Transform
from gateway.core.task import TaskDefault
from gateway.core.trimming import TrimPolicy
from gateway.demo.models import MODELS
from gateway.settings import (
    BudgetSpec,
    ConfigError,
    Listen,
    Mode,
    Secret,
    Settings,
    TeamSpec,
    Telemetry,
    WebhookSpec,
    ensure_pepper,
    environment,
    load,
    shipped,
)

PROVIDERS = """
providers:
  openai: {wire: openai, base_url: "https://api.openai.example/v1", key_env: [OPENAI_API_KEY], bridge: true}
  anthropic: {wire: anthropic, base_url: "https://api.anthropic.example/v1", key_env: [ANTHROPIC_API_KEY, CLAUDE_KEY]}
  resale: {wire: openai, base_url: "https://resale.example/v1", key_env: [RESALE_KEY], stream_usage: false}
"""
PRICES = """
version: 1
models:
  - {price: openai/large, provider: openai, model: large, tier: standard, context_tokens: 100000, aliases: [large-1],
     rows: [{rates: {input_usd_per_mtok: "2", output_usd_per_mtok: "8"}}]}
  - {price: openai/mini, provider: openai, model: mini, tier: small,
     rows: [{rates: {input_usd_per_mtok: "0.2", output_usd_per_mtok: "0.8"}}]}
  - {price: anthropic/opus, provider: anthropic, model: opus, operations: [chat, messages],
     rows: [{rates: {input_usd_per_mtok: "5", output_usd_per_mtok: "25"}}]}
  - {price: resale/large, provider: resale, model: large,
     rows: [{rates: {input_usd_per_mtok: "3", output_usd_per_mtok: "9"}}]}
"""
CONFIGURATION_PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"
#: (text of the file, environment) -> Settings
Read = Callable[..., Settings]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    (tmp_path / "providers.yaml").write_text(PROVIDERS)
    (tmp_path / "prices.yaml").write_text(PRICES)

    def read(text: str, env: Mapping[str, str] | None = None) -> Settings:
        file = tmp_path / "my.yaml"
        file.write_text(text)
        return load(file, env or {}, lists=tmp_path)

    return read


def problems(read: Read, text: str, env: Mapping[str, str] | None = None) -> list[str]:
    """All problems as "line key: message (hint)"."""
    with pytest.raises(ConfigError) as caught:
        read(text, env)
    return [str(p).removeprefix(f"{p.file}:") for p in caught.value.problems]


# --- what a configuration amounts to -------------------------------------------------------------------


def test_an_empty_file_is_the_embedded_default_with_the_demo_provider(read: Read) -> None:
    settings = read("")
    assert (settings.listen, settings.admin_listen) == (Listen("127.0.0.1", 4000), Listen("127.0.0.1", 4001))
    assert settings.database_url == "sqlite+aiosqlite:///var/ledger.db"
    assert (settings.redis_url, settings.pepper, settings.workers) == (None, None, 1)
    assert settings.demo
    assert [(d.model, d.tier) for d in settings.catalog.deployments] == [
        ("demo-large", Tier.STANDARD),
        ("demo-fast", Tier.FAST),
        ("demo-small", Tier.SMALL),
        ("demo-embed", Tier.SMALL),
    ]
    assert all(settings.prices.find(d.price, 0) for d in settings.catalog.deployments)
    assert settings.keyless == ("openai", "anthropic", "resale")


def test_the_demo_models_are_priced_at_what_the_demo_provider_bills(read: Read) -> None:
    settings = read("")
    billed = {
        m.name: (
            m.rates.input_uncached,
            m.rates.output,
            m.rates.cache_read,
            m.rates.cache_write_5m,
            m.rates.cache_write_1h,
        )
        for m in MODELS
    }
    priced = {}
    for d in settings.catalog.deployments:
        row = settings.prices.find(d.price, 0)
        assert row is not None
        r = row.rates
        priced[d.model] = (r.input, r.output, r.cache_read or 0, r.cache_write_5m or 0, r.cache_write_1h or 0)
    assert priced == billed


def test_the_demo_provider_gets_its_address_later(read: Read) -> None:
    settings = read("").with_demo_at("http://127.0.0.1:9/v1")
    assert not settings.demo
    assert {d.provider.base_url for d in settings.catalog.deployments} == {"http://127.0.0.1:9/v1"}
    assert settings.providers["demo"].base_url == "http://127.0.0.1:9/v1"
    assert settings.catalog.by_model["demo/demo-small"][0].provider.base_url == "http://127.0.0.1:9/v1"


def test_a_demo_that_is_alone_answers_to_the_names_that_clients_have_built_in() -> None:
    asked = (
        "gpt-4o-mini",
        "gpt-5",
        "gpt-5-codex",
        "claude-sonnet-4-5",
        "claude-opus-5-5",
        "text-embedding-3-small",
    )
    alone = load(shipped("config/gateway.yaml"), {}).catalog.by_model
    assert {name: [d.name for d in alone[name]] for name in asked} == {
        "gpt-4o-mini": ["demo/demo-fast"],
        "gpt-5": ["demo/demo-fast"],
        "gpt-5-codex": ["demo/demo-fast"],
        "claude-sonnet-4-5": ["demo/demo-large"],
        "claude-opus-5-5": ["demo/demo-large"],
        "text-embedding-3-small": ["demo/demo-embed"],
    }


def test_a_demo_beside_a_real_provider_takes_no_real_name(read: Read) -> None:
    catalog = read("demo: on", {"OPENAI_API_KEY": "k"}).catalog
    assert {name for name, ds in catalog.by_model.items() if any(d.provider.name == "demo" for d in ds)} == {
        *("demo-large", "demo-fast", "demo-small", "demo-embed"),
        *("demo/demo-large", "demo/demo-fast", "demo/demo-small", "demo/demo-embed"),
    }


def test_a_key_in_the_environment_switches_a_known_provider_on(read: Read) -> None:
    settings = read("", {"CLAUDE_KEY": " sk-secret\n"})
    assert settings.credentials == {"anthropic": Secret("sk-secret")}
    (opus,) = settings.catalog.deployments
    assert (opus.name, opus.model, opus.upstream_model, opus.aliases) == (
        "anthropic/opus",
        "opus",
        "opus",
        ("anthropic/opus",),
    )
    assert opus.operations == {Operation.CHAT, Operation.MESSAGES}
    assert opus.provider.wire is Wire.ANTHROPIC
    assert opus.provider.credential == "anthropic"
    assert not settings.demo
    assert settings.keyless == ("openai", "resale")


def test_two_providers_of_one_model_are_both_candidates_in_configuration_order(read: Read) -> None:
    env = {"OPENAI_API_KEY": "a", "RESALE_KEY": "b"}

    def candidates(text: str, model: str) -> list[str]:
        return [d.name for d in read(text, env).catalog.by_model[model]]

    assert candidates("", "large") == ["openai/large", "resale/large"]
    assert candidates("providers: {resale: }", "large") == ["resale/large", "openai/large"]
    assert candidates("", "resale/large") == ["resale/large"]
    assert candidates("", "large-1") == ["openai/large"]


def test_a_server_of_ones_own_has_its_own_prices(read: Read) -> None:
    settings = read(
        """
providers:
  local:
    base_url: http://127.0.0.1:8000/v1/
    on_disconnect: cancel_free
    timeouts: {first_byte_s: 600}
    deployments:
      - model: coder
        upstream_model: Some/Coder-30B
        tier: small
        operations: [chat]
        aliases: [cheap]
        price: {input_usd_per_mtok: 0.10, cache_read_usd_per_mtok: 0.02, output_usd_per_mtok: "0.40"}
      - {model: mystery, price: none, timeouts: {first_event_s: 30, total_s: 900}}
      - {model: like-large, price: openai/large, weight: 3, priority: 1, context_tokens: 8192}
"""
    )
    coder, mystery, like_large = settings.catalog.deployments
    assert coder.provider.base_url == "http://127.0.0.1:8000/v1"
    assert coder.provider.credential == ""
    assert coder.provider.on_disconnect is OnDisconnect.CANCEL_FREE
    assert (coder.provider.first_byte_timeout_s, coder.provider.idle_timeout_s) == (600, 120)
    assert like_large.provider == coder.provider
    own = dataclasses.replace(coder.provider, first_event_timeout_s=30, total_timeout_s=900)
    assert mystery.provider == own
    assert (coder.name, coder.model, coder.upstream_model) == ("local/coder", "coder", "Some/Coder-30B")
    assert (coder.tier, set(coder.operations)) == (Tier.SMALL, {Operation.CHAT})
    assert set(settings.catalog.by_model) == {
        "coder",
        "local/coder",
        "cheap",
        "mystery",
        "local/mystery",
        "like-large",
        "local/like-large",
    }
    row = settings.prices.find(coder.price, 0)
    assert row is not None
    assert row.rates == Rates(input=100_000, output=400_000, cache_read=20_000)
    assert (mystery.price, settings.prices.find(mystery.price, 0)) == ("", None)
    assert (like_large.price, like_large.weight, like_large.priority) == ("openai/large", 3, 1)
    assert like_large.context_tokens == 8192


def test_the_version_of_an_own_price_changes_with_its_rates(read: Read) -> None:
    def version(usd: str) -> str:
        rates = f'{{input_usd_per_mtok: "{usd}", output_usd_per_mtok: "1"}}'
        settings = read(
            f"providers: {{x: {{base_url: 'http://h/v1', deployments: [{{model: m, price: {rates}}}]}}}}"
        )
        return settings.prices.by_price["own:x/m"][0].version

    assert version("1") == version("1.0") != version("2")


def test_a_known_provider_can_be_narrowed_changed_and_switched_off(read: Read) -> None:
    settings = read(
        """
providers:
  openai:
    key: ${MY_KEY}
    base_url: http://127.0.0.1:9/v1
    models: [large]
    deployments:
      - {model: large, tier: fast, max_output_tokens: 500}
      - {model: thrifty, upstream_model: mini}
  resale: {enabled: false}
""",
        {"MY_KEY": "k", "OPENAI_API_KEY": "other", "RESALE_KEY": "r"},
    )
    assert settings.credentials == {"openai": Secret("k")}
    large, thrifty = settings.catalog.deployments
    assert (large.tier, large.max_output_tokens, large.context_tokens) == (Tier.FAST, 500, 100_000)
    assert (large.price, large.provider.base_url) == ("openai/large", "http://127.0.0.1:9/v1")
    assert (thrifty.model, thrifty.upstream_model, thrifty.price) == ("thrifty", "mini", "openai/mini")
    assert "mini" not in settings.catalog.by_model
    assert settings.keyless == ("resale", "anthropic")


def test_discovery_can_be_switched_off(read: Read) -> None:
    settings = read("discover_providers: false", {"OPENAI_API_KEY": "k"})
    assert list(settings.providers) == ["demo"]


def test_teams_budgets_limits_and_rules(read: Read) -> None:
    settings = read(
        """
tenants: [acme]
teams:
  research:
    models: [large]
    limits: {requests_per_min: 60}
    task_budget_usd: 2
    budget: {limit_usd: "500.000000001", window: 30d, on_exceed: warn}
budgets: [{scope: "tenant:acme", limit_usd: 1000}]
task_budget_usd: 0.10
limits: {tokens_per_min: 4_000_000, concurrent: 8}
mode: shadow
rules:
  - {name: small, when: "request.tools == 0", tier: small, max_output_tokens: 100}
  - {name: rest, tier: standard, reasoning_effort: low, why: the rest}
""",
        {"OPENAI_API_KEY": "k"},
    )
    assert settings.tenants == ("acme",)
    assert settings.teams == (
        TeamSpec("research", "acme", ("large",), RateLimit(requests_per_min=60), 2_000_000_000),
    )
    assert [(b.scope, b.limit, b.window, str(b.on_exceed)) for b in settings.budgets] == [
        ("team:research", 500_000_000_001, "30d", "warn"),
        ("tenant:acme", 1_000_000_000_000, "month", "error"),
    ]
    assert settings.task_default == TaskDefault(100_000_000)
    assert settings.limits == RateLimit(None, 4_000_000, 8)
    assert settings.routing.mode is Mode.SHADOW
    assert settings.routing.texts == (
        RuleText("small", "request.tools == 0", Tier.SMALL, Caps(max_output_tokens=100)),
        RuleText("rest", "true", Tier.STANDARD, Caps(reasoning_effort="low"), "the rest"),
    )


def test_a_mistake_in_a_rule_is_placed_however_it_is_written(read: Read) -> None:
    text = """rules:
  - {name: a, tier: standard, when: task.steps > 3}
  - {name: b, tier: standard, when: 'request.client == ''pi'' && task.steps > 3'}
  - {name: c, tier: standard, when: "request.client == \\"pi\\" && task.steps > 3"}
  - name: d
    tier: standard
    when: |
      request.stream &&
        task.steps > 3
  - name: e
    tier: standard
    when: >-
      request.stream
      && task.steps > 3
  - name: f
    tier: standard
    when: request.stream &&
      task.steps > 3
"""
    found = [line.split(" ")[0] for line in problems(read, text, {"OPENAI_API_KEY": "k"})]
    assert found == ["2:42:", "3:71:", "4:71:", "9:14:", "14:15:", "18:12:"]


OWN = """providers:
  x: {base_url: "http://h/v1", deployments: [{model: big, tier: fast, price: none}, {model: tiny, tier: small, price: none}]}
"""
VIRTUAL = f"""{OWN}
virtual_models:
  coder:
    rules:
      - {{name: short, when: request.context_tokens < 1000, tier: small}}
      - {{name: images, when: request.has_images, model: looker}}
    otherwise: fast
  looker: {{otherwise: big}}
"""


def test_virtual_models_have_rules_of_their_own(read: Read) -> None:
    virtual = read(VIRTUAL).routing.virtual
    assert [(name, [r.text.target for r in rules.rules]) for name, rules in virtual.items()] == [
        ("coder", ["small", "looker"]),
        ("looker", []),
    ]
    assert (virtual["coder"].default_tier, virtual["looker"].default_model) == (Tier.FAST, "big")


def test_virtual_models_that_lead_nowhere_or_back_are_problems(read: Read) -> None:
    text = f"""{OWN}
virtual_models:
  a: {{otherwise: b}}
  b: {{rules: [{{name: r, model: a}}], otherwise: big}}
  c: {{otherwise: c}}
  fast: {{otherwise: big}}
  big: {{otherwise: fast}}
  d: {{otherwise: bigg, rules: [{{name: r, model: big, tier: fast}}]}}
"""
    assert problems(read, text) == [
        "5:3: virtual_models.a: leads back to itself: a -> b -> a",
        "7:3: virtual_models.c: leads back to itself: c -> c",
        "8:3: virtual_models.fast: 'fast' is one of the gateway's own names already",
        "9:3: virtual_models.big: 'big' is a model already",
        "10:7: virtual_models.d.otherwise: there is no model 'bigg' (`tollhouse check` of a sound file lists them)",
        "10:42: virtual_models.d.rules[0].model: a rule leads to a tier or to a model, not to both",
    ]


def test_auto_goes_to_the_tier_that_there_is(read: Read) -> None:
    own = "providers: {x: {base_url: 'http://h/v1', deployments: [{model: m, tier: small, price: none}]}}"
    assert read(own).catalog.default_tier is Tier.SMALL
    assert problems(read, own + "\ndefault_tier: fast") == ["2: default_tier: no deployment is in tier fast"]


# --- references to the environment, and secrets ----------------------------------------------------------


def test_values_come_from_the_environment_as_text(read: Read) -> None:
    settings = read(
        """
listen: ${HOST:-127.0.0.1}:${PORT:-4000}
workers: ${WORKERS}
database_url: postgresql://gw:${PW}@db/gw
redis_url: ${REDIS:-}
log_level: ${LEVEL:-debug}
""",
        {"PORT": "7", "WORKERS": "3", "PW": "p: {x}", "LEVEL": ""},
    )
    assert (settings.listen, settings.workers, settings.redis_url) == (Listen("127.0.0.1", 7), 3, None)
    assert settings.database_url == "postgresql://gw:p: {x}@db/gw"
    assert settings.log_level == "debug"


def test_a_missing_variable_is_a_problem_with_its_line(read: Read) -> None:
    assert problems(read, "log_level: info\nredis_url: ${REDIS}") == [
        "2: redis_url: the environment variable REDIS is not set (set it, or write ${REDIS:-} if it may be missing)"
    ]


def test_no_secret_shows_in_any_representation(read: Read) -> None:
    settings = read(
        """
database_url: postgresql://gw:s3cret-db@db/gw?password=s3cret-query
redis_url: redis://:s3cret-redis@cache:6379/0
pepper: s3cret-pepper-that-is-long
providers: {openai: {key: s3cret-key}}
""",
        {"ANTHROPIC_API_KEY": "s3cret-environment"},
    )
    assert "s3cret" not in f"{settings!r} {settings} {settings.credentials}"
    assert settings.database_shown == "postgresql://gw:***@db/gw?..."
    assert settings.redis_shown == "redis://:***@cache:6379/0"
    assert settings.credentials["openai"].reveal() == "s3cret-key"


# --- everything that is wrong, at once ---------------------------------------------------------------------


def test_all_problems_are_found_in_one_pass(read: Read) -> None:
    text = """listen: 4000
workes: 2
workers: many
log_level: verbose
expose_cost: perhaps
drain_s: -1
body_limit_bytes: 12
redis_url: http://cache
timeouts: {first_byte: 3}
telemetry: [1]
task_budget_usd: "1.0000000001"
workers: 3
"""
    assert problems(read, text) == [
        "1: listen: must be host:port, not '4000' (for example 127.0.0.1:4000)",
        "2: workes: there is no such setting (did you mean workers?)",
        "3: workers: must be a whole number, not 'many'",
        "4: log_level: must be one of debug, info, warning, error, not 'verbose'",
        "5: expose_cost: must be true or false, not 'perhaps'",
        "6: drain_s: must be a number from 0 to 3600, not '-1'",
        "7: body_limit_bytes: must be from 1024 to 1073741824, not 12",
        "8: redis_url: must begin with redis://, rediss:// or unix://",
        "9: timeouts.first_byte: there is no such setting (did you mean first_byte_s?)",
        "10: telemetry: must be a mapping, not a list",
        "11: task_budget_usd: is finer than 0.000000001 dollars: 1.0000000001",
        "12: workers: is given twice; the first time in line 3",
    ]


def test_providers_that_cannot_work_are_problems(read: Read) -> None:
    text = """providers:
  openai:
    models: [larg]
  resale: {}
  local:
    base_url: localhost:8000
    deployments:
      - {model: a}
      - {model: a, price: none}
      - {model: b, price: openai/larg, operations: [talk], tier: big}
      - {model: c, price: {input_usd_per_mtok: cheap}}
  empty:
    base_url: http://user:pw@h/v1
  lost: {deployments: [{price: none}]}
"""
    assert problems(read, text, {"OPENAI_API_KEY": "k"}) == [
        "3: providers.openai.models: openai has no listed model 'larg' (declare it under `deployments:`)",
        "4: providers.resale: has no key (set RESALE_KEY in the environment, or `enabled: false`)",
        "6: providers.local.base_url: must be an http or https URL, not 'localhost:8000'",
        "8: providers.local.deployments[0].price: is required, because an unknown price is not zero "
        '(give `price: {input_usd_per_mtok: "0.1", output_usd_per_mtok: "0.2"}`, or `price: none`)',
        "9: providers.local.deployments[1].model: there already is a deployment 'local/a'",
        "10: providers.local.deployments[2].operations: 'talk' is none of "
        "chat, responses, messages, embeddings, count_tokens",
        "10: providers.local.deployments[2].price: there is no listed price 'openai/larg' (did you mean openai/large?)",
        "10: providers.local.deployments[2].tier: must be one of fast, standard, small, not 'big'",
        "11: providers.local.deployments[3].price.input_usd_per_mtok: must be an amount in dollars, not 'cheap' "
        '(for example "12.50")',
        "11: providers.local.deployments[3].price.output_usd_per_mtok: is required (dollars per million tokens, "
        'for example "0.1")',
        "12: providers.empty: has no deployments, so nothing can be called there (list its models under `deployments:`)",
        "13: providers.empty.base_url: must not hold a user name or a password (give the secret as `key:`)",
        "14: providers.lost.base_url: is required (for example http://127.0.0.1:8000/v1)",
        "14: providers.lost.deployments[0].model: is required (the name that clients ask for)",
    ]


def test_budgets_count_in_any_unit(read: Read) -> None:
    settings = read(
        """
budgets:
  - {scope: "tenant:default", limit_calls: 20_000, window: day, mode: shadow}
  - {scope: "tenant:default", limit_output_tokens: 5000000, alerts: [90, 50], on_exceed: summarize, landing_percent: 5}
""",
        {"OPENAI_API_KEY": "k"},
    )
    assert settings.budgets == (
        BudgetSpec("tenant:default", 20_000, "day", unit=Unit.CALLS, mode=BudgetMode.SHADOW),
        BudgetSpec(
            "tenant:default",
            5_000_000,
            "month",
            OnExceed.SUMMARIZE,
            unit=Unit.OUTPUT_TOKENS,
            alert_percents=(50, 90),
            landing_percent=5,
        ),
    )
    text = """budgets:
  - {scope: "tenant:default", limit_calls: 5, limit_usd: 1}
  - {scope: "tenant:default", limit_calls: 1.5, alerts: [0, x]}
"""
    assert problems(read, text, {"OPENAI_API_KEY": "k"}) == [
        "2: budgets[0].limit_calls: a budget has one limit, and this one has limit_usd",
        "3: budgets[1].limit_calls: must be a whole number, not '1.5'",
        "3: budgets[1].alerts: must be a list of percents from 1 to 100 (for example [50, 80, 100])",
    ]


def test_rules_teams_and_budgets_that_match_nothing_are_problems(read: Read) -> None:
    text = """rules:
  - {name: a, tier: small, when: task.step > 3}
  - {name: a, tier: standard, when: task.step > 4}
  - {name: b, when: task.steps > 3}
  - {name: c, tier: standard, when: task.step}
  - {name: d, tier: standard}
  - {name: e, tier: standard, when: task.step > 5}
teams:
  one: {tenant: nowhere, models: [none-such], budget: {window: fortnight}}
budgets:
  - {scope: "team:two", limit_usd: 1}
  - {scope: everyone, limit_usd: x}
"""
    assert problems(read, text, {"ANTHROPIC_API_KEY": "k"}) == [
        "2:15: rules[0].tier: no deployment is in tier small (give one of them `tier: small`)",
        "3:6: rules[1].name: another rule has the same name",
        "4:5: rules[2].tier: is required (one of fast, standard, small)",
        "4:26: rules[2].when: task has no 'steps'; it has age_s, budget_used, interactive, reading, repeats, "
        "spent_usd, step, tool_errors",
        "5:37: rules[3].when: must be true or false, not int",
        "7:31: rules[5].when: can never match, because rule 'a' before it matches whenever it would",
        "9: teams.one.tenant: there is no tenant 'nowhere' (list it under `tenants:`)",
        "9: teams.one.models: no deployment serves 'none-such'",
        '9: teams.one.budget.limit_usd: is required (for example "50")',
        '9: teams.one.budget.window: \'fortnight\' is not a window: write "lifetime", "hour", "day", "week", '
        '"month", or the length of a rolling window such as "30d" or "rolling:24h"',
        "11: budgets[0].scope: no traffic reaches this budget: there is no team:two",
        "12: budgets[1].scope: must be tenant:<id>, team:<id> or key:<id>, not 'everyone'",
        "12: budgets[1].limit_usd: must be an amount in dollars, not 'x' (for example \"12.50\")",
    ]


def test_a_webhook_goes_to_a_public_address_and_is_signed(read: Read) -> None:
    url = "https://hooks.acme.dev/t?token=s3cr3t"
    settings = read(f'webhook: {{url: "{url}", secret: "${{S}}"}}', {"S": "0123456789abcdef"})
    assert settings.webhook == WebhookSpec(url, Secret("0123456789abcdef"))
    assert "s3cr3t" not in repr(settings)
    assert "0123456789abcdef" not in repr(settings)
    assert read("").webhook is None
    text = """webhook:
  url: https://169.254.169.254/latest
  secret: short
"""
    assert problems(read, text) == [
        "2: webhook.url: may not be used: its address is not a public one",
        "3: webhook.secret: must have at least 16 characters (openssl rand -hex 32)",
    ]
    assert problems(read, 'webhook: {url: "http://hooks.acme.dev/"}') == [
        "1: webhook.url: may not be used: it must begin with https://",
        "1: webhook.secret: is required (openssl rand -hex 32)",
    ]
    assert problems(read, "webhook: {secret: 0123456789abcdef}") == [
        "1: webhook.url: is required (for example https://hooks.my-company.com/tollhouse)"
    ]
    assert problems(read, 'webhook: {url: "https://hooks.acme.dev/", secret: "${NONE}"}') == [
        "1: webhook.secret: the environment variable NONE is not set (set it, or write ${NONE:-} if it may be missing)"
    ]


def test_breakers_are_changed_by_a_mode_or_by_numbers(read: Read) -> None:
    assert read("").breakers == BreakerPolicy()
    text = """breakers:
  loop: stop
  tool_errors: off
  steps: {mode: stop, most: 500}
  spend_slope: {limit_usd_per_min: "2.50"}
  polling: {tools: [wait_for_build], gap_s: 5}
"""
    assert read(text).breakers == BreakerPolicy(
        loop=Repeats(BreakerMode.STOP, stop=6, warn=3),
        tool_errors=Errors(BreakerMode.OFF),
        steps=StepCap(BreakerMode.STOP, 500),
        spend_slope=SpendSlope(limit_nano_usd_per_min=2_500_000_000),
        polling=Polling(frozenset({"wait_for_build"}), 5.0),
    )
    wrong = """breakers:
  loops: stop
  loop: broken
  ping_pong: {stop: 50}
  steps: {most: many}
  polling: stop
"""
    assert problems(read, wrong) == [
        "2: breakers.loops: there is no such setting (did you mean loop?)",
        "3: breakers.loop: must be one of off, observe, alert, stop, not 'broken'",
        "4: breakers.ping_pong: repeats trip at 2 to 20, not at 50",
        "5: breakers.steps.most: must be a whole number, not 'many'",
        "6: breakers.polling: must be a mapping, not a single value",
    ]


def test_nothing_to_call_is_a_problem(read: Read) -> None:
    assert problems(read, "demo: off") == [
        "1: providers: nothing is configured that could answer a request (set a provider's key)"
    ]


def test_one_sqlite_file_serves_one_process(read: Read) -> None:
    assert problems(read, "workers: 2") == [
        "1: workers: only one process can serve from a SQLite file (set database_url to a Postgres)"
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: [1\nb: 2", "2: not valid YAML: while parsing a flow sequence"),
        ("- a\n- b", "1: the file must hold a mapping, not a list"),
        ("x: &a [*a]", "1: x[0]: an anchor may not contain itself"),
        ("? [a]\n: b", "1: a key must be plain text"),
    ],
)
def test_files_that_are_no_configuration(read: Read, text: str, expected: str) -> None:
    assert problems(read, text)[0].startswith(expected)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path / "none.yaml", {})
    assert str(caught.value) == f"{tmp_path}/none.yaml: cannot be read: No such file or directory"


# --- what is shipped ---------------------------------------------------------------------------------------


def test_the_shipped_default_needs_nothing() -> None:
    settings = load(None, {})
    assert settings.demo
    assert Path(settings.file) == Path("config/gateway.yaml")


def test_the_shipped_production_example_needs_its_secrets_and_no_more() -> None:
    with pytest.raises(ConfigError) as caught:
        load(shipped("config/production.yaml"), {})
    assert all(p.message.endswith("is not set") for p in caught.value.problems)
    asked = {p.message.split()[3] for p in caught.value.problems}
    assert asked == {"TOLLHOUSE_DATABASE_URL", "TOLLHOUSE_PEPPER", "ANTHROPIC_API_KEY", "OPENAI_API_KEY"}
    env = dict.fromkeys(asked, "x" * 32) | {"TOLLHOUSE_DATABASE_URL": "postgresql://gw@127.0.0.1/gw"}
    settings = load(None, env | {"TOLLHOUSE_CONFIG": str(shipped("config/production.yaml"))})
    assert list(settings.providers) == ["anthropic", "openai", "local"]
    assert settings.budgets[0] == BudgetSpec("team:research", 500_000_000_000, "month")


# --- the pepper --------------------------------------------------------------------------------------------


def test_the_pepper_is_made_once_and_only_its_owner_can_read_it(read: Read, tmp_path: Path) -> None:
    settings = read(f"state_dir: {tmp_path}/state")
    pepper = ensure_pepper(settings)
    assert len(pepper) == 64
    assert ensure_pepper(settings) == pepper
    file = tmp_path / "state" / "pepper"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [p.name for p in file.parent.iterdir()] == ["pepper"]
    file.chmod(0o644)
    with pytest.raises(ConfigError, match=r"can be read by other users \(chmod 600"):
        ensure_pepper(settings)


def test_a_cut_pepper_is_refused_rather_than_replaced(read: Read, tmp_path: Path) -> None:
    file = tmp_path / "pepper"
    file.write_text("short\n")
    file.chmod(0o600)
    with pytest.raises(ConfigError, match="too short to be a pepper"):
        ensure_pepper(read(f"state_dir: {tmp_path}"))


def test_a_configured_pepper_wins(read: Read) -> None:
    assert ensure_pepper(read("pepper: ${P}", {"P": "0123456789abcdef"})) == b"0123456789abcdef"
    assert ensure_pepper(read("", {"TOLLHOUSE_PEPPER": "0123456789abcdef"})) == b"0123456789abcdef"
    assert problems(read, "pepper: short") == [
        "1: pepper: must have at least 16 characters (openssl rand -hex 32)"
    ]


def test_the_environment_is_read_in_one_place() -> None:
    assert "PATH" in environment()


def test_every_setting_is_documented(read: Read) -> None:
    """The reader's own list of what it knows, section by section, against docs/configuration.md."""
    text = """x: 1
timeouts: {x: 1}
telemetry: {x: 1}
webhook: {x: 1}
breakers: {x: 1, steps: {x: 1}, wall_clock: {x: 1}, loop: {x: 1}, polling: {x: 1}, tool_errors: {x: 1},
  spend_slope: {x: 1}, fan_out: {x: 1}, retries: {x: 1}}
limits: {x: 1}
caching: {x: 1}
providers: {p: {base_url: "http://h/v1", x: 1, timeouts: {x: 1}, deployments: [{model: m, x: 1, price: {x: 1}, timeouts: {x: 1},
  queue: {x: 1}, replicas: {x: 1, dns: {x: 1}, kubernetes: {x: 1}}},
  {model: n, price: {gpu: {x: 1}}}]}}
rules: [{name: r, tier: standard, x: 1}]
teams: {t: {x: 1, budget: {x: 1}}}
budgets: [{scope: "team:t", limit_usd: 1, x: 1}]
"""
    hints = [p for p in problems(read, text) if "there is no such setting" in p]
    known = {word for hint in hints for word in re.findall(r"\w+", hint.partition("known here:")[2])}
    assert len(hints) == 29
    prose = re.sub(r"(?s)```.*?```", "", CONFIGURATION_PAGE.read_text("utf-8"))
    documented = set(re.findall(r"\w+", " ".join(re.findall(r"`[^`]+`", prose))))
    assert known - documented == set()


def test_caching_is_read_and_what_means_nothing_is_a_problem(read: Read) -> None:
    settings = read(
        "teams: {research: {}}\n"
        "caching:\n  level: observe\n  teams: {research: relocate}\n  keys: {abc: safe}\n"
        "  deployments: {demo/demo-large: safe}\n  off: [cache_key, markers]\n  trim_over_chars: 50000\n"
    )
    assert settings.caching == CachingPolicy(
        Level.OBSERVE,
        {"abc": Level.SAFE},
        {"research": Level.RELOCATE},
        {"demo/demo-large": Level.SAFE},
        frozenset({Transform.CACHE_KEY, Transform.MARKERS}),
        TrimPolicy(50_000, 8_000),
    )
    assert read("").caching == CachingPolicy()
    assert problems(
        read,
        "caching:\n  level: fast\n  teams: {nobody: safe}\n  deployments: {none/such: safe}\n"
        "  off: [sorting]\n  trim_over_chars: 500\n  trim_keep_chars: 900\n",
    ) == [
        "2: caching.level: must be one of observe, safe, relocate, not 'fast'",
        "3: caching.teams.nobody: there is no team 'nobody'",
        "4: caching.deployments.none/such: there is no deployment 'none/such'",
        "5: caching.off: there is no transform 'sorting' (one of tools_first_seen, billing_nonce, markers, cache_key, "
        "relocate, trim)",
        "7: caching.trim_keep_chars: must be from 100 to trim_over_chars (500), not 900",
    ]


# --- telemetry -----------------------------------------------------------------------------------------


def test_the_standard_variables_say_what_the_file_leaves_open(read: Read) -> None:
    env = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318/",
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "https://traces.example/in",
        "OTEL_EXPORTER_OTLP_HEADERS": "x-key=a%20b, x-team = core",
        "OTEL_TRACES_SAMPLER": "traceidratio",
        "OTEL_TRACES_SAMPLER_ARG": "0.25",
        "OTEL_SERVICE_NAME": "gateway",
        "OTEL_RESOURCE_ATTRIBUTES": "service.name=other,deployment.environment=test",
        "OTEL_METRIC_EXPORT_INTERVAL": "5000",
        "OTEL_EXPORTER_OTLP_TIMEOUT": "2500",
    }
    found = read("", env).telemetry
    assert {name: value.reveal() for name, value in found.headers.items()} == {
        "x-key": "a b",
        "x-team": "core",
    }
    assert dataclasses.replace(found, headers={}) == Telemetry(
        traces_url="https://traces.example/in",
        metrics_url="http://127.0.0.1:4318/v1/metrics",
        sampling_ratio=0.25,
        follow_parent=False,
        metrics_every_s=5.0,
        timeout_s=2.5,
        service_name="gateway",
        resource={"deployment.environment": "test"},
    )
    written = "telemetry: {otlp_endpoint: 'http://10.0.0.1:4318', sampling_ratio: 1, service_name: mine}"
    ours = read(written, env).telemetry
    assert (ours.traces_url, ours.metrics_url) == (
        "https://traces.example/in",
        "http://10.0.0.1:4318/v1/metrics",
    )
    assert (ours.sampling_ratio, ours.service_name) == (1.0, "mine")
    assert read("").telemetry == Telemetry()


@pytest.mark.parametrize(
    ("text", "env", "traces", "metrics"),
    [
        ("", {"OTEL_SDK_DISABLED": "true"}, False, False),
        ("", {"OTEL_TRACES_EXPORTER": "none"}, False, True),
        ("", {"OTEL_METRICS_EXPORTER": "none"}, True, False),
        ("telemetry: {traces: false, sample_errors: true}", {}, False, True),
        ("telemetry: {metrics: false}", {}, True, False),
    ],
)
def test_each_signal_can_be_switched_off(
    read: Read, text: str, env: dict[str, str], traces: bool, metrics: bool
) -> None:
    found = read(text, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318", **env}).telemetry
    assert (bool(found.traces_url), bool(found.metrics_url)) == (traces, metrics)


def test_variables_that_make_no_sense_are_problems(read: Read) -> None:
    env = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "127.0.0.1:4318",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
        "OTEL_EXPORTER_OTLP_HEADERS": "a-secret-without-a-name",
        "OTEL_TRACES_SAMPLER": "jaeger_remote",
        "OTEL_METRIC_EXPORT_INTERVAL": "soon",
    }
    found = problems(read, "telemetry: {sampling_ratio: 0.5}", env)
    assert [problem.partition(": ")[2] for problem in found] == [
        "telemetry: OTEL_TRACES_SAMPLER must be one of always_off, always_on, parentbased_always_off, "
        "parentbased_always_on, parentbased_traceidratio, traceidratio, not 'jaeger_remote'",
        "telemetry.otlp_endpoint: must be an http or https URL, not '127.0.0.1:4318'",
        "telemetry: OTEL_EXPORTER_OTLP_PROTOCOL must be http/protobuf, not 'grpc'",
        "telemetry: OTEL_EXPORTER_OTLP_HEADERS must be key=value,key=value",
        "telemetry: OTEL_METRIC_EXPORT_INTERVAL must be a number above 0, not 'soon'",
    ]
