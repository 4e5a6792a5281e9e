"""The configuration as a whole: read it anew, and try out rules before they are written into it."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any, Self

from pydantic import Field, StringConstraints, model_validator

from gateway.admin.call import Call, Reply
from gateway.admin.in_force import RuleOut, rule_out
from gateway.admin.ports import Finding
from gateway.admin.problems import Fault, Problem
from gateway.admin.route import Route
from gateway.admin.schemas import In
from gateway.admin.shown import Out
from gateway.core.offices import Right

RULES_CHARS_MAX = 100_000


class ReloadOut(Out):
    """The configuration was read anew. What cannot change while requests are served waits for a restart."""

    reloaded: bool
    waiting_for_restart: list[str]


class RulesIn(In):
    """Either YAML, as it would stand in the configuration (`rules:`, `virtual_models:`, `mode:`), or the rules as JSON."""

    yaml: Annotated[str, StringConstraints(max_length=RULES_CHARS_MAX)] | None = None
    rules: Annotated[list[dict[str, Any]], Field(max_length=100)] | None = None

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if (self.yaml is None) == (self.rules is None):
            raise ValueError("give `yaml` or `rules`")
        return self

    @property
    def text(self) -> str:
        return self.yaml if self.yaml is not None else json.dumps({"rules": self.rules})


class FindingOut(Out):
    """One thing that is wrong; `line` and `column` from 1, 0 = the text as a whole."""

    line: int
    column: int
    key: str
    message: str
    hint: str


class RulesChecked(Out):
    """Whether rules can be used with the deployments in force: what they amount to, and everything that is wrong."""

    ok: bool
    rules: list[RuleOut]
    problems: list[FindingOut]


async def reload(call: Call) -> Reply:
    """Read the configuration anew, as SIGHUP does, in all processes of this gateway.

    A configuration with mistakes changes nothing; `errors` has every one with file, line and key.
    """
    outcome = call.deps.reload()
    if outcome is None:
        raise Problem(409, "This gateway was not started from a file.")
    if outcome.problems:
        faults = [Fault(problem.key or "file", _told(problem)) for problem in outcome.problems]
        raise Problem(422, "Not reloaded: the configuration has mistakes, so the old one stays.", faults)
    waiting = list(outcome.waiting)
    await call.registry.note("configuration.reload", "configuration", {"waiting_for_restart": waiting})
    return Reply({"reloaded": True, "waiting_for_restart": waiting})


async def check_rules(call: Call) -> Reply:
    """Try out rules on the deployments in force; nothing changes."""
    wanted = RulesIn.model_validate(call.body)
    rules, problems = await asyncio.to_thread(call.deps.check_rules, wanted.text)
    return Reply(
        {
            "ok": not problems,
            "rules": [rule_out(n, rule, "", None) for n, rule in enumerate(rules, 1)],
            "problems": [
                {"line": p.line, "column": p.column, "key": p.key, "message": p.message, "hint": p.hint}
                for p in problems
            ],
        }
    )


def _told(problem: Finding) -> str:
    place = problem.file + (f":{problem.line}" if problem.line else "")
    place += f":{problem.column}" if problem.column else ""
    return f"{place}: {problem.message}" + (f" ({problem.hint})" if problem.hint else "")


ROUTES = (
    Route("POST", "/reload", reload, Right.OPERATE, "configuration", ReloadOut),
    Route("POST", "/rules/check", check_rules, Right.OPERATE, "configuration", RulesChecked, RulesIn),
)
