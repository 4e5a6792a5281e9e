"""teams: make and list."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gateway.commands.database import Desk, at_desk
from gateway.commands.keys import limit_shown, models_shown
from gateway.commands.output import OperatorError, dollars, nano_from_usd, print_json, print_table, say
from gateway.core.identity import RateLimit
from gateway.storage.accounts import Team


@dataclass(frozen=True, slots=True)
class Wanted:
    """A team as asked for on the command line; `task_budget` in dollars."""

    name: str
    models: tuple[str, ...]
    task_budget: str | None
    limit: RateLimit


def create(path: Path | None, wanted: Wanted, as_json: bool) -> int:
    task_budget_nano_usd = None if wanted.task_budget is None else nano_from_usd(wanted.task_budget)

    async def act(desk: Desk) -> Team:
        if any(team.team_id == wanted.name for team in await desk.accounts.list_teams()):
            raise OperatorError(f"there already is a team {wanted.name}")
        models = frozenset(wanted.models)
        return await desk.accounts.put_team(
            Team(wanted.name, models=models, limit=wanted.limit, task_budget_nano_usd=task_budget_nano_usd)
        )

    team = at_desk(path, act)
    if as_json:
        print_json(document(team))
    else:
        say(f"team {team.team_id}; make a key for it with: tollhouse keys create NAME --team {team.team_id}")
    return 0


def show(path: Path | None, as_json: bool) -> int:
    found = at_desk(path, lambda desk: desk.accounts.list_teams())
    if as_json:
        print_json([document(team) for team in found])
        return 0
    print_table(
        ["team", "tenant", "models", "limits", "each task>"],
        [
            [
                t.team_id,
                t.tenant_id,
                models_shown(t.models),
                limit_shown(t.limit),
                dollars(t.task_budget_nano_usd),
            ]
            for t in found
        ],
    )
    return 0


def document(team: Team) -> dict[str, Any]:
    return {
        "team": team.team_id,
        "tenant": team.tenant_id,
        "models": sorted(team.models),
        "limits": asdict(team.limit),
        "task_budget_nano_usd": team.task_budget_nano_usd,
    }
