"""Lists of the admin API over what happened: tasks, ledger entries, the audit trail."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gateway.core.errors import InvalidRequest, NotFound
from gateway.core.offices import AuditEntry, Page, Reach
from gateway.storage import task_rows
from gateway.storage.accounts import SELECT_TASKS, Task, task_of
from gateway.storage.pages import Listing
from gateway.storage.tables import ledger
from gateway.storage.transact import Fetch, Sql, Tx

_WITHIN = {"tenant": "tenant_id = {}", "team": "team_id = {}"}
_TASK_FILTERS = {
    "team_id": "team_id = {}",
    "tenant_id": "tenant_id = {}",
    "key_id": "key_id = {}",
    "state": "state = {}",
    "parent_task_id": "parent_task_id = {}",
    "external_id": "external_id = {}",
    "since": "last_at_ms >= {}",
    "until": "last_at_ms < {}",
}
#: What tasks may be sorted by, the most first -> (column, its place in SELECT_TASKS).
_ORDERS = {
    "last_at": ("last_at_ms", 9),
    "created_at": ("created_at_ms", 8),
    "spend": ("cost_nano_usd", 12),
    "steps": ("steps", 10),
}
#: What a task spends in a minute, on average; the first one is a whole one.
_SLOPE = "(cost_nano_usd / ((last_at_ms - created_at_ms) / 60000 + 1))"
_SLOPED = SELECT_TASKS.replace(" FROM task", f", {_SLOPE} FROM task")
_TASK_PLACES = SELECT_TASKS.count(", ") + 1
TASKS = {
    "slope": Listing(
        _SLOPED, (_SLOPE, "task_id"), (_TASK_PLACES, 0), _TASK_FILTERS, _WITHIN, descending=True
    ),
    **{
        name: Listing(SELECT_TASKS, (column, "task_id"), (place, 0), _TASK_FILTERS, _WITHIN, descending=True)
        for name, (column, place) in _ORDERS.items()
    },
}
_ENTRY_COLUMNS = tuple(c.name for c in ledger.columns)
ENTRIES = Listing(
    f"SELECT {', '.join(_ENTRY_COLUMNS)} FROM ledger",  # noqa: S608
    ("at_ms", "entry_id"),
    (_ENTRY_COLUMNS.index("at_ms"), _ENTRY_COLUMNS.index("entry_id")),
    {
        **{
            f"{name}": f"{name} = {{}}"
            for name in ("request_id", "task_id", "key_id", "team_id", "tenant_id", "model", "kind", "error")
        },
        "since": "at_ms >= {}",
        "until": "at_ms < {}",
    },
    _WITHIN,
    descending=True,
)
AUDIT = Listing(
    "SELECT audit_id, at_ms, actor, action, subject, body, hash FROM audit",
    ("at_ms", "audit_id"),
    (1, 0),
    {
        "actor": "actor = {}",
        "action": "action = {}",
        "subject": "subject = {}",
        "since": "at_ms >= {}",
        "until": "at_ms < {}",
    },
    {},
    descending=True,
)
#: The task of that id, else one of each key that has tasks of that name: its latest.
_FIND = Sql(
    f"{SELECT_TASKS} WHERE (task_id = $1 OR external_id = $1) AND ($2 = '' OR tenant_id = $2) "
    "AND ($3 = '' OR team_id = $3) ORDER BY CASE WHEN task_id = $1 THEN 0 ELSE 1 END, last_at_ms DESC LIMIT 20"
)
_THESE = Sql(f"{SELECT_TASKS} WHERE task_id = ANY($1::text[]) ORDER BY created_at_ms, task_id")


def tasks(reach: Reach, filters: Mapping[str, Any], after: Any, limit: int) -> Tx[Page[Task]]:
    """`sort`: last_at, created_at, spend, slope or steps; the most first."""
    wanted = {name: value for name, value in filters.items() if name != "sort"}
    page = yield from TASKS[filters.get("sort") or "last_at"].page(reach, wanted, after, limit)
    return Page([task_of(row[:_TASK_PLACES]) for row in page.rows], page.after)


def find_task(reach: Reach, name: str) -> Tx[Task]:
    """By its id, or by the id that its client gave it. Raises `NotFound`, `InvalidRequest` for one of several keys."""
    found = [task_of(row) for row in (yield Fetch(_FIND, (name, reach.tenant_id, reach.team_id)))]
    if not found:
        raise NotFound(f"there is no task {name}")
    if found[0].task_id != name:
        latest = list({t.key_id: t for t in reversed(found)}.values())
        if len(latest) > 1:
            shown = ", ".join(f"{t.task_id} of key {t.key_id}" for t in latest)
            raise InvalidRequest(f"several keys have a task {name}: say which by its id: {shown}")
    return found[0]


def task_tree(reach: Reach, name: str) -> Tx[Sequence[Task]]:
    """The task and all below it, itself first. Those below are its keys' own, so in the same reach."""
    root = yield from find_task(reach, name)
    ids = yield from task_rows.below(root.task_id)
    rows = yield Fetch(_THESE, (ids,))
    below = [task_of(row) for row in rows]
    return [root, *(t for t in below if t.task_id != root.task_id and reach.holds(t.tenant_id, t.team_id))]


def entries(reach: Reach, filters: Mapping[str, Any], after: Any, limit: int) -> Tx[Page[Mapping[str, Any]]]:
    """Ledger entries, the latest first, as all columns of `tables.ledger`."""
    page = yield from ENTRIES.page(reach, filters, after, limit)
    found = [dict(zip(_ENTRY_COLUMNS, row, strict=True)) for row in page.rows]
    for entry in found:
        entry["stream"] = bool(entry["stream"])  # SQLite has no booleans
    return Page(found, page.after)


def audit(filters: Mapping[str, Any], after: Any, limit: int) -> Tx[Page[AuditEntry]]:
    """The latest first."""
    page = yield from AUDIT.page(Reach(), filters, after, limit)
    found = []
    for audit_id, at_ms, actor, action, subject, body, digest in page.rows:
        found.append(AuditEntry(audit_id, at_ms, actor, action, subject, msgspec.json.decode(body), digest))
    return Page(found, page.after)
