"""A configuration of LiteLLM's proxy becomes ours: it loads, and what it does not say is said."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from gateway import cli
from gateway.core.catalog import Operation, Wire
from gateway.core.litellm_config import Left, imported
from gateway.settings import Settings, load

LISTED = {"openai/gpt-6.1-sol", "anthropic/claude-opus-5"}
THEIRS = """
model_list:
- model_name: sol
  litellm_params: {model: openai/gpt-6.1-sol, api_key: os.environ/OPENAI_API_KEY, rpm: 60}
- model_name: sol
  litellm_params: {model: openai/gpt-6.1-sol, api_key: os.environ/SECOND_KEY, order: 2, weight: 5}
- model_name: coder
  litellm_params:
    model: hosted_vllm/Qwen/Qwen3-Coder
    api_base: http://127.0.0.1:8000/v1/
    input_cost_per_token: 1e-07
    output_cost_per_token: 0.0000004
    cache_read_input_token_cost: 0.00000002
  model_info: {max_input_tokens: 131072, max_output_tokens: 16384}
- model_name: embed
  litellm_params: {model: openai/bge-m3, api_base: http://127.0.0.1:8001/v1, api_key: sk-written-out-1234}
  model_info: {mode: embedding, base_model: nobody/knows}
- model_name: azure-gpt
  litellm_params: {model: azure/gpt-x, api_base: https://x.example, api_version: 2026-01-01, api_key: os.environ/AZURE}
- model_name: "*"
  litellm_params: {model: "*"}
router_settings:
  routing_strategy: usage-based-routing-v2
  model_group_alias: {gpt-4: coder, gpt-5: nothing}
  redis_host: os.environ/REDIS_HOST
  redis_port: 6380
litellm_settings: {max_budget: 250.50, budget_duration: 30d, drop_params: true, request_timeout: 600}
general_settings: {master_key: os.environ/MASTER, database_url: postgresql://u:p@h/db, alerting: [slack]}
guardrails: [{guardrail_name: pii}]
"""


class Said(NamedTuple):
    status: int
    out: str
    err: str


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> Said:
    status = cli.run(arguments)
    captured = capsys.readouterr()
    return Said(status, captured.out, captured.err)


def settings_of(config: dict[str, Any], folder: Path, variables: list[str]) -> Settings:
    path = folder / "ours.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False), "utf-8")
    values = {name: f"{name.lower()}-0123456789" for name in variables}
    return load(path, {**values, "REDIS_HOST": "127.0.0.1"})


def test_what_is_carried_loads_and_means_the_same(tmp_path: Path) -> None:
    found = imported(yaml.safe_load(THEIRS), LISTED)
    settings = settings_of(found.config, tmp_path, found.variables)
    assert [
        (
            d.name,
            d.provider.wire,
            d.upstream_model,
            d.price,
            d.weight,
            d.priority,
            d.context_tokens,
            d.aliases,
        )
        for d in settings.catalog.deployments
    ] == [
        ("openai/sol", Wire.OPENAI, "gpt-6.1-sol", "openai/gpt-6.1-sol", 100, 0, 1050000, ("openai/sol",)),
        ("openai-2/sol", Wire.OPENAI, "gpt-6.1-sol", "openai/gpt-6.1-sol", 5, 2, None, ("openai-2/sol",)),
        (
            "hosted-vllm/coder",
            Wire.OPENAI,
            "Qwen/Qwen3-Coder",
            "own:hosted-vllm/coder",
            100,
            0,
            131072,
            ("hosted-vllm/coder", "gpt-4"),
        ),
        ("openai-3/embed", Wire.OPENAI, "bge-m3", "", 100, 0, None, ("openai-3/embed",)),
        ("azure/azure-gpt", Wire.LITELLM, "gpt-x", "", 100, 0, None, ("azure/azure-gpt",)),
    ]
    coder = next(d for d in settings.catalog.deployments if d.model == "coder")
    assert (coder.provider.base_url, coder.provider.cache_rules) == ("http://127.0.0.1:8000/v1", "vllm")
    row = settings.prices.find(coder.price, 0)
    assert row is not None
    assert (row.rates.input, row.rates.output, row.rates.cache_read) == (100_000, 400_000, 20_000)
    embed = next(d for d in settings.catalog.deployments if d.model == "embed")
    assert embed.operations == {Operation.EMBEDDINGS}
    azure = settings.providers["azure"]
    assert dict(azure.litellm_params) == {"api_version": "2026-01-01"}
    assert [(b.scope, b.limit, b.window) for b in settings.budgets] == [
        ("tenant:default", 250_500_000_000, "month")
    ]
    assert (settings.redis_url, settings.timeouts.total_s) == ("redis://127.0.0.1:6380/0", 600)
    assert settings.admin_key is not None
    assert settings.admin_key.reveal() == "master-0123456789"
    assert dataclasses.replace(settings).providers.keys() == {
        "openai",
        "openai-2",
        "hosted-vllm",
        "openai-3",
        "azure",
    }


def test_what_may_stand_in_either_section_is_explained_in_both() -> None:
    for section in ("litellm_settings", "router_settings"):
        (left,) = imported({section: {"context_window_fallbacks": [{"a": ["b"]}]}}, LISTED).left
        assert left == Left(
            f"{section}.context_window_fallbacks",
            "a prompt that is too long goes to a model with a larger window by itself; set context_tokens",
        )


def test_what_is_not_carried_is_named_and_no_secret_is_copied() -> None:
    found = imported(yaml.safe_load(THEIRS), LISTED)
    assert sorted(left.where for left in found.left) == [
        "general_settings.alerting",
        "general_settings.database_url",
        "guardrails",
        "litellm_settings.drop_params",
        "model_list[0].litellm_params.rpm",
        "model_list[3]",
        "model_list[3].litellm_params.api_key",
        "model_list[4]",
        "model_list[5]",
        "router_settings.model_group_alias.gpt-5",
        "router_settings.routing_strategy",
    ]
    assert all(left.why for left in found.left)
    assert [left.where for left in found.left if left.why == "has no counterpart"] == ["guardrails"]
    assert "sk-written-out" not in str(found)
    assert "IMPORTED_MODEL_LIST_3_LITELLM_PARAMS_API_KEY" in found.variables


def test_the_command_writes_a_file_and_tells_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs, ours = tmp_path / "config.yaml", tmp_path / "ours.yaml"
    theirs.write_text(THEIRS, "utf-8")
    told = said(capsys, "import", "litellm", str(theirs), "--out", str(ours))
    assert (told.status, told.out) == (0, "")
    assert "general_settings.alerting: set webhook: {url, secret}" in told.err.replace("\n", "")
    assert "11 things could not be carried" in told.err
    assert yaml.safe_load(ours.read_text("utf-8"))["providers"]["openai"]["key"] == "${OPENAI_API_KEY}"

    again = said(capsys, "import", "litellm", str(theirs), "--out", str(ours))
    assert (again.status, "exists already" in again.err) == (2, True)
    printed = said(capsys, "import", "litellm", str(theirs))
    assert yaml.safe_load(printed.out)["budgets"][0]["limit_usd"] == "250.5"


@pytest.mark.parametrize("text", ["- a", "model_list: {}", "a: [", "\x00"])
def test_what_is_no_such_file_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text, "utf-8")
    told = said(capsys, "import", "litellm", str(path))
    assert (told.status, str(path) in told.err.replace("\n", "")) == (2, True)


def test_how_deployments_are_chosen_and_how_many_calls_they_take_is_carried(tmp_path: Path) -> None:
    theirs = yaml.safe_load(THEIRS)
    theirs["router_settings"]["routing_strategy"] = "cost-based-routing"
    theirs["model_list"][0]["litellm_params"]["max_parallel_requests"] = 7
    found = imported(theirs, LISTED)
    settings = settings_of(found.config, tmp_path, found.variables)
    assert settings.catalog.order == "price"
    assert [d.concurrent for d in settings.catalog.deployments if d.model == "sol"] == [7, None]
    assert not [left for left in found.left if "routing_strategy" in left.where or "parallel" in left.where]
