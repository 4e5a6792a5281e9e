"""audit verify: is the trail what was written?"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from gateway.commands.database import Desk, at_desk
from gateway.commands.output import complain, print_json, say
from gateway.storage import audit


def verify(path: Path | None, known: str, as_json: bool) -> int:
    """0 if every entry is in its place, 1 if not."""

    async def act(desk: Desk) -> audit.Verified:
        return await audit.verify(desk.database, known)

    found = at_desk(path, act)
    if as_json:
        print_json({"sound": found.sound, **asdict(found)})
    else:
        _tell(found)
    return 0 if found.sound else 1


def _tell(found: audit.Verified) -> None:
    if found.broken is not None:
        complain(f"the chain breaks at entry {found.broken.audit_id}: {found.broken.why}")
    if found.cut:
        complain("entries are missing at the end: the last hash that was written is not there")
    if found.lost:
        complain("the hash that you kept is not in the trail")
    if found.unchained:
        since = ", some of them while it was there already" if found.late else ""
        say(f"{found.unchained:,} entries of a version without a chain{since}: nothing proves them")
    if found.sound:
        say(
            f"{found.entries:,} entries, each where it was written; the last hash is {found.head or '(none)'}"
        )
