"""Retries, fallback and what each failed attempt costs: one entry per attempt, whatever happens."""

from __future__ import annotations

import json

import pytest

from gateway.core.catalog import Wire
from gateway.core.entry import Kind, Refused, Unit
from gateway.pipeline.exchange import Policy
from tests.support.recorder import CHAT_USAGE, Recorder, Script, chat_chunks, messages_events, named, sse
from tests.support.small_world import SmallWorld, deployment, provider

CHAT = "/v1/chat/completions"
BODY = json.dumps({"model": "m", "max_tokens": 100, "messages": [{"role": "user", "content": "hi"}]}).encode()
STREAM = json.dumps(
    {"model": "m", "max_tokens": 100, "stream": True, "messages": [{"role": "user", "content": "hi"}]}
).encode()


def says(status: int, error: object, **headers: str) -> Script:
    return Script(
        status, [json.dumps({"error": error}).encode()], {"Content-Type": "application/json", **headers}
    )


OVERLOADED = says(503, {"message": "busy", "type": "server_error"})
LIMITED = says(429, {"message": "slow down"}, **{"Retry-After": "0"})


async def test_a_second_deployment_takes_over() -> None:
    async with Recorder() as one, Recorder() as two:
        one.scripts = [OVERLOADED]
        first = deployment(provider(one.base_url, name="one"))
        second = deployment(provider(two.base_url, name="two"), priority=1)
        async with SmallWorld([first, second]) as gw:
            async with gw.http.post(CHAT, data=BODY) as answer:
                assert (answer.status, answer.headers["x-deployment"], answer.headers["x-attempts"]) == (
                    200,
                    "two/m",
                    "2",
                )
            assert await gw.settled() == [
                (1, Kind.VOID, "error", "upstream_overloaded"),
                (2, Kind.POST, "stop", ""),
            ]
            assert gw.ledger.holds == {}


async def test_one_deployment_is_tried_three_times_then_the_caller_hears_of_it() -> None:
    async with Recorder() as upstream, SmallWorld([deployment(provider(upstream.base_url))]) as gw:
        upstream.scripts = [LIMITED, LIMITED, LIMITED]
        async with gw.http.post(CHAT, data=BODY) as answer:
            error = (await answer.json())["error"]
            assert (answer.status, answer.headers["retry-after"]) == (429, "1")
            assert error["code"] == "upstream_overloaded"
        assert await gw.settled() == [(n, Kind.VOID, "error", "upstream_overloaded") for n in (1, 2, 3)]
        assert len(upstream.received) == 3


async def test_what_is_wrong_with_the_request_is_passed_on_once() -> None:
    async with Recorder() as upstream, SmallWorld([deployment(provider(upstream.base_url))]) as gw:
        upstream.scripts = [
            says(
                400,
                {
                    "message": "max_tokens too large",
                    "type": "invalid_request_error",
                    "param": "max_tokens",
                    "code": "too_big",
                },
            )
        ]
        async with gw.http.post(CHAT, data=BODY) as answer:
            assert answer.status == 400
            assert await answer.json() == {
                "error": {
                    "message": "max_tokens too large",
                    "type": "invalid_request_error",
                    "param": "max_tokens",
                    "code": "too_big",
                }
            }
        assert await gw.settled() == [(1, Kind.VOID, "error", "upstream_refused")]


@pytest.mark.parametrize("status", [401, 402, 403])
async def test_a_broken_credential_is_never_the_callers_fault(status: int) -> None:
    async with Recorder() as upstream:
        world = SmallWorld([deployment(provider(upstream.base_url))], policy=Policy(attempts_max=1))
        async with world as gw:
            upstream.scripts = [
                says(status, {"message": "Incorrect API key provided: sk-upstream-1234567890abcdef"})
            ]
            async with gw.http.post(CHAT, data=BODY) as answer:
                text = await answer.text()
                assert answer.status == 502
                assert "sk-upstream" not in text
                assert "your key is fine" in text


async def test_nothing_listens_there() -> None:
    async with Recorder() as upstream:
        dead = provider("http://127.0.0.1:1/v1", name="dead")
        async with SmallWorld([deployment(dead), deployment(provider(upstream.base_url), priority=1)]) as gw:
            async with gw.http.post(CHAT, data=BODY) as answer:
                assert answer.status == 200
            assert await gw.settled() == [
                (1, Kind.VOID, "error", "upstream_unreachable"),
                (2, Kind.POST, "stop", ""),
            ]


