"""usage: sums by team, key, task, model, day ..."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gateway.commands.database import at_desk
from gateway.commands.output import dollars, moment, ms_from_day, print_csv, print_json, print_table, say
from gateway.commands.tasks import input_total, share
from gateway.storage import reports
from gateway.storage.reports import UsageRow

#: As good as for ever, and still within a BIGINT when widened to full hours.
_FOR_EVER_MS = 2**52


def usage(
    path: Path | None, by: str, since: str | None, until: str | None, *, as_json: bool, as_csv: bool
) -> int:
    names, from_ms, to_ms = asked(by, since, until)
    rows = at_desk(path, lambda desk: reports.usage(desk.database, by=names, from_ms=from_ms, to_ms=to_ms))
    if as_json:
        print_json([document(names, row) for row in rows])
    elif as_csv:
        print_csv([document(names, row) for row in rows])
    elif not rows:
        say("nothing was used in that time")
    else:
        _print(names, rows)
    return 0


def asked(by: str, since: str | None, until: str | None) -> tuple[list[str], int, int]:
    """(what to group by, from, to) in milliseconds."""
    names = [word.strip() for word in by.split(",") if word.strip()]
    from_ms = 0 if since is None else ms_from_day(since)
    return names, from_ms, _FOR_EVER_MS if until is None else ms_from_day(until)


def document(names: list[str], row: UsageRow) -> dict[str, Any]:
    """One group, flat, for JSON and CSV."""
    return {
        **dict(zip(names, map(shown, names, row.group), strict=True)),
        "attempts": row.attempts,
        "errors": row.errors,
        "retries": row.retries,
        "cost_nano_usd": row.cost_nano_usd,
        "uncached_cost_nano_usd": row.list_cost_nano_usd,
        "saved_nano_usd": row.saved_nano_usd,
        **row.tokens,
    }


def _print(names: list[str], rows: list[UsageRow]) -> None:
    print_table(
        [*names, "attempts>", "errors>", "input>", "cached>", "output>", "cost>", "saved by caching>"],
        [
            [
                *map(shown, names, row.group),
                f"{row.attempts:,}",
                f"{row.errors:,}",
                f"{input_total(row.tokens):,}",
                share(row.tokens),
                f"{row.tokens['output']:,}",
                dollars(row.cost_nano_usd),
                dollars(row.saved_nano_usd),
            ]
            for row in rows
        ],
    )
    say(
        f"total {dollars(sum(row.cost_nano_usd for row in rows))} in {sum(row.attempts for row in rows):,} attempts"
    )


def shown(name: str, value: str | int) -> str:
    """A group's value for people and programs."""
    return moment(int(value))[:10] if name == "day" else str(value)
