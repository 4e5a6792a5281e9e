"""The command line, as an operator meets it: what is printed, what it exits with, and what it says is wrong."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from gateway import cli
from gateway.commands.findings import Finding, State, clock_skew
from gateway.commands.output import OperatorError, dollars, nano_from_usd
from gateway.commands.run import demo_settings
from gateway.core import secrets
from gateway.core.explanation import Cause, Explanation, Verdict
from gateway.core.usage import Usage
from gateway.settings import load
from gateway.storage import schema
from gateway.storage.accounts import Accounts
from gateway.storage.database import open_database
from gateway.storage.schema import migrations_directory
from tests.storage import worlds

ROOT = Path(__file__).resolve().parent.parent


class Said(NamedTuple):
    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        assert self.status == 0, self.err
        return json.loads(self.out)

    @property
    def rows(self) -> list[list[str]]:
        """The cells of a printed table, without its header."""
        lines = [line for line in self.out.splitlines() if line.strip() and "───" not in line]
        return [re.split(r"\s{2,}", line.strip()) for line in lines[1:]]


Tollhouse = Callable[..., Said]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The embedded default with its state in a folder of the test, whatever keys the environment holds."""
    file = tmp_path / "gateway.yaml"
    file.write_text(f"discover_providers: false\nstate_dir: {tmp_path}/state\nadmin_listen: 127.0.0.1:0\n")
    return file


@pytest.fixture
def tollhouse(config: Path, capsys: pytest.CaptureFixture[str]) -> Tollhouse:
    """Run a command on that configuration."""

    def tollhouse(*arguments: str) -> Said:
        status = cli.run([*arguments, "--config", str(config)])
        captured = capsys.readouterr()
        return Said(status, captured.out, captured.err)

    return tollhouse


@pytest.fixture(scope="module")
def fresh_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("fresh") / "ledger.db"
    asyncio.run(schema.migrate(f"sqlite:///{file}"))
    return file


@pytest.fixture
def migrated(tollhouse: Tollhouse, config: Path, fresh_database: Path) -> Tollhouse:
    """The same, with a database as `migrate` leaves it."""
    state = config.parent / "state"
    state.mkdir()
    shutil.copy(fresh_database, state / "ledger.db")
    return tollhouse


# --- the command itself ------------------------------------------------------------------------------------


def test_help_is_quick_because_it_loads_nothing_heavy() -> None:
    program = (
        "import sys; from gateway import cli; status = cli.run(['--help']); "
        "print(sorted({'yaml', 'sqlalchemy', 'aiohttp', 'pydantic', 'cel', 'redis', 'litellm'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.splitlines()[-1] == "[]"
    commands = (
        "serve",
        "demo",
        "migrate",
        "check",
        "doctor",
        "prices",
        "usage",
        "explain",
        "replay",
        "keys",
        "teams",
        "budgets",
        "tasks",
        "journal",
    )
    assert all(f" {command} " in done.stdout for command in commands)


def test_unknown_options_are_refused_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["serve", "--prot", "1"]) == 2
    assert "--port" in capsys.readouterr().err
    assert cli.run(["--version"]) == 0
    assert capsys.readouterr().out == "tollhouse 0.1.0\n"


# --- check -------------------------------------------------------------------------------------------------


def test_check_shows_every_problem_with_its_line(tollhouse: Tollhouse, config: Path) -> None:
    config.write_text("listne: 127.0.0.1:4000\nworkers: 0\n")
    said = tollhouse("check")
    assert said == Said(
        2,
        "",
        f"{config}:1: listne: there is no such setting (did you mean listen?)\n"
        f"{config}:2: workers: must be from 1 to 256, not 0\n"
        "2 problems in the configuration\n",
    )
    said = tollhouse("check", "--json")
    assert said.status == 2
    assert json.loads(said.out)["problems"][1] == {
        "file": str(config),
        "line": 2,
        "key": "workers",
        "message": "must be from 1 to 256, not 0",
        "hint": "",
        "column": 0,
    }


