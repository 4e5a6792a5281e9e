"""Ask a running gateway: its admin port, at the address and with the key of the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import aiohttp

from gateway.administration import admin_token
from gateway.commands.output import OperatorError
from gateway.settings import Settings

_TIMEOUT_S = 10.0


async def rows_of(
    settings: Settings, path: str, change: tuple[str, Mapping[str, Any]] | None = None
) -> list[dict[str, Any]]:
    """The rows at /admin/v1`path`, after the POST (path, body) if there is one. `OperatorError` says what went wrong."""
    base = f"http://{settings.admin_listen}/admin/v1"
    headers = {"Authorization": f"Bearer {admin_token(settings)}"}
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    try:
        async with aiohttp.ClientSession(headers=headers, timeout=timeout) as http:
            if change is not None:
                async with http.post(base + change[0], json=change[1]) as answer:
                    await _refuse_bad(answer)
            async with http.get(base + path) as answer:
                await _refuse_bad(answer)
                rows: list[dict[str, Any]] = (await answer.json())["data"]
    except (aiohttp.ClientConnectionError, TimeoutError) as error:
        hint = "is a gateway running with this configuration?"
        raise OperatorError(f"nobody answers at {base}{path}: {error}", hint) from error
    return rows


async def _refuse_bad(answer: aiohttp.ClientResponse) -> None:
    if answer.status == 200:
        return
    found = await answer.json(content_type=None)
    said = found.get("detail") or found.get("title") if isinstance(found, dict) else None
    raise OperatorError(f"the gateway answers HTTP {answer.status}: {said or 'no reason given'}")
