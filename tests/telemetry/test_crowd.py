"""The pages of several workers as one, whoever of them dies."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.telemetry.crowd import Page, Told, merged, told, total
from gateway.telemetry.page import OPENMETRICS, Exemplar, Family, Sample, wants_openmetrics, written
from gateway.telemetry.peers import Peers
from gateway.telemetry.series import Counter, Gauge, Histogram


def counter(value: int, label: str = "x") -> Family:
    return Family("t_usd_total", "counter", "T.", ("a",), (Sample((label,), value),), nano=True)


def values(families: list[Family]) -> dict[str, dict[tuple[str, ...], float]]:
    return {f.name: {s.labels: s.value for s in f.samples} for f in families}


def test_counters_and_buckets_add_up_and_gauges_by_their_rule() -> None:
    def page(count: int, took_s: float, available: float) -> list[Family]:
        counted, timed = Counter("t_total", "T.", ("a",)), Histogram("t_seconds", "T.", (), (0.1, 1.0))
        counted.add(("x",), count)
        timed.observe((), took_s)
        well = Gauge("t_available", "T.", lambda: available, across="min")
        inside = Gauge("t_inside", "T.", lambda: {("x",): 2.0}, ("a",))
        return [counted.read(), timed.read(), well.read(), inside.read()]

    assert written(merged([page(3, 0.05, 1.0), page(4, 0.5, 0.0), page(5, 7.0, 1.0)])).decode() == (
        "# HELP t_total T.\n# TYPE t_total counter\n"
        't_total{a="x"} 12\n'
        "# HELP t_seconds T.\n# TYPE t_seconds histogram\n"
        't_seconds_bucket{le="0.1"} 1\n'
        't_seconds_bucket{le="1.0"} 2\n'
        't_seconds_bucket{le="+Inf"} 3\n'
        "t_seconds_sum 7.55\n"
        "t_seconds_count 3\n"
        "# HELP t_available T.\n# TYPE t_available gauge\n"
        "t_available 0.0\n"
        "# HELP t_inside T.\n# TYPE t_inside gauge\n"
        't_inside{a="x"} 6.0\n'
    )


def test_dollars_add_up_to_the_nano() -> None:
    page = merged([[counter(9_007_199_254_740_993)], [counter(1)], [counter(1, "y")]])
    assert b't_usd_total{a="x"} 9007199.254740994\n' in written(page)


def test_what_a_dead_worker_has_told_stays_and_its_gauges_go() -> None:
    gauge = Family("t", "gauge", "T.", (), (Sample((), 1.0),))
    first = Page(0, 100, (counter(5), gauge))
    other = Page(1, 100, (counter(7), gauge))
    memory = {0: told(None, first), 1: told(None, other)}
    assert values(total(memory, [first, other])) == {"t_usd_total": {("x",): 12}, "t": {(): 2.0}}

    assert values(total(memory, [other])) == {"t_usd_total": {("x",): 12}, "t": {(): 1.0}}

    again = Page(0, 200, (counter(1), gauge))
    memory[0] = told(memory[0], again)
    assert values(total(memory, [again, other])) == {"t_usd_total": {("x",): 13}, "t": {(): 2.0}}
    assert told(memory[0], first) == memory[0], "a slow scrape brings what was told long ago"


def test_hours_that_every_worker_counts_are_counted_once_whoever_dies() -> None:
    """Four hours of one replica: the first worker died after two, the one in its place has seen the last one."""

    def page(index: int, born_ns: int, hours: float) -> Page:
        replicas = Family("t_hours_total", "counter", "T.", ("d",), (Sample(("gpu",), hours),), across="max")
        return Page(index, born_ns, (replicas,))

    second = page(1, 100, 4.0)
    memory = {0: told(None, page(0, 100, 2.0)), 1: told(None, second)}
    assert values(total(memory, [second])) == {"t_hours_total": {("gpu",): 4.0}}
    again = page(0, 200, 1.0)
    memory[0] = told(memory[0], again)
    assert memory[0].gone == page(0, 100, 2.0).families
    assert values(total(memory, [again, second])) == {"t_hours_total": {("gpu",): 4.0}}
    memory[0] = told(memory[0], page(0, 200, 2.5))
    assert values(total(memory, [second])) == {"t_hours_total": {("gpu",): 4.5}}, "two and two and a half"


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=30), st.randoms())
def test_no_order_of_scrapes_makes_a_counter_fall(steps: list[tuple[int, int]], random: Random) -> None:
    """Readings of processes that live one after the other, told in any order: each told total is at least the last."""
    readings: list[Page] = []
    counted: dict[int, int] = {}
    for born, more in steps:
        counted[born] = counted.get(born, 0) + more
        readings.append(Page(0, born, (counter(counted[born]),)))
    random.shuffle(readings)
    memory: Told | None = None
    last = 0.0
    for reading in readings:
        memory = told(memory, reading)
        now = values(total({0: memory}, []))["t_usd_total"]["x",]
        assert last <= now <= sum(counted.values())
        last = now


def test_the_newest_request_of_a_bucket_is_its_exemplar() -> None:
    def page(at_s: float) -> list[Family]:
        timed = Histogram("t_seconds", "T.", ("a",), (0.1, 1.0))
        timed.observe(("x",), 0.5)
        timed.exemplify(("x",), Exemplar(0.5, f"{int(at_s):032x}", f"{7:016x}", at_s))
        return [timed.read()]

    families = [*merged([page(2.0), page(1.0)]), counter(3)]
    assert written(families, openmetrics=True).decode() == (
        "# TYPE t_seconds histogram\n# HELP t_seconds T.\n"
        't_seconds_bucket{a="x",le="0.1"} 0\n'
        't_seconds_bucket{a="x",le="1.0"} 2 # {trace_id="00000000000000000000000000000002",span_id="0000000000000007"} 0.5 2.000\n'
        't_seconds_bucket{a="x",le="+Inf"} 2\n'
        't_seconds_sum{a="x"} 1.0\n'
        't_seconds_count{a="x"} 2\n'
        "# TYPE t_usd counter\n# HELP t_usd T.\n"
        't_usd_total{a="x"} 0.000000003\n'
        "# EOF\n"
    )
    assert b"#" not in written(families).replace(b"# HELP", b"").replace(b"# TYPE", b"")


@pytest.mark.parametrize(
    ("accept", "openmetrics"),
    [
        ("", False),
        ("*/*", False),
        ("text/plain", False),
        ("application/openmetrics-text", True),
        ("application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1", True),
        ("application/openmetrics-text;q=0.2, text/plain;q=0.9", False),
        ("application/openmetrics-text;q=0", False),
        ("application/openmetrics-text;q=nonsense", False),
    ],
)
def test_openmetrics_is_for_those_who_prefer_it(accept: str, openmetrics: bool) -> None:
    assert wants_openmetrics(accept) is openmetrics
    assert OPENMETRICS.startswith("application/openmetrics-text; version=1.0.0")


class Crowd:
    """Three workers in one directory; `counted[i]` is what number `i` counts."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.counted = [1, 20, 300]

    def peers(self, index: int) -> Peers:
        def read() -> list[Family]:
            up = Family("t_workers", "gauge", "T.", (), (Sample((), 1.0),))
            return [counter(self.counted[index]), up]

        return Peers(self.directory, index, read)