def test_check_shows_what_is_configured(tollhouse: Tollhouse, config: Path) -> None:
    config.write_text(
        config.read_text()
        + "rules: [{name: late, tier: small, when: task.step > 9, max_output_tokens: 10}]\n"
        + 'task_budget_usd: "2"\ntask_on_exceed: summarize\nteams: {blue: {budget: {limit_usd: 5}}}\n'
    )
    said = tollhouse("check")
    assert said.status == 0
    assert "demo-large   demo       standard       $3.00    $0.30       $15.00   1,000,000" in said.out
    assert re.search(r"late +task.step > 9 +small +max_output_tokens 10", said.out)
    assert re.search(r"team:blue +\$5.00 +month +error\s+every task +\$2.00 +lifetime +summarize", said.out)
    summary = tollhouse("check", "--json").json
    assert (summary["ok"], summary["database"], summary["teams"]) == (
        True,
        f"sqlite+aiosqlite:///{config.parent}/state/ledger.db",
        ["blue"],
    )
    assert summary["rules"] == [
        {
            "name": "late",
            "when": "task.step > 9",
            "tier": "small",
            "model": None,
            "caps": {
                "max_output_tokens": 10,
                "reasoning_effort": None,
                "service_tier": None,
                "urgency": None,
                "priority": None,
            },
        }
    ]


def test_every_command_tells_a_broken_configuration_the_same_way(tollhouse: Tollhouse, config: Path) -> None:
    config.write_text("workers: 0\n")
    expected = f"{config}:1: workers: must be from 1 to 256, not 0\n1 problem in the configuration\n"
    for command in (["serve"], ["migrate"], ["keys", "list"], ["usage"], ["prices"], ["doctor"]):
        said = tollhouse(*command)
        assert said.status == 2
        assert said.err == expected or command == ["doctor"]
    assert "must be from 1 to 256" in tollhouse("doctor").out


def test_one_sqlite_file_serves_one_process_however_it_is_asked(tollhouse: Tollhouse) -> None:
    said = tollhouse("serve", "--workers", "2")
    assert said == Said(
        2, "", "only one process can serve from a SQLite file (set database_url to a Postgres)\n"
    )


def test_a_demo_sees_no_key_and_no_configuration() -> None:
    settings = demo_settings(
        {"OPENAI_API_KEY": "k", "TOLLHOUSE_CONFIG": "none.yaml", "TOLLHOUSE_STATE_DIR": "/tmp/demo"}
    )
    assert (list(settings.providers), settings.credentials) == (["demo"], {})
    assert settings.state_dir == Path("/tmp/demo")


# --- the database ------------------------------------------------------------------------------------------


def test_a_database_that_is_not_there_is_named_and_not_made(tollhouse: Tollhouse, config: Path) -> None:
    database = config.parent / "state" / "ledger.db"
    said = tollhouse("keys", "list")
    assert said == Said(2, "", f"there is no database {database} yet (run: tollhouse migrate)\n")
    assert not database.exists()


def test_migrate_up_and_down(tollhouse: Tollhouse, config: Path) -> None:
    assert tollhouse("migrate").status == 0
    assert tollhouse("teams", "list").status == 0
    versions = sorted(p.name[:4] for p in migrations_directory().glob("versions/*.py"))
    for at in (*(f"revision {v}" for v in reversed(versions[:-1])), "no schema"):
        said = tollhouse("migrate", "--down")
        assert said == Said(0, f"sqlite+aiosqlite:///{config.parent}/state/ledger.db is at {at}\n", "")
    said = tollhouse("teams", "list")
    assert said.status == 2
    assert said.err.endswith("run: tollhouse migrate\n")


