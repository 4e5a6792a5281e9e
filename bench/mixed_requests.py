"""Mixed traffic from a seed: all five operations, streams or not, agents' growing histories, clients that leave."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import aiohttp

WORDS = (
    "budget",
    "cache",
    "prefix",
    "route",
    "token",
    "model",
    "agent",
    "step",
    "ledger",
    "hold",
    "settle",
    "tier",
)
SYSTEM = "You are a careful agent. " * 400  # above every model's smallest cacheable prefix
#: Longer than any answer of the demo provider takes, faults that stall included.
PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Call:
    """One request. `leaves_after` = body reads after which the client hangs up; None = it stays; 0 = at once."""

    number: int
    operation: str
    path: str
    body: bytes
    headers: Mapping[str, str]
    leaves_after: int | None


@dataclass(slots=True)
class Tally:
    """What clients saw."""

    statuses: Counter[int] = field(default_factory=Counter)
    left: int = 0
    broken: int = 0  # the answer ended early
    by_operation: Counter[str] = field(default_factory=Counter)


def _text(rnd: random.Random, words: int) -> str:
    return " ".join(rnd.choices(WORDS, k=words))


def _turns(rnd: random.Random, steps: int) -> list[dict[str, str]]:
    """The history of an agent after `steps` steps; the same seed gives the same beginning, so prefixes match."""
    turns = [{"role": "user", "content": _text(rnd, 60)}]
    for _ in range(steps):
        turns.append({"role": "assistant", "content": _text(rnd, 30)})
        turns.append({"role": "user", "content": _text(rnd, 40)})
    return turns


def calls(count: int, seed: int, leave_share: float) -> list[Call]:
    """`count` calls of some `count / 20` agents."""
    rnd = random.Random(seed)
    agents = max(1, count // 20)
    steps = [0] * agents
    return [_call(n, rnd, seed, steps, leave_share) for n in range(count)]


def _call(number: int, rnd: random.Random, seed: int, steps: list[int], leave_share: float) -> Call:
    agent = rnd.randrange(len(steps))
    operation = rnd.choices(
        ("chat", "messages", "responses", "embeddings", "count_tokens"), (40, 35, 10, 10, 5)
    )[0]
    turns = _turns(random.Random(f"{seed}/{agent}"), steps[agent] % 12)
    steps[agent] += 1
    stream = operation in ("chat", "messages", "responses") and rnd.random() < 0.6
    body = _BODIES[operation](rnd, turns)
    if stream:
        body["stream"] = True
        if operation == "chat" and rnd.random() < 0.5:
            body["stream_options"] = {"include_usage": True}
    leaves = rnd.randrange(6) if rnd.random() < leave_share else None
    headers = {"X-Task-Id": f"agent-{agent}", "Content-Type": "application/json"}
    return Call(number, operation, _PATHS[operation], json.dumps(body).encode(), headers, leaves)


_PATHS = {
    "chat": "/v1/chat/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
    "embeddings": "/v1/embeddings",
    "count_tokens": "/v1/messages/count_tokens",
}


def _chat(rnd: random.Random, turns: list[dict[str, str]]) -> dict[str, object]:
    model = rnd.choice(("demo-fast", "demo-large"))
    messages = [{"role": "system", "content": SYSTEM}, *turns]
    return {"model": model, "messages": messages, "max_completion_tokens": rnd.randrange(16, 200)}


def _messages(rnd: random.Random, turns: list[dict[str, str]]) -> dict[str, object]:
    model = rnd.choice(("demo-large", "demo-small"))
    ttl: dict[str, str] = {"type": "ephemeral"} | ({"ttl": "1h"} if rnd.random() < 0.3 else {})
    system = [{"type": "text", "text": SYSTEM, "cache_control": ttl}]
    return {"model": model, "system": system, "messages": turns, "max_tokens": rnd.randrange(16, 200)}


def _responses(rnd: random.Random, turns: list[dict[str, str]]) -> dict[str, object]:
    return {
        "model": "demo-fast",
        "instructions": SYSTEM,
        "input": turns,
        "max_output_tokens": rnd.randrange(16, 200),
    }


def _embeddings(rnd: random.Random, turns: list[dict[str, str]]) -> dict[str, object]:
    return {"model": "demo-embed", "input": [turns[0]["content"], _text(rnd, 20)]}


def _count_tokens(_: random.Random, turns: list[dict[str, str]]) -> dict[str, object]:
    return {"model": "demo-large", "messages": turns}


_BODIES = {
    "chat": _chat,
    "messages": _messages,
    "responses": _responses,
    "embeddings": _embeddings,
    "count_tokens": _count_tokens,
}


async def send_all(base_url: str, key: str, todo: Sequence[Call], connections: int) -> Tally:
    """All calls, so many at once. Returns when each one was answered, broke or was left."""
    tally = Tally()
    waiting = iter(todo)
    timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
    # One connection per call: hanging up is closing the socket, which must hit no other call.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(base_url, connector=connector, timeout=timeout) as session:

        async def worker() -> None:
            for call in waiting:
                await _send(session, key, call, tally)

        async with asyncio.TaskGroup() as group:
            for n in range(connections):
                group.create_task(worker(), name=f"client {n}")
    return tally


async def _send(session: aiohttp.ClientSession, key: str, call: Call, tally: Tally) -> None:
    tally.by_operation[call.operation] += 1
    headers = {**call.headers, "Authorization": f"Bearer {key}"}
    try:
        async with session.post(call.path, data=call.body, headers=headers) as answer:
            tally.statuses[answer.status] += 1
            reads = 0
            while call.leaves_after is None or reads < call.leaves_after:
                if not await answer.content.readany():
                    return
                reads += 1
            tally.left += 1
            answer.close()  # not read to its end: closes the socket under the gateway's writes
    except (aiohttp.ClientError, TimeoutError):
        tally.broken += 1
