"""One scrape of a gateway with several workers tells what all of them have counted, whichever of them is asked."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import aiohttp

from gateway.storage import replica_names
from tests.e2e.test_processes import listeners, statuses, until, workers_of
from tests.support.running import Serving, Tollhouse

OK = re.compile(r'^tollhouse_requests_total\{operation="chat",.*status_class="2xx"\} (\d+)$', re.MULTILINE)
WORKERS = re.compile(r"^tollhouse_workers (\S+)$", re.MULTILINE)


async def scrape(serving: Serving) -> tuple[int, float]:
    """Answered chats and workers, on a connection of its own: the kernel picks a worker."""
    url = await serving.says(r"\(admin: (http://[^)]+)\)")
    async with aiohttp.ClientSession() as http, http.get(f"{url}/metrics") as answer:
        page = await answer.text()
    assert answer.status == 200, page
    return sum(map(int, OK.findall(page))), float(WORKERS.findall(page)[0])


async def test_any_worker_tells_the_totals_of_all_also_of_one_that_was_killed(
    tmp_path: Path, postgres_url: str
) -> None:
    tollhouse = Tollhouse(tmp_path, postgres_url, listen="127.0.0.1:0", workers=3, log_level="warning")
    async with tollhouse.serve("--first-run") as serving:
        await until(lambda: listeners(serving.url) == 3)
        assert await statuses(serving.url, serving.key, 40) == {200: 40}
        assert [await scrape(serving) for _ in range(8)] == [(40, 3.0)] * 8

        os.kill(workers_of(serving)[1], signal.SIGKILL)
        await until(lambda: listeners(serving.url) == 2)
        assert [await scrape(serving) for _ in range(4)] == [(40, 2.0)] * 4

        await until(lambda: listeners(serving.url) == 3)
        assert await statuses(serving.url, serving.key, 20) == {200: 20}
        assert [await scrape(serving) for _ in range(8)] == [(60, 3.0)] * 8
        (meeting,) = (tollhouse.state / "workers").iterdir()
        assert {p.name for p in meeting.glob("worker-*")} == {f"worker-{n}.json" for n in range(3)}
        assert await serving.end() == 0
    assert not meeting.exists()


def test_two_gateways_on_any_port_have_names_of_their_own_and_find_them_again(tmp_path: Path) -> None:
    with replica_names.taken(tmp_path, 0) as one:
        with replica_names.taken(tmp_path, 0) as two:
            assert one != two
        with replica_names.taken(tmp_path, 0) as again:
            assert again == two
    with replica_names.taken(tmp_path, 0) as restarted:
        assert restarted == one
    with replica_names.taken(tmp_path / "elsewhere", 0) as elsewhere:
        assert elsewhere not in (one, two)
    with replica_names.taken(tmp_path, 4000) as fixed:
        assert fixed.endswith("-4000")


async def test_two_gateways_on_one_store_do_not_fence_one_another(tmp_path: Path, postgres_url: str) -> None:
    (tmp_path / "other").mkdir()
    first = Tollhouse(tmp_path, postgres_url, listen="127.0.0.1:0", log_level="warning", pepper="p" * 32)
    second = Tollhouse(
        tmp_path / "other", postgres_url, listen="127.0.0.1:0", log_level="warning", pepper="p" * 32
    )
    async with first.serve("--first-run") as one, second.serve() as two:
        for _ in range(2):
            assert await statuses(one.url, one.key, 3) == {200: 3}
            assert await statuses(two.url, one.key, 3) == {200: 3}
        assert (await one.end(), await two.end()) == (0, 0)
