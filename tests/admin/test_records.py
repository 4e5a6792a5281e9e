"""What can only be read."""

from __future__ import annotations

from pathlib import Path

from gateway.storage.ledger import SqlLedger
from tests.admin.office import Office
from tests.storage import worlds


async def test_the_configuration_in_force_is_shown_without_a_secret(it: Office) -> None:
    _, providers = await it.ask("GET", "/providers")
    (provider,) = providers["data"]
    assert (provider["name"], provider["base_url"], provider["credential"], provider["deployments"]) == (
        "acme",
        "http://127.0.0.1:1/v1",
        "acme",
        ["large-eu", "mini-eu"],
    )
    nowhere = dict.fromkeys(("source", "version", "created_at", "updated_at", "document"))
    assert (await it.ask("GET", "/credentials"))[1]["data"] == [
        {"name": "acme", "present": True, "providers": ["acme"], **nowhere}
    ]
    _, small = await it.ask("GET", "/deployments?tier=small")
    assert [(d["name"], d["health"]) for d in small["data"]] == [("mini-eu", "open")]
    assert [d["name"] for d in (await it.ask("GET", "/deployments?model=acme/large"))[1]["data"]] == [
        "large-eu"
    ]
    assert (await it.ask("GET", "/tiers"))[1]["data"] == [
        {"name": "fast", "default": False, "deployments": [], "fallbacks": [], **nowhere},
        {"name": "standard", "default": True, "deployments": ["large-eu"], "fallbacks": [], **nowhere},
        {"name": "small", "default": False, "deployments": ["mini-eu"], "fallbacks": [], **nowhere},
    ]
    _, rules = await it.ask("GET", "/rules")
    assert (rules["mode"], [(r["position"], r["name"], r["when"], r["target"]) for r in rules["data"]]) == (
        "active",
        [(1, "late", "task.step > 40", "small")],
    )
    _, prices = await it.ask("GET", "/prices?model=LARGE&at=2026-11-30")
    (price,) = prices["data"]
    assert (price["price"], price["usd_per_mtok"]) == (
        "acme/large",
        {
            "input": "3",
            "output": "15",
            "cache_read": "0.3",
            "cache_write_5m": None,
            "cache_write_1h": None,
            "cache_write_12h": None,
        },
    )


async def test_the_ledger_in_pages_and_by_filter(on: Office, tmp_path: Path) -> None:
    ledger = await SqlLedger.open(on.database, replica_id="r1", journal_dir=tmp_path / "journal")
    requests = []
    for n in range(5):
        attempt = worlds.attempt(model="sonnet" if n % 2 else "mini", started_at_ms=worlds.NOON_MS + n)
        await worlds.reserve(ledger, attempt, 50_000_000)
        await ledger.settle(attempt, worlds.outcome(n + 1))
        requests.append(attempt.request_id)
    await ledger.close()

    found = []
    more = ""
    while True:
        _, page = await on.ask("GET", f"/ledger?limit=2{more}")
        found += page["data"]
        if not page["has_more"]:
            break
        more = f"&cursor={page['next_cursor']}"
    assert [e["request_id"] for e in found] == requests[::-1], "the latest first"
    assert [e["amount_usd"] for e in found][:2] == ["0.000000005", "0.000000004"]
    assert "budgets" not in found[0]
    assert (
        len((await on.ask("GET", "/ledger?model=sonnet&since=2026-09-21&until=2026-09-22"))[1]["data"]) == 2
    )
    assert (await on.ask("GET", "/ledger?until=2026-09-21"))[1]["data"] == []

    _, one = await on.ask("GET", f"/requests/{requests[0]}")
    assert [e["model"] for e in one["entries"]] == ["mini"]
    assert one["prefix"] == (await on.ask("GET", f"/requests/{requests[0]}/prefix"))[1]


async def test_the_audit_trail_by_who_and_what(on: Office) -> None:
    await on.ask("POST", "/teams", {"name": "research"})
    _, key = await on.ask("POST", "/keys", {"name": "ci", "team": "research"})
    await on.ask("DELETE", f"/keys/{key['key_id']}")
    _, page = await on.ask("GET", f"/audit?actor=admin&subject=key:{key['key_id']}")
    assert [e["action"] for e in page["data"]] == ["key.revoke", "key.create"]
    assert page["data"][1]["body"] == {"name": "ci", "team_id": "research", "task_id": None}
    _, made = await on.ask("GET", "/audit?action=team.create&actor=admin")
    assert [(e["subject"], e["body"]["tenant_id"]) for e in made["data"]] == [("team:research", "default")]


async def test_which_clients_are_told_apart_and_what_each_did(on: Office, tmp_path: Path) -> None:
    ledger = await SqlLedger.open(on.database, replica_id="r1", journal_dir=tmp_path / "journal")
    for client in ("codex", "codex", "aider"):
        attempt = worlds.attempt(client=client)
        await worlds.reserve(ledger, attempt, 50_000_000)
        await ledger.settle(attempt, worlds.outcome(7))
    await ledger.close()
    times = "since=2026-09-21&until=2026-09-22"
    _, page = await on.ask("GET", f"/clients?{times}")
    assert [(c["client"], c["attempts"], c["cost_usd"]) for c in page["data"]][:3] == [
        ("codex", 2, "0.000000014"),
        ("aider", 1, "0.000000007"),
        ("ai-sdk", 0, "0"),
    ]
    _, one = await on.ask("GET", f"/clients/openai-python?{times}")
    assert (one["library"], one["known_by"]) == (
        True,
        ["User-Agent: openai/python...", "User-Agent: asyncopenai/python..."],
    )
    assert (await on.ask("GET", "/clients/nobody"))[0] == 404
    status, problem = await on.ask("GET", "/clients?since=2026-09-22&until=2026-09-21")
    assert (status, problem["errors"][0]["field"]) == (422, "until")
