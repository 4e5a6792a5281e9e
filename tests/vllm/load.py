"""Agents' conversations through a gateway, and what each call saw of its answer."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import dataclass, field
from typing import Any

import aiohttp

CHAT = "/v1/chat/completions"
#: After so many a conversation begins anew: a context is not endless.
TURNS_MAX = 40
_EARLY = (5, 50)  # events of a stream
_WORDS = [
    "read",
    "write",
    "search",
    "test",
    "file",
    "line",
    "error",
    "value",
    "check",
    "return",
    "open",
    "close",
    "next",
    "list",
    "count",
]


@dataclass(frozen=True, slots=True)
class Call:
    """`finish` is "" and `error` is not where the answer was broken off. `usage` is prompt, cached, output."""

    request_id: str
    status: int
    text: str
    finish: str
    error: str
    usage: tuple[int, int, int] | None

    @property
    def whole(self) -> bool:
        return self.status == 200 and not self.error and self.finish in ("stop", "length")


@dataclass(slots=True)
class Load:
    """Agents' conversations; every other one streams. `calls` has what has ended so far.

    One begins after the other has had its first answer: what is common to all is then cached for all but the first.
    """

    http: aiohttp.ClientSession
    seed: int
    model: str
    output_tokens: int
    calls: list[Call] = field(default_factory=list)
    begun: int = 0  # streams that are at the beginning of their answers: nobody has all of them in a buffer
    over: bool = False

    async def run(self, agents: int, turns: int) -> None:
        begun = [asyncio.Event() for _ in range(agents + 1)]
        begun[0].set()
        await asyncio.gather(*(self._agent(n, turns, begun[n], begun[n + 1]) for n in range(agents)))

    async def _agent(self, n: int, turns: int, mine: asyncio.Event, following: asyncio.Event) -> None:
        await mine.wait()
        chance = random.Random(f"{self.seed} {n}")
        said: list[dict[str, str]] = []
        for turn in range(turns):
            if self.over:
                break
            if turn % TURNS_MAX == 0:
                said = [{"role": "system", "content": self._prose(random.Random(self.seed), 600)}]
            said.append({"role": "user", "content": self._prose(chance, chance.randrange(20, 160))})
            call = await self._call(said, f"{self.seed}-{n}-{turn // TURNS_MAX}", stream=n % 2 == 0)
            self.calls.append(call)
            following.set()
            if call.whole:
                said.append({"role": "assistant", "content": call.text})
            else:
                said.pop()
        following.set()

    async def _call(self, said: list[dict[str, str]], session: str, *, stream: bool) -> Call:
        body: dict[str, Any] = {"model": self.model, "max_tokens": self.output_tokens, "messages": said}
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        async with self.http.post(CHAT, json=body, headers={"X-Session-ID": session}) as answer:
            text = await self._read(answer, stream)
            about = answer.headers.get("x-request-id", ""), answer.status
        if not stream or answer.status != 200:
            doc = json.loads(text)
            if answer.status != 200:
                return Call(*about, "", "", doc["error"]["code"], None)
            choice = doc["choices"][0]
            return Call(*about, choice["message"]["content"], choice["finish_reason"], "", _usage(doc))
        return _streamed(*about, text)

    async def _read(self, answer: aiohttp.ClientResponse, stream: bool) -> str:
        parts, events, early = [], 0, False
        try:
            async for part in answer.content.iter_any():
                parts.append(part)
                events += part.count(b"data: ") if stream else 0
                if early is not (_EARLY[0] <= events < _EARLY[1]):
                    early = not early
                    self.begun += 1 if early else -1
        finally:
            self.begun -= early
        return b"".join(parts).decode()

    @staticmethod
    def _prose(chance: random.Random, words: int) -> str:
        return " ".join(chance.choices(_WORDS, k=words))


def _streamed(request_id: str, status: int, text: str) -> Call:
    said, finish, error, usage, done = "", "", "", None, False
    for event in text.split("\n\n"):
        data = event.removeprefix("data: ")
        if data == "[DONE]":
            done = True
        elif data.startswith("{"):
            doc = json.loads(data)
            error = (doc.get("error") or {}).get("code") or error
            usage = _usage(doc) or usage
            for choice in doc.get("choices") or ():
                said += choice["delta"].get("content") or ""
                finish = choice["finish_reason"] or finish
    if not done and not error:
        error = "no end"
    return Call(request_id, status, said, finish, error, usage)


def _usage(doc: dict[str, Any]) -> tuple[int, int, int] | None:
    told = doc.get("usage")
    if not told:
        return None
    cached = (told.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return told["prompt_tokens"], cached, told["completion_tokens"]
