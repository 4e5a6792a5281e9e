"""journal: what replicas keep of their settlements beside the database."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from gateway.commands.database import Desk, at_desk
from gateway.commands.output import ms_from_day, print_json, say
from gateway.storage.replay import Replayed, replay


def post_again(path: Path | None, directory: Path | None, since: str | None, as_json: bool) -> int:
    """1 if the database does not take everything."""
    since_ms = 0 if since is None else ms_from_day(since)

    async def act(desk: Desk) -> Replayed:
        return await replay(desk.database, directory or desk.settings.state_dir / "journal", since_ms)

    done = at_desk(path, act)
    if as_json:
        print_json(asdict(done))
    else:
        say(
            f"{done.files} files: {done.posted} settlements posted that the database had lost, {done.corrected} "
            f"corrected, {done.known} were there, {done.rejected} rejected"
        )
    return 1 if done.rejected else 0