def test_a_database_that_does_not_answer_is_one_line(tollhouse: Tollhouse, config: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        config.write_text(config.read_text() + f"database_url: postgresql://gw:s3cret@127.0.0.1:{port}/gw\n")
        said = tollhouse("keys", "list")
    assert (said.status, said.out, said.err.count("\n")) == (2, "", 1)
    assert said.err.startswith(f"postgresql://gw:***@127.0.0.1:{port}/gw: ")
    assert "s3cret" not in said.err


# --- keys, teams, budgets ------------------------------------------------------------------------------------


def test_a_key_is_shown_once_and_works_under_the_pepper_of_the_state_directory(
    migrated: Tollhouse, config: Path
) -> None:
    created = migrated(
        "keys", "create", "ci", "--model", "demo-small", "--requests-per-min", "9", "--json"
    ).json
    parsed = secrets.parse_key(created["key"])
    assert parsed is not None
    key_id, secret = parsed
    pepper = (config.parent / "state" / "pepper").read_bytes().strip()
    (listed,) = migrated("keys", "list", "--json").json
    assert listed == {
        "key_id": key_id,
        "name": "ci",
        "tenant": "default",
        "team": "default",
        "models": ["demo-small"],
        "limits": {"requests_per_min": 9, "tokens_per_min": None, "concurrent": None},
        "expires_at_ms": None,
        "revoked_at_ms": None,
        "task_id": None,
        "labels": {},
    }
    (record,) = at_database(config, lambda accounts: accounts.list_keys())
    assert secrets.matches(pepper, secret, record.secret_hmac)
    assert secret not in migrated("keys", "list").out


def test_a_key_with_a_budget_then_revoked(migrated: Tollhouse) -> None:
    said = migrated("keys", "create", "ci", "--budget", "12.50", "--window", "day", "--expires-days", "2")
    key_id = said.out[3:11]
    assert said.out.splitlines()[1] == f"key {key_id} of team default; it is shown only now"
    (budget,) = migrated("budgets", "list", "--json").json
    assert (budget["scope"], budget["limit_nano_usd"], budget["window"]) == (
        f"key:{key_id}",
        12_500_000_000,
        "day",
    )
    assert migrated("keys", "list").rows[0][-1] == "active"
    said = migrated("keys", "revoke", key_id)
    assert said.out.startswith(f"key {key_id} (ci) is revoked since ")
    assert migrated("keys", "list").rows[0][-1] == "revoked"


def test_teams_and_budgets_are_made_and_listed(migrated: Tollhouse) -> None:
    assert migrated("teams", "create", "blue", "--task-budget", "0.5", "--concurrent", "3").status == 0
    assert migrated("teams", "list").rows == [
        ["blue", "default", "all", "3 at once", "$0.50"],
        ["default", "default", "all", "-", "-"],
    ]
    said = migrated("budgets", "set", "team:blue", "20", "--window", "lifetime", "--on-exceed", "warn")
    assert said.out == "team:blue may spend $20.00 per lifetime, $20.00 left\n"
    assert migrated("budgets", "list").rows == [
        ["team:blue", "lifetime", "$20.00", "$0.00", "$0.00", "$20.00", "-", "warn"]
    ]


def test_a_raise_needs_a_reason(migrated: Tollhouse) -> None:
    assert migrated("budgets", "set", "team:default", "20").status == 0
    assert migrated("budgets", "set", "team:default", "10").status == 0
    for more in (["30"], ["10", "--shadow"], ["10", "--on-exceed", "warn"], ["30", "--reason", " "]):
        refused = migrated("budgets", "set", "team:default", *more)
        assert (refused.status, "a raise needs a reason" in refused.err) == (2, True), more
    assert migrated("budgets", "set", "team:default", "30", "--reason", "release week").status == 0


def test_budgets_count_tokens_and_calls_and_are_adjusted_with_a_reason(migrated: Tollhouse) -> None:
    said = migrated(
        "budgets", "set", "team:default", "2,000", "--unit", "calls", "--window", "day", "--shadow"
    )
    assert said.out == "team:default may use 2,000 calls per day, 2,000 calls left\n"
    said = migrated(
        *[
            "budgets",
            "adjust",
            "team:default",
            "3000",
            "--unit",
            "calls",
            "--reason",
            "release",
            "--until",
            "2099-01-01",
        ]
    )
    assert said.out == "team:default may use 3,000 calls per day, 3,000 calls left\n"
    (budget,) = migrated("budgets", "list", "--json").json
    assert (budget["unit"], budget["limit_calls"], budget["mode"], budget["override_until_ms"]) == (
        "calls",
        3_000,
        "shadow",
        4_070_908_800_000,
    )
    row = migrated("budgets", "list").rows[0]
    assert (row[2], row[-1]) == ("3,000 calls", "shadow: only counts")


def test_adjust_asks_which_budget_is_meant_only_if_there_are_several(migrated: Tollhouse) -> None:
    for window, zone in (("day", "UTC"), ("month", "Europe/Berlin")):
        migrated("budgets", "set", "team:default", "5", "--window", window, "--zone", zone)
    why = ("--reason", "release week")
    said = migrated("budgets", "adjust", "team:default", "6", *why)
    assert (said.status, said.err) == (
        2,
        "team:default has 2 budgets in usd "
        "(say which: --window day --zone UTC or --window month --zone Europe/Berlin)\n",
    )
    said = migrated("budgets", "adjust", "team:default", "6", "--window", "month", *why)
    assert said.out == "team:default may spend $6.00 per month, $6.00 left\n"


def test_a_budget_says_what_it_announces_and_keeps_back(migrated: Tollhouse) -> None:
    alerts = ("--alerts", "25, 75", "--landing-percent", "10")
    budget = migrated("budgets", "set", "team:default", "2", *alerts, "--json").json
    assert (budget["alerts"], budget["landing_nano_usd"]) == ([25, 75], 200_000_000)
    assert migrated("budgets", "set", "team:default", "2", "--alerts", "", "--json").json["alerts"] == []


def test_mistakes_are_one_line_that_says_what_to_do(migrated: Tollhouse) -> None:
    dimensions = "tenant, team, key, task, model, provider, deployment, tier, client, day"
    for command, expected in {
        "keys create a --team nowhere": "there is no team nowhere",
        "keys create a --budget lots": "'lots' is not an amount in dollars (for example \"12.50\")",
        "keys revoke abcdefgh": "there is no key abcdefgh",
        "teams create default": "there already is a team default",
        "budgets set team:nowhere 5": "there is no team nowhere",
        "budgets set blue 5": "'blue' is not a scope: write one of tenant:<id>, team:<id>, key:<id>, task:<id>",
        "budgets set team:default 5 --on-exceed shrug": "--on-exceed must be one of error, summarize, soft_stop, "
        "warn, not 'shrug'",
        "budgets set team:default 5 --unit euro": "--unit must be one of usd, input_tokens, output_tokens, calls, "
        "not 'euro'",
        "budgets set team:default 1.5 --unit calls": "'1.5' is not a number of calls",
        "budgets set team:default 5 --alerts half": "--alerts must be percents such as \"50,90\", not 'half'",
        "budgets set team:default 5 --alerts 50,190": "alerts must be at 1 to 100 percent, not at [50, 190]",
        "budgets adjust team:default 5 --reason x": "team:default has no such budget in usd "
        "(tollhouse budgets list shows what there is)",
        "budgets set team:default 5 --zone Mars": "there is no time zone 'Mars'; use an IANA name such as "
        "'Europe/Berlin'",
        "tasks show none": "there is no task none",
        "usage --by planet": f"cannot group by planet; choose from {dimensions}",
        "usage --since yesterday": "'yesterday' is not a date (for example 2026-11-30, or 2026-11-30T12:00)",
        "prices --model no-such": "there is no price for a model like 'no-such' (`tollhouse prices` lists all)",
    }.items():
        assert migrated(*command.split()) == Said(2, "", expected + "\n")


def test_what_the_configuration_declares_is_there_and_is_changed_there(
    migrated: Tollhouse, config: Path
) -> None:
    text = config.read_text()
    declared = (
        "teams: {red: {task_budget_usd: 1, budget: {limit_usd: %d, window: day, zone: Europe/Berlin}}}\n"
    )
    config.write_text(text + declared % 5)
    assert migrated("keys", "create", "a", "--team", "red").status == 0
    (budget,) = migrated("budgets", "list", "--json").json
    assert (budget["limit_nano_usd"], budget["zone"]) == (5_000_000_000, "Europe/Berlin")
    said = migrated("budgets", "set", "team:red", "9", "--window", "day", "--zone", "Europe/Berlin")
    assert said == Said(2, "", f"the budget of team:red per day is declared in {config}\n")
    config.write_text(text + declared % 7)
    assert migrated("budgets", "list").rows[0][1:3] == ["day in Europe/Berlin", "$7.00"]
    assert migrated("teams", "list").rows[1] == ["red", "default", "all", "-", "$1.00"]


# --- tasks and usage -----------------------------------------------------------------------------------------


@pytest.fixture
def used(migrated: Tollhouse, config: Path) -> Tollhouse:
    """Two attempts of one task, one of another team."""

    async def spend() -> None:
        settings = load(config, {})
        async with worlds.opened(settings.database_url, config.parent / "journal") as (ledger, _, accounts):
            await accounts.ensure_defaults()
            for at_ms, changes, cost in (
                (worlds.NOON_MS, {"task_external_id": "fix-42", "task_source": "header"}, 30_000_000),
                (worlds.NOON_MS + 1, {"attempt_no": 2, "model": "haiku"}, 10_000_000),
                (worlds.NOON_MS + 2, {"team_id": "blue", "task_id": "task_b"}, 500),
            ):
                attempt = worlds.attempt(started_at_ms=at_ms, **changes)
                await worlds.reserve(ledger, attempt, 40_000_000)
                await ledger.settle(attempt, worlds.outcome(cost))

    asyncio.run(spend())
    return migrated


def test_usage_by_anything(used: Tollhouse) -> None:
    said = used("usage", "--by", "team,model")
    assert said.rows == [
        ["default", "sonnet", "1", "0", "1,150", "87%", "20", "$0.03", "$0.06"],
        ["default", "haiku", "1", "0", "1,150", "87%", "20", "$0.01", "$0.02"],
        ["blue", "sonnet", "1", "0", "1,150", "87%", "20", "$0.0000005", "$0.000001"],
        ["total $0.0400005 in 3 attempts"],
    ]
    (day,) = used("usage", "--by", "day", "--json").json
    assert (day["day"], day["attempts"], day["retries"], day["cost_nano_usd"]) == (
        "2026-09-21",
        3,
        1,
        40_000_500,
    )
    csv = used("usage", "--by", "task", "--csv").out.splitlines()
    assert csv[0] == (
        "task,attempts,errors,retries,cost_nano_usd,uncached_cost_nano_usd,saved_nano_usd,input_uncached,cache_read,"
        "cache_write_5m,cache_write_1h,cache_write_12h,output,reasoning"
    )
    assert csv[1:] == [
        "task_a,2,0,1,40000000,120000000,80000000,200,2000,100,0,0,40,10",
        "task_b,1,0,0,500,1500,1000,100,1000,50,0,0,20,5",
    ]
    assert used("usage", "--since", "2026-10-01").out == "nothing was used in that time\n"


@pytest.fixture
def missed(migrated: Tollhouse, config: Path) -> tuple[Tollhouse, str, str]:
    """A request whose tools were reordered, and one that was read from the cache."""
    miss = Explanation(
        Verdict.MISS,
        Cause.TOOLS_REORDERED,
        "tools",
        1,
        120,
        "",
        1_150,
        0,
        1_000,
        1_000,
        2_700_000,
        "req_0",
        9_500,
    )
    attempts = [worlds.attempt(), worlds.attempt()]

    async def spend() -> None:
        settings = load(config, {})
        async with worlds.opened(settings.database_url, config.parent / "journal") as (ledger, _, accounts):
            await accounts.ensure_defaults()
            for attempt, said in zip(attempts, (miss, None), strict=True):
                await worlds.reserve(ledger, attempt, 40_000_000)
                usage = Usage(input_uncached=1_150) if said else Usage(50, 1_000, 100)
                await ledger.settle(attempt, worlds.outcome(30_000_000, usage=usage, miss=said))

    asyncio.run(spend())
    return migrated, attempts[0].request_id, attempts[1].request_id


def test_explain_says_why_a_prompt_was_not_read_from_the_cache(missed: tuple[Tollhouse, str, str]) -> None:
    tollhouse, miss, hit = missed
    assert tollhouse("explain", miss).out.splitlines() == [
        "attempt 1 on sonnet-main: miss (tools reordered)",
        "  why     the same tools came in another order, from place 1 on",
        "  tokens  1,150 of input: 0 read from the cache, 0 written to it, 1,150 neither",
        "  where   behind 120 bytes of prompt",
        "  lost    1,000 tokens that could have been read: $0.0027",
        "  saved   $0.06 against the same tokens without a cache",
        "  before  req_0, answered 9.5 s earlier",
        "  level   safe would have kept this from happening",
        "  do      Send the tools in one fixed order, or let the gateway do so with cache level safe.",
    ]
    assert tollhouse("explain", hit).out.splitlines()[0] == "attempt 1 on sonnet-main: hit"
    (attempt,) = tollhouse("explain", miss, "--json").json["attempts"]
    assert (attempt["cause"], attempt["segment"], attempt["index"], attempt["offset_bytes"]) == (
        "tools_reordered",
        "tools",
        1,
        120,
    )
    assert tollhouse("explain", "req_none").status == 2
    assert tollhouse("explain", "req_none").err == "there is no request req_none\n"


def test_usage_shows_misses_by_cause_beside_what_was_saved(missed: tuple[Tollhouse, str, str]) -> None:
    tollhouse, _, _ = missed
    said = tollhouse("usage", "--misses", "--by", "team")
    assert ["default", "tools reordered", "1", "1,000", "$0.0027", "safe"] in said.rows
    assert ["default", "2", "$0.0027", "$0.12"] in said.rows
    assert tollhouse("usage", "--misses", "--by", "task", "--json").json == [
        {
            "task": "task_a",
            "attempts": 2,
            "saved_nano_usd": 120_000_000,
            "lost_nano_usd": 2_700_000,
            "misses": [
                {
                    "cause": "tools_reordered",
                    "attempts": 1,
                    "lost_tokens": 1_000,
                    "lost_nano_usd": 2_700_000,
                    "prevented_by": "safe",
                }
            ],
        }
    ]
    csv = tollhouse("usage", "--misses", "--by", "model", "--csv").out.splitlines()
    assert csv == [
        "model,cause,attempts,lost_tokens,lost_nano_usd,prevented_by",
        "sonnet,tools_reordered,1,1000,2700000,safe",
    ]
    csv = tollhouse("usage", "--misses", "--by", "tier", "--csv").out.splitlines()
    assert csv == [
        "tier,cause,attempts,lost_tokens,lost_nano_usd,prevented_by",
        "standard,tools_reordered,1,1000,2700000,safe",
    ]
    assert tollhouse("tasks", "show", "task_a").out.splitlines()[-1] == (
        "tools reordered: 1,000 tokens not read from a cache in 1 attempt, $0.0027 lost"
    )
    (miss,) = tollhouse("tasks", "show", "task_a", "--json").json["misses"]
    assert miss["cause"] == "tools_reordered"


def test_a_task_is_found_by_the_name_its_client_gave_it(used: Tollhouse) -> None:
    listed = used("tasks", "list", "--json").json
    assert {(t["task_id"], t["external_id"], t["cost_nano_usd"]) for t in listed} == {
        ("task_a", "fix-42", 40_000_000),
        ("task_b", "", 500),
    }
    shown = used("tasks", "show", "fix-42").rows
    assert shown[0][:2] == ["task_a", "fix-42"]
    assert [[*row[2:6], row[8]] for row in shown[2:]] == [
        ["sonnet", "standard", "post", "1,150", "$0.03"],
        ["haiku", "standard", "post (try 2)", "1,150", "$0.01"],
    ]
    entries = used("tasks", "show", "task_a", "--json").json["entries"]
    assert [e["amount_nano_usd"] for e in entries] == [30_000_000, 10_000_000]


def test_a_journal_that_is_replayed_posts_nothing_twice(used: Tollhouse, tmp_path: Path) -> None:
    lost = "0 files: 0 settlements posted that the database had lost, 0 corrected, 0 were there, 0 rejected"
    assert used("journal", "replay", "--directory", str(tmp_path)).out == f"{lost}\n"


def test_a_task_is_paused_and_resumed_by_an_operator(used: Tollhouse) -> None:
    paused = used("tasks", "pause", "fix-42", "--reason", "too dear", "--json").json
    assert (paused["task_id"], paused["state"], paused["state_reason"]) == (
        "task_a",
        "paused_admin",
        "too dear",
    )
    assert "paused_admin: too dear" in used("tasks", "show", "fix-42").out
    assert used("tasks", "resume", "fix-42").out == "task_a is running\n"
    assert used("tasks", "resume", "nobody").status == 2


# --- doctor --------------------------------------------------------------------------------------------------


@pytest.fixture
def stranger() -> Iterator[int]:
    """A port on which something else listens, which says good-bye to everyone."""

    def turn_away() -> None:
        with contextlib.suppress(OSError):
            while True:
                with server.accept()[0] as client:
                    client.recv(65_536)
                    client.sendall(b"220 mail.example ready\r\n")

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=turn_away)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
    thread.join()


