"""`/v1/tasks`: what is refused and why, who sees what, on a whole gateway over SQLite."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest

from gateway.core.catalog import Operation
from gateway.core.task import CHILDREN_MAX, DEPTH_MAX
from gateway.edge.urls import Target, resolve
from gateway.settings import ensure_pepper
from gateway.storage.accounts import Accounts, Team
from gateway.storage.tasks import Tasks
from tests.support.running import Running, running

TASKS = "/v1/tasks"


@dataclass
class Desk:
    gw: Running

    async def send(self, method: str, path: str, body: object = None, key: str = "") -> tuple[int, Any]:
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {key or self.gw.key}"}
        async with self.gw.http.request(method, path, data=data, headers=headers) as answer:
            return answer.status, await answer.json()

    async def declare(self, limit: str = "1", key: str = "", **more: object) -> Any:
        body = {"name": "run", "budgets": [{"unit": "usd", "limit": limit}], **more}
        status, doc = await self.send("POST", TASKS, body, key)
        assert status == 201, doc
        return doc

    async def refused(
        self, path: str, body: object = None, key: str = "", method: str = "POST"
    ) -> tuple[int, str, str | None]:
        """(status, code, field) of an error in OpenAI's shape."""
        status, doc = await self.send(method, path, body, key)
        assert list(doc) == ["error"], doc
        error = doc["error"]
        assert sorted(error) == ["code", "message", "param", "type"]
        return status, error["code"], error["param"]

    async def other_key(self) -> str:
        accounts = Accounts(self.gw.app.database, actor="test")
        _, text = await accounts.create_key(pepper=ensure_pepper(self.gw.app.settings), name="other")
        return text


@pytest.fixture
async def desk(sqlite_url: str) -> AsyncIterator[Desk]:
    async with running(sqlite_url) as gw:
        yield Desk(gw)


def budget(**fields: object) -> dict[str, object]:
    return {"name": "n", "budgets": [{"unit": "usd", "limit": "1"} | fields]}


BAD: list[tuple[str, object, str | None]] = [
    ("empty", b"", None),
    ("not json", b"{", None),
    ("not utf-8", b'{"name":"\xff"}', None),
    ("deep", b"[" * 60_000, None),
    ("digits without end", b'{"name":"n","budgets":[{"unit":"calls","limit":' + b"9" * 5_000 + b"}]}", None),
    ("an array", [], None),
    ("no name", {}, "name"),
    ("name is empty", {"name": ""}, "name"),
    ("name with NUL", {"name": "a\0b"}, "name"),
    ("name is long", {"name": "n" * 201}, "name"),
    ("unknown field", {"name": "n", "budget": 5}, "budget"),
    ("unknown field of a budget", budget(amount=1), "budgets[0].amount"),
    ("unknown unit", budget(unit="eur"), "budgets[0].unit"),
    ("dollars as a float", budget(limit=0.1), "budgets[0].limit"),
    ("dollars with an exponent", budget(limit="1e3"), "budgets[0].limit"),
    ("negative dollars", budget(limit="-1"), "budgets[0].limit"),
    ("too many dollars", budget(limit="100000000.01"), "budgets[0].limit"),
    ("finer than can be kept", budget(limit="0.0000000001"), "budgets[0].limit"),
    ("dollars without end", budget(limit="0" * 41), "budgets[0].limit"),
    ("tokens as a text", budget(unit="input_tokens", limit="5"), "budgets[0].limit"),
    ("tokens as a truth", budget(unit="input_tokens", limit=True), "budgets[0].limit"),
    ("negative tokens", budget(unit="output_tokens", limit=-1), "budgets[0].limit"),
    ("too many calls", budget(unit="calls", limit=10**17 + 1), "budgets[0].limit"),
    ("calls beyond 64 bits", budget(unit="calls", limit=10**30), "budgets[0].limit"),
    ("another window", budget(window="month"), "budgets[0].window"),
    ("unknown end", budget(on_exceed="explode"), "budgets[0].on_exceed"),
    ("ratio above one", budget(alert_ratios=[0.5, 1.5]), "budgets[0].alert_ratios[1]"),
    ("ratio too fine", budget(alert_ratios=[0.555]), "budgets[0].alert_ratios"),
    ("a unit twice", {"name": "n", "budgets": [{"unit": "calls", "limit": 1}] * 2}, "budgets"),
    ("label is a number", {"name": "n", "labels": {"k": 1}}, "labels.k"),
    ("parent is a number", {"name": "n", "parent": 1}, "parent"),
]


async def test_bad_declarations_name_the_field_and_leave_nothing_behind(desk: Desk) -> None:
    for name, body, param in BAD:
        assert await desk.refused(TASKS, body) == (400, "invalid_request", param), name
    assert await desk.refused(TASKS, b" " * 65_537) == (413, "request_too_large", None)
    assert await desk.refused(TASKS, {"name": "n", "parent": "nope"}) == (404, "not_found", "parent")
    accounts = Accounts(desk.gw.app.database, actor="test")
    assert await accounts.list_tasks() == []
    assert len(await accounts.list_keys()) == 1


