"""Recorded runs, played again against a provider's documented cache rules: what their input costs, and could cost. Pure.

A run is the requests of one agent, in order. Recordings come in three shapes:
- `{"tools": [...], "messages": [...]}`: a finished conversation in the chat dialect; request k is what was said before
  the k-th answer;
- `{"requests": [{"body": {...}, "path": "/v1/messages", "at_ms": 0}, ...]}`: requests as they were sent;
- `{"request": {"method", "path", "headers", "body"}}`: one captured request; those of a folder that continue one
  another are a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from gateway.core import prices
from gateway.core.cache_rules import CacheRule
from gateway.core.cache_simulator import (
    CacheSimulator,
    Count,
    Prompt,
    TooManyMarkers,
    best_usages,
    count_by_size,
    read_prompt,
)
from gateway.core.catalog import Operation
from gateway.core.dialects import read
from gateway.core.errors import InvalidRequest
from gateway.core.prefix import anchor, chain
from gateway.core.prices import PriceRow
from gateway.core.usage import Usage

#: Between two steps of a run whose recording has no times: about what an agent's turn takes.
GAP_MS = 15_000
#: A recording of more bytes is none of an agent's run.
RECORDING_BYTES_MAX = 256 << 20
_OPERATIONS = {
    operation.path: operation for operation in (Operation.CHAT, Operation.RESPONSES, Operation.MESSAGES)
}


class NotARun(ValueError):
    """The recording has none of the shapes that are known, or a body that no provider would take."""


@dataclass(frozen=True, slots=True)
class Request:
    operation: Operation
    body: bytes
    at_ms: int


@dataclass(frozen=True, slots=True)
class Run:
    name: str
    requests: tuple[Request, ...]

    @property
    def steps(self) -> int:
        return len(self.requests)


#: One run's requests, one after the other, as the gateway would send them on.
Shape = Callable[[Request], bytes]


@dataclass(frozen=True, slots=True)
class Played:
    """What the input of a run costs, in nano-dollars."""

    run: str
    provider: str
    model: str
    level: str
    steps: int
    input_tokens: int
    read_tokens: int
    minimum_met: bool  # its first request is long enough to be cached
    uncached_nano_usd: int  # without any cache
    as_sent_nano_usd: int  # as the client sent it, straight to the provider
    cost_nano_usd: int  # through the gateway, at this level
    best_nano_usd: int  # every token shared with an earlier step read, every new one written once


@dataclass(frozen=True, slots=True)
class Direct:
    """What a run costs without a gateway: as in `Played`."""

    minimum_met: bool
    uncached_nano_usd: int
    as_sent_nano_usd: int
    best_nano_usd: int


def _nothing() -> None:
    """Nobody watches."""


@dataclass(frozen=True, slots=True)
class Theatre:
    """What runs are played against: a model, its cache rule and its price, and a way to count tokens."""

    provider: str
    model: str
    rule: CacheRule
    row: PriceRow
    count: Count = count_by_size

    def direct(self, run: Run, on_step: Callable[[], None] = _nothing) -> Direct:
        """What a run costs without a gateway. Raises `NotARun` where a body is none."""
        prompts = []
        for request in run.requests:
            prompts.append(self._prompt(request.operation, request.body))
            on_step()
        times = [r.at_ms for r in run.requests]
        return Direct(
            bool(prompts) and prompts[0].tokens >= (self.rule.min_prefix_tokens or 0),
            self._cost([Usage(input_uncached=prompt.tokens) for prompt in prompts], times),
            self._cost(self._usages(prompts, times), times),
            self._cost(best_usages(prompts, self.count), times),
        )

    def play(
        self,
        run: Run,
        level: str,
        shape: Shape,
        direct: Direct | None = None,
        on_step: Callable[[], None] = _nothing,
    ) -> Played:
        """Raises `NotARun` where a body is none. `direct` is what `self.direct(run)` says."""
        known = self.direct(run) if direct is None else direct
        shaped = []
        for request in run.requests:
            shaped.append(self._prompt(request.operation, shape(request)))
            on_step()
        times = [r.at_ms for r in run.requests]
        through = self._usages(shaped, times)
        return Played(
            run.name,
            self.provider,
            self.model,
            level,
            run.steps,
            sum(u.input_total for u in through),
            sum(u.cache_read for u in through),
            known.minimum_met,
            known.uncached_nano_usd,
            known.as_sent_nano_usd,
            self._cost(through, times),
            known.best_nano_usd,
        )

    def _prompt(self, operation: Operation, body: bytes) -> Prompt:
        try:
            return read_prompt(self.rule, operation, body, self.count)
        except (msgspec.DecodeError, KeyError, TypeError, AttributeError) as e:
            raise NotARun(f"a request's body is none of its dialect: {e}") from e

    def _usages(self, prompts: Sequence[Prompt], times: Sequence[int]) -> list[Usage]:
        cache = CacheSimulator(self.rule)
        usages = []
        for step, (prompt, at_ms) in enumerate(zip(prompts, times, strict=True), 1):
            try:
                usages.append(cache.ask(prompt, at_ms))
            except TooManyMarkers as e:
                raise NotARun(f"the provider refuses request {step}: {e}") from e
        return usages

    def _cost(self, usages: Iterable[Usage], times: Sequence[int]) -> int:
        return sum(
            prices.cost(self.row, usage, at_ms).nano_usd for usage, at_ms in zip(usages, times, strict=True)
        )


# --- recordings ---------------------------------------------------------------------------------------------


def run_of(
    name: str, recording: Mapping[str, Any], *, model: str, as_messages: bool, start_ms: int, gap_ms: int
) -> Run:
    """The run in a recording of the first or second shape. `as_messages`: what was recorded as chat is sent as messages.

    Raises `NotARun`.
    """
    try:
        if isinstance(recording.get("messages"), list):
            bodies = _conversation(recording)
            requests = [Request(Operation.CHAT, body, start_ms + k * gap_ms) for k, body in enumerate(bodies)]
        elif isinstance(recording.get("requests"), list):
            requests = [_sent(r, start_ms + k * gap_ms) for k, r in enumerate(recording["requests"])]
        else:
            raise NotARun('it has neither "messages" nor "requests"')
        if not requests:
            raise NotARun("nothing is asked in it")
        return Run(name, tuple(_for_provider(r, model, as_messages) for r in requests))
    except NotARun:
        raise
    except (LookupError, TypeError, AttributeError, ValueError) as e:
        raise NotARun(f"it is not what it looks like: {type(e).__name__} {e}") from e


def runs_of_captures(
    captures: Sequence[tuple[str, Mapping[str, Any]]],
    *,
    model: str,
    as_messages: bool,
    start_ms: int,
    gap_ms: int,
) -> list[Run]:
    """Runs out of captured requests (third shape): a request belongs to the run whose last one it extends."""
    runs: list[tuple[str, list[Request], bytes]] = []
    for name, recording in captures:
        captured = recording["request"]
        operation = _OPERATIONS.get(str(captured.get("path")).removeprefix("/v1"))
        if operation is None or not isinstance(captured.get("body"), dict):
            continue  # probes, lists of models, dialects that are not played
        if as_messages and operation is Operation.RESPONSES:
            continue
        body = msgspec.json.encode({**captured["body"], "model": model})
        try:
            facts = read(operation, body)
        except InvalidRequest as e:
            raise NotARun(f"{name}: {e.message}") from e
        links = chain(facts.segments)[: anchor(facts.segments)]
        for i, (first, requests, last) in enumerate(runs):
            if last in links and requests[-1].operation is operation:
                requests.append(Request(operation, body, start_ms + len(requests) * gap_ms))
                runs[i] = first, requests, links[-1]
                break
        else:
            runs.append((name, [Request(operation, body, start_ms)], links[-1]))
    try:
        return [
            Run(name, tuple(_for_provider(r, model, as_messages) for r in found)) for name, found, _ in runs
        ]
    except (LookupError, TypeError, AttributeError, ValueError) as e:
        raise NotARun(f"a captured request is not what it looks like: {type(e).__name__} {e}") from e


def _conversation(recording: Mapping[str, Any]) -> list[bytes]:
    messages = recording["messages"]
    ends = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not ends:
        raise NotARun("nobody answers in it")
    tools = {"tools": recording["tools"]} if recording.get("tools") else {}
    return [msgspec.json.encode({"model": "", "messages": messages[:end], **tools}) for end in ends]


def _sent(recorded: Mapping[str, Any], at_ms: int) -> Request:
    path = str(recorded.get("path", "/v1/chat/completions")).removeprefix("/v1")
    if path not in _OPERATIONS:
        raise NotARun(f"{path} is no address of a chat")
    return Request(
        _OPERATIONS[path], msgspec.json.encode(recorded["body"]), int(recorded.get("at_ms", at_ms))
    )


def _for_provider(request: Request, model: str, as_messages: bool) -> Request:
    """With the model that is played, in a dialect that its provider speaks."""
    body: dict[str, Any] = msgspec.json.decode(request.body)
    operation = request.operation
    if as_messages and operation is Operation.RESPONSES:
        raise NotARun("this provider is not reached in the responses dialect")
    if as_messages and operation is Operation.CHAT:
        body, operation = messages_of_chat(body), Operation.MESSAGES
    return replace(request, operation=operation, body=msgspec.json.encode({**body, "model": model}))


def messages_of_chat(body: Mapping[str, Any]) -> dict[str, Any]:
    """The same conversation as an agent of the messages dialect sends it."""
    system: list[dict[str, Any]] = []
    out: list[dict[str, Any]] = []
    for message in body["messages"]:
        role, content = message["role"], message.get("content")
        if role in ("system", "developer") and not out:
            system += _texts(content)
        elif role in ("tool", "function"):
            block = {
                "type": "tool_result",
                "tool_use_id": message.get("tool_call_id", ""),
                "content": content,
            }
            if out and out[-1]["role"] == "user" and out[-1]["content"][-1]["type"] == "tool_result":
                out[-1]["content"].append(block)
            else:
                out.append({"role": "user", "content": [block]})
        elif role == "assistant":
            out.append(
                {
                    "role": role,
                    "content": [*_texts(content), *map(_tool_use, message.get("tool_calls") or [])],
                }
            )
        else:
            out.append({"role": "user", "content": _texts(content)})
    sent: dict[str, Any] = {"model": body.get("model"), "max_tokens": 1_024}
    if body.get("tools"):
        sent["tools"] = [_tool(tool.get("function") or tool.get("custom") or tool) for tool in body["tools"]]
    if system:
        sent["system"] = system
    return {**sent, "messages": out}


def _texts(content: object) -> list[dict[str, Any]]:
    if isinstance(content, list):
        return [{"type": "text", "text": part["text"]} if "text" in part else dict(part) for part in content]
    return [{"type": "text", "text": content}] if content else []


def _tool(function: Mapping[str, Any]) -> dict[str, Any]:
    named = {name: function[name] for name in ("name", "description") if name in function}
    return {**named, "input_schema": function.get("parameters") or {"type": "object"}}


def _tool_use(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function") or call["custom"]
    try:
        arguments = msgspec.json.decode(function.get("arguments", function.get("input")) or "{}")
    except msgspec.DecodeError:
        arguments = {"text": function.get("arguments", function.get("input"))}
    return {"type": "tool_use", "id": call.get("id", ""), "name": function["name"], "input": arguments}