def findings(said: Said) -> dict[str, tuple[str, str]]:
    return {f["subject"]: (f["state"], f["found"]) for f in json.loads(said.out)["findings"]}


def test_check_shows_whose_prompts_are_shaped_how_far(tollhouse: Tollhouse, config: Path) -> None:
    caching = "caching: {level: observe, teams: {research: relocate}, off: [cache_key]}"
    config.write_text(config.read_text() + f"teams: {{research: {{}}}}\n{caching}\n")
    said = tollhouse("check")
    assert "caching   all observe, team research relocate    off: cache_key\n" in said.out
    shown = json.loads(tollhouse("check", "--json").out)["caching"]
    assert shown == {"all": "observe", "team research": "relocate"}


def test_doctor_says_what_is_wrong_and_what_to_do(tollhouse: Tollhouse, config: Path, stranger: int) -> None:
    config.write_text(config.read_text() + f"listen: 127.0.0.1:{stranger}\nredis_url: redis://127.0.0.1:1\n")
    said = tollhouse("doctor", "--json")
    found = findings(said)
    assert said.status == 1
    assert found["configuration"] == ("ok", f"{config} has no problems")
    assert found["state directory"][0] == "ok"
    assert found["pepper"] == ("ok", f"will be made in {config.parent}/state/pepper")
    assert found["database"] == ("fail", f"there is no {config.parent}/state/ledger.db yet")
    assert found["port for requests"] == ("fail", f"something else listens at 127.0.0.1:{stranger}")
    assert found["redis"][0] == "warn"
    assert found["providers"] == ("warn", "no provider has a key, so the built-in demo answers")


