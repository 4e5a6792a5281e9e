"""health: which deployments and credentials a running gateway uses, and how to take one out or put it back."""

from __future__ import annotations

import asyncio
from pathlib import Path

from gateway.commands.asking import rows_of
from gateway.commands.opening import load_settings
from gateway.commands.output import print_json, print_table


def health(path: Path | None, action: str, subject: str, as_json: bool) -> int:
    """`action` is "show", "reset", "drain" or "undrain"."""
    settings = load_settings(path)
    change = None if action == "show" else ("/health", {"subject": subject, "action": action})
    rows = asyncio.run(rows_of(settings, "/health", change))
    if as_json:
        print_json(rows)
        return 0
    print_table(
        ["deployment or credential", "status", "cause", "failures>", "ejections>", "back in s>", "share>"],
        [
            [
                row["subject"],
                row["status"],
                row["cause"] or "-",
                str(row["failures_in_a_row"]),
                str(row["ejections"]),
                f"{row['back_in_s']:g}" if row["back_in_s"] else "-",
                f"{row['share']:.0%}",
            ]
            for row in rows
        ],
    )
    return 0