async def test_bad_changes_name_the_field(desk: Desk) -> None:
    task = await desk.declare()
    at = f"{TASKS}/{task['id']}"
    change = {"unit": "usd", "limit": "2", "reason": "more"}
    for path, body, param in [
        ("budgets", {**change, "reason": ""}, "reason"),
        ("budgets", {**change, "limit": "-2"}, "limit"),
        ("budgets", {**change, "unit": "calls", "limit": 1}, "unit"),
        ("budgets", {**change, "window": "day"}, "window"),
        ("outcome", {}, "success"),
        ("outcome", {"success": 1}, "success"),
        ("outcome", {"success": True, "score": "high"}, "score"),
        ("outcome", b'{"success": true, "score": 1' + b"0" * 400 + b"}", "score"),
        ("outcome", b'{"success": true, "score": NaN}', None),
        ("outcome", {"success": True, "labels": {"a": "\n"}}, "labels.a"),
        ("done", {"why": "x"}, "why"),
        ("done", b"null", None),
    ]:
        assert await desk.refused(f"{at}/{path}", body) == (400, "invalid_request", param), (path, body)
    _, seen = await desk.send("GET", at)
    assert (seen["state"], seen["outcome"], seen["remaining_usd"]) == ("running", None, "1")


async def test_what_a_declaration_says_is_what_is_shown(desk: Desk) -> None:
    budgets = [
        {"unit": "usd", "limit": "0.50", "on_exceed": "summarize", "alert_ratios": [0.9, 0.25]},
        {"unit": "input_tokens", "limit": 9_000, "on_exceed": "warn", "window": "lifetime"},
    ]
    status, doc = await desk.send("POST", TASKS, {"name": "run", "labels": {"repo": "x"}, "budgets": budgets})
    assert status == 201
    assert doc.pop("key").startswith("gw-")
    assert doc == {
        "object": "task",
        "id": doc["id"],
        "name": "run",
        "state": "running",
        "state_reason": "",
        "steps": 0,
        "attempts": 0,
        "cost_usd": "0",
        "parent": None,
        "depth": 0,
        "external_id": "",
        "source": "declared",
        "labels": {"repo": "x"},
        "created_at": doc["created_at"],
        "last_at": doc["created_at"],
        "spent_usd": "0",
        "held_usd": "0",
        "remaining_usd": "0.49",
        "next_step_usd": None,
        "steps_left": None,
        "budgets": doc["budgets"],
        "budgets_above": [],
        "children": [],
        "outcome": None,
        "breakers": [],
    }
    assert sorted(doc["budgets"], key=lambda b: str(b["unit"]), reverse=True) == [
        {
            "unit": "usd",
            "limit": "0.5",
            "spent": "0",
            "held": "0",
            "kept_back": "0.01",
            "remaining": "0.49",
            "window": "lifetime",
            "on_exceed": "summarize",
            "alert_ratios": [0.25, 0.9],
        },
        {
            "unit": "input_tokens",
            "limit": 9_000,
            "spent": 0,
            "held": 0,
            "kept_back": 0,
            "remaining": 9_000,
            "window": "lifetime",
            "on_exceed": "warn",
            "alert_ratios": [0.5, 0.8, 0.9, 1.0],
        },
    ]
    cache = {"saved_usd": "0", "lost_usd": "0", "misses": []}
    assert await desk.send("GET", f"/t/other/tasks/{doc['id']}") == (200, {**doc, "cache": cache})


async def test_a_task_without_a_dollar_budget_gets_its_teams(desk: Desk) -> None:
    await Accounts(desk.gw.app.database, actor="test").put_team(Team("default", task_budget_nano_usd=10**9))
    status, doc = await desk.send("POST", "/t/x/v1/tasks", {"name": "n"})
    assert (status, doc["remaining_usd"]) == (201, "1")


async def test_a_key_sees_tasks_of_its_own_only(desk: Desk) -> None:
    lead = await desk.declare()
    child = await desk.declare("0.2", lead["key"])
    sibling = await desk.declare("0.2", lead["key"])
    grandchild = await desk.declare("0.1", child["key"])
    seen_by = {
        desk.gw.key: {"lead", "child", "sibling", "grandchild"},
        lead["key"]: {"lead", "child", "sibling", "grandchild"},
        child["key"]: {"child", "grandchild"},
        grandchild["key"]: {"grandchild"},
        await desk.other_key(): set(),
    }
    named = {"lead": lead, "child": child, "sibling": sibling, "grandchild": grandchild}
    for key, visible in seen_by.items():
        for name, task in named.items():
            status, _ = await desk.send("GET", f"{TASKS}/{task['id']}", key=key)
            assert status == (200 if name in visible else 404), name

    hidden = (404, "not_found", None)
    change = {"unit": "usd", "limit": "0", "reason": "spite"}
    for verb, body in (("budgets", change), ("outcome", {"success": False}), ("done", {})):
        for key in (child["key"], await desk.other_key()):
            assert await desk.refused(f"{TASKS}/{sibling['id']}/{verb}", body, key) == hidden
    for path in ("task_0", "a%00b", "%FF", "a" * 300, "a%2Fb"):
        assert await desk.refused(f"{TASKS}/{path}", method="GET") == hidden
    assert (await desk.send("GET", f"{TASKS}/{sibling['id']}"))[1]["state"] == "running"


