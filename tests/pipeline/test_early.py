"""Who is bound by a budget that is known to be used up is refused by that alone: whatever the body is, or how long."""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import replace
from typing import Any

import pytest

from gateway.core.catalog import Wire
from gateway.core.entry import OnExceed, Refused, Unit
from gateway.core.least import least_nano_usd
from gateway.core.prices import HourWindow, PriceRow, Rates, Ratio, SizedRates
from gateway.core.task import State
from gateway.edge.server import EdgeOptions
from tests.pipeline.test_repeats import AskedLedger
from tests.support.recorder import Recorder
from tests.support.small_world import KEY as KEY_TEXT
from tests.support.small_world import KEY_ID, RATES, SmallWorld, deployment, provider

KEY = f"key:{KEY_ID}"
SPENT = Refused(KEY, 1_000_000_000, 1_000_000_000, 0, None)
FREE = PriceRow("up/m", "up/m@1", 0, Rates(0, 0))
PRICED = PriceRow("up/m", "up/m@1", 0, RATES)
CODEX = {"User-Agent": "codex_exec/0.171.0"}

Told = tuple[int, dict[str, str], bytes]


async def post(
    gw: SmallWorld, path: str = "/v1/chat/completions", *, body: bytes | None = None, **more: Any
) -> Told:
    headers = more.pop("headers", {})
    asked = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **more}
    sent = {"data": body} if body is not None else {"json": asked}
    async with gw.http.post(path, headers=headers, **sent) as answer:
        said = {k: v for k, v in answer.headers.items() if k.startswith("x-")}
        for changing in ("x-request-id", "x-gateway-overhead-ms"):
            said.pop(changing, None)
        return answer.status, said, await answer.read()


def world(upstream: Recorder, ledger: AskedLedger, options: EdgeOptions | None = None) -> SmallWorld:
    """`m` at a server of OpenAI's API, `c` at one of Anthropic's."""
    one = deployment(provider(upstream.base_url))
    other = deployment(provider(upstream.base_url, Wire.ANTHROPIC, "an"), "c")
    return SmallWorld([one, other], ledger=ledger, options=options or EdgeOptions())


async def test_bodies_that_differ_are_told_the_same_in_their_dialect_unread() -> None:
    ledger = AskedLedger()
    async with Recorder() as upstream, world(upstream, ledger) as gw:
        ledger.refuse = SPENT
        assert (await post(gw))[0] == 402
        counted = len(gw.done)
        why = (
            f"the budget of the key {KEY_ID} is used up: $1 spent and $0 reserved of $1; what is left does not pay for "
            "this request. Ask its owner to raise it."
        )
        said = {"x-should-retry": "false", "x-budget-scope": KEY, "x-budget-remaining-usd": "0"}
        openai = (
            f'{{"error":{{"message":"{why}","type":"invalid_request_error","param":null,"code":"budget_exceeded"}}}}'
        ).encode()
        for words in ("one", "two " * 100_000, "two " * 200_000):
            assert await post(gw, messages=[{"role": "user", "content": words}], stream=True) == (
                402,
                said,
                openai,
            )
        assert await post(gw, body=b"no JSON at all") == (402, said, openai)
        assert await post(gw, model="unknown") == (402, said, openai)
        assert await post(gw, "/v1/responses", input="hi") == (400, said, openai)
        status, headers, body = await post(gw, "/v1/messages", max_tokens=10)
        assert (status, headers) == (402, said)
        assert body.startswith(
            f'{{"type":"error","error":{{"type":"billing_error","message":"{why}"'.encode()
        )
        assert (ledger.asked, upstream.received) == (1, [])
        assert {d.error for d in gw.done[counted:]} == {"budget_exceeded"}


async def test_a_body_that_is_only_waited_for_may_stop_or_break_off() -> None:
    ledger = AskedLedger()
    ledger.refuse = SPENT
    options = EdgeOptions(body_timeout_s=0.2)
    async with Recorder() as upstream, world(upstream, ledger, options) as gw:
        await post(gw)
        host, port = gw.url.removeprefix("http://").split(":")
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n"
        begun = f"{head}Authorization: Bearer {KEY_TEXT}\r\n\r\n{{".encode()
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(begun)
        assert (await reader.read(4096)).startswith(b"HTTP/1.1 408 ")
        writer.close()
        await writer.wait_closed()
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(begun)
        await writer.drain()
        writer.transport.abort()
        assert await gw.settled() == []
        assert gw.faults == []


