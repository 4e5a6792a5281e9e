"""explain: why a request was or was not read from its provider's cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gateway.commands import overlay
from gateway.commands.database import Desk, at_desk
from gateway.commands.output import print_json, say
from gateway.storage.explained import Explained


def explain(path: Path | None, request_id: str, as_json: bool) -> int:
    async def act(desk: Desk) -> dict[str, Any]:
        settings, _ = await overlay.examine(path, desk.settings)
        explained = Explained(desk.database, lambda: settings.catalog, lambda: settings.cache_rules)
        return await explained.request(request_id)

    found = at_desk(path, act)
    if as_json:
        print_json(found)
        return 0
    for attempt in found["attempts"]:
        for line in lines(attempt):
            say(line)
    return 0


def lines(attempt: dict[str, Any]) -> list[str]:
    """One attempt for people."""
    tokens = attempt["tokens"]
    told = [
        f"attempt {attempt['attempt_no']} on {attempt['deployment']}: {attempt['verdict']}"
        + (f" ({attempt['cause'].replace('_', ' ')})" if attempt["cause"] else ""),
        f"  why     {attempt['why']}",
        f"  tokens  {tokens['input']:,} of input: {tokens['read']:,} read from the cache, "
        f"{tokens['written']:,} written to it, {tokens['uncached']:,} neither",
    ]
    if attempt["offset_bytes"] is not None:
        told.append(f"  where   behind {attempt['offset_bytes']:,} bytes of prompt")
    if tokens["lost"]:
        told.append(f"  lost    {tokens['lost']:,} tokens that could have been read: ${attempt['lost_usd']}")
    told.append(f"  saved   ${attempt['saved_usd']} against the same tokens without a cache")
    if attempt["previous_request_id"]:
        seconds = attempt["gap_ms"] / 1_000
        told.append(f"  before  {attempt['previous_request_id']}, answered {seconds:,.1f} s earlier")
    if attempt["transforms"]:
        told.append(f"  changed {', '.join(attempt['transforms'])} (cache level {attempt['level']})")
    if attempt.get("vendor_says"):
        told.append(f"  vendor  {attempt['vendor_says']}, says the provider")
    if attempt["prevented_by"]:
        told.append(f"  level   {attempt['prevented_by']} would have kept this from happening")
    if attempt["advice"]:
        told.append(f"  do      {attempt['advice']}")
    return told
