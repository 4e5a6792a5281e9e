"""`GET /v1/tasks/{id}/artifacts/{hash}`: the whole text of a tool result that was trimmed, page by page."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from gateway.core.errors import InvalidRequest, NotFound
from gateway.core.identity import KeyRecord
from gateway.edge.tasks import TaskDesk

#: (task id, hash) -> text; None if it is not known (any more)
FindArtifact = Callable[[str, str], Awaitable[str | None]]

PAGE_CHARS = 16_000
PAGE_CHARS_MAX = 64_000
_MOST = 1_000_000_000
_NAME_CHARS_MAX = 200


def own_or_shared(own: Callable[[str, str], str | None], shared: FindArtifact | None) -> FindArtifact:
    """What this process has trimmed, else what any that shares with it has."""

    async def text(task_id: str, digest: str) -> str | None:
        found = own(task_id, digest)
        return found if found is not None or shared is None else await shared(task_id, digest)

    return text


async def answer_artifact(
    desk: TaskDesk, find: FindArtifact, key: KeyRecord, task: str, digest: str, query: Mapping[str, str]
) -> dict[str, object]:
    """One page; `offset` and `limit` count characters. Raises `NotFound` also for what another key's task has."""
    offset = _number(query, "offset", 0, 0, _MOST)
    limit = _number(query, "limit", PAGE_CHARS, 1, PAGE_CHARS_MAX)
    if not 0 < len(task) <= _NAME_CHARS_MAX or not task.isprintable():
        raise NotFound("there is no such task")
    task_id = (await desk.view(key, task)).task.task_id
    text = await find(task_id, digest)
    if text is None:
        raise NotFound(
            "this task has no such artifact; they are kept while the run goes on, and come back with its next step"
        )
    end = min(len(text), offset + limit)
    return {
        "object": "task.artifact",
        "task_id": task_id,
        "hash": digest,
        "chars": len(text),
        "offset": offset,
        "text": text[offset:end],
        "next_offset": end if end < len(text) else None,
    }


def _number(query: Mapping[str, str], name: str, default: int, low: int, high: int) -> int:
    text = query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 12 and low <= int(text) <= high):
        raise InvalidRequest(f"'{name}' must be a whole number from {low} to {high}", param=name)
    return int(text)
