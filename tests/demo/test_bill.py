from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.demo.bill import BillFile, BillLine, State, Tokens, price, read_lines
from gateway.demo.models import DEMO_FAST, DEMO_LARGE, MODELS, DemoModel, Rates
from gateway.demo.provider import BILL_NAME, DemoProvider
from tests.demo.talk import HELLO, Talk, talking

#: dollars per million tokens, as a vendor's price page has them: input, read, 5m write, 1h write, output
PAGE = {
    "demo-large": ("3", "0.3", "3.75", "6", "15"),
    "demo-small": ("1", "0.1", "1.25", "2", "5"),
    "demo-fast": ("2.5", "0.25", "3.125", "0", "10"),
    "demo-embed": ("0.02", "0", "0", "0", "0"),
}
COUNT = st.integers(0, 3_000_000)


@given(st.sampled_from(MODELS), COUNT, COUNT, COUNT, COUNT, COUNT)
def test_price_is_the_exact_fraction_rounded_up_once(
    model: DemoModel, uncached: int, read: int, write_5m: int, write_1h: int, output: int
) -> None:
    counts = (uncached, read, write_5m, write_1h if model.rates.cache_write_1h else 0, output)
    dollars = sum(n * Fraction(rate) / 10**6 for n, rate in zip(counts, PAGE[model.name], strict=True))
    assert price(model.rates, Tokens(*counts)) == math.ceil(dollars * 10**9)


@given(st.integers(1, 10**9), COUNT)
def test_a_broken_nano_dollar_is_a_whole_one(rate_pico: int, tokens: int) -> None:
    rates = Rates(rate_pico, 0, 0, 0, 0)
    assert price(rates, Tokens(input_uncached=tokens)) == math.ceil(Fraction(rate_pico * tokens, 1_000))


def test_a_class_that_the_model_does_not_have_has_no_price() -> None:
    with pytest.raises(ValueError, match="no 1h cache writes"):
        price(DEMO_FAST.rates, Tokens(cache_write_1h=1))


async def test_one_line_per_request_with_everything_on_it() -> None:
    async with talking(DemoProvider(clock_ms=lambda: 5_000)) as talk:
        got = await talk.post("messages", HELLO["messages"], headers={"x-client-request-id": "att_1"})
        output = got.body["usage"]["output_tokens"]
        assert talk.provider.bill() == [
            BillLine(
                bill_id=1,
                client_request_id="att_1",
                request_id=got.body["id"],
                at_ms=5_000,
                model="demo-large",
                requested_model="demo-large",
                operation="messages",
                status=200,
                input_uncached=9,
                cache_read=0,
                cache_write_5m=0,
                cache_write_1h=0,
                output=output,
                nano_usd=9 * 3_000 + output * 15_000,
                state=State.COMPLETE,
                finish="stop",
                stream=False,
            )
        ]
        assert got.headers["x-request-id"] == got.headers["request-id"] == got.body["id"]


async def test_refused_requests_have_a_line_of_zero_and_counting_has_none(talk: Talk) -> None:
    await talk.post("/messages/count_tokens", HELLO["messages"])
    await talk.post("chat", {"model": "demo-fast", "messages": []})
    await talk.post("chat", {"model": "nobody", "messages": []})
    lines = [(line.status, line.model, line.nano_usd, line.state) for line in talk.provider.bill()]
    assert lines == [(400, "demo-fast", 0, State.REFUSED), (404, "", 0, State.REFUSED)]


async def test_the_bill_over_http_is_the_bill(talk: Talk) -> None:
    for dialect, body in HELLO.items():
        await talk.post(dialect, body)
    page = (await talk.get("/demo/bill?after=1")).body["data"]
    assert read_lines(page) == talk.provider.bill(after=1)
    assert [row["bill_id"] for row in page] == [2, 3]
    assert (await talk.get("/demo/bill?after=x")).status == 400


async def test_a_generation_is_found_by_either_id(talk: Talk) -> None:
    got = await talk.post("chat", HELLO["chat"], headers={"x-client-request-id": "att_7"})
    by_ours = (await talk.get(f"/v1/generation?id={got.body['id']}")).body
    by_theirs = (await talk.get("/v1/generation?id=att_7")).body
    line = talk.provider.bill()[0]
    assert by_ours == by_theirs == {"data": line.generation()}
    assert by_ours["data"]["native_tokens_prompt"] == got.body["usage"]["prompt_tokens"]
    assert by_ours["data"]["native_tokens_completion"] == got.body["usage"]["completion_tokens"]
    assert by_ours["data"]["total_cost"] == pytest.approx(line.nano_usd / 1e9)
    assert (await talk.get("/v1/generation?id=nobody")).status == 404


async def test_a_restart_reads_the_bill_back_and_drops_a_torn_last_line(tmp_path: Path) -> None:
    async with talking(DemoProvider(tmp_path, fsync=True)) as talk:
        first = await talk.post("chat", HELLO["chat"])
    with (tmp_path / BILL_NAME).open("ab") as file:
        file.write(b'{"bill_id":2,"client_req')
    async with talking(DemoProvider(tmp_path)) as talk:
        again = await talk.post("chat", HELLO["chat"])
        assert [line.request_id for line in talk.provider.bill()] == [first.body["id"], again.body["id"]]
    assert first.body["id"] != again.body["id"]
    kept = BillFile(tmp_path / BILL_NAME)
    assert [line.bill_id for line in kept.after(0)] == [1, 2]
    kept.close()


def test_lines_are_appended_in_order_only() -> None:
    bill = BillFile(None)
    line = BillLine(
        2,
        "",
        "r",
        0,
        "m",
        "m",
        "chat",
        200,
        0,
        0,
        0,
        0,
        0,
        price(DEMO_LARGE.rates, Tokens()),
        State.REFUSED,
        "",
        False,
    )
    with pytest.raises(ValueError, match="bill line 2 is not the next one"):
        bill.append(line)
