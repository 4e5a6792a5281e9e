"""What the listener does before a resource is asked: probes, the door, sizes, shapes of errors."""

from __future__ import annotations

import aiohttp
import pytest

from gateway.admin.server import BODY_BYTES_MAX
from tests.admin.office import Office, office
from tests.storage import worlds


async def test_probes_and_metrics_are_open(it: Office) -> None:
    async with it.http.get("/livez") as answer:
        assert (answer.status, await answer.json()) == (200, {"status": "alive"})
    async with it.http.get("/readyz") as answer:
        assert (answer.status, await answer.json()) == (200, {"status": "ready", "reasons": []})
    async with it.http.get("/metrics") as answer:
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert await answer.text() == "tollhouse_up 1\n"

    it.reasons.append("the ledger does not answer")
    async with it.http.get("/readyz") as answer:
        assert (answer.status, await answer.json()) == (
            503,
            {"status": "not ready", "reasons": ["the ledger does not answer"]},
        )


@pytest.mark.parametrize("key", [None, "", "wrong", "gw-abcdefgh-" + "x" * 43])
async def test_every_resource_needs_an_admin_key(it: Office, key: str | None) -> None:
    for method, path in (
        ("GET", "/keys"),
        ("POST", "/keys"),
        ("GET", "/requests/req_1"),
        ("PUT", "/budgets"),
    ):
        status, body = await it.ask(method, path, {}, key=key)
        assert (status, body["title"]) == (401, "Unauthorized")
        assert key is None or len(key) < 10 or key not in str(body)


async def test_wrong_keys_are_slowed_down_and_the_right_one_still_opens(it: Office) -> None:
    statuses = [(await it.ask("GET", "/teams", key=f"guess-{n}"))[0] for n in range(12)]
    assert statuses == [401] * 10 + [429] * 2
    async with it.http.get("/admin/v1/teams", headers={"Authorization": "Bearer guess"}) as answer:
        assert (answer.status, answer.headers["Retry-After"]) == (429, "60")
    assert (await it.ask("GET", "/teams"))[0] == 200

    it.clock_s += 61
    assert (await it.ask("GET", "/teams", key="guess"))[0] == 401


async def test_the_key_is_asked_for_before_the_body_is_read(it: Office) -> None:
    async with it.http.post("/admin/v1/keys", data=b"x" * (BODY_BYTES_MAX + 1)) as answer:
        assert answer.status == 401


@pytest.mark.parametrize(
    ("more", "status", "detail"),
    [
        ({"data": b"{" * 10}, 400, "The body is not valid JSON."),
        ({"data": b"[" * 100_000}, 400, "The body is not valid JSON."),
        ({"data": b'{"name": "' + b"x" * BODY_BYTES_MAX + b'"}'}, 413, f"The body is larger than {BODY_BYTES_MAX} bytes."),
        ({"data": b"{}", "headers": {"Content-Type": "text/plain"}}, 415, "The body must be application/json."),
        ({"data": b"\x1f\x8b", "headers": {"Content-Encoding": "gzip"}}, 415, "Compressed bodies are not accepted."),
    ],
    ids=["broken", "deep", "large", "no json", "compressed"],
)  # fmt: skip
async def test_bad_bodies_are_told_apart(
    it: Office, more: dict[str, object], status: int, detail: str
) -> None:
    given = more.pop("headers", {})
    assert isinstance(given, dict)
    headers = {"Authorization": "Bearer admin-key-of-the-tests", "Content-Type": "application/json", **given}
    data = more["data"]
    assert isinstance(data, bytes)
    async with it.http.post("/admin/v1/teams", data=data, headers=headers) as answer:
        assert answer.content_type == "application/problem+json"
        body = await answer.json()
    assert (answer.status, body["status"], body["detail"]) == (status, status, detail)


async def test_unknown_addresses_and_methods_are_problems_too(it: Office) -> None:
    status, body = await it.ask("GET", "/nothing")
    assert (status, body["type"], body["title"]) == (404, "about:blank", "Not Found")
    status, body = await it.ask("DELETE", "/keys")
    assert (status, body["detail"]) == (405, "This address does not take that method.")


async def test_the_unforeseen_says_nothing_about_itself(it: Office) -> None:
    await worlds.run(it.database, "DROP TABLE task")
    status, body = await it.ask("GET", "/tasks")

    assert (status, body["detail"]) == (500, "The admin API failed; the log says why.")
    assert [where for where, _ in it.faults] == ["GET /admin/v1/tasks"]


async def test_a_stopped_listener_is_gone(sqlite_url: str) -> None:
    async with office(sqlite_url) as it:
        url = it.url
    async with aiohttp.ClientSession() as http:
        with pytest.raises(aiohttp.ClientConnectorError):
            await http.get(f"{url}/livez")
