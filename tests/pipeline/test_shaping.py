"""What really leaves for a provider: the bytes that a server on the other side receives, by level and provider."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from gateway.core import dialects
from gateway.core.catalog import Operation
from gateway.core.entry import Amounts, Attempt, Granted, Refused
from gateway.core.shaping import CachingPolicy, Level, Transform
from tests.support.played_cache import RULES, compact
from tests.support.recorder import Recorder
from tests.support.small_world import KEY_ID, MemoryLedger, SmallWorld, Wire, deployment, provider

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
RULE_TEXT = "Never delete what you did not make. " * 160
MARK = b',"cache_control":{"type":"ephemeral"}'
BREAKPOINT = b',"prompt_cache_breakpoint":{"mode":"explicit"}'
TOOLS = [{"name": n, "description": n * 200, "input_schema": {"type": "object"}} for n in ("read", "write")]
FUNCTIONS = [
    {"type": "function", "function": {"name": n, "parameters": {"type": "object"}}} for n in ("a", "b")
]


def messages(*, tools: list[dict[str, Any]] = TOOLS, **more: Any) -> bytes:
    said = [
        {"role": "user", "content": "Fix it."},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "read", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "1"}]},
    ]
    return compact(
        {"model": "m", "max_tokens": 9, "tools": tools, "system": RULE_TEXT, "messages": said, **more}
    )


def chat(**more: Any) -> bytes:
    said = [{"role": "system", "content": RULE_TEXT}, {"role": "user", "content": "Fix it."}]
    return compact({"model": "m", "tools": FUNCTIONS, "messages": said, **more})


@asynccontextmanager
async def world(
    rules: str,
    wire: Wire = Wire.ANTHROPIC,
    upstream_model: str = "claude-opus-4-8",
    caching: CachingPolicy = CachingPolicy(),  # noqa: B008 - frozen
) -> AsyncIterator[tuple[SmallWorld, Recorder]]:
    """One deployment named up/m, whose provider follows these cache rules."""
    async with Recorder() as upstream:
        at = provider(upstream.base_url, wire, cache_rules=rules)
        there = deployment(at, "m", upstream_model)
        async with SmallWorld([there], cache_rules=RULES, caching=caching) as gw:
            yield gw, upstream


async def sent(
    gw: SmallWorld, upstream: Recorder, path: str, body: bytes, **headers: str
) -> tuple[bytes, str | None]:
    """(the body that arrived, with the model's name put back; the transforms that the answer names)."""
    told = {"content-type": "application/json", **{k.replace("_", "-"): v for k, v in headers.items()}}
    async with gw.http.post(path, data=body, headers=told) as answer:
        assert answer.status == 200, await answer.text()
        await answer.read()
        transforms = answer.headers.get("x-cache-transforms")
    arrived = upstream.received[-1].body
    name = gw.deployments[0].upstream_model.encode()
    return arrived.replace(b'"model":"%b"' % name, b'"model":"m"', 1), transforms


async def test_markers_are_on_the_wire_and_nothing_else_is_changed() -> None:
    async with world("anthropic") as (gw, upstream):
        body = messages()
        arrived, transforms = await sent(gw, upstream, MESSAGES, body)
        assert transforms == "markers@1"
        system = json.dumps(RULE_TEXT).encode()
        expected = body.replace(system, b'[{"type":"text","text":' + system + MARK + b"}]")
        expected = expected.replace(b'"content":"1"}', b'"content":"1"' + MARK + b"}")
        assert arrived == expected
        # a stream carries the same
        streamed, _ = await sent(gw, upstream, MESSAGES, messages(stream=True))
        assert streamed == expected.replace(
            b'"content":"1"' + MARK + b"}]}]}", b'"content":"1"' + MARK + b'}]}],"stream":true}'
        )


async def test_at_observe_the_body_leaves_as_it_came() -> None:
    off = CachingPolicy(level=Level.OBSERVE)
    async with world("anthropic", caching=off) as (gw, upstream):
        assert await sent(gw, upstream, MESSAGES, messages()) == (messages(), None)


@pytest.mark.parametrize(
    ("policy", "header", "shaped"),
    [
        (CachingPolicy(), None, True),
        (CachingPolicy(), "observe", False),
        (CachingPolicy(level=Level.OBSERVE), "safe", True),
        (CachingPolicy(deployments={"up/m": Level.OBSERVE}), None, False),
        (CachingPolicy(deployments={"up/m": Level.OBSERVE}, teams={"team1": Level.SAFE}), None, True),
        (CachingPolicy(teams={"team1": Level.SAFE}, keys={KEY_ID: Level.OBSERVE}), None, False),
        (CachingPolicy(keys={KEY_ID: Level.OBSERVE}), "safe", True),
        (CachingPolicy(keys={"another": Level.OBSERVE}), None, True),
        (CachingPolicy(off=frozenset({Transform.MARKERS})), None, False),
    ],
)
async def test_the_narrowest_level_holds(policy: CachingPolicy, header: str | None, shaped: bool) -> None:
    async with world("anthropic", caching=policy) as (gw, upstream):
        headers = {} if header is None else {"x_cache_level": header}
        arrived, transforms = await sent(gw, upstream, MESSAGES, messages(), **headers)
        assert (arrived != messages()) == shaped
        assert transforms == ("markers@1" if shaped else None)
        assert "x-cache-level" not in upstream.received[-1].headers


async def test_a_level_that_there_is_not_is_refused() -> None:
    async with world("anthropic") as (gw, upstream):
        async with gw.http.post(MESSAGES, data=messages(), headers={"X-Cache-Level": "fast"}) as answer:
            assert answer.status == 400
            error = (await answer.json())["error"]
        assert (
            error["message"] == "the header x-cache-level must be one of observe, safe, relocate, not 'fast'"
        )
        assert upstream.received == []


async def test_tools_keep_the_order_and_the_bytes_in_which_the_run_first_sent_them() -> None:
    plain = CachingPolicy(off=frozenset({Transform.MARKERS}))
    async with world("anthropic", caching=plain) as (gw, upstream):
        first = messages()
        assert (await sent(gw, upstream, MESSAGES, first))[0] == first
        shuffled = messages(tools=[dict(reversed(t.items())) for t in reversed(TOOLS)])
        assert shuffled != first
        assert await sent(gw, upstream, MESSAGES, shuffled) == (first, "tools_first_seen@1")
        # another set of tools is another set, and the first one is still known when it comes back
        fewer = messages(tools=TOOLS[:1])
        assert (await sent(gw, upstream, MESSAGES, fewer))[0] == fewer
        assert (await sent(gw, upstream, MESSAGES, shuffled))[0] == first
        # the order of a schema's properties means something, so an array or a value that differs is left alone
        other = messages(tools=[{**TOOLS[0], "description": "other"}, TOOLS[1]])
        assert (await sent(gw, upstream, MESSAGES, other))[0] == other


async def test_the_billing_line_reaches_those_who_read_it_and_nobody_else() -> None:
    line = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.332.a1b; cch=00000;"}
    rules = {"type": "text", "text": RULE_TEXT}
    body = messages(system=[line, rules])
    plain = CachingPolicy(off=frozenset({Transform.MARKERS}))
    async with world("anthropic", caching=plain) as (gw, upstream):
        assert await sent(gw, upstream, MESSAGES, body) == (body, None)
    async with world("vllm", caching=replace(plain, off=plain.off | {Transform.CACHE_KEY})) as (gw, upstream):
        assert await sent(gw, upstream, MESSAGES, body) == (messages(system=[rules]), "billing_nonce@1")
        only = messages(system=[line])
        assert await sent(gw, upstream, MESSAGES, only) == (only, None)


async def test_openai_is_marked_from_5_6_on_and_gets_a_key_before() -> None:
    said = [{"role": "assistant", "content": "Done."}, {"role": "user", "content": "Thanks."}]
    body = (
        chat()
        if not said
        else compact({**json.loads(chat()), "messages": json.loads(chat())["messages"] + said})
    )
    async with world("openai", Wire.OPENAI, "gpt-6-sol") as (gw, upstream):
        arrived, transforms = await sent(gw, upstream, CHAT, body)
        system = json.dumps(RULE_TEXT).encode()
        assert arrived == body.replace(system, b'[{"type":"text","text":' + system + BREAKPOINT + b"}]")
        assert transforms == "markers@1"
    async with world("openai", Wire.OPENAI, "gpt-5.4") as (gw, upstream):
        arrived, transforms = await sent(gw, upstream, CHAT, body, x_task_id="run")
        key = json.loads(arrived)["prompt_cache_key"]
        assert arrived == body.replace(
            b'"model":"m"', b'"model":"m","prompt_cache_key":"%b"' % key.encode(), 1
        )
        assert transforms == "cache_key@1"
        again, _ = await sent(gw, upstream, CHAT, body, x_task_id="run")
        other, _ = await sent(gw, upstream, CHAT, body, x_task_id="other")
        assert again == arrived != other
        theirs = compact({**json.loads(body), "prompt_cache_key": "mine"})
        assert await sent(gw, upstream, CHAT, theirs) == (theirs, None)


async def test_other_providers_get_what_their_rules_say() -> None:
    async with world("xai", Wire.OPENAI, "grok-5") as (gw, upstream):
        arrived, _ = await sent(gw, upstream, CHAT, chat(), x_task_id="run")
        assert arrived == chat()
        task = upstream.received[-1].headers["x-grok-conv-id"]
        assert task.startswith("task_")
    async with world("deepseek", Wire.OPENAI, "deepseek-v4-flash") as (gw, upstream):
        assert await sent(gw, upstream, CHAT, chat()) == (chat(), None)
    async with world("nobody", Wire.OPENAI, "any") as (gw, upstream):
        assert await sent(gw, upstream, CHAT, chat()) == (chat(), None)


async def test_a_clock_in_the_system_prompt_moves_at_relocate_and_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def asked(clock: str) -> bytes:
        return messages(system=f"It is {clock}.\n{RULE_TEXT}", tools=[])

    only = CachingPolicy(off=frozenset(set(Transform) - {Transform.RELOCATE}))
    caplog.set_level("INFO", "gateway.pipeline.shape")
    async with world("anthropic", caching=only) as (gw, upstream):
        for clock in ("9:14", "9:15"):
            assert await sent(gw, upstream, MESSAGES, asked(clock)) == (asked(clock), None)
        for clock in ("9:16", "9:17", "9:18"):
            arrived, transforms = await sent(gw, upstream, MESSAGES, asked(clock), x_cache_level="relocate")
        moved = b',{"role":"system","content":"As of now:\\nIt is 9:18."}]}'
        assert arrived == asked("9:16")[:-2] + moved
        assert transforms == "relocate@3"
        (told,) = [r.getMessage() for r in caplog.records if r.name == "gateway.pipeline.shape"]
        assert told.endswith("@@ line 1 (clock) @@\n-It is 9:17.\n It is 9:16.\n+It is 9:17.")


class Asking(MemoryLedger):
    """Remembers what each hold asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []

    async def reserve(
        self, attempt: Attempt, scopes: Sequence[str], ask: Amounts, least: Amounts, *, landing: bool = False
    ) -> Granted | Refused:
        self.asked.append(ask.nano_usd or 0)
        return await super().reserve(attempt, scopes, ask, least, landing=landing)


async def test_a_longer_life_is_held_at_its_price() -> None:
    """An hour costs 6 instead of 3.75 dollars per million to write: the hold covers what may be billed."""
    asked, client, body = [], "", messages()
    async with Recorder() as upstream:
        at = provider(upstream.base_url, Wire.ANTHROPIC, cache_rules="anthropic")
        for life in ("", "1h"):
            ledger = Asking()
            async with SmallWorld(
                [deployment(at, "m", "claude-opus-5")], cache_rules=RULES, ledger=ledger
            ) as gw:
                segments = dialects.read(Operation.MESSAGES, body).segments
                gw.world.shaper.lineages.find((KEY_ID, client, ""), segments).life = life
                arrived, _ = await sent(gw, upstream, MESSAGES, body)
                client = gw.done[-1].client
                asked += ledger.asked
    assert arrived.count(b'"cache_control":{"type":"ephemeral","ttl":"1h"}') == 3
    short, long = asked
    # all of the input at the hour's price; the marks that ask for it are some bytes longer
    output = 9 * 15_000
    assert 0 <= (long - output) / 6_000 - (short - output) / 3_750 < 50


async def test_a_run_without_a_session_stays_one_task_when_its_tools_are_shuffled_or_its_clock_moves() -> (
    None
):
    async def asked(gw: SmallWorld, turns: int, clock: str, order: int, level: str) -> str:
        said: list[dict[str, Any]] = [{"role": "user", "content": "Fix it."}]
        for n in range(turns):
            said += [{"role": "assistant", "content": f"done {n}"}, {"role": "user", "content": f"go on {n}"}]
        system = f"It is {clock}.\n{RULE_TEXT}"
        body = {"model": "m", "max_tokens": 9, "tools": TOOLS[::order], "system": system, "messages": said}
        async with gw.http.post(MESSAGES, data=compact(body), headers={"x-cache-level": level}) as answer:
            assert answer.status == 200
            return str(answer.headers["x-task-id"])

    async with world("anthropic") as (gw, _):
        first, second, third = [await asked(gw, n, "9:14", (-1) ** n, "safe") for n in range(3)]
        assert first == second == third
        # a second run with the same opening is another task, and so is what has another history
        assert await asked(gw, 0, "9:14", -1, "safe") != first
    async with world("anthropic") as (gw, _):
        tasks = [await asked(gw, n, f"9:1{n}", (-1) ** n, "relocate") for n in range(4)]
        assert len(set(tasks)) == 1
        assert await asked(gw, 1, "9:20", 1, "relocate") != tasks[0]
