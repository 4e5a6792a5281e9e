"""health: which deployments and credentials a running gateway uses, and how to take one out or put it back."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp

from gateway.administration import admin_token
from gateway.commands.opening import load_settings
from gateway.commands.output import OperatorError, print_json, print_table
from gateway.settings import Settings

_TIMEOUT_S = 10.0


def health(path: Path | None, action: str, subject: str, as_json: bool) -> int:
    """`action` is "show", "reset", "drain" or "undrain"."""
    settings = load_settings(path)
    rows = asyncio.run(_ask(settings, action, subject))
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


async def _ask(settings: Settings, action: str, subject: str) -> list[dict[str, Any]]:
    url = f"http://{settings.admin_listen}/admin/v1/health"
    headers = {"Authorization": f"Bearer {admin_token(settings)}"}
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    try:
        async with aiohttp.ClientSession(headers=headers, timeout=timeout) as http:
            if action != "show":
                async with http.post(url, json={"subject": subject, "action": action}) as answer:
                    await _refuse_bad(answer)
            async with http.get(url) as answer:
                await _refuse_bad(answer)
                rows: list[dict[str, Any]] = (await answer.json())["data"]
    except (aiohttp.ClientConnectionError, TimeoutError) as error:
        hint = "is a gateway running with this configuration?"
        raise OperatorError(f"nobody answers at {url}: {error}", hint) from error
    return rows


async def _refuse_bad(answer: aiohttp.ClientResponse) -> None:
    if answer.status == 200:
        return
    found = await answer.json(content_type=None)
    said = found.get("detail") or found.get("title") if isinstance(found, dict) else None
    raise OperatorError(f"the gateway answers HTTP {answer.status}: {said or 'no reason given'}")
