"""Prices of one's own: stated, seen, ended, never changed once charged; and charged by every replica within a second."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import aiohttp

from gateway.administration import admin_token
from gateway.app import App
from gateway.settings import Secret, ensure_pepper
from tests.admin.office import Office
from tests.support.running import Running, running

RATES = {"input_usd_per_mtok": "2", "output_usd_per_mtok": "8.5"}
LATER = {"valid_from": "2099-01-01T00:00:00Z", "valid_to": "2099-02-01T00:00:00Z"}


async def listed(it: Office, at: str = "") -> list[tuple[str, str, str | None]]:
    """(origin, price of input, end) of the rows of acme/large, by time."""
    _, page = await it.ask("GET", "/prices?model=acme/large" + (f"&at={at}" if at else ""))
    return [(row["origin"], row["usd_per_mtok"]["input"], row["valid_to"]) for row in page["data"]]


async def test_a_price_is_stated_and_what_it_goes_before_holds_around_it(on: Office) -> None:
    wanted = {"price": "acme/large", "rates": RATES, **LATER, "source": "contract 7"}
    once = {"Idempotency-Key": "contract"}
    status, made, told = await on.told("POST", "/prices", wanted, headers=once)
    assert (await on.told("POST", "/prices", wanted, headers=once))[:2] == (201, made), "once"
    assert (status, made["origin"], made["usd_per_mtok"]["output"]) == (201, "api", "8.5")
    assert (made["valid_from"], made["valid_to"]) == ("2099-01-01T00:00:00.000Z", "2099-02-01T00:00:00.000Z")
    assert (made["deployments"], made["source"]) == (["large-eu"], "contract 7")
    assert await listed(on) == [
        ("release", "3", "2099-01-01T00:00:00.000Z"),
        ("api", "2", "2099-02-01T00:00:00.000Z"),
        ("release", "3", None),
    ]
    assert await listed(on, "2099-01-31") == [("api", "2", "2099-02-01T00:00:00.000Z")]

    path = f"/prices/{made['price_id']}"
    assert (await on.told("GET", path))[1:] == (made, (await on.told("GET", path))[2])
    stale = {"If-Match": '"stale"'}
    assert (await on.told("PATCH", path, {"per_request_usd": "0.01"}, headers=stale))[0] == 412
    seen = {"If-Match": told["ETag"]}
    status, patched, _ = await on.told(
        "PATCH", path, {"per_request_usd": "0.01", "valid_to": None}, headers=seen
    )
    assert (status, patched["per_request_usd"], patched["valid_to"]) == (200, "0.01", None)
    assert (await on.ask("DELETE", path))[0] == 200
    assert (await on.ask("GET", path))[0] == 404
    assert await listed(on) == [("release", "3", None)]
    _, trail = await on.ask("GET", f"/audit?subject=price:{made['price_id']}")
    assert [entry["action"] for entry in trail["data"]] == ["price.delete", "price.change", "price.create"]
    assert trail["data"][2]["body"]["row"]["rates"] == RATES


async def test_what_was_charged_stays_charged(on: Office) -> None:
    _, first = await on.ask("POST", "/prices", {"price": "acme/large", "rates": RATES})
    path = f"/prices/{first['price_id']}"
    for patch in (
        {"rates": {**RATES, "input_usd_per_mtok": "1"}},
        {"source": "x"},
        {"valid_from": "2099-01-01T00:00:00Z"},
    ):
        status, problem = await on.ask("PATCH", path, patch)
        assert (status, "has begun, and what was charged stays charged" in problem["detail"]) == (409, True)
    status, problem = await on.ask("PATCH", path, {"valid_to": "2020-01-01T00:00:00Z"})
    assert (status, problem["errors"][0]["field"]) == (400, "valid_to")
    status, problem = await on.ask(
        "POST", "/prices", {"price": "acme/large", "rates": RATES, "valid_from": "2026-01-01T00:00:00Z"}
    )
    assert (status, problem["errors"][0]["field"]) == (400, "valid_from")

    # The next one ends it; its own end gives the price back to the configuration.
    status, second = await on.ask(
        "POST", "/prices", {"price": "acme/large", "rates": {**RATES, "input_usd_per_mtok": "1"}}
    )
    assert status == 201, second
    status, ended = await on.ask("DELETE", f"/prices/{second['price_id']}")
    assert (status, ended["valid_to"] is not None) == (200, True)
    assert [(origin, usd) for origin, usd, _ in await listed(on)] == [
        ("release", "3"),
        ("api", "2"),
        ("api", "1"),
        ("release", "3"),
    ]


async def test_a_row_that_a_later_one_has_ended_stays_ended_there(on: Office) -> None:
    first, second = [
        (
            await on.ask(
                "POST", "/prices", {"price": "acme/large", "rates": {**RATES, "input_usd_per_mtok": usd}}
            )
        )[1]
        for usd in ("1", "2")
    ]
    status, ended = await on.ask("DELETE", f"/prices/{first['price_id']}")
    assert (status, ended["valid_to"]) == (200, second["valid_from"])
    assert [(origin, usd) for origin, usd, _ in await listed(on)] == [
        ("release", "3"),
        ("api", "1"),
        ("api", "2"),
    ]


async def test_mistakes_are_named_and_nothing_is_half_done(on: Office) -> None:
    for wrong, field in (
        ({"price": "acme/lerge"}, "price"),
        ({"rates": {"input_usd_per_mtok": "1"}}, "rates.output_usd_per_mtok"),
        ({"rates": {**RATES, "input_usd_per_mtok": 1.5}}, "rates.input_usd_per_mtok"),
        ({"rates": {**RATES, "input_usd_per_mtok": "999999"}}, "rates"),
        ({"rates": {**RATES, "input_usd_per_mtok": "0.000000001"}}, "rates.input_usd_per_mtok"),
        ({"valid_to": "2099-01-01T00:00:00Z", "valid_from": "2099-02-01T00:00:00Z"}, "valid_to"),
        ({"hours": [{"from": "25:00", "to": "06:00", "rates": RATES}]}, "hours.0.from"),
        ({"service_tiers": {"flex": {}}}, "service_tiers.flex"),
        ({"tier": "small"}, "tier"),
    ):
        row: dict[str, Any] = {"price": "acme/large", "rates": RATES, **LATER, **wrong}
        status, problem = await on.ask("POST", "/prices", row)
        assert (status in (400, 422), problem["errors"][0]["field"]) == (True, field), problem
        good = {"price": "acme/mini", "rates": RATES}
        status, problem = await on.ask("POST", "/prices/bulk", {"prices": [good, row]})
        assert (status in (400, 422), problem["errors"][0]["field"]) == (True, f"prices.1.{field}"), problem
    assert await on.rows("SELECT count(*) FROM own_price") == [(0,)]

    row = {"price": "acme/large", "rates": RATES, **LATER}
    status, problem = await on.ask("POST", "/prices/bulk", {"prices": [row, row]})
    assert (status, problem["errors"][0]["field"]) == (400, "prices.1.valid_from")
    assert await on.rows("SELECT count(*) FROM own_price") == [(0,)]
    made = await asyncio.gather(*(on.ask("POST", "/prices", row) for _ in range(8)))
    assert sorted(status for status, _ in made) == [201] + [400] * 7, "of those that overlap one is made"


async def test_replicas_charge_it_within_a_second_and_the_past_stays(
    postgres_url: str, tmp_path: Path
) -> None:
    async with running(postgres_url) as gw:
        pepper = Secret(ensure_pepper(gw.app.settings).decode())
        settings = dataclasses.replace(gw.app.settings, state_dir=tmp_path, pepper=pepper)
        async with App(settings, replica_id="other", access_log=False) as other:
            before = await charged(gw, gw.app)
            headers = {"Authorization": f"Bearer {admin_token(gw.app.settings)}"}
            url = f"http://127.0.0.1:{gw.app.admin_port}/admin/v1/prices"
            wanted = {
                "price": "own:demo/demo-fast",
                "rates": {"input_usd_per_mtok": "0", "output_usd_per_mtok": "0"},
                "per_request_usd": "1.25",
            }
            began_s = asyncio.get_running_loop().time()
            async with aiohttp.ClientSession(headers=headers) as http:
                async with http.post(url, json=wanted) as answer:
                    assert answer.status == 201, await answer.text()
                for app in (gw.app, other):
                    while await charged(gw, app) != 1_250_000_000:
                        assert asyncio.get_running_loop().time() - began_s < 5
                async with http.get(f"{url}?model=own:demo/demo-fast") as answer:
                    rows = (await answer.json())["data"]
            assert [row["origin"] for row in rows] == ["configuration", "api"]
            entries = await gw.entries()
            assert min(entries, key=lambda e: e["at_ms"])["amount_nano_usd"] == before
            priced = {e["price_version"] for e in entries if e["amount_nano_usd"] == 1_250_000_000}
            assert priced == {rows[1]["price_id"]}


async def charged(gw: Running, app: App) -> int:
    """What one call costs there."""
    url = f"http://127.0.0.1:{app.edge.port}/v1/chat/completions"
    body = {"model": "demo-fast", "messages": [{"role": "user", "content": "demo:output=3"}]}
    async with gw.http.post(url, json=body) as answer:
        assert answer.status == 200, await answer.text()
        request_id = answer.headers["x-request-id"]
    await app.quiet()
    return next(int(e["amount_nano_usd"]) for e in await gw.entries() if e["request_id"] == request_id)
