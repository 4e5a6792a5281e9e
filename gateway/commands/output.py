"""How commands speak: a table for people or JSON for programs, errors as one line with a hint."""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from gateway.core.entry import Unit
from gateway.core.money import NANO_PER_USD, usd_text

#: A pipe has no width; this one keeps rows on one line.
_PIPE_COLUMNS = 200
_DOLLARS = re.compile(r"\$?(\d{0,9})(?:\.(\d{0,9}))?", re.ASCII)


class OperatorError(Exception):
    """A command cannot do what was asked; the message says why and the hint what to do."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message, self.hint = message, hint


def console(stderr: bool = False) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    return Console(
        file=stream, width=None if stream.isatty() else _PIPE_COLUMNS, highlight=False, markup=False
    )


def say(text: str) -> None:
    console().print(text)


def complain(text: str) -> None:
    console(stderr=True).print(text)


def print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "") -> None:
    """Columns whose name ends in ">" are aligned to the right."""
    table = Table(box=SIMPLE_HEAD, title=title or None, title_justify="left", pad_edge=False)
    for name in columns:
        table.add_column(name.rstrip(">"), justify="right" if name.endswith(">") else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console().print(table)


def print_csv(rows: Sequence[Mapping[str, Any]]) -> None:
    if not rows:
        return
    writer = csv.DictWriter(sys.stdout, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


def dollars(nano_usd: int | None) -> str:
    """For people: "$12.50", "$0.00042"; at least cents, never more digits than there are."""
    if nano_usd is None:
        return "-"
    sign = "-" if nano_usd < 0 else ""
    whole, _, fraction = usd_text(abs(nano_usd)).partition(".")
    return f"{sign}${int(whole):,}.{fraction:0<2}"


def amount(number: int, unit: Unit) -> str:
    """For people: "$12.50", "1,000 calls"."""
    return dollars(number) if unit is Unit.USD else f"{number:,} {unit.replace('_', ' ')}"


def nano_from_usd(text: str) -> int:
    """Dollars as typed ("12.50") to nano-dollars; OperatorError for anything that is not an exact amount."""
    amount = _DOLLARS.fullmatch(text.strip())
    if amount is None or not (amount[1] or amount[2]):
        raise OperatorError(f"{text!r} is not an amount in dollars", 'for example "12.50"')
    return int(amount[1] or "0") * NANO_PER_USD + int(f"{amount[2] or '':0<9}")


def moment(ms: int | None) -> str:
    """Milliseconds since 1970 as UTC to the second, "-" for none."""
    if ms is None:
        return "-"
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def ms_from_day(text: str) -> int:
    """A UTC day or moment ("2026-11-30", "2026-11-30T12:00") as milliseconds since 1970."""
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise OperatorError(
            f"{text!r} is not a date", "for example 2026-11-30, or 2026-11-30T12:00"
        ) from None
    if when.tzinfo is None:
        when = when.replace(tzinfo=UTC)
    return int(when.timestamp() * 1000)
