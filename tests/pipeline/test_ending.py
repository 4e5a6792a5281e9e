"""What a caller gets when a budget ends: the refusal, a soft stop, one summary, or a warning."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from gateway.core.catalog import Provider, Tier, Wire
from gateway.core.entry import Kind, OnExceed, Refused, Unit
from gateway.core.prices import PriceRow, Rates
from gateway.core.sse import SseSplitter, event_data
from tests.support.recorder import Recorder, Script
from tests.support.small_world import SmallWorld, deployment, provider

#: The task that `X-Task-Id: run` names under the key of `small_world`.
HEADERS = {"X-Task-Id": "run"}
LONG = "look at gateway/core/budget.py and say what it does " * 400
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "Fix the failing test in tests/test_cart.py"},
    {"role": "assistant", "content": LONG},
    {"role": "user", "content": "and now run it"},
]
FUNCTION = {"name": "shell", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}


def up(upstream: Recorder) -> Provider:
    return provider(upstream.base_url, Wire.DEMO)


def asked(path: str, stream: bool) -> dict[str, Any]:
    if path == "/v1/responses":
        return {
            "model": "m",
            "input": MESSAGES,
            "stream": stream,
            "tools": [{**FUNCTION, "type": "function"}],
        }
    body = {"model": "m", "messages": MESSAGES, "max_tokens": 500, "stream": stream}
    return body if path == "/v1/messages" else {**body, "tools": [TOOL], "tool_choice": "auto"}


async def used_up(gw: SmallWorld, on_exceed: OnExceed, scope: str = "", **more: Any) -> Refused:
    """The budget of the task `run` refuses from now on."""
    if not scope:
        async with gw.http.post(
            "/v1/chat/completions", json=asked("/v1/chat/completions", False), headers=HEADERS
        ) as a:
            scope = f"task:{a.headers['x-task-id']}"
        await gw.settled()
        gw.ledger.entries.clear()
    facts: dict[str, Any] = {"limit": 10**9, "spent": 980_000_000, "held": 0, "kept_back": 20_000_000} | more
    refused = Refused(scope, resets_at_ms=None, on_exceed=on_exceed, **facts)
    gw.ledger.refuse = refused
    return refused


async def post(
    gw: SmallWorld, path: str, stream: bool, **headers: str
) -> tuple[aiohttp.ClientResponse, bytes]:
    async with gw.http.post(path, json=asked(path, stream), headers={**HEADERS, **headers}) as answer:
        return answer, await answer.read()


def events(body: bytes) -> list[dict[str, Any]]:
    data = [event_data(event)[1] for event in SseSplitter().feed(body)]
    return [json.loads(d) for d in data if d != b"[DONE]"]


def text_of(path: str, stream: bool, body: bytes) -> str:
    """What a client of that dialect shows."""
    if stream:
        found = events(body)
        if path == "/v1/chat/completions":
            assert body.endswith(b"data: [DONE]\n\n")
            return "".join(c["delta"].get("content", "") for e in found for c in e["choices"])
        return "".join(
            e["delta"] if isinstance(e["delta"], str) else e["delta"].get("text", "")
            for e in found
            if "delta" in e
        )
    doc = json.loads(body)
    if path == "/v1/chat/completions":
        return str(doc["choices"][0]["message"]["content"])
    content = doc["content"] if path == "/v1/messages" else doc["output"][0]["content"]
    return str(content[0]["text"])


PATHS = ["/v1/chat/completions", "/v1/messages", "/v1/responses"]
SAYS = "the budget of the {} is used up: $0.98 spent and $0 reserved of $1, $0.02 of it kept back"


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("path", PATHS)
async def test_a_soft_stop_is_a_normal_answer_that_says_so(path: str, stream: bool) -> None:
    async with Recorder() as upstream, SmallWorld([deployment(up(upstream))]) as gw:
        refused = await used_up(gw, OnExceed.SOFT_STOP)
        sent = len(upstream.received)
        answer, body = await post(gw, path, stream)
        assert text_of(path, stream, body).startswith(SAYS.format(refused.scope.replace(":", " ")))
        assert (answer.status, answer.headers["x-budget-stop"]) == (200, "soft_stop")
        assert (answer.headers["x-budget-remaining-usd"], answer.headers["x-should-retry"]) == ("0", "false")
        assert gw.done[-1].error == "budget_exceeded"
        assert (len(upstream.received), await gw.settled()) == (sent, []), "nothing was sent or posted"
        assert b"tool" not in body.replace(b"tool_choice", b"").replace(b'"tools"', b"").replace(
            b"tool_calls", b""
        )


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("path", PATHS)
async def test_a_summary_is_written_once_by_the_small_tier(path: str, stream: bool) -> None:
    async with Recorder() as upstream:
        at = up(upstream)
        small = deployment(at, model="tiny", upstream_model="tiny-2026", tier=Tier.SMALL)
        async with SmallWorld([deployment(at), small]) as gw:
            refused = await used_up(gw, OnExceed.SUMMARIZE)
            upstream.received.clear()
            gw.ledger.lands = True
            answer, body = await post(gw, path, stream)
            assert text_of(path, stream, body) == "Hello"
            assert (answer.status, answer.headers["x-budget-stop"]) == (200, "summarize")
            assert (answer.headers["x-model"], answer.headers["x-rule"]) == ("tiny", "summarize")

            (received,) = upstream.received
            sent = json.loads(received.body)
            assert (received.path, sent["model"], sent["stream"]) == (path, "tiny-2026", stream)
            assert "tools" not in sent
            said = json.dumps(sent)
            assert "Fix the failing test in tests/test_cart.py" in said
            assert "and now run it" in said
            assert len(received.body) < 20_000, "as much of the run as $0.02 pay for"

            assert await gw.settled() == [
                (1, Kind.POST, "stop" if "chat" in path else gw.ledger.lines()[0][2], "")
            ]
            attempt, outcome = gw.ledger.entries[0]
            assert (attempt.task_id, attempt.rule, attempt.tier) == (
                refused.scope.removeprefix("task:"), "summarize", "small",
            )  # fmt: skip
            assert 0 < outcome.cost_nano_usd <= 20_000_000

            answer, body = await post(gw, path, stream)
            assert answer.status == (400 if path == "/v1/responses" else 402)
            assert b"is used up" in body
            assert len(upstream.received) == 1


@pytest.mark.parametrize(
    ("why", "more"),
    [
        ("no small deployment", {}),
        ("that of a task above", {"scope": "task:another"}),
        ("too little left", {"limit": 980_000_100}),
        ("holds may come back", {"held": 500_000_000, "spent": 400_000_000}),
        ("the ledger says no", {}),
    ],
)
async def test_without_a_landing_the_refusal_stands(why: str, more: dict[str, Any]) -> None:
    async with Recorder() as upstream:
        at = up(upstream)
        small = [] if why == "no small deployment" else [deployment(at, model="tiny", tier=Tier.SMALL)]
        async with SmallWorld([deployment(at), *small]) as gw:
            await used_up(gw, OnExceed.SUMMARIZE, **more)
            gw.ledger.lands = why != "the ledger says no"
            upstream.received.clear()
            answer, body = await post(gw, PATHS[0], False)
            assert (answer.status, json.loads(body)["error"]["code"]) == (402, "budget_exceeded")
            assert (upstream.received, await gw.settled()) == ([], [])


@pytest.mark.parametrize(
    ("limit", "most_bytes"),
    # Of what is kept back an eighth, $0.0025, so that others have theirs; where that is too little, the smallest.
    [(1_000_000_000, 8_000), (200_000_000, 4_000)],
)
async def test_a_budget_that_many_share_lets_each_sum_up_out_of_its_share(
    limit: int, most_bytes: int
) -> None:
    async with Recorder() as upstream:
        at = up(upstream)
        both = [deployment(at), replace(deployment(at, model="tiny", tier=Tier.SMALL), price="up/tiny")]
        tiny = PriceRow("up/tiny", "up/tiny@1", 0, Rates(250_000, 1_250_000))
        async with SmallWorld(both, more_prices=[tiny]) as gw:
            kept_back = limit // 50
            more = {"limit": limit, "spent": limit - kept_back, "kept_back": kept_back}
            await used_up(gw, OnExceed.SUMMARIZE, "team:team1", **more)
            gw.ledger.lands = True
            answer, body = await post(gw, PATHS[0], False)
            assert (answer.status, answer.headers["x-budget-stop"]) == (200, "summarize")
            assert text_of(PATHS[0], False, body) == "Hello"
            assert len(upstream.received[-1].body) < most_bytes
            await gw.settled()
            ((_, outcome),) = gw.ledger.entries
            assert 0 < outcome.cost_nano_usd < kept_back // 8

            # Its own is had; it is nobody else's.
            answer, body = await post(gw, PATHS[0], False)
            assert (answer.status, json.loads(body)["error"]["code"]) == (402, "budget_exceeded")
            gw.ledger.lands = True
            answer, _ = await post(gw, PATHS[0], False, **{"X-Task-Id": "another"})
            assert (answer.status, answer.headers["x-budget-stop"]) == (200, "summarize")


async def test_a_summary_that_fails_leaves_the_refusal() -> None:
    async with Recorder() as upstream:
        at = up(upstream)
        async with SmallWorld([deployment(at), deployment(at, model="tiny", tier=Tier.SMALL)]) as gw:
            await used_up(gw, OnExceed.SUMMARIZE)
            gw.ledger.lands = True
            upstream.scripts = [Script(400, [b'{"error":{"message":"no","type":"invalid_request_error"}}'])]
            answer, body = await post(gw, PATHS[0], False)
            assert (answer.status, json.loads(body)["error"]["code"]) == (402, "budget_exceeded")
            assert await gw.settled() == [(1, Kind.VOID, "error", "upstream_refused")]


async def test_a_stream_for_codex_fails_in_the_one_form_that_it_shows() -> None:
    async with Recorder() as upstream, SmallWorld([deployment(up(upstream))]) as gw:
        await used_up(gw, OnExceed.ERROR, scope="key:k", unit=Unit.CALLS, limit=5, spent=5, kept_back=0)
        agent = {"User-Agent": "codex_exec/0.171.0 (Linux; x86_64) xterm"}
        answer, body = await post(gw, "/v1/responses", True, **agent)
        created, failed = events(body)
        assert (answer.status, created["type"], failed["type"]) == (
            200,
            "response.created",
            "response.failed",
        )
        assert failed["response"]["error"] == {
            "code": "invalid_prompt",
            "message": "the budget of the key k is used up: 5 calls spent and 0 calls reserved of 5 calls; this "
            "request may use up to 1 call. Ask its owner to raise it.",
        }
        assert answer.headers["x-budget-remaining-calls"] == "0"
        answer, body = await post(gw, "/v1/responses", False, **agent)
        assert (answer.status, json.loads(body)["error"]["type"]) == (400, "invalid_request_error")
        assert upstream.received == []


async def test_a_budget_that_warns_lets_pass_says_so_and_is_told_once() -> None:
    async with Recorder() as upstream, SmallWorld([deployment(up(upstream))]) as gw:
        gw.ledger.warned = (
            Refused("team:team1", 100, 120, 3, None, Unit.CALLS, OnExceed.WARN),
            Refused("tenant:t1", 5, 5, 0, 1_800_000_000_000, Unit.USD, OnExceed.WARN),
        )
        for _ in range(3):
            answer, _ = await post(gw, PATHS[0], False)
            assert (answer.status, answer.headers["x-budget-warning"]) == (
                200,
                "team:team1 calls, tenant:t1 usd",
            )
        assert gw.alerts == [
            (
                "budget_warning",
                "warned/team:team1/calls/100/None",
                {
                    "scope": "team:team1", "unit": "calls", "limit": 100, "spent": 120, "held": 3,
                    "resets_at": None, "message": "the budget of team:team1 is used up, and only warns",
                },
            ),
            (
                "budget_warning",
                "warned/tenant:t1/usd/5/1800000000000",
                {
                    "scope": "tenant:t1", "unit": "usd", "limit": 5, "spent": 5, "held": 0,
                    "resets_at": "2027-01-15T08:00:00Z",
                    "message": "the budget of tenant:t1 is used up, and only warns",
                },
            ),
        ]  # fmt: skip


async def test_answers_say_what_is_left_in_each_unit() -> None:
    async with Recorder() as upstream, SmallWorld([deployment(up(upstream))]) as gw:
        gw.ledger.remaining_nano_usd, gw.ledger.remaining_calls = 1_500_000_000, 7
        for stream in (False, True):
            answer, _ = await post(gw, PATHS[0], stream)
            said = {k: v for k, v in answer.headers.items() if k.startswith("x-budget")}
            scope = f"task:{answer.headers['x-task-id']}"
            assert said == {
                "x-budget-remaining-usd": "1.5", "x-budget-scope": scope, "x-budget-remaining-calls": "7",
            }  # fmt: skip