async def test_a_raise_a_new_window_and_a_second_end_it() -> None:
    ledger = AskedLedger()
    async with Recorder() as upstream, world(upstream, ledger) as gw:
        ledger.refuse = SPENT
        await post(gw)
        assert ((await post(gw, user="a"))[0], ledger.asked) == (402, 1)
        ledger.refuse, ledger.changed = None, 1
        assert ((await post(gw, user="b"))[0], ledger.asked) == (200, 2)

        ledger.refuse = replace_window(SPENT, gw.world.clock.now_ms() + 60_000)
        await post(gw, user="c")
        assert ((await post(gw, user="d"))[0], ledger.asked) == (402, 3)
        ledger.changed += 1
        ledger.refuse = replace_window(SPENT, gw.world.clock.now_ms())
        await post(gw, user="e")
        await post(gw, user="f")
        assert ledger.asked == 5, "a window that is over says nothing"

        spent, now_s = gw.world.spent, time.monotonic()
        assert (spent.any(now_s), spent.any(now_s + 2)) == (True, False)


def replace_window(refused: Refused, resets_at_ms: int) -> Refused:
    return Refused(refused.scope, refused.limit, refused.spent, refused.held, resets_at_ms)


@pytest.mark.parametrize(
    ("left_nano_usd", "asked"),
    # 64 tokens of input written to a cache are $0.00024, a token of output $0.000015; no answer is lowered below 2,048.
    [
        (191_999, [1, 1, 1]),
        (254_999, [1, 1, 1]),
        (255_000, [1, 2, 2]),
        (30_959_999, [1, 2, 2]),
        (30_960_000, [1, 2, 3]),
    ],
)
async def test_a_refusal_says_nothing_of_a_smaller_request(left_nano_usd: int, asked: list[int]) -> None:
    """Unread it is told where not even 64 tokens of input can be paid; read, where its own least cannot be."""
    ledger = AskedLedger()
    async with Recorder() as upstream, world(upstream, ledger) as gw:
        ledger.refuse = Refused(KEY, 10**9, 10**9 - left_nano_usd, 0, None)
        seen = []
        await post(gw, max_tokens=4_000)
        seen.append(ledger.asked)
        ledger.refuse = None  # whatever asks the ledger is granted
        small = await post(gw, max_tokens=1)
        seen.append(ledger.asked)
        large = await post(gw, max_tokens=4_001)
        seen.append(ledger.asked)
        assert seen == asked
        assert (small[0] == 200, large[0] == 200) == (asked[1] > asked[0], asked[2] > asked[1])


@pytest.mark.parametrize(
    "refused",
    [
        Refused(KEY, 10**9, 0, 10**9, None),  # money that is only held may come back
        Refused(KEY, 10**9, 10**9, 0, None, on_exceed=OnExceed.SUMMARIZE),
        Refused("key:another", 10**9, 10**9, 0, None),
        Refused("task:another", 10**9, 10**9, 0, None, state=State.PAUSED_LOOP),
    ],
)
async def test_what_may_end_otherwise_is_asked_for(refused: Refused) -> None:
    ledger = AskedLedger()
    async with Recorder() as upstream, world(upstream, ledger) as gw:
        ledger.refuse = refused
        await post(gw)
        await post(gw, user="a")
        assert ledger.asked >= 2


@pytest.mark.parametrize("free", [[FREE], []])
async def test_a_model_that_is_free_or_has_no_price_is_as_before(free: list[PriceRow]) -> None:
    ledger = AskedLedger()
    rows = [*free, PriceRow("up/dear", "up/dear@1", 0, RATES)]
    async with Recorder() as upstream:
        at = provider(upstream.base_url)
        both = [deployment(at), replace(deployment(at, "dear"), price="up/dear")]
        async with SmallWorld(both, ledger=ledger, price=False, more_prices=rows) as gw:
            ledger.refuse = SPENT
            assert (await post(gw, model="dear"))[0] == 402
            ledger.refuse = None
            assert (await post(gw, model="dear", user="a"))[0] == 402
            assert ledger.asked == 1, "told by its model, which costs something"
            assert ((await post(gw))[0], ledger.asked) == (200, 2)


