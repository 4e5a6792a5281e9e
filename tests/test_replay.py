"""`tollhouse replay`: recorded runs through the gateway's shaping, against providers' documented cache rules."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gateway import cli
from tests.support.material import SHARED

Replay = Callable[..., tuple[int, str, str]]
TOOL = {
    "type": "function",
    "function": {"name": "read", "description": "reads", "parameters": {"type": "object"}},
}


@pytest.fixture
def replay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Replay:
    config = tmp_path / "gateway.yaml"
    config.write_text(f"discover_providers: false\nstate_dir: {tmp_path}/state\n")

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        status = cli.run(["replay", *map(str, arguments), "--config", str(config)])
        said = capsys.readouterr()
        return status, said.out, said.err

    return run


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """Two runs of 22 steps: an agent that asks and is answered."""
    folder = tmp_path / "runs"
    folder.mkdir()
    for name in ("one", "two"):
        messages: list[dict[str, Any]] = [{"role": "system", "content": f"{name} " + "rule " * 2_000}]
        for n in range(22):
            messages += [
                {"role": "user", "content": f"{name} {n} " + "word " * 100},
                {"role": "assistant", "content": f"answer {n}"},
            ]
        (folder / f"{name}.json").write_text(json.dumps({"tools": [TOOL], "messages": messages}))
    (folder / "notes.json").write_text("[]")
    return folder


def test_json_has_one_object_per_run_and_level(replay: Replay, recorded: Path) -> None:
    status, out, _ = replay(
        recorded, "--provider", "anthropic", "--model", "claude-sonnet-5-5", "--level", "safe", "--json"
    )
    assert status == 0
    one, two = json.loads(out)
    assert (one["run"], two["run"], one["steps"], one["level"]) == ("one", "two", 22, "safe")
    # the client marks nothing, so nothing is cached as it was sent
    assert one["as_sent_nano_usd"] == one["uncached_nano_usd"]
    assert one["best_nano_usd"] <= one["cost_nano_usd"] <= 1.1 * one["best_nano_usd"]
    assert one["cost_nano_usd"] <= 0.25 * one["uncached_nano_usd"]


def test_observe_is_what_the_client_sent(replay: Replay, recorded: Path) -> None:
    for provider in ("anthropic", "openai", "demo"):
        _, out, _ = replay(recorded, "--provider", provider, "--level", "observe", "--json")
        for run in json.loads(out):
            assert run["cost_nano_usd"] == run["as_sent_nano_usd"]


def test_people_get_a_table_and_bars_and_a_drawing(replay: Replay, recorded: Path, tmp_path: Path) -> None:
    drawing = tmp_path / "costs.svg"
    status, out, _ = replay(recorded, "--provider", "openai", "--svg", drawing)
    assert status == 0
    header = next(line for line in out.splitlines() if "no cache" in line)
    names = ("no cache", "as sent", "observe", "safe", "relocate", "best")
    assert [name for name in names if name in header] == list(names)
    assert [line.split("  ")[0].strip() for line in out.splitlines() if "█" in line] == list(names)
    assert drawing.read_text().startswith("<svg")
    assert drawing.read_text().count("<rect") == 1 + 2 * len(names)


def test_a_clock_in_the_system_prompt_shows_what_relocate_is_worth(replay: Replay, tmp_path: Path) -> None:
    history: list[dict[str, Any]] = []
    requests = []
    for n in range(22):
        clock = f"You are an agent.\nCurrent time: 2026-11-30 12:{n:02d}:07\n" + "rule: be brief\n" * 400
        history.append({"role": "user", "content": f"{n} " + "word " * 100})
        messages = [{"role": "system", "content": clock}, *history]
        requests.append({"body": {"model": "x", "tools": [TOOL], "messages": messages}})
        history.append({"role": "assistant", "content": f"answer {n}"})
    file = tmp_path / "clock.json"
    file.write_text(json.dumps({"requests": requests}))
    _, out, _ = replay(file, "--provider", "openai", "--model", "gpt-5.6-sol", "--json")
    cost = {run["level"]: run["cost_nano_usd"] / run["uncached_nano_usd"] for run in json.loads(out)}
    assert cost["observe"] == 1.25  # all of it written anew in every step
    assert cost["relocate"] < 0.25


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "there is no nowhere"),
        (["--provider", "acme"], "there is no provider 'acme' in the price list (known: anthropic, "),
        (["--model", "claude-0"], "anthropic has no model 'claude-0' in the price list (known: "),
        (["--level", "bold"], "there is no level 'bold' (known: observe, safe, relocate)"),
    ],
)
def test_mistakes_end_in_a_message(replay: Replay, recorded: Path, arguments: list[str], said: str) -> None:
    given = ["--provider", "anthropic", *arguments] if "--provider" not in arguments else arguments
    paths = [] if "nowhere" in arguments else [recorded]
    status, _, err = replay(*paths, *given)
    assert status == 2
    assert err.startswith(said), err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "it is not JSON"),
        ("[]", "it is no object"),
        ("{}", 'it has neither "messages" nor "requests"'),
        ('{"messages":[{"role":"assistant","content":"x"}]}', "empty"),
        ('{"requests":[{"body":{"messages":[]}}]}', "empty"),
        ("[" * 100_000, "it is not JSON"),
    ],
)
def test_a_file_that_is_no_run_is_told(replay: Replay, tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "run.json"
    file.write_text(text)
    status, _, err = replay(file, "--provider", "openai", "--level", "safe")
    assert status == 2
    assert said in err
    assert "Traceback" not in err


TRACES = sorted((SHARED / "traces").glob("*.json"))


@pytest.mark.parametrize("model", ["anthropic/claude-opus-5-5", "openai/gpt-5.6-sol"] if TRACES else [])
def test_recorded_agents_pay_a_quarter_at_most_and_nearly_the_best_possible(
    replay: Replay, model: str
) -> None:
    provider, _, name = model.partition("/")
    _, out, _ = replay(*TRACES, "--provider", provider, "--model", name, "--level", "safe", "--json")
    long = [run for run in json.loads(out) if run["steps"] >= 20 and run["minimum_met"]]
    assert len(long) == 5
    for run in long:
        assert run["cost_nano_usd"] <= 0.25 * run["uncached_nano_usd"], run
        assert run["cost_nano_usd"] <= 1.1 * run["best_nano_usd"], run
        assert run["cost_nano_usd"] <= run["as_sent_nano_usd"], run


#: Gemini's own dialect is not served.
CLIENTS = sorted(
    p for p in (SHARED / "fixtures" / "clients").glob("*") if p.is_dir() and p.name != "gemini-cli"
)


@pytest.mark.parametrize("client", CLIENTS, ids=lambda p: p.name)
def test_sessions_of_real_clients_cost_no_more_than_as_they_were_sent(replay: Replay, client: Path) -> None:
    # Codex speaks the responses dialect, in which Anthropic is not reached.
    for provider in ("openai",) if client.name == "codex" else ("anthropic", "openai"):
        status, out, err = replay(client, "--provider", provider, "--level", "observe", "--json")
        assert status == 0, err
        for run in json.loads(out):
            assert run["cost_nano_usd"] == run["as_sent_nano_usd"]
