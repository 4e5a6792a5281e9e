"""What lies beside the project: captured requests, traces, recorded answers. Absent on a plain clone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHARED = Path(__file__).resolve().parents[3] / "shared"
ABSENT = f"{SHARED} is not there: captured requests of real clients were not tried, only the project's own"


@dataclass(frozen=True, slots=True)
class Captured:
    """One request as a real client sent it."""

    name: str  # "claude-code/01-first-turn"
    method: str
    path: str
    headers: list[tuple[str, str]]
    body: dict[str, Any] | None


def captured() -> list[Captured]:
    """All captured requests, or none (then `ABSENT` says so in the test's name)."""
    return list(_captured())


def _captured() -> Iterator[Captured]:
    for path in sorted((SHARED / "fixtures" / "clients").glob("*/*.json")):
        request = json.loads(path.read_text())["request"]
        headers = [(name, value) for name, value in request["headers"]]
        yield Captured(
            f"{path.parent.name}/{path.stem}", request["method"], request["path"], headers, request["body"]
        )