@pytest.mark.parametrize(
    ("unit", "path", "told"),
    [
        (Unit.CALLS, "/v1/chat/completions", True),
        (Unit.INPUT_TOKENS, "/v1/chat/completions", True),
        (Unit.OUTPUT_TOKENS, "/v1/chat/completions", True),
        (Unit.OUTPUT_TOKENS, "/v1/embeddings", False),
        (Unit.INPUT_TOKENS, "/v1/embeddings", True),
        (Unit.USD, "/v1/embeddings", True),
        (Unit.USD, "/v1/messages/count_tokens", False),
        (Unit.CALLS, "/v1/messages/count_tokens", False),
    ],
)
async def test_what_a_call_does_not_use_does_not_refuse_it(unit: Unit, path: str, told: bool) -> None:
    ledger = AskedLedger()
    async with Recorder() as upstream, world(upstream, ledger) as gw:
        ledger.refuse = Refused(KEY, 1_000, 1_000, 0, None, unit)
        await post(gw)
        await post(gw, path, model="c" if "messages" in path else "m", input="hi", user="a")
        assert ledger.asked == (1 if told else 2)


async def test_a_soft_stop_and_a_stream_for_codex_have_their_form() -> None:
    ledger = AskedLedger()
    async with Recorder() as upstream, world(upstream, ledger) as gw:
        ledger.refuse = Refused(KEY, 100, 100, 0, None, on_exceed=OnExceed.SOFT_STOP)
        for n in itertools.count(1):
            status, headers, body = await post(gw, user=str(n))
            assert (status, headers["x-budget-stop"]) == (200, "soft_stop")
            assert b"is used up" in body
            if n == 3:
                break
        assert ledger.asked == 1

        ledger.refuse, ledger.changed = SPENT, 1
        await post(gw)
        for n in range(3):
            asked: dict[str, Any] = {"input": f"hi {n}", "stream": True, "headers": CODEX}
            status, headers, body = await post(gw, "/v1/responses", **asked)
            assert (status, body.count(b"event: response.failed"), body.count(b"invalid_prompt")) == (
                200,
                1,
                1,
            )
        assert ledger.asked == 2


async def test_a_task_that_is_closed_is_told_by_its_header_and_no_other_is() -> None:
    ledger = AskedLedger()
    async with Recorder() as upstream, world(upstream, ledger) as gw:
        one, two = {"X-Task-Id": "one"}, {"X-Task-Id": "two"}
        # The key's budget would refuse it as well; the state is the task's alone.
        ledger.refuse = Refused(KEY, 100, 50, 0, None, state=State.PAUSED_ADMIN)
        first = await post(gw, headers=one)
        ledger.refuse = None
        assert (await post(gw, headers=one, body=b"{}"), ledger.asked) == (first, 1)
        assert ((await post(gw, headers=two))[0], ledger.asked) == (200, 2)
        # In the messages dialect a body may name its session before these headers do.
        turn: dict[str, Any] = {"model": "c", "max_tokens": 10, "headers": {"session-id": "three"}}
        ledger.refuse = Refused("task:x", 100, 100, 0, None, state=State.PAUSED_BUDGET)
        await post(gw, "/v1/messages", **turn)
        ledger.refuse = None
        own = {"user_id": "user__session_11111111-1111-4111-8111-111111111111"}
        assert ((await post(gw, "/v1/messages", metadata=own, **turn))[0], ledger.asked) == (200, 4)
        assert ((await post(gw, "/v1/messages", user="a", **turn))[0], ledger.asked) == (402, 4)


async def test_an_answer_that_was_kept_costs_nothing_and_is_given() -> None:
    ledger = AskedLedger()
    async with Recorder() as upstream, world(upstream, ledger) as gw:
        kept: dict[str, Any] = {"headers": {"x-response-cache": "60"}}
        await post(gw, **kept)
        ledger.refuse = SPENT
        assert (await post(gw))[0] == 402
        again = await post(gw, **kept)
        assert (again[0], again[1]["x-response-cache"], again[1]["x-cost-usd"]) == (200, "hit", "0")


@pytest.mark.parametrize(
    ("row", "least"),
    [
        (PRICED, 192_000),
        (
            replace(PRICED, service_tiers={"flex": Ratio(1, 2), "priority": Ratio(2)}, batch=Ratio(1, 2)),
            48_000,
        ),
        (replace(PRICED, size_tiers=((1_000, Rates(1_000_000, 1)),)), 64_000),
        (replace(PRICED, hours=(HourWindow(0, 60, SizedRates(Rates(0, 1))),)), 0),
        (replace(PRICED, service_tiers={"flex": SizedRates(Rates(2_000_000, 1))}), 128_000),
        (FREE, 0),
    ],
)
def test_the_least_that_64_tokens_cost(row: PriceRow, least: int) -> None:
    assert least_nano_usd(row, 64) == least