async def test_limits_of_a_task_are_changed_from_above(desk: Desk) -> None:
    lead = await desk.declare("1")
    child = await desk.declare("0.4", lead["key"])
    at = f"{TASKS}/{child['id']}/budgets"
    change = {"unit": "usd", "limit": "0.9", "reason": "more to read"}
    assert await desk.refused(at, change, child["key"]) == (403, "permission_denied", None)
    status, doc = await desk.send("POST", at, change, lead["key"])
    assert (status, doc["remaining_usd"]) == (200, "0.9")
    assert await desk.refused(at, {**change, "limit": "1.1"}, lead["key"]) == (
        400, "invalid_request", "limit",
    )  # fmt: skip
    assert (await desk.send("GET", f"{TASKS}/{lead['id']}"))[1]["held_usd"] == "0.9"


async def test_children_are_bounded_in_number_and_depth(desk: Desk) -> None:
    task = await desk.declare("1")
    lead = task
    for _ in range(DEPTH_MAX):
        task = await desk.declare("0.01", task["key"])
    body = budget(limit="0.001")
    assert await desk.refused(TASKS, body, task["key"]) == (400, "invalid_request", "parent")
    for _ in range(CHILDREN_MAX - 1):
        await desk.declare("0.001", parent=lead["id"])
    assert await desk.refused(TASKS, {**body, "parent": lead["id"]}) == (400, "invalid_request", "parent")
    await desk.send("POST", f"{TASKS}/{lead['id']}/done")
    assert await desk.refused(TASKS, {**body, "parent": lead["id"]}) == (400, "invalid_request", "parent")


async def test_an_id_is_never_taken_for_the_name_that_a_client_gave(desk: Desk) -> None:
    task = await desk.declare()
    call = {"model": "demo-large", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}
    path = f"/t/{task['id']}/v1/chat/completions"
    assert (await desk.send("POST", path, call))[0] == 200
    await desk.gw.app.quiet()
    assert (await desk.send("GET", f"{TASKS}/{task['id']}"))[1]["source"] == "declared"
    assert (await desk.send("GET", f"{TASKS}/{task['id']}", key=task["key"]))[0] == 200


def test_addresses() -> None:
    show = Target("task", "openai", ("GET", "HEAD", "PATCH"), name="a/b", verb="show")
    assert resolve("/v1/tasks/a%2Fb", True) == resolve("/tasks/a%2Fb/", False) == show
    assert resolve("/t/x/v1/tasks", False) == Target("task", "openai", ("POST",), task="x", verb="declare")
    assert resolve("/tasks/a/done", False) == Target("task", "openai", ("POST",), name="a", verb="done")
    for path in ("/v1/tasks/a/b", "/v1/tasks//done", "/v1/tasks/a/done/x"):
        assert resolve(path, False).kind == "none", path
    assert resolve("/t/tasks/v1/embeddings", False).operation is Operation.EMBEDDINGS


async def test_a_task_is_paused_and_resumed_by_its_owner_but_not_by_its_own_key(desk: Desk) -> None:
    task = await desk.declare()
    at = f"{TASKS}/{task['id']}"
    for body, param in [({}, "state"), ({"state": "done"}, "state"), ({"state": "running", "x": 1}, "x")]:
        assert await desk.refused(at, body, method="PATCH") == (400, "invalid_request", param)
    status, seen = await desk.send("PATCH", at, {"state": "paused", "reason": "let me look"})
    assert (status, seen["state"], seen["state_reason"]) == (200, "paused_loop", "let me look")
    assert await desk.refused(at, {"state": "running"}, task["key"], "PATCH") == (
        403,
        "permission_denied",
        None,
    )
    assert await desk.refused(at, {"state": "running"}, await desk.other_key(), "PATCH") == (
        404,
        "not_found",
        None,
    )
    status, seen = await desk.send("PATCH", at, {"state": "running", "reason": "go on"})
    assert (status, seen["state"], seen["state_reason"]) == (200, "running", "")

    tasks = Tasks(desk.gw.app.database, actor="operator", pepper=b"")
    await tasks.pause(task["id"], "by an operator")
    assert await desk.refused(at, {"state": "running"}, method="PATCH") == (403, "permission_denied", None)
