"""Mixed traffic from a seed: all operations, streams or not, growing histories, clients that leave."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tests.support.raw_client import RawClient

PATHS = {
    "chat": "/v1/chat/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
    "embeddings": "/v1/embeddings",
    "count_tokens": "/v1/messages/count_tokens",
}
_RULES = "You are careful. Say what you did, and why. " * 300  # above the smallest prefix that is cached
_WORDS = ("budget", "cache", "prefix", "route", "token", "model", "agent", "step", "ledger", "hold")


@dataclass(frozen=True, slots=True)
class Call:
    """One request. `leaves_after`: events (or headers, for a plain answer) after which its client is gone; None = stays.

    0 leaves before anything came, by a RST (`resets`) or a FIN.
    """

    operation: str
    body: bytes
    task: str
    leaves_after: int | None
    resets: bool


@dataclass(slots=True)
class Tally:
    """What the clients saw."""

    statuses: Counter[int] = field(default_factory=Counter)
    left: int = 0
    cut: int = 0  # the connection broke under the answer


def calls(count: int, seed: int, leaving: float) -> Iterator[Call]:
    """`count` calls of ten agents that take turns; a share of `leaving` does not stay to the end."""
    rnd = random.Random(seed)
    steps = dict.fromkeys(range(10), 0)
    for _ in range(count):
        agent = rnd.randrange(10)
        steps[agent] += 1
        operation = rnd.choices(tuple(PATHS), (35, 35, 15, 10, 5))[0]
        body = _body(rnd, operation, _history(random.Random(f"{seed}/{agent}"), steps[agent]))
        if operation in ("chat", "messages", "responses") and rnd.random() < 0.7:
            body["stream"] = True
            if operation == "chat" and rnd.random() < 0.5:
                body["stream_options"] = {"include_usage": True}
        leaves_after = rnd.randrange(12) if rnd.random() < leaving else None
        yield Call(operation, json.dumps(body).encode(), f"agent-{agent}", leaves_after, rnd.random() < 0.5)


def _history(rnd: random.Random, turns: int) -> list[dict[str, object]]:
    """The same beginning for the same agent, longer with every turn."""
    said = [" ".join(rnd.choices(_WORDS, k=30)) for _ in range(2 * turns - 1)]
    return [{"role": "user" if i % 2 == 0 else "assistant", "content": text} for i, text in enumerate(said)]


def _body(rnd: random.Random, operation: str, history: list[dict[str, object]]) -> dict[str, object]:
    most = rnd.randrange(8, 60)
    match operation:
        case "chat":
            messages = [{"role": "system", "content": _RULES}, *history]
            return {
                "model": rnd.choice(("demo-fast", "demo-large")),
                "messages": messages,
                "max_completion_tokens": most,
            }
        case "messages":
            ttl = {"ttl": "1h"} if rnd.random() < 0.3 else {}
            system = [{"type": "text", "text": _RULES, "cache_control": {"type": "ephemeral", **ttl}}]
            return {"model": "demo-large", "system": system, "messages": history, "max_tokens": most}
        case "responses":
            return {
                "model": "demo-fast",
                "instructions": _RULES,
                "input": history,
                "max_output_tokens": most,
            }
        case "embeddings":
            return {"model": "demo-embed", "input": [turn["content"] for turn in history]}
        case _:
            return {"model": "demo-small", "messages": history}


async def send_all(url: str, key: str, todo: Sequence[Call] | Iterator[Call], at_once: int) -> Tally:
    """All calls, `at_once` of them at a time."""
    tally = Tally()
    waiting = iter(todo)

    async def client() -> None:
        for call in waiting:
            await send(url, key, call, tally)

    async with asyncio.TaskGroup() as group:
        for n in range(at_once):
            group.create_task(client(), name=f"client {n}")
    return tally


async def send(url: str, key: str, call: Call, tally: Tally) -> None:
    async with RawClient(url, key) as client:
        try:
            await client.post(PATHS[call.operation], call.body, {"X-Task-Id": call.task})
            if call.leaves_after != 0:
                status, headers = await client.head()
                tally.statuses[status] += 1
                if "content-length" in headers:
                    await client.body(int(headers["content-length"]))
                elif await _read_events(client, call.leaves_after):
                    return
            if call.leaves_after is not None:
                tally.left += 1
                if call.resets:
                    client.reset()
                else:
                    client.finish()
                    await client.ended()
        except (ConnectionError, asyncio.IncompleteReadError):
            tally.cut += 1


async def _read_events(client: RawClient, most: int | None) -> bool:
    """True if the stream ended before so many events had come."""
    read = 0
    while most is None or read < most:
        if await client.event() is None:
            return True
        read += 1
    return False
