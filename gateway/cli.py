"""The command line: `tollhouse --help`. Declarations only; what a command does is in `gateway/commands`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from gateway import __version__
from gateway.commands.config_group import configuration

_HELP = "An OpenAI-compatible gateway that keeps long-horizon agents inside their budget."


def _end(status: int | None, **_: object) -> None:
    """What a command returns is its exit status; the rest are options of the root."""
    raise typer.Exit(status or 0)


app = typer.Typer(
    help=_HELP,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    result_callback=_end,
)
keys = typer.Typer(help="Virtual keys: create, list, revoke.", no_args_is_help=True)
teams = typer.Typer(help="Teams: create, list.", no_args_is_help=True)
budgets = typer.Typer(help="Budgets of tenants, teams, keys and tasks.", no_args_is_help=True)
tasks = typer.Typer(help="Tasks (agent runs): what each one did and cost.", no_args_is_help=True)
journal = typer.Typer(help="Settlements that replicas keep beside the database.", no_args_is_help=True)
audit = typer.Typer(help="The audit trail: who changed what.", no_args_is_help=True)
importing = typer.Typer(help="Configurations of others.", no_args_is_help=True)
for name, group in (
    ("journal", journal),
    ("keys", keys),
    ("teams", teams),
    ("budgets", budgets),
    ("tasks", tasks),
    ("audit", audit),
    ("config", configuration),
    ("import", importing),
):
    app.add_typer(group, name=name)

Config = Annotated[
    Path | None,
    typer.Option(
        "--config", "-c", help="Configuration file; default: $TOLLHOUSE_CONFIG, then the shipped one."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table; money in nano-dollars.")]
Since = Annotated[
    str | None, typer.Option(help="From this UTC day or moment on: 2026-11-30, 2026-11-30T12:00.")
]
Window = Annotated[str, typer.Option(help="lifetime, hour, day, week, month, 30d ...")]
Zone = Annotated[str, typer.Option(help="Time zone of a calendar window: Europe/Berlin.")]
Unit = Annotated[str, typer.Option(help="usd, input_tokens, output_tokens or calls.")]
Until = Annotated[str | None, typer.Option(help="Until before this UTC day or moment.")]


def main() -> None:
    """The `tollhouse` command."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """The exit status; mistakes of the operator end in a message and status 2, never in a traceback."""
    from gateway.commands.output import OperatorError, complain

    try:
        app(args=list(arguments), prog_name="tollhouse")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    except OperatorError as error:
        complain(f"{error.message}{f' ({error.hint})' if error.hint else ''}")
        return 2
    return 0


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        typer.echo(f"tollhouse {__version__}")
        raise typer.Exit


@app.command()
def serve(
    config: Config = None,
    host: Annotated[
        str | None, typer.Option(help="Address for requests; that for admin is configured.")
    ] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Port for requests.")] = None,
    admin_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port for admin and metrics.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes; more than one needs Postgres.")
    ] = None,
    first_run: Annotated[
        bool,
        typer.Option("--first-run", help="Prepare the database, make a first key and show how to use it."),
    ] = False,
) -> int:
    """Start the gateway; SIGTERM lets running requests end, then stops."""
    from gateway.commands import run

    return run.serve(
        config, host=host, port=port, admin_port=admin_port, workers=workers, first_run=first_run
    )


@app.command()
def demo(
    steps: Annotated[int, typer.Option(min=1, max=500, help="Steps of the simulated agent.")] = 20,
    as_json: Json = False,
) -> int:
    """Run a simulated agent through the gateway, on a built-in provider, and show what it cost."""
    from gateway.commands import run

    return run.demo(steps=steps, json_out=as_json)


@app.command()
def migrate(
    config: Config = None,
    down: Annotated[bool, typer.Option("--down", help="Undo the last migration instead.")] = False,
) -> int:
    """Bring the database to the schema of this version."""
    from gateway.commands import database

    return database.migrate(config, down=down)


@app.command("backup-check")
def backup_check(config: Config = None, as_json: Json = False) -> int:
    """Does a restored database fit together: schema, ledger, budgets, sums, holds, audit trail? Changes nothing."""
    from gateway.commands import backup_check

    return backup_check.backup_check(config, as_json)


@app.command()
def check(config: Config = None, as_json: Json = False) -> int:
    """Read the configuration: every problem with its line, or what it amounts to."""
    from gateway.commands import check

    return check.check(config, as_json)


@app.command()
def doctor(config: Config = None, as_json: Json = False) -> int:
    """Try what the gateway depends on: what works, what does not, and what to do about it."""
    from gateway.commands import doctor

    return doctor.doctor(config, as_json)


@app.command()
def prices(
    config: Config = None,
    model: Annotated[str | None, typer.Option(help="Only models whose name contains this.")] = None,
    as_json: Json = False,
) -> int:
    """The price list in force: dollars per million tokens."""
    from gateway.commands import prices

    return prices.prices(config, model, as_json)


@keys.command("create")
def keys_create(
    name: Annotated[str, typer.Argument(help="What the key is for, for example a person or an agent.")],
    config: Config = None,
    team: Annotated[str, typer.Option(help="The team that pays.")] = "default",
    model: Annotated[list[str] | None, typer.Option(help="May use only this model; repeat for more.")] = None,
    budget: Annotated[str | None, typer.Option(help='Budget in dollars: "12.50".')] = None,
    window: Annotated[str, typer.Option(help="Its window: lifetime, day, week, month, 30d ...")] = "month",
    requests_per_min: Annotated[int | None, typer.Option(min=1)] = None,
    tokens_per_min: Annotated[int | None, typer.Option(min=1)] = None,
    concurrent: Annotated[int | None, typer.Option(min=1)] = None,
    expires_days: Annotated[int | None, typer.Option(min=1, help="The key ends after so many days.")] = None,
    as_json: Json = False,
) -> int:
    """Make a virtual key. It is shown once; only its HMAC is stored."""
    from gateway.commands import keys
    from gateway.core.identity import RateLimit

    limit = RateLimit(requests_per_min, tokens_per_min, concurrent)
    wanted = keys.Wanted(name, team, tuple(model or ()), budget, window, limit, expires_days)
    return keys.create(config, wanted, as_json)


@keys.command("list")
def keys_list(config: Config = None, as_json: Json = False) -> int:
    """All virtual keys, without their secrets."""
    from gateway.commands import keys

    return keys.show(config, as_json)


@keys.command("revoke")
def keys_revoke(
    key_id: Annotated[str, typer.Argument(help="The 8 characters after gw-.")], config: Config = None
) -> int:
    """End a key; running gateways refuse it within a second."""
    from gateway.commands import keys

    return keys.revoke(config, key_id)


@teams.command("create")
def teams_create(
    name: str,
    config: Config = None,
    model: Annotated[list[str] | None, typer.Option(help="May use only this model; repeat for more.")] = None,
    task_budget: Annotated[str | None, typer.Option(help="Budget in dollars of each of its tasks.")] = None,
    requests_per_min: Annotated[int | None, typer.Option(min=1)] = None,
    tokens_per_min: Annotated[int | None, typer.Option(min=1)] = None,
    concurrent: Annotated[int | None, typer.Option(min=1)] = None,
    as_json: Json = False,
) -> int:
    """Make a team."""
    from gateway.commands import teams
    from gateway.core.identity import RateLimit

    limit = RateLimit(requests_per_min, tokens_per_min, concurrent)
    wanted = teams.Wanted(name, tuple(model or ()), task_budget, limit)
    return teams.create(config, wanted, as_json)


@teams.command("list")
def teams_list(config: Config = None, as_json: Json = False) -> int:
    """All teams."""
    from gateway.commands import teams

    return teams.show(config, as_json)


@budgets.command("set")
def budgets_set(
    scope: Annotated[str, typer.Argument(help="tenant:<id>, team:<id>, key:<id> or task:<id>.")],
    limit: Annotated[str, typer.Argument(help='Dollars ("12.50"), or a number of tokens or calls.')],
    config: Config = None,
    window: Window = "month",
    zone: Zone = "UTC",
    on_exceed: Annotated[
        str, typer.Option(help="error, summarize, soft_stop, or warn to let through.")
    ] = "error",
    unit: Unit = "usd",
    shadow: Annotated[bool, typer.Option("--shadow", help="Refuse nothing; count what would be.")] = False,
    alerts: Annotated[
        str, typer.Option(help='Percents of the limit that are announced: "50,90"; "" for none.')
    ] = "50,80,90,100",
    landing_percent: Annotated[
        int | None,
        typer.Option(help="Kept back for a last answer; default: 2 with --on-exceed summarize, else 0."),
    ] = None,
    reason: Annotated[str, typer.Option(help="Why; a raise needs one. Kept in the audit trail.")] = "",
    as_json: Json = False,
) -> int:
    """Set or change a budget; a running gateway follows within a second."""
    from gateway.commands import budgets

    rule = budgets.Rule(window, zone, on_exceed, unit, shadow, alerts, landing_percent)
    return budgets.put(config, scope, limit, rule, reason, as_json)


@budgets.command("adjust")
def budgets_adjust(
    scope: Annotated[str, typer.Argument(help="tenant:<id>, team:<id>, key:<id> or task:<id>.")],
    limit: Annotated[str, typer.Argument(help='The new limit: dollars ("12.50"), or tokens or calls.')],
    reason: Annotated[str, typer.Option(help="Why; kept in the audit trail.")],
    config: Config = None,
    until: Annotated[
        str | None, typer.Option(help="A UTC day or moment; the old limit is back then.")
    ] = None,
    window: Window = "",
    zone: Zone = "",
    unit: Unit = "usd",
    as_json: Json = False,
) -> int:
    """Raise or lower a limit; a task that waited for money goes on. With several budgets, --window says which."""
    from gateway.commands import budgets

    rule = budgets.Rule(window, zone, unit=unit)
    return budgets.adjust(config, scope, limit, rule, reason, until, as_json)


@budgets.command("list")
def budgets_list(config: Config = None, as_json: Json = False) -> int:
    """All budgets: limit, spent, held, left."""
    from gateway.commands import budgets

    return budgets.show(config, as_json)


@importing.command("litellm")
def import_litellm(
    file: Annotated[Path, typer.Argument(help="config.yaml of LiteLLM's proxy.")],
    out: Annotated[Path | None, typer.Option(help="Write there, a new file; default: print it.")] = None,
    as_json: Json = False,
) -> int:
    """Turn a configuration of LiteLLM's proxy into ours, and say what could not be carried."""
    from gateway.commands import importing as imports

    return imports.litellm(file, out, as_json)