def test_doctor_is_content_with_a_migrated_default(migrated: Tollhouse, config: Path) -> None:
    config.write_text(config.read_text() + "listen: 127.0.0.1:0\n")
    said = migrated("doctor", "--json")
    assert said.status == 0
    found = findings(said)
    assert (found["schema"], found["ledger"][0], found["clock"][0]) == (
        ("ok", "is that of this version"),
        "ok",
        "ok",
    )
    pepper = config.parent / "state" / "pepper"
    migrated("keys", "create", "a")
    pepper.chmod(0o644)
    assert findings(migrated("doctor", "--json"))["pepper"] == (
        "fail",
        f"{pepper} can be read by other users",
    )


def test_a_database_clock_that_is_off_is_told() -> None:
    assert clock_skew(1_000, 900, 1_100).state is State.OK
    assert clock_skew(3_900, 900, 1_100) == Finding(
        "database clock",
        State.WARN,
        "differs from ours by 2800 ms",
        "synchronise both; the database's clock decides windows",
    )


# --- money as people write it --------------------------------------------------------------------------------


def test_dollars_are_exact_both_ways() -> None:
    assert [dollars(n) for n in (0, 1, 500_000_000, -12_345_678_900_000_000, None)] == [
        "$0.00",
        "$0.000000001",
        "$0.50",
        "-$12,345,678.90",
        "-",
    ]
    assert [nano_from_usd(t) for t in ("0", "12.50", "$3", ".000000001")] == [
        0,
        12_500_000_000,
        3_000_000_000,
        1,
    ]
    for text in ("", "-1", "1e3", "1.0000000001", "1,5", "nan", "."):
        with pytest.raises(OperatorError):
            nano_from_usd(text)