@pytest.mark.parametrize(
    ("name", "script", "kind", "error"),
    [
        ("empty", Script(200, []), Kind.CHARGE_UNKNOWN, "upstream_malformed"),
        (
            "html",
            Script(200, [b"<html>oops</html>"], {"Content-Type": "text/html"}),
            Kind.CHARGE_UNKNOWN,
            "upstream_malformed",
        ),
        (
            "truncated",
            Script(200, [b'{"id":"x","choices":[{"mess']),
            Kind.CHARGE_UNKNOWN,
            "upstream_malformed",
        ),
        ("error in 200", says(200, {"message": "overloaded", "code": 500}), Kind.VOID, "upstream_error"),
        (
            "html 502",
            Script(502, [b"<html>bad gateway</html>"], {"Content-Type": "text/html"}),
            Kind.CHARGE_UNKNOWN,
            "upstream_error",
        ),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
async def test_answers_that_are_no_answers(name: str, script: Script, kind: Kind, error: str) -> None:
    async with Recorder() as upstream:
        async with SmallWorld([deployment(provider(upstream.base_url))], policy=Policy(attempts_max=1)) as gw:
            upstream.scripts = [script]
            async with gw.http.post(CHAT, data=BODY) as answer:
                assert answer.status == 502, name
                assert (await answer.json())["error"]["type"] == "server_error"
            held = dict(gw.ledger.holds)
            assert await gw.settled() == [(1, kind, "error", error)]
            outcome = gw.ledger.entries[0][1]
            assert outcome.cost_nano_usd == (
                0 if kind is Kind.VOID else sum(held.values()) or outcome.cost_nano_usd
            )
            assert (outcome.cost_nano_usd > 0) == (kind is Kind.CHARGE_UNKNOWN)


@pytest.mark.parametrize("left", ["remaining_nano_usd", "remaining_calls"])
async def test_a_lost_answer_under_a_hard_budget_is_not_paid_for_twice(left: str) -> None:
    lost = Script(200, [b'{"id":'], abort=True)
    async with Recorder() as upstream, SmallWorld([deployment(provider(upstream.base_url))]) as gw:
        upstream.scripts = [lost]
        async with gw.http.post(CHAT, data=BODY) as answer:
            assert (answer.status, answer.headers["x-attempts"]) == (200, "2")  # no budget: tried again
        gw.ledger.entries.clear()
        upstream.scripts = [lost]
        setattr(gw.ledger, left, 10**9)
        async with gw.http.post(CHAT, data=BODY) as answer:
            assert answer.status == 502
        assert await gw.settled() == [(1, Kind.CHARGE_UNKNOWN, "error", "upstream_lost")]


async def test_a_stream_that_fails_before_its_first_event_is_tried_again() -> None:
    quiet = Script(200, [b": keep-alive\n\n"], {"Content-Type": "text/event-stream"}, abort=True)
    broken = Script(200, [sse({"error": {"message": "no"}})], {"Content-Type": "text/event-stream"})
    async with Recorder() as upstream, SmallWorld([deployment(provider(upstream.base_url))]) as gw:
        upstream.scripts = [quiet, broken]
        async with gw.http.post(CHAT, data=STREAM) as answer:
            assert answer.status == 200
            assert (await answer.read()).endswith(b"data: [DONE]\n\n")
        assert await gw.settled() == [
            (1, Kind.CHARGE_UNKNOWN, "error", "upstream_lost"),
            (2, Kind.VOID, "error", "upstream_error"),
            (3, Kind.POST, "stop", ""),
        ]


async def test_a_cut_stream_ends_in_an_error_event_and_is_estimated() -> None:
    events = {"Content-Type": "text/event-stream"}
    chat = Script(200, [sse(*chat_chunks(usage=False)[:2])], events, abort=True)
    messages = Script(200, [named(*messages_events()[:3])], events, abort=True)
    async with Recorder() as upstream, SmallWorld([deployment(provider(upstream.base_url, Wire.DEMO))]) as gw:
        upstream.scripts = [chat, messages]
        async with gw.http.post(CHAT, data=STREAM) as answer:
            text = (await answer.read()).decode()
        assert "[DONE]" not in text
        last = json.loads(text.strip().rpartition("data: ")[2])
        assert (last["error"]["code"], last["error"]["type"]) == ("upstream_lost", "server_error")
        async with gw.http.post("/v1/messages", data=STREAM) as answer:
            text = (await answer.read()).decode()
        assert text.strip().rpartition("\n\n")[2].startswith("event: error\n")
        assert await gw.settled() == [(1, Kind.POST, "upstream_cut", "upstream_lost")] * 2
        qualities = [o.quality.value for _, o in gw.ledger.entries]
        assert qualities == ["estimated", "estimated"]
        # Anthropic reported its input in the first event, so only the output is a guess
        assert gw.ledger.entries[1][1].usage.cache_read == 64


async def test_usage_is_asked_for_and_hidden_from_who_did_not() -> None:
    async with Recorder() as upstream, SmallWorld([deployment(provider(upstream.base_url))]) as gw:
        async with gw.http.post(CHAT, data=STREAM) as answer:
            plain = await answer.read()
        asking = STREAM[:-1] + b',"stream_options":{"include_usage":true}}'
        async with gw.http.post(CHAT, data=asking) as answer:
            asked = await answer.read()
        assert json.loads(upstream.received[0].body)["stream_options"] == {"include_usage": True}
        assert plain == sse(*chat_chunks(usage=False), done=True)
        usage = json.loads(asked.decode().strip().split("\n\n")[-2].removeprefix("data: "))["usage"]
        # 36 uncached x 3 + 64 read x 0.3 + 5 out x 15 = 202.2 micro-dollars
        assert usage == {**CHAT_USAGE, "cost": 0.0002022}
        assert [o.cost_nano_usd for _, o in gw.ledger.entries] == [202_200, 202_200]


async def test_cost_in_body_and_header() -> None:
    async with Recorder() as upstream, SmallWorld([deployment(provider(upstream.base_url))]) as gw:
        async with gw.http.post(CHAT, data=BODY) as answer:
            doc = await answer.json()
            assert doc["usage"] == {**CHAT_USAGE, "cost": 0.0002022}
            assert answer.headers["x-cost-usd"] == "0.0002022"
            assert answer.headers["x-uncached-cost-usd"] == "0.000375"
            assert answer.headers["x-upstream-request-id"] == "up-1"


async def test_a_budget_that_is_used_up_refuses_before_any_byte() -> None:
    async with Recorder() as upstream, SmallWorld([deployment(provider(upstream.base_url, Wire.DEMO))]) as gw:
        gw.ledger.refuse = Refused("task:t", 1_000_000_000, 990_000_000, 5_000_000, None)
        shown = []
        for path, body in (
            (CHAT, BODY),
            ("/v1/messages", BODY),
            ("/v1/responses", b'{"model":"m","input":"hi"}'),
        ):
            async with gw.http.post(path, data=body) as answer:
                error = (await answer.json())["error"]
                shown.append((answer.status, error["type"], error["code"], answer.headers["x-should-retry"]))
                assert "$0.99 spent and $0.005 reserved of $1" in error["message"]
                assert "retry-after" not in answer.headers
        assert shown == [
            (402, "invalid_request_error", "budget_exceeded", "false"),
            (402, "billing_error", "budget_exceeded", "false"),
            (400, "invalid_request_error", "budget_exceeded", "false"),
        ]
        assert upstream.received == []
        assert await gw.settled() == []


async def test_a_refusal_is_in_the_unit_of_its_budget() -> None:
    async with Recorder() as upstream, SmallWorld([deployment(provider(upstream.base_url))]) as gw:
        said = {}
        for refused in (
            Refused("team:red", 2_000, 1_998, 2, 1_790_000_000_000, Unit.CALLS),
            Refused("task:t", 90_000, 60_000, 0, None, Unit.OUTPUT_TOKENS, kept_back=1_800),
            Refused("task:t", 0, 0, 0, None, state="paused_admin"),
        ):
            gw.ledger.refuse = refused
            async with gw.http.post(CHAT, data=BODY) as answer:
                assert answer.status == 402
                left = {k: v for k, v in answer.headers.items() if k.startswith("x-budget-remaining")}
                said[(await answer.json())["error"]["message"]] = left
        assert said == {
            "the budget of the team red is used up: 1,998 calls spent and 2 calls reserved of 2,000 calls; this "
            "request may use up to 1 call. It resets at 2026-09-21T14:13:20Z.": {
                "x-budget-remaining-calls": "0"
            },
            "the budget of the task t has too little left for this request: 60,000 output tokens spent and 0 "
            "output tokens reserved of 90,000 output tokens, 1,800 output tokens of it kept back for a last answer; "
            "this request may use up to 100 output tokens. Ask its owner to raise it (POST /v1/tasks/t/budgets), or start a new task.": {
                "x-budget-remaining-output-tokens": "28200"
            },
            "the task t is paused_admin, so it gets no answers": {"x-budget-remaining-usd": "0"},
        }


async def test_under_a_budget_the_output_is_bounded_in_the_request_itself() -> None:
    unbounded = b'{"model":"m","messages":[{"role":"user","content":"hi"}]}'
    async with Recorder() as upstream, SmallWorld([deployment(provider(upstream.base_url))]) as gw:
        async with gw.http.post(CHAT, data=unbounded) as answer:
            assert answer.status == 200
        gw.ledger.remaining_nano_usd = 10**9
        async with gw.http.post(CHAT, data=unbounded) as answer:
            assert answer.headers["x-budget-remaining-usd"] == "1"
        gw.ledger.grant_nano_usd = 60_000_000
        async with gw.http.post(CHAT, data=unbounded) as answer:
            assert answer.status == 200
        bounds = [json.loads(r.body).get("max_completion_tokens") for r in upstream.received]
        assert bounds[:2] == [None, 8_192]
        assert 0 < bounds[2] < 4_000  # what the smaller grant pays for
