"""The same conversations, straight to a server and through a gateway in front of it, step by step."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import aiohttp

from gateway.core.catalog import Provider, Wire
from gateway.core.shaping import Level
from tests.support.played_cache import RULES, compact
from tests.support.small_world import SmallWorld, deployment, provider

STEPS = 6
TOOLS = [
    {
        "type": "function",
        "function": {"name": n, "description": f"{n} a file", "parameters": {"type": "object"}},
    }
    for n in ("read", "write", "search", "list")
]


@dataclass(frozen=True, slots=True)
class Step:
    """Prompt tokens, and those of them that the server read from its cache."""

    conversation: str
    step: int
    level: str
    prompt: int
    direct: int
    through: int
    may_lack: int = 0

    @property
    def lost(self) -> bool:
        return self.through + self.may_lack < self.direct


#: What the clock says at each step of a run that has one.
CLOCKS = {
    "clock": "012345",
    # a line that stands still, also in another wording than its first, and goes back to an older one
    "slow clock": "001112",
    "clock back": "011010",
}
#: Runs of the same client and prompt after the first, with a clock: their first step has those of others to read.
LATER_RUNS = 2
#: The first run that has its line at the end of the system prompt has all that stood before the line to read; straight,
#: also the words with which the line itself begins, rounded up to a block.
FIRST_MOVED_LACKS = 32


def conversation(kind: str, nonce: str, model: str, salt: str = "", run: int = 0) -> list[bytes]:
    """The requests of a run. `nonce` makes the prompt new to the server; it is the same in both runs that are compared."""
    said: list[dict[str, Any]] = []
    bodies = []
    order = random.Random(kind)
    for n in range(STEPS):
        said.append({"role": "user", "content": f"Turn {n} of {run}: " + "look at the next file. " * 12})
        # a later run begins with a time that no other has told
        clock = f"It is {9 + run}:1{CLOCKS[kind][n]}.\n" if kind in CLOCKS else ""
        system = f"Session {nonce}.\n{clock}" + "\n".join(f"Rule {i}: be brief." for i in range(260))
        tools = order.sample(TOOLS, len(TOOLS)) if kind == "shuffled tools" else TOOLS
        messages = [{"role": "system", "content": system}, *said]
        # "auto" would let a server without a parser for tool calls refuse the request
        body: dict[str, Any] = {"model": model, "max_tokens": 4, "temperature": 0, "messages": messages}
        if salt:
            body["cache_salt"] = salt
        bodies.append(compact(body if kind == "plain" else {**body, "tools": tools, "tool_choice": "none"}))
        said.append({"role": "assistant", "content": f"Done with {n}."})
    return bodies


class NotApart(Exception):
    """The server shared what was asked straight with what came through the gateway, so nothing can be compared."""


async def parity(base_url: str, model: str, rules: str, wire: Wire = Wire.OPENAI) -> list[Step]:
    """Every step of every conversation at the levels that change something. `rules`: whose cache rules the server's are.

    Both runs have the same prompts. What keeps them apart is the salt that the gateway gives a tenant and we give the
    other run, or the gateway's credential.
    """
    found: list[Step] = []
    nonces = random.Random()
    salt = f"straight-{nonces.randrange(10**17)}" if rules == "vllm" else ""
    at: Provider = provider(base_url, wire, cache_rules=rules)
    async with (
        SmallWorld([deployment(at, "m", model)], cache_rules=RULES) as gw,
        aiohttp.ClientSession() as straight,
    ):
        for kind in ("plain", "stable tools", "shuffled tools", *CLOCKS):
            for level in (Level.SAFE, Level.RELOCATE):
                nonce = str(nonces.randrange(10**17, 10**18))
                headers = {"x-cache-level": level.value}
                later = LATER_RUNS if kind in CLOCKS and level is Level.RELOCATE else 0
                for run in range(1 + later):
                    asked = conversation(kind, nonce, model, salt, run)
                    direct = [await _asked(straight, base_url, b) for b in asked]
                    asked = conversation(kind, nonce, "m", run=run)
                    through = [await _asked(gw.http, gw.url + "/v1", b, headers) for b in asked]
                    if kind == "plain" and through[0][1]:
                        raise NotApart(f"{through[0][1]} tokens of a new conversation were in the cache")
                    name = f"{kind}, later run {run}" if run else kind
                    for n, ((prompt, read), (_, kept)) in enumerate(zip(direct, through, strict=True)):
                        lacks = FIRST_MOVED_LACKS if (run, n) == (1, 0) else 0
                        found.append(Step(name, n, level.value, prompt, read, kept, lacks))
    return found


async def _asked(
    http: aiohttp.ClientSession, base_url: str, body: bytes, headers: dict[str, str] | None = None
) -> tuple[int, int]:
    told = {"content-type": "application/json", **(headers or {})}
    async with http.post(f"{base_url}/chat/completions", data=body, headers=told) as answer:
        if answer.status != 200:
            raise RuntimeError(f"{base_url} answered {answer.status}: {await answer.text()}")
        usage = (await answer.json())["usage"]
    return usage["prompt_tokens"], (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