# --- the image -----------------------------------------------------------------------------------------------


def test_the_image_is_locked_and_runs_as_nobody() -> None:
    text = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    stages = [line.split()[1] for line in lines if line.startswith("FROM ")]
    assert len(stages) == 2
    assert all(re.fullmatch(r"python:3\.\d+-slim-[a-z]+", stage) for stage in stages)
    installs = [line for line in lines if "pip install" in line]
    assert len(installs) == 2
    assert all("--require-hashes" in line or "--no-index" in line for line in installs)
    final = lines[max(i for i, line in enumerate(lines) if line.startswith("FROM ")) :]
    assert not any("pip" in line or "apt" in line for line in final)
    users = [i for i, line in enumerate(final) if line.startswith("USER ")]
    assert [final[i] for i in users] == ["USER 10001:10001"]
    assert not any(line.startswith(("RUN ", "COPY ", "ADD ")) for line in final[users[0] :])
    assert any(line.startswith("HEALTHCHECK ") and "/livez" in line for line in final)


def test_continuous_integration_runs_what_the_readme_says() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    commands = re.findall(r'"(make [a-z]+)"', script)
    readme = (ROOT / "README.md").read_text()
    assert commands == ["make test", "make check"]
    assert all(command in readme for command in commands)


def at_database(config: Path, ask: Callable[[Accounts], Any]) -> Any:
    """Look into the database behind the command line's back."""

    async def look() -> Any:
        database = open_database(load(config, {}).database_url)
        try:
            return await ask(Accounts(database, actor="test"))
        finally:
            await database.close()

    return asyncio.run(look())