@tasks.command("list")
def tasks_list(
    config: Config = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="At most so many, latest first.")] = 20,
    as_json: Json = False,
) -> int:
    """The latest tasks: steps, tokens, cache share, cost."""
    from gateway.commands import tasks

    return tasks.show_all(config, limit, as_json)


@tasks.command("show")
def tasks_show(task_id: str, config: Config = None, as_json: Json = False) -> int:
    """One task, attempt by attempt."""
    from gateway.commands import tasks

    return tasks.show_one(config, task_id, as_json)


@tasks.command("pause")
def tasks_pause(
    task_id: str,
    reason: Annotated[str, typer.Option(help="Why, for the audit trail.")] = "",
    config: Config = None,
    as_json: Json = False,
) -> int:
    """Let a task and all below it admit nothing."""
    from gateway.commands import tasks

    return tasks.change_state(config, task_id, reason, pause=True, as_json=as_json)


@tasks.command("resume")
def tasks_resume(
    task_id: str,
    reason: Annotated[str, typer.Option(help="Why, for the audit trail.")] = "",
    config: Config = None,
    as_json: Json = False,
) -> int:
    """Let a task go on that was paused or stopped by a breaker, on every replica within a second."""
    from gateway.commands import tasks

    return tasks.change_state(config, task_id, reason, pause=False, as_json=as_json)


