"""Transactions of the admin API over tasks: names and labels, and the runs whose outcome was said."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from gateway.core.errors import InvalidRequest
from gateway.core.offices import Reach
from gateway.core.outcomes import Run
from gateway.storage import audit
from gateway.storage.registry_lists import find_task
from gateway.storage.transact import Fetch, Sql, Tx, json_text

RUNS_MAX = 10_000
#: How long before it was last used somebody may have helped a run.
_LIFE_MS = 30 * 86_400_000
#: Of the task itself, and of the attempts that most of its money went to.
_TASK_GROUPS = {"tenant_id": 1, "team_id": 2, "key_id": 3, "name": 4}
_ENTRY_GROUPS = ("model", "tier", "client", "deployment")
GROUPS = (*_TASK_GROUPS, *_ENTRY_GROUPS)

_MORE = Sql("SELECT name, labels FROM task WHERE task_id = $1 FOR UPDATE")
_CHANGE = Sql("UPDATE task SET name = $2, labels = $3 WHERE task_id = $1")
_RUNS = Sql(
    "SELECT task_id, tenant_id, team_id, key_id, name, success, score, cost_nano_usd, steps, output, labels, "
    "outcome_labels FROM task WHERE success IS NOT NULL AND last_at_ms >= $1 AND last_at_ms < $2 "
    "AND ($3 = '' OR tenant_id = $3) AND ($4 = '' OR team_id = $4) AND ($5 = '' OR key_id = $5) "
    "ORDER BY last_at_ms LIMIT $6"
)
_INTERVENTIONS = Sql(
    "SELECT subject, count(*) FROM audit WHERE at_ms >= $1 AND action IN ('task.resume', 'budget.raise') "
    "AND subject LIKE 'task:%' GROUP BY subject"
)
_SHARES = Sql(
    "SELECT task_id, model, tier, client, deployment, CAST(sum(amount_nano_usd) AS BIGINT) FROM ledger "
    "WHERE task_id = ANY($1::text[]) GROUP BY task_id, model, tier, client, deployment"
)


def change_task(
    actor: str,
    reach: Reach,
    name: str,
    change: Callable[[str, Mapping[str, str]], tuple[str, Mapping[str, str]]],
) -> Tx[str]:
    """Change a task's name and labels as `change` says, which gets them; returns its id."""
    task_id = (yield from find_task(reach, name)).task_id
    rows = yield Fetch(_MORE, (task_id,))
    before = (rows[0][0], msgspec.json.decode(rows[0][1], type=dict[str, str]))
    after = change(*before)
    if after != before:
        said = {"name": after[0], "labels": dict(after[1])}
        yield from audit.record(actor, "task.change", f"task:{task_id}", said)
        yield Fetch(_CHANGE, (task_id, after[0], json_text(dict(after[1]))))
    return task_id


def runs(
    reach: Reach, by: Sequence[str], label: str, from_ms: int, to_ms: int, team_id: str, key_id: str
) -> Tx[list[Run]]:
    """Tasks whose outcome was said and that were last used in [from, to), with their groups: `by` (of GROUPS), then the
    value of the label, if one is named (that of the outcome before that of the task).
    """
    if reach.team_id and team_id not in ("", reach.team_id):
        return []
    args = (from_ms, to_ms, reach.tenant_id, reach.team_id or team_id, key_id, RUNS_MAX + 1)
    rows = yield Fetch(_RUNS, args)
    if len(rows) > RUNS_MAX:
        raise InvalidRequest(f"more than {RUNS_MAX:,} runs: ask for a shorter time", param="since")
    rows_told = yield Fetch(_INTERVENTIONS, (from_ms - _LIFE_MS,))
    told = {str(row[0]): int(row[1]) for row in rows_told}
    most: dict[str, dict[str, str]] = {}
    if any(name in _ENTRY_GROUPS for name in by):
        shares: dict[str, tuple[int, dict[str, str]]] = {}
        for task_id, *values, amount in (yield Fetch(_SHARES, ([row[0] for row in rows],))):
            if task_id not in shares or amount > shares[task_id][0]:
                shares[task_id] = amount, dict(zip(_ENTRY_GROUPS, values, strict=True))
        most = {task_id: values for task_id, (_, values) in shares.items()}
    return [_run(row, by, label, told, most.get(row[0], {})) for row in rows]


def _run(
    row: Sequence[Any], by: Sequence[str], label: str, told: Mapping[str, int], most: Mapping[str, str]
) -> Run:
    group = [row[_TASK_GROUPS[name]] if name in _TASK_GROUPS else most.get(name, "") for name in by]
    if label:
        labels = [msgspec.json.decode(text, type=dict[str, str]) for text in (row[11], row[10]) if text]
        group.append(next((found[label] for found in labels if label in found), ""))
    task_id, success, score, cost, steps, output = row[0], *row[5:10]
    return Run(
        task_id, tuple(group), bool(success), score, cost, steps, output, told.get(f"task:{task_id}", 0)
    )
