"""usage --misses: what was not read from providers' caches, by cause, beside what caches saved."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gateway.commands.database import Desk, at_desk
from gateway.commands.output import dollars, print_csv, print_json, print_table, say
from gateway.commands.tasks import cause_document
from gateway.commands.usage import asked, shown
from gateway.core.explanation import Cause, prevented_by
from gateway.storage import reports
from gateway.storage.reports import MissRow, UsageRow


def misses(
    path: Path | None, by: str, since: str | None, until: str | None, *, as_json: bool, as_csv: bool
) -> int:
    names, from_ms, to_ms = asked(by, since, until)

    async def act(desk: Desk) -> tuple[list[MissRow], list[UsageRow]]:
        rows = await reports.misses(desk.database, by=names, from_ms=from_ms, to_ms=to_ms)
        return rows, await reports.usage(desk.database, by=names, from_ms=from_ms, to_ms=to_ms)

    rows, used = at_desk(path, act)
    if as_json:
        print_json([_group(names, row, rows) for row in used])
    elif as_csv:
        print_csv([{**_named(names, row.group), **cause_document(row)} for row in rows])
    elif not used:
        say("nothing was used in that time")
    else:
        _print(names, rows, used)
    return 0


def _group(names: Sequence[str], used: UsageRow, rows: Sequence[MissRow]) -> dict[str, Any]:
    own = [row for row in rows if row.group == used.group]
    return {
        **_named(names, used.group),
        "attempts": used.attempts,
        "saved_nano_usd": used.saved_nano_usd,
        "lost_nano_usd": sum(row.lost_nano_usd for row in own),
        "misses": [cause_document(row) for row in own],
    }


def _named(names: Sequence[str], group: Sequence[str | int]) -> dict[str, str]:
    return dict(zip(names, map(shown, names, group), strict=True))


def _print(names: Sequence[str], rows: Sequence[MissRow], used: Sequence[UsageRow]) -> None:
    print_table(
        [*names, "cause", "attempts>", "lost tokens>", "lost>", "prevented by"],
        [
            [
                *map(shown, names, row.group),
                row.cause.replace("_", " "),
                f"{row.attempts:,}",
                f"{row.lost_tokens:,}",
                dollars(row.lost_nano_usd),
                prevented_by(Cause(row.cause)),
            ]
            for row in rows
        ],
    )
    print_table(
        [*names, "attempts>", "lost by misses>", "saved by caching>"],
        [
            [
                *map(shown, names, row.group),
                f"{row.attempts:,}",
                dollars(sum(m.lost_nano_usd for m in rows if m.group == row.group)),
                dollars(row.saved_nano_usd),
            ]
            for row in used
        ],
    )
