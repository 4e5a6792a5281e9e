"""Marks that shaping puts into a chat request reach Anthropic through litellm, in their places."""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.core import dialects
from gateway.core.catalog import Operation
from gateway.core.prefix import chain
from gateway.core.shaping import Request, Shaper
from gateway.upstream.litellm import LitellmUpstream
from tests.support.played_cache import compact, rule_of, spliced
from tests.support.provider_fakes import SECRETS, ProviderFake, call, deployment

MARK = {"type": "ephemeral"}
ANSWER = {
    "id": "m", "type": "message", "role": "assistant", "model": "c", "content": [{"type": "text", "text": "ok"}],
    "stop_reason": "end_turn", "stop_sequence": None, "usage": {"input_tokens": 1, "output_tokens": 1},
}  # fmt: skip


def marked(blocks: list[dict[str, Any]]) -> list[bool]:
    return [block.get("cache_control") == MARK for block in blocks]


async def test_marks_on_strings_of_chat_reach_anthropic() -> None:
    calls = [{"id": "c1", "type": "function", "function": {"name": "read", "arguments": "{}"}}]
    tools = [
        {"type": "function", "function": {"name": n, "parameters": {"type": "object"}}} for n in ("read", "b")
    ]
    body = {
        "model": "m",
        "max_tokens": 9,
        "tools": tools,
        "messages": [
            {"role": "system", "content": "Be brief. " * 2_000},
            {"role": "user", "content": "go"},
            {"role": "assistant", "content": None, "tool_calls": calls},
            {"role": "tool", "tool_call_id": "c1", "content": "found " * 200},
        ],
    }
    raw = compact(body)
    facts = dialects.read(Operation.CHAT, raw)
    rule = rule_of("anthropic/claude-opus-4-8")
    shaped = Shaper().shape(
        Request(Operation.CHAT, facts, raw, chain(facts.segments), ("k", "c", ""), rule, False)
    )
    assert [m.segment for m in shaped.marks] == [1, 4]
    upstream = LitellmUpstream(SECRETS)
    await upstream.start()
    async with ProviderFake() as fake:
        fake.replies(ANSWER)
        where = deployment("anthropic", fake.url)
        answer = await upstream.open(
            call(where, Operation.CHAT, msgspec.json.decode(spliced(facts, raw, shaped)))
        )
        assert answer.status == 200
        await answer.close()
        [asked] = fake.asked
    await upstream.stop()
    assert marked(asked.body["system"]) == [True]
    assert [marked(m["content"]) for m in asked.body["messages"]] == [[False], [False], [True]]
    assert asked.body["messages"][2]["content"][0]["type"] == "tool_result"
