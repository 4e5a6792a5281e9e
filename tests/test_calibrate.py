"""`tollhouse calibrate`: what is measured of a replica, what it refuses to measure, and that a gateway uses it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from gateway.commands.calibrate import Wanted, measure
from gateway.commands.output import OperatorError
from gateway.core.calibration import (
    Calibration,
    Point,
    Timed,
    Unmeasurable,
    cached_rate,
    calibration,
    output_rate,
    point_of,
    sizes,
)
from gateway.core.replicas.group import policy_of
from gateway.settings import Settings, load
from gateway.settings.calibration import FILE, keep, kept
from tests.support.fake_vllm import FakeVllm, Options

WANTED = Wanted("gpu/small", chunk_tokens=2_048, repeats=2, streams=4, output_tokens=20)
MEASURED = Calibration(20_480.0, 500_000.0, 900.0, 60.0, 8_192, "small", 1)


def settings(tmp_path: Path, *urls: str, more: str = "") -> Settings:
    file = tmp_path / "my.yaml"
    listed = json.dumps(list(urls) or ["http://127.0.0.1:1/v1"])
    file.write_text(
        f"discover_providers: false\nstate_dir: {tmp_path}\nproviders:\n  gpu:\n    key: sk-gpu\n    deployments:\n"
        f"      - {{model: small, price: none, replicas: {{urls: {listed}{more}}}}}\n"
    )
    return load(file, {})


async def run(
    found: Settings, wanted: Wanted = WANTED
) -> tuple[str, tuple[Point, ...], Calibration, list[str]]:
    steps: list[str] = []
    (deployment,) = found.catalog.deployments
    one = await measure(found, deployment, wanted, steps.append)
    return one.address, one.points, one.calibration, steps


# --- the arithmetic ---------------------------------------------------------------------------------------


def test_the_rates_are_those_of_a_full_chunk_and_of_many_answers() -> None:
    points = [Point(1_024, 0.2), Point(8_192, 0.4)]
    again = [Timed(8_192, 8_160, 1, 0.02, 0.02), Timed(8_192, 8_160, 1, 0.04, 0.04)]
    alone = (10.0, Timed(50, 0, 101, 0.1, 2.1))
    together = [(20.0, Timed(50, 0, 101, 0.1, 4.0)), (20.5, Timed(50, 0, 101, 0.1, 4.6))]
    found = calibration(points, again, alone, together, upstream_model="small", now_ms=7)
    assert found == Calibration(20_480.0, 307_200.0, 50.0, 50.0, 8_192, "small", 7)
    assert found.tau_tokens(14.0) == 286_720
    assert output_rate(together) == pytest.approx(200 / 5.0)
    assert sizes(8_192) == (1_024, 2_048, 4_096, 8_192)


def test_what_cannot_be_what_was_meant_is_no_measurement() -> None:
    with pytest.raises(Unmeasurable, match="500 of 1000 tokens came from a cache that cannot have held them"):
        point_of([Timed(1_000, 500, 1, 0.1, 0.1)])
    assert point_of([Timed(1_000, 16, 1, 0.1, 0.1), Timed(1_000, None, 1, 0.3, 0.3)]) == Point(1_000, 0.2)
    assert cached_rate([Timed(1_000, None, 1, 0.1, 0.1), Timed(1_000, 100, 1, 0.1, 0.1)]) is None
    with pytest.raises(Unmeasurable, match="too short to time"):
        output_rate([(0.0, Timed(9, 0, 1, 0.1, 0.1))])
    slow_cache = [Timed(8_192, 8_160, 1, 0.5, 0.5)]  # by noise slower than computing it
    alone = (0.0, Timed(9, 0, 11, 0.1, 1.1))
    found = calibration([Point(8_192, 0.4)], slow_cache, alone, [alone], upstream_model="m", now_ms=0)
    assert found.cached_tokens_per_s == found.prefill_tokens_per_s == 20_480.0


@asynccontextmanager
async def at_work(replica: FakeVllm) -> AsyncIterator[None]:
    """One request that the replica works on until this ends."""
    body = {"model": "small", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    replica.engine.hold_at = 0
    async with aiohttp.ClientSession() as http:
        asked = asyncio.ensure_future(http.post(f"{replica.base_url}/chat/completions", json=body))
        await replica.engine.until(held=1)
        yield
        replica.engine.let_go()
        (await asked).release()


# --- a replica --------------------------------------------------------------------------------------------


async def test_a_replica_s_rates_are_found(tmp_path: Path) -> None:
    options = Options(prefill_tokens_per_s=40_000, decode_tokens_per_s=500)
    async with FakeVllm(options) as replica:
        address, points, found, steps = await run(settings(tmp_path, replica.base_url))
        assert address == replica.base_url
        assert [round(p.prompt_tokens / 2_048, 1) for p in points] == [0.1, 0.3, 0.5, 1.0]
        # it sleeps for as long as such a prefill takes, and this machine is never faster than that
        assert 15_000 < found.prefill_tokens_per_s <= 41_000
        assert found.cached_tokens_per_s is not None
        assert found.cached_tokens_per_s > 1.5 * found.prefill_tokens_per_s
        assert 150 < found.single_output_tokens_per_s <= 550
        assert found.output_tokens_per_s > 1.5 * found.single_output_tokens_per_s
        assert (found.upstream_model, found.chunk_tokens) == ("small", points[-1].prompt_tokens)
        assert len(steps) == 2 * (4 + 1) + 4 + 2
        assert steps[0] == "warming up"
        assert {seen.headers["authorization"] for seen in replica.seen} == {"Bearer sk-gpu"}
        prompts = [seen.body["messages"][0]["content"] for seen in replica.seen]
        assert len({prompt[:16] for prompt in prompts}) == len(prompts) - 2  # two were sent again


async def test_a_replica_at_work_is_left_alone_and_an_idle_one_is_taken(tmp_path: Path) -> None:
    async with FakeVllm() as busy, FakeVllm() as idle:
        async with at_work(busy):
            address, *_ = await run(settings(tmp_path, busy.base_url, idle.base_url))
            assert address == idle.base_url
            assert len(busy.seen) == 1
            host = busy.base_url.partition("://")[2].removesuffix("/v1")
            with pytest.raises(
                OperatorError, match=f"no replica of gpu/small is idle: {busy.base_url} has 1 req"
            ):
                await run(settings(tmp_path, busy.base_url, idle.base_url), replace(WANTED, replica=host))
        with pytest.raises(OperatorError, match="gpu/small has no replica 'elsewhere:1'"):
            await run(settings(tmp_path, busy.base_url), replace(WANTED, replica="elsewhere:1"))


async def test_what_others_sent_meanwhile_spoils_it(tmp_path: Path) -> None:
    async with FakeVllm() as replica:
        (deployment,) = (found := settings(tmp_path, replica.base_url)).catalog.deployments

        def step(what: str) -> None:
            if what == "writing alone":  # as somebody else's prompt would
                replica.engine.counters.prompt_tokens += 100_000

        with pytest.raises(OperatorError, match="somebody else sent it 100000 tokens meanwhile"):
            await measure(found, deployment, WANTED, step)


@pytest.mark.parametrize(
    ("options", "wanted", "said"),
    [
        (Options(model="another"), WANTED, "HTTP 404: .*does not exist"),
        (Options(max_model_len=600), WANTED, "HTTP 400: .*maximum context length"),
    ],
)
async def test_what_a_replica_refuses_is_said(
    tmp_path: Path, options: Options, wanted: Wanted, said: str
) -> None:
    async with FakeVllm(options) as replica:
        with pytest.raises(OperatorError, match=said):
            await run(settings(tmp_path, replica.base_url), wanted)


async def test_a_replica_that_is_not_there_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match="no replica of gpu/small is idle: http://127.0.0.1:1/v1"):
        await run(settings(tmp_path))


async def test_a_replica_that_does_not_tell_what_it_cached_has_no_cached_rate(tmp_path: Path) -> None:
    async with FakeVllm(Options(details=False)) as replica:
        *_, found, _ = await run(settings(tmp_path, replica.base_url))
        assert found.cached_tokens_per_s is None


# --- what is kept -----------------------------------------------------------------------------------------


def test_what_was_measured_is_used_unless_the_configuration_says_otherwise(tmp_path: Path) -> None:
    def rate(more: str = "") -> float | None:
        (deployment,) = settings(tmp_path, more=more).catalog.deployments
        assert deployment.replicas is not None
        assert policy_of(deployment.replicas).tau == round(
            (deployment.replicas.prefill_tokens_per_s or 16_000) * 14
        )
        return deployment.replicas.prefill_tokens_per_s

    assert rate() is None
    assert keep(tmp_path, "gpu/small", MEASURED) == tmp_path / FILE
    assert keep(tmp_path, "gpu/other", replace(MEASURED, upstream_model="other")) == tmp_path / FILE
    assert rate() == 20_480.0
    assert rate(", prefill_tokens_per_s: 15928") == 15_928.0
    assert set(kept(tmp_path)) == {"gpu/small", "gpu/other"}
    keep(tmp_path, "gpu/small", replace(MEASURED, upstream_model="of another model"))
    assert rate() is None


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"gpu/small": {}}', '{"gpu/small": 3}', '{"gpu/small": {"prefill_tokens_per_s": 0}}'],
)
def test_a_file_that_cannot_be_read_is_as_good_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    assert kept(tmp_path) == {}
    keep(tmp_path, "gpu/small", MEASURED)
    assert kept(tmp_path) == {"gpu/small": MEASURED}