@journal.command("replay")
def journal_replay(
    config: Config = None,
    directory: Annotated[
        Path | None, typer.Option(help="Where the journals are; default: `journal` in state_dir.")
    ] = None,
    since: Since = None,
    as_json: Json = False,
) -> int:
    """After a failover or a restore: post again what the last 24 hours settled here and the database has lost."""
    from gateway.commands import journal

    return journal.post_again(config, directory, since, as_json)


@audit.command("verify")
def audit_verify(
    config: Config = None,
    head: Annotated[
        str, typer.Option(help="A last hash that you kept earlier: it must be in the trail.")
    ] = "",
    as_json: Json = False,
) -> int:
    """Try every link of the chain: nothing was changed, left out or slipped in. Status 1 if something was."""
    from gateway.commands import audit

    return audit.verify(config, head, as_json)


@app.command()
def usage(
    config: Config = None,
    by: Annotated[
        str, typer.Option(help="team, key, task, model, day, tier, deployment, client; commas for several.")
    ] = "model",
    since: Since = None,
    until: Until = None,
    as_json: Json = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV; money in nano-dollars.")] = False,
    misses: Annotated[
        bool, typer.Option("--misses", help="What was not read from a cache, by cause, instead.")
    ] = False,
) -> int:
    """What was used and what it cost."""
    from gateway.commands import misses as missed
    from gateway.commands import usage

    if misses:
        return missed.misses(config, by, since, until, as_json=as_json, as_csv=as_csv)
    return usage.usage(config, by, since, until, as_json=as_json, as_csv=as_csv)


@app.command()
def health(
    action: Annotated[str, typer.Argument(help="show, drain, undrain or reset.")] = "show",
    subject: Annotated[str, typer.Argument(help="A deployment, or credential:NAME.")] = "",
    config: Config = None,
    as_json: Json = False,
) -> int:
    """Which deployments a running gateway uses; take one out of the traffic, or put it back."""
    from gateway.commands import health

    if action not in ("show", "drain", "undrain", "reset") or (action != "show") != bool(subject):
        raise typer.BadParameter("show; or drain, undrain or reset, and the name of a deployment")
    return health.health(config, action, subject, as_json)


