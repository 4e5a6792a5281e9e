"""The demo agent: plays `script.Conversation` against a base URL and reports every step."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from gateway.demo.hearing import Counted, StreamEar, hear_plain
from gateway.demo.script import Conversation, Dialect, Heard

_PATHS = {"messages": "/messages", "chat": "/chat/completions"}
DEFAULT_MODEL = "demo-large"


@dataclass(frozen=True, slots=True)
class StepReport:
    """One model call as the agent saw it."""

    step: int  # from 1
    stream: bool
    status: int  # 0 if the connection failed
    tool: str  # the tool that the model called, "" for text
    usage: Counted
    latency_ms: float  # request sent to last byte
    first_byte_ms: float  # request sent to response headers
    overhead_ms: float | None  # the gateway's own time, from its x-gateway-overhead-ms
    request_id: str
    error: str = ""


@dataclass(frozen=True, slots=True)
class AgentReport:
    """A whole run. `error` is "" if all steps were made, else why it ended."""

    task_id: str
    steps: tuple[StepReport, ...]
    text: str  # the last answer
    error: str

    @property
    def finished(self) -> bool:
        return not self.error

    @property
    def usage(self) -> Counted:
        """Summed over the steps."""
        counts = [step.usage for step in self.steps]
        return Counted(
            sum(c.input_uncached for c in counts),
            sum(c.cache_read for c in counts),
            sum(c.cache_write for c in counts),
            sum(c.output for c in counts),
        )


def _ignore(_: StepReport) -> None:
    return None


def streams(step: int) -> bool:
    """Two of three steps are streamed, like agents that stream all but their short calls."""
    return step % 3 != 0


async def run_agent(
    base_url: str,
    key: str,
    *,
    steps: int = 20,
    model: str = DEFAULT_MODEL,
    dialect: Dialect = "messages",
    on_step: Callable[[StepReport], None] = _ignore,
    task_id: str | None = None,
    timeout_s: float = 120.0,
) -> AgentReport:
    """Run one task of `steps` model calls. `base_url` ends in /v1, whatever the dialect.

    Sends `x-task-id` (a new one unless given). Ends early, without raising, at the first answer that is not 200
    or not whole; agents' own retries are left out so that every request is in the report.
    """
    task = task_id or f"demo-{uuid.uuid4().hex[:12]}"
    conversation = Conversation(model, dialect, steps)
    headers = {"x-task-id": task, "authorization": f"Bearer {key}", "content-type": "application/json"}
    if dialect == "messages":
        headers["anthropic-version"] = "2023-06-01"
    url = base_url.rstrip("/") + _PATHS[dialect]
    made: list[StepReport] = []
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout, auto_decompress=False) as session:
        while True:
            heard, report = await _step(session, url, conversation)
            made.append(report)
            on_step(report)
            if report.error or not conversation.hear(heard):
                return AgentReport(task, tuple(made), heard.text, report.error)


async def _step(session: aiohttp.ClientSession, url: str, talk: Conversation) -> tuple[Heard, StepReport]:
    stream = streams(talk.step)
    body = msgspec.json.encode(talk.body(stream))
    heard, usage, error = Heard(), Counted(), ""
    status, headers, first_byte_s = 0, dict[str, str](), 0.0
    start = time.perf_counter()
    try:
        async with session.post(url, data=body) as response:
            first_byte_s = time.perf_counter() - start
            status, headers = response.status, {k.lower(): v for k, v in response.headers.items()}
            if status != 200:
                error = _message_of(await response.read(), status)
            elif stream:
                ear = StreamEar(talk.dialect)
                async for line in response.content:
                    ear.line(line)
                heard, usage = ear.result()
                error = ear.error or ("" if ear.done else "the stream ended without its last event")
            else:
                answer: dict[str, Any] = msgspec.json.decode(await response.read(), type=dict[str, Any])
                heard, usage = hear_plain(talk.dialect, answer)
    except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError) as e:
        error = f"{type(e).__name__}: {e}"
    except (KeyError, IndexError) as e:
        error = f"the answer has no {e}"
    return heard, StepReport(
        step=talk.step,
        stream=stream,
        status=status,
        tool=heard.tool_name,
        usage=usage,
        latency_ms=(time.perf_counter() - start) * 1_000,
        first_byte_ms=first_byte_s * 1_000,
        overhead_ms=_number(headers.get("x-gateway-overhead-ms")),
        request_id=headers.get("x-request-id", ""),
        error=error,
    )


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def _message_of(body: bytes, status: int) -> str:
    """The error message of either dialect, else the status."""
    try:
        decoded = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return f"HTTP {status}"
    error = decoded.get("error") if isinstance(decoded, Mapping) else None
    message = error.get("message") if isinstance(error, Mapping) else None
    return f"HTTP {status}: {message}" if message else f"HTTP {status}"
