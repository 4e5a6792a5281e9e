"""`tollhouse explain --request`, and what the shipped rules say to the cases that they are for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway import cli
from gateway.core.catalog import Tier
from gateway.core.rules import OwnerFacts, RequestFacts, RuleContext, RuleSet, TaskFacts
from gateway.settings import load, shipped

BODY = {
    "model": "auto",
    "max_tokens": 100,
    "messages": [
        {"role": "user", "content": "fix it"},
        {
            "role": "assistant",
            "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "read_file", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "tool_call_id": "c", "content": "text"},
    ],
}
CONFIG = """
providers:
  own:
    base_url: http://127.0.0.1:1/v1
    deployments:
      - {model: big, tier: standard, price: {input_usd_per_mtok: "3", cache_read_usd_per_mtok: "0.3", output_usd_per_mtok: "15"}}
      - {model: tiny, tier: small, price: {input_usd_per_mtok: "2.9", cache_read_usd_per_mtok: "0.29", output_usd_per_mtok: "14"}}
rules:
  - {name: reading, when: task.reading, tier: small}
  - {name: labelled, when: request.labels.env == 'ci', tier: small}
virtual_models:
  coder: {rules: [{name: late, when: task.step > 10, model: big}], otherwise: small}
"""


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    config, request = tmp_path / "my.yaml", tmp_path / "body.json"
    config.write_text(CONFIG)
    request.write_text(json.dumps(BODY))
    return config, request


def explain(files: tuple[Path, Path], capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    config, request = files
    assert cli.run(["explain", "--request", str(request), "-c", str(config), "--json", *options]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_it_shows_every_rule_the_tier_and_the_candidates(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    found = explain(files, capsys)
    (auto,) = found["rules"]
    assert [(r["name"], r["matched"], r["decided"], r["why"]) for r in auto["rules"]] == [
        ("reading", True, True, "task.reading"),
        ("labelled", None, False, "there is no 'env'"),
    ]
    assert (found["tier"], found["rule"], found["reason"]) == ("small", "reading", "task.reading")
    assert [(c["deployment"], c["hold_nano_usd"]) for c in found["candidates"]] == [("own/tiny", 2_516_500)]
    assert found["switch"] is None


def test_it_weighs_the_switch_away_from_a_warm_cache(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    files[1].write_text(json.dumps(BODY | {"metadata": {"filler": "x" * 400_000}}))
    found = explain(files, capsys, "--home", "own/big", "--warm-tokens", "100000", "--task-step", "12")
    switch = found["switch"]
    assert (switch["from"], switch["to"], switch["goes"]) == ("own/big", "own/tiny", False)
    assert switch["arithmetic"]["going_nano_usd"] > 20 * switch["arithmetic"]["saving_nano_usd"]
    assert (found["tier"], [c["deployment"] for c in found["candidates"]]) == ("standard", ["own/big"])


def test_a_virtual_model_is_followed_to_where_it_leads(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    files[1].write_text(json.dumps(BODY | {"model": "coder"}))
    assert explain(files, capsys)["candidates"][0]["deployment"] == "own/tiny"
    late = explain(files, capsys, "--task-step", "12")
    assert (late["rule"], late["candidates"][0]["deployment"]) == ("late", "own/big")
    files[0].write_text(
        CONFIG.replace("tier: small}\n  - {name: labelled", "model: coder}\n  - {name: labelled")
    )
    files[1].write_text(json.dumps(BODY))
    led = explain(files, capsys)
    assert (led["tier"], led["rule"], led["reason"]) == (
        "small",
        "reading",
        "task.reading; coder: no rule matched",
    )
    assert [(r["name"], r["matched"], r["why"]) for r in led["rules"][1]["rules"]] == [
        ("late", False, "task.step is 1")
    ]
    assert cli.run(["check", "-c", str(files[0]), "--json"]) == 0
    reading = json.loads(capsys.readouterr().out)["rules"][0]
    assert (reading["tier"], reading["model"]) == (None, "coder")


def test_in_shadow_it_goes_where_the_request_would_go(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    files[0].write_text(f"mode: shadow\n{CONFIG}")
    found = explain(files, capsys, "--home", "own/big", "--warm-tokens", "9")
    assert (found["mode"], found["tier"], found["rule"], found["reason"], found["switch"]) == (
        "shadow",
        "standard",
        "shadow:reading",
        "the default; would be small",
        None,
    )
    assert [c["deployment"] for c in found["candidates"]] == ["own/big"]
    assert [r["decided"] for r in found["rules"][0]["rules"]] == [True, False]


def test_people_get_tables_and_mistakes_a_sentence(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    config, request = files
    assert cli.run(["explain", "--request", str(request), "-c", str(config)]) == 0
    out = capsys.readouterr().out
    assert "-> reading" in out
    assert "tier    small" in out
    assert cli.run(["explain", "--request", str(request.parent / "none.json"), "-c", str(config)]) == 2
    assert "none.json cannot be read: No such file or directory" in capsys.readouterr().err
    request.write_text("[")
    assert cli.run(["explain", "--request", str(request), "-c", str(config)]) == 2
    assert "is not JSON" in capsys.readouterr().err
    assert cli.run(["explain", "--request", str(request), "-c", str(config), "--label", "env"]) == 2
    assert "--label 'env' is not name=value" in capsys.readouterr().err
    assert cli.run(["explain"]) == 2
    assert "--request" in capsys.readouterr().err


def test_check_says_which_rules_may_fail_on_a_request(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["check", "-c", str(files[0]), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["notes"] == [
        "rule 'labelled' of auto cannot be evaluated on a request without labels (there is no 'env'): "
        "there it counts as not matched"
    ]
    assert found["virtual_models"] == {"coder": [{"name": "late", "when": "task.step > 10", "target": "big"}]}
    assert cli.run(["check", "-c", str(files[0])]) == 0
    out = capsys.readouterr().out
    assert "note: rule 'labelled'" in out
    assert "virtual model coder, otherwise small" in out


# --- the shipped rules ------------------------------------------------------------------------------------


def shipped_rules() -> RuleSet:
    return load(shipped("config/gateway.yaml"), {}).routing.rules


def request(**facts: Any) -> RuleContext:
    return RuleContext(request=RequestFacts(**facts))


def task(**facts: Any) -> RuleContext:
    return RuleContext(task=TaskFacts(**facts))


@pytest.mark.parametrize(
    ("context", "rule", "tier"),
    [
        (request(purpose="title", client="claude-code"), "titles", Tier.SMALL),
        (request(purpose="compaction", client="codex"), "compaction", Tier.SMALL),
        (task(interactive=True, tool_errors=1), "debugging-with-a-person", Tier.FAST),
        (request(labels={"workload": "batch"}), "offline", Tier.STANDARD),
        (RuleContext(key=OwnerFacts(labels={"workload": "offline"})), "offline", Tier.STANDARD),
        (task(reading=True), "reading", Tier.SMALL),
        (task(tool_errors=3, interactive=True), "stuck", Tier.STANDARD),
        (task(repeats=3), "stuck", Tier.STANDARD),
        (task(budget_used=0.85, tool_errors=5), "near-the-budget", Tier.SMALL),
        (RuleContext(), "", Tier.STANDARD),
    ],
)
def test_the_shipped_rules_do_what_cost_aware_teams_do_by_hand(
    context: RuleContext, rule: str, tier: Tier
) -> None:
    decision = shipped_rules().decide(context)
    assert (decision.rule, decision.tier, decision.failed) == (rule, tier, ())


def test_a_rule_that_is_optional_is_left_out_where_its_tier_has_no_deployment(tmp_path: Path) -> None:
    config = tmp_path / "my.yaml"
    only_big = CONFIG.replace("tier: small, price", "tier: standard, price").replace(
        "otherwise: small", "otherwise: big"
    )
    config.write_text(only_big.replace("tier: small}", "tier: small, optional: true}"))
    assert load(config, {}).routing.texts == ()