@app.command()
def replicas(
    action: Annotated[str, typer.Argument(help="show, drain or undrain.")] = "show",
    deployment: Annotated[str, typer.Argument(help="Whose replica.")] = "",
    replica: Annotated[str, typer.Argument(help="Its host and port, address, or name.")] = "",
    config: Config = None,
    as_json: Json = False,
) -> int:
    """Servers of your own behind a running gateway: health, queues, caches; take one out, or put it back."""
    from gateway.commands import replicas

    if action not in ("show", "drain", "undrain") or (action != "show") != bool(deployment and replica):
        raise typer.BadParameter("show; or drain or undrain, a deployment and one of its replicas")
    return replicas.replicas(config, action, deployment, replica, as_json)


@app.command()
def calibrate(
    deployment: Annotated[str, typer.Argument(help="Of one's own, as `provider/model`.")],
    config: Config = None,
    replica: Annotated[str, typer.Option(help="Host and port; default: the first one that is idle.")] = "",
    chunk_tokens: Annotated[int, typer.Option(min=64, help="Its --max-num-batched-tokens.")] = 8_192,
    streams: Annotated[int, typer.Option(min=1, max=1_024, help="Answers at once, to time its output.")] = 32,
    keep: Annotated[bool, typer.Option(help="Keep what is found, for the next start or reload.")] = True,
    as_json: Json = False,
) -> int:
    """Measure an idle replica: takes GPU time, is booked to nobody, and needs the replica for itself meanwhile."""
    from gateway.commands import calibrate

    wanted = calibrate.Wanted(deployment, replica, chunk_tokens, streams=streams, kept=keep)
    return calibrate.calibrate(config, wanted, as_json)


@app.command()
def explain(
    request_id: Annotated[str | None, typer.Argument(help="x-request-id of an answer.")] = None,
    config: Config = None,
    request: Annotated[Path | None, typer.Option(help="Instead: a request's body; where it goes.")] = None,
    task_step: Annotated[int, typer.Option(min=1, help="With --request: the task's requests so far.")] = 1,
    budget_used: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of the task's budget.")] = 0.0,
    tool_errors: Annotated[int | None, typer.Option(min=0, help="Failures in a row; or the body's.")] = None,
    repeats: Annotated[int | None, typer.Option(min=0, help="Equal turns in a row; or the body's.")] = None,
    interactive: Annotated[bool, typer.Option("--interactive", help="A person has just spoken.")] = False,
    client: Annotated[str, typer.Option(help="claude-code, codex, opencode, ...")] = "other",
    purpose: Annotated[str, typer.Option(help="title, compaction or subagent.")] = "",
    label: Annotated[list[str] | None, typer.Option(help="name=value; repeat for several.")] = None,
    home: Annotated[str, typer.Option(help="The deployment that answered the task last.")] = "",
    warm_tokens: Annotated[int, typer.Option(min=0, help="What of the prompt it holds in its cache.")] = 0,
    as_json: Json = False,
) -> int:
    """Why a request was or was not read from its provider's cache; or where a request would go, and why."""
    from gateway.commands import explain, explain_route

    if (request is None) == (request_id is None):
        raise typer.BadParameter("give the id of a request, or --request with a body")
    if request is None:
        return explain.explain(config, request_id or "", as_json)
    labels = explain_route.labels_of(label or ())
    supposed = explain_route.Supposed(
        task_step, budget_used, tool_errors, repeats, interactive, client, purpose, labels, home, warm_tokens
    )
    return explain_route.explain_route(config, request, supposed, as_json)


@app.command()
def replay(
    runs: Annotated[list[Path], typer.Argument(help="Recorded runs: JSON files, or folders of them.")],
    provider: Annotated[str, typer.Option(help="Whose cache rules and prices: anthropic, openai, ...")],
    config: Config = None,
    model: Annotated[str | None, typer.Option(help="One of its models; default: the first listed.")] = None,
    level: Annotated[
        list[str] | None, typer.Option(help="observe, safe or relocate; repeat for several; default: all.")
    ] = None,
    gap_s: Annotated[
        float, typer.Option(min=0.0, help="Seconds between two steps whose recording has no times.")
    ] = 15.0,
    svg: Annotated[Path | None, typer.Option(help="Also draw the costs into this file.")] = None,
    as_json: Json = False,
) -> int:
    """What recorded runs would cost: without a cache, as sent, at each level, and at best."""
    from gateway.commands import replay
    from gateway.commands.output import OperatorError
    from gateway.core.shaping import Level

    unknown = [name for name in level or () if name not in set(Level)]
    if unknown:
        raise OperatorError(f"there is no level {unknown[0]!r}", f"known: {', '.join(Level)}")
    levels = tuple(dict.fromkeys(Level(name) for name in level or ()))
    return replay.replay(config, replay.Wanted(runs, provider, model, levels, gap_s, svg), as_json)


if __name__ == "__main__":
    main()