@pytest.fixture
def crowd(tmp_path: Path) -> Crowd:
    return Crowd(tmp_path)


async def test_whoever_is_asked_tells_all_and_forgets_nobody(crowd: Crowd) -> None:
    one, two, three = (crowd.peers(index) for index in range(3))
    for each in (one, two, three):
        await each.start()
    both = await asyncio.gather(one.families(), three.families())
    assert [values(page) for page in both] == [{"t_usd_total": {("x",): 321}, "t_workers": {(): 3.0}}] * 2

    assert two._server is not None
    two._server.close()  # as if it were killed
    crowd.counted[0] = 2
    assert values(await three.families()) == {"t_usd_total": {("x",): 322}, "t_workers": {(): 2.0}}

    crowd.counted[1] = 5
    again = crowd.peers(1)
    await again.start()
    assert values(await one.families()) == {"t_usd_total": {("x",): 327}, "t_workers": {(): 3.0}}

    crowd.counted[1] = 6
    await again.close()  # one that ends by itself says its last word
    assert values(await one.families()) == {"t_usd_total": {("x",): 328}, "t_workers": {(): 2.0}}
    await one.close()
    await three.close()


async def test_a_port_that_belongs_to_somebody_else_by_now_is_no_worker(crowd: Crowd) -> None:
    async def stranger(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example ready\r\n")
        writer.close()

    one, two = crowd.peers(0), crowd.peers(1)
    await one.start()
    await two.start()
    assert two._server is not None
    port = two._server.sockets[0].getsockname()[1]
    two._server.close()
    await two._server.wait_closed()
    async with await asyncio.start_server(stranger, "127.0.0.1", port):
        assert values(await one.families()) == {"t_usd_total": {("x",): 1}, "t_workers": {(): 1.0}}
    await one.close()
