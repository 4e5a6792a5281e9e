"""Every fault, what it looks like on the wire, and what it costs."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from gateway.demo.bill import State
from gateway.demo.faults import Fault, FaultKind, FaultPlan, read_plan
from gateway.demo.provider import DemoProvider
from tests.demo.talk import HELLO, Talk, final_usage, streamed, talking, token_events

DIALECTS = ["chat", "responses", "messages"]
#: "Say hello." in either family, and no output
INPUT_TOKENS = 9


def plan(*faults: Fault) -> FaultPlan:
    return FaultPlan(faults)


def charged(talk: Talk) -> list[tuple[int, State, int, bool]]:
    """(status, state, output, whether anything was charged) of each line"""
    return [(line.status, line.state, line.output, line.nano_usd > 0) for line in talk.provider.bill()]


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_refusals_cost_nothing_and_name_the_dialects_type(dialect: str, talk: Talk) -> None:
    talk.provider.set_faults(
        plan(
            *(
                Fault(FaultKind.REFUSE, s, retry_after_s=7 if s == 429 else None)
                for s in (429, 500, 503, 529, 401)
            )
        )
    )
    got = [await talk.post(dialect, HELLO[dialect]) for _ in range(6)]
    assert [g.status for g in got] == [429, 500, 503, 529, 401, 200]
    assert [g.headers.get("retry-after") for g in got[:2]] == ["7", None]
    types = ["rate_limit_error", "api_error", "api_error", "overloaded_error", "authentication_error"]
    if dialect != "messages":
        types = ["rate_limit_error", "server_error", "server_error", "server_error", "authentication_error"]
    assert [g.body["error"]["type"] for g in got[:5]] == types
    assert [line.nano_usd for line in talk.provider.bill()[:5]] == [0] * 5


async def test_answers_that_are_no_answers(talk: Talk) -> None:
    kinds = (
        FaultKind.HTML_502,
        FaultKind.EMPTY_200,
        FaultKind.ERROR_IN_200,
        FaultKind.TRUNCATED_JSON,
        FaultKind.WRONG_TYPE,
    )
    talk.provider.set_faults(plan(*map(Fault, kinds)))
    html, empty, error, truncated, typed = [await talk.post("chat", HELLO["chat"]) for _ in kinds]
    assert (html.status, html.headers["content-type"], html.raw[:6]) == (
        502,
        "text/html",
        b"<html>",
    )
    assert (empty.status, empty.raw, empty.cut) == (200, b"", False)
    assert (error.status, error.body["error"]["type"]) == (200, "server_error")
    assert (truncated.status, truncated.body, truncated.cut) == (200, None, False)
    assert typed.headers["content-type"] == "text/html"
    full = typed.body["usage"]["completion_tokens"]
    assert charged(talk) == [
        (502, State.REFUSED, 0, False),
        (200, State.REFUSED, 0, False),
        (200, State.REFUSED, 0, False),
        (200, State.COMPLETE, full, True),
        (200, State.COMPLETE, full, True),
    ]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("billed", [False, True])
async def test_a_reset_before_headers_is_charged_or_not_as_told(
    billed: bool, stream: bool, talk: Talk
) -> None:
    talk.provider.set_faults(plan(Fault(FaultKind.CLOSE, billed=billed)))
    body = streamed("chat", HELLO["chat"]) if stream else HELLO["chat"]
    with pytest.raises(aiohttp.ClientError):
        await talk.post("chat", body)
    await talk.provider.settled()
    [(status, state, output, money)] = charged(talk)
    assert (status, state, output > 0, money) == (
        0,
        State.COMPLETE if billed else State.REFUSED,
        billed,
        billed,
    )


@pytest.mark.parametrize("k", [0, 4, 10_000])
@pytest.mark.parametrize("dialect", DIALECTS)
async def test_a_cut_stream_delivers_and_bills_k_tokens(dialect: str, k: int, talk: Talk) -> None:
    full = len(token_events(dialect, (await talk.post(dialect, streamed(dialect, HELLO[dialect]))).events))
    talk.provider.set_faults(plan(Fault(FaultKind.CUT, after_events=k)))
    got = await talk.post(dialect, streamed(dialect, HELLO[dialect]))
    assert got.cut
    assert len(token_events(dialect, got.events)) == min(k, full)
    line = talk.provider.bill()[1]
    assert (line.state, line.output, line.input_uncached) == (State.INTERRUPTED, min(k, full), INPUT_TOKENS)


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_an_error_event_ends_the_stream_and_stops_the_bill(dialect: str, talk: Talk) -> None:
    talk.provider.set_faults(plan(Fault(FaultKind.ERROR_EVENT, after_events=2), Fault(FaultKind.ERROR_EVENT)))
    got = await talk.post(dialect, streamed(dialect, HELLO[dialect]))
    assert not got.cut
    last = got.events[-1]
    assert "[demo] injected stream error" in json.dumps(last)
    assert (last.get("type") or "error") == "error"
    plain = await talk.post(dialect, HELLO[dialect])
    assert charged(talk) == [(200, State.INTERRUPTED, 2, True), (500, State.REFUSED, 0, False)]
    assert plain.status == 500


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_usage_lies_while_the_bill_does_not(dialect: str, talk: Talk) -> None:
    kinds = (
        FaultKind.OK,
        FaultKind.USAGE_NEGATIVE,
        FaultKind.USAGE_HUGE,
        FaultKind.USAGE_MISSING,
        FaultKind.USAGE_TWICE,
    )
    talk.provider.set_faults(plan(*map(Fault, (*kinds, FaultKind.USAGE_TWICE))))
    honest, negative, huge, missing, _ = [(await talk.post(dialect, HELLO[dialect])).body for _ in kinds]
    key = "completion_tokens" if dialect == "chat" else "output_tokens"
    n = honest["usage"][key]
    assert [negative["usage"][key], huge["usage"][key], missing.get("usage")] == [-n, n + 10**12, None]
    twice = (await talk.post(dialect, streamed(dialect, HELLO[dialect]))).events
    assert final_usage(dialect, twice) == honest["usage"]
    assert json.dumps(twice).count(f'"{key}": {n}') == 2
    assert [line.output for line in talk.provider.bill()] == [n] * 6


@pytest.mark.parametrize("kind", [FaultKind.SLOW, FaultKind.COMMENTS, FaultKind.CRLF, FaultKind.WRONG_TYPE])
async def test_odd_framing_still_says_the_same(kind: FaultKind, talk: Talk) -> None:
    plain = await talk.post("chat", HELLO["chat"])
    talk.provider.set_faults(plan(Fault(kind)))
    got = await talk.post("chat", streamed("chat", HELLO["chat"]))
    assert "".join(token_events("chat", got.events)) == plain.body["choices"][0]["message"]["content"]
    shows = {
        FaultKind.SLOW: b"data: ",
        FaultKind.COMMENTS: b": keep-alive\n\ndata: ",
        FaultKind.CRLF: b"\r\n\r\n",
        FaultKind.WRONG_TYPE: b"data: ",
    }
    assert shows[kind] in got.raw
    content_type = "text/plain" if kind is FaultKind.WRONG_TYPE else "text/event-stream"
    assert got.headers["content-type"] == f"{content_type}; charset=utf-8"


async def leave_after(talk: Talk, tokens: int) -> None:
    """Read a long stream up to that many tokens, then drop the connection."""
    body = {
        "model": "demo-fast",
        "stream": True,
        "messages": [{"role": "user", "content": "demo:output=5000"}],
    }
    response = await talk.session.post(talk.provider.base_url + "/chat/completions", json=body)
    seen = 0
    async for line in response.content:
        seen += b'"content":' in line and b'"content":""' not in line
        if seen == tokens:
            break
    response.close()
    await talk.provider.settled()


async def test_a_reader_who_leaves_pays_for_what_was_produced() -> None:
    async with talking(DemoProvider(chunk_delay_s=0.002)) as talk:
        await leave_after(talk, 3)
        [line] = talk.provider.bill()
        assert (line.state, line.finish) == (State.INTERRUPTED, "client_gone")
        assert 3 <= line.output < 5_000
        assert line.nano_usd == line.input_uncached * 2_500 + line.output * 10_000


async def test_a_draining_provider_bills_to_the_end() -> None:
    async with talking(DemoProvider(chunk_delay_s=0.002, on_disconnect="drain")) as talk:
        await leave_after(talk, 3)
        assert charged(talk) == [(200, State.COMPLETE, 5_000, True)]


async def test_leaving_before_the_first_token_is_charged_whole_if_plain_and_input_only_if_streamed() -> None:
    async with talking(DemoProvider(first_token_delay_s=60)) as talk:
        for body in (HELLO["chat"], streamed("chat", HELLO["chat"])):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await talk.post("chat", body)
            await talk.provider.settled()
        plain, stream = talk.provider.bill()
        assert (plain.state, plain.output > 0, plain.status) == (State.COMPLETE, True, 0)
        assert (stream.state, stream.output, stream.nano_usd) == (State.INTERRUPTED, 0, INPUT_TOKENS * 2_500)


async def test_stopping_the_provider_bills_what_was_under_way() -> None:
    provider = DemoProvider(faults=plan(Fault(FaultKind.STALL, after_events=2)))
    async with talking(provider) as talk:
        url = provider.base_url + "/chat/completions"
        response = await talk.session.post(url, json=streamed("chat", HELLO["chat"]))
        await response.content.readline()
        await provider.stop()
        with pytest.raises(aiohttp.ClientError):
            await response.read()
    assert [(line.state, line.output) for line in provider.bill()] == [(State.INTERRUPTED, 2)]


@pytest.mark.parametrize(
    ("fault", "stream", "want"),
    [
        (Fault(FaultKind.STALL, after_events=2), True, (200, State.INTERRUPTED, True)),
        (Fault(FaultKind.STALL), False, (200, State.COMPLETE, True)),
        (Fault(FaultKind.STALL_HEADERS), True, (0, State.REFUSED, False)),
        (Fault(FaultKind.STALL_HEADERS), False, (0, State.REFUSED, False)),
        (Fault(FaultKind.STALL_HEADERS, billed=True), True, (0, State.COMPLETE, True)),
        (Fault(FaultKind.STALL_HEADERS, billed=True), False, (0, State.COMPLETE, True)),
    ],
)
async def test_a_stall_lasts_until_the_client_leaves(
    fault: Fault, stream: bool, want: tuple[int, State, bool], talk: Talk
) -> None:
    talk.provider.set_faults(plan(fault))
    body: dict[str, Any] = streamed("chat", HELLO["chat"]) if stream else HELLO["chat"]
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await talk.post("chat", body)
    await talk.provider.settled()
    [(status, state, _, money)] = charged(talk)
    assert (status, state, money) == want


async def test_a_script_over_http_then_a_draw_by_seed(talk: Talk) -> None:
    script = {"script": ["ok", 503, {"kind": "refuse", "status": 429, "retry_after_s": 2}]}
    url = talk.provider.root_url + "/demo/faults"
    async with talk.session.post(url, json=script) as response:
        assert await response.json() == {"ok": True}
    assert [(await talk.post("chat", HELLO["chat"])).status for _ in range(4)] == [200, 503, 429, 200]
    mistakes: list[dict[str, Any]] = [
        {"script": ["nonsense"]},
        {"scripts": []},
        {"rates": {"cut": 2}},
        {"script": [{"after": 1}]},
        {"script": [200]},
    ]
    for wrong in mistakes:
        async with talk.session.post(url, json=wrong) as response:
            assert response.status == 400


def test_draws_depend_on_seed_and_number_alone() -> None:
    rates = {FaultKind.CUT: 0.3, FaultKind.REFUSE: 0.2}
    one, same, other = (
        FaultPlan(seed=1, rates=rates),
        FaultPlan(seed=1, rates=rates),
        FaultPlan(seed=2, rates=rates),
    )
    drawn = [one.at(n) for n in range(2_000)]
    assert drawn == [same.at(n) for n in range(2_000)]
    assert drawn != [other.at(n) for n in range(2_000)]
    shares = {kind: sum(f.kind is kind for f in drawn) / 2_000 for kind in (*rates, FaultKind.OK)}
    assert shares == pytest.approx({**rates, FaultKind.OK: 0.5}, abs=0.05)


def test_plans_are_read_strictly() -> None:
    assert read_plan({"script": ["cut", 529], "seed": 3}) == FaultPlan(
        (Fault(FaultKind.CUT), Fault(FaultKind.REFUSE, 529)), 3, {}
    )
    with pytest.raises(ValueError, match="unknown fault fields: \\['after'\\]"):
        read_plan({"script": [{"kind": "cut", "after": 2}]})
