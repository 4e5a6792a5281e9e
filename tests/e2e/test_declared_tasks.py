"""Declared tasks as their owners use them: over HTTP, on both stores, in front of a provider that bills."""

from __future__ import annotations

from typing import Any

from gateway.core.budget import OnExceed
from gateway.core.task import TaskDefault
from gateway.settings import ensure_pepper
from gateway.storage.accounts import Accounts
from tests.support.running import Running, running


async def ask(gw: Running, method: str, path: str, key: str = "", body: object = None) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {key or gw.key}"}
    async with gw.http.request(method, path, json=body, headers=headers) as answer:
        return answer.status, await answer.json()


async def call(gw: Running, key: str) -> tuple[int, Any]:
    """One model call of about $0.002 at most, which takes 100 tokens of output."""
    content = "demo:output=100"
    body = {"model": "demo-large", "max_tokens": 120, "messages": [{"role": "user", "content": content}]}
    return await ask(gw, "POST", "/v1/chat/completions", key, body)


async def until_refused(gw: Running, key: str) -> tuple[int, Any]:
    """How many calls were answered, and the refusal of the next."""
    for answered in range(100):
        status, doc = await call(gw, key)
        await gw.settle_all()
        if status != 200:
            assert status == 402, doc
            return answered, doc
    raise AssertionError("nothing was refused")


async def test_a_task_stops_at_its_budget_and_goes_on_when_it_is_raised(store: str) -> None:
    async with running(store) as gw:
        declared = {"name": "fix the build", "budgets": [{"unit": "usd", "limit": "0.01"}]}
        status, task = await ask(gw, "POST", "/v1/tasks", body=declared)
        assert (status, task["state"], task["remaining_usd"]) == (201, "running", "0.01")
        at, key = f"/v1/tasks/{task['id']}", task["key"]

        answered, refusal = await until_refused(gw, key)
        assert answered > 0
        assert refusal["error"]["code"] == "budget_exceeded"
        assert f"the budget of the task {task['id']} is used up" in refusal["error"]["message"]

        status, seen = await ask(gw, "GET", at, key)
        assert (status, seen["steps"], seen["held_usd"]) == (200, answered, "0")
        assert seen["steps_left"] == int(float(seen["remaining_usd"]) / float(seen["next_step_usd"]))
        assert 0 < float(seen["spent_usd"]) <= 0.01
        assert abs(float(seen["spent_usd"]) + float(seen["remaining_usd"]) - 0.01) < 1e-12
        assert "key" not in seen
        assert seen["budgets"][0]["spent"] == seen["spent_usd"] == seen["cost_usd"]
        assert float(seen["next_step_usd"]) * answered >= float(seen["spent_usd"])

        more = {"unit": "usd", "limit": "0.02", "reason": "nearly there"}
        assert (await ask(gw, "POST", f"{at}/budgets", key, more))[0] == 403, "no agent raises its own limit"
        less = {"unit": "usd", "limit": "0.001", "reason": "stop it"}
        assert (await ask(gw, "POST", f"{at}/budgets", body=less))[1]["remaining_usd"] == "0"
        assert (await call(gw, key))[0] == 402
        assert (await ask(gw, "GET", at))[1]["state"] == "paused_budget"
        status, raised = await ask(gw, "POST", f"{at}/budgets", body=more)
        assert (status, raised["budgets"][0]["limit"]) == (200, "0.02")
        assert raised["state"] == "running"
        assert (await call(gw, key))[0] == 200

        said = {"success": True, "score": 0.9, "labels": {"suite": "green"}}
        status, judged = await ask(gw, "POST", f"{at}/outcome", key, said)
        assert (status, {**judged["outcome"], "at": ""}) == (200, {**said, "at": ""})
        assert (await ask(gw, "POST", f"{at}/done", key))[1]["state"] == "done"
        status, refusal = await call(gw, key)
        assert (status, "is done" in refusal["error"]["message"]) == (402, True)
        assert (await gw.ledger_equals_bill()).differences == ()


async def test_a_childs_slice_comes_back_when_it_is_done(store: str) -> None:
    async with running(store) as gw:
        budgets = [{"unit": "usd", "limit": "0.05"}, {"unit": "calls", "limit": 10}]
        _, parent = await ask(gw, "POST", "/v1/tasks", body={"name": "lead", "budgets": budgets})
        slices = [{"unit": "usd", "limit": "0.04"}, {"unit": "calls", "limit": 3}]
        status, child = await ask(
            gw, "POST", "/v1/tasks", parent["key"], {"name": "search", "budgets": slices}
        )
        assert (status, child["parent"], child["depth"]) == (201, parent["id"], 1)
        _, seen = await ask(gw, "GET", f"/v1/tasks/{parent['id']}")
        assert (seen["held_usd"], seen["remaining_usd"]) == ("0.04", "0.01")
        assert [c["id"] for c in seen["children"]] == [child["id"]]

        status, refused = await ask(
            gw, "POST", "/v1/tasks", parent["key"], {"name": "more", "budgets": slices}
        )
        assert (status, refused["error"]["param"]) == (400, "budgets")

        assert (await call(gw, child["key"]))[0] == 200
        await gw.settle_all()
        status, ended = await ask(gw, "POST", f"/v1/tasks/{child['id']}/done", child["key"], {})
        assert (status, ended["state"]) == (200, "done")
        _, seen = await ask(gw, "GET", f"/v1/tasks/{parent['id']}", parent["key"])
        assert (seen["held_usd"], seen["spent_usd"], seen["cost_usd"]) == ("0", ended["spent_usd"], "0")
        calls = next(b for b in seen["budgets"] if b["unit"] == "calls")
        assert (calls["spent"], calls["held"], calls["remaining"]) == (1, 0, 9)


async def named(gw: Running, task: str, parent: str = "") -> tuple[int, str, Any]:
    """A call with the owner's key that names its task: status, the task that it counted in, and the answer."""
    content = "demo:output=100"
    body = {"model": "demo-large", "max_tokens": 120, "messages": [{"role": "user", "content": content}]}
    headers = {"X-Task-Id": task} | ({"X-Parent-Task-Id": parent} if parent else {})
    async with gw.http.post("/v1/chat/completions", json=body, headers=headers) as answer:
        return answer.status, answer.headers.get("x-task-id", ""), await answer.json()


async def test_a_key_joins_its_own_tasks_by_their_ids_and_puts_children_below_them(store: str) -> None:
    async with running(store) as gw:
        declared = {"name": "lead", "budgets": [{"unit": "calls", "limit": 3}]}
        _, task = await ask(gw, "POST", "/v1/tasks", body=declared)
        lead = task["id"]

        assert (await named(gw, lead))[:2] == (200, lead)
        status, own, _ = await named(gw, "scout", parent=lead)
        assert (status, own == lead) == (200, False)
        # An id out of an answer's header is as good as a declared one, and needs its parent no more.
        assert (await named(gw, own))[:2] == (200, own)
        await gw.settle_all()
        status, _, refusal = await named(gw, "scout-2", parent="scout")
        assert status == 402
        assert f"the budget of the task {lead} is used up: 3 calls spent" in refusal["error"]["message"]
        _, seen = await ask(gw, "GET", f"/v1/tasks/{lead}")
        assert (seen["steps"], seen["budgets"][0]["spent"]) == (1, 3)
        assert [(child["id"], child["steps"]) for child in seen["children"]] == [(own, 2)]
        assert (await gw.ledger_equals_bill()).differences == ()


async def test_a_key_does_not_join_another_keys_task(store: str) -> None:
    async with running(store) as gw:
        _, theirs = await ask(gw, "POST", "/v1/tasks", body={"name": "theirs", "budgets": []})
        accounts = Accounts(gw.app.database, actor="test")
        _, other = await accounts.create_key(pepper=ensure_pepper(gw.app.settings), name="other")
        gw.http.headers["Authorization"] = f"Bearer {other}"
        status, own, _ = await named(gw, theirs["id"])
        assert (status, own == theirs["id"]) == (200, False)
        assert (await ask(gw, "GET", f"/v1/tasks/{theirs['id']}"))[1]["steps"] == 0


async def until_summed_up(gw: Running, headers: dict[str, str], *, stream: bool = False) -> tuple[int, str]:
    """How many calls were answered by the model that was asked for, and the tier that wrote the last answer."""
    lines = "a line of code " * 200
    history = [{"role": "user", "content": f"step {i} demo:output=300 {lines}"} for i in range(5)]
    body = {"model": "demo-large", "max_tokens": 400, "messages": history, "stream": stream}
    for answered in range(200):
        async with gw.http.post("/v1/chat/completions", json=body, headers=headers) as answer:
            text = await answer.text()
            assert answer.status == 200, text
            if "x-budget-stop" in answer.headers:
                assert answer.headers["x-budget-stop"] == "summarize"
                return answered, answer.headers["x-tier"]
        await gw.settle_all()
    raise AssertionError("it does not end")


async def test_a_run_that_nobody_declared_is_summed_up_where_the_configuration_says_so(store: str) -> None:
    of_tasks = {"task_default": TaskDefault(100_000_000, OnExceed.SUMMARIZE)}
    async with running(store, configured=of_tasks) as gw:
        headers = {"X-Task-Id": "night-run"}
        answered, tier = await until_summed_up(gw, headers)
        assert (answered > 0, tier) == (True, "small")
        assert (await named(gw, "night-run"))[0] == 402
        _, seen = await ask(gw, "GET", "/v1/tasks/night-run")
        assert (seen["state"], seen["state_reason"].split(" req_")[0]) == ("paused_budget", "summed up by")
        assert 0 < float(seen["spent_usd"]) <= 0.1

        # One that is declared without a budget of dollars gets the same.
        _, task = await ask(gw, "POST", "/v1/tasks", body={"name": "declared", "budgets": []})
        assert (await until_summed_up(gw, {"Authorization": f"Bearer {task['key']}"}))[1] == "small"


async def test_a_run_is_summed_up_once_when_its_money_ends_and_again_after_a_raise(store: str) -> None:
    async with running(store) as gw:
        budgets = [{"unit": "usd", "limit": "0.2", "on_exceed": "summarize"}]
        _, task = await ask(gw, "POST", "/v1/tasks", body={"name": "fix it", "budgets": budgets})
        headers = {"Authorization": f"Bearer {task['key']}"}

        answered, tier = await until_summed_up(gw, headers)
        assert (answered > 0, tier) == (True, "small")
        assert (await call(gw, task["key"]))[0] == 402
        at = f"/v1/tasks/{task['id']}"
        _, seen = await ask(gw, "GET", at)
        assert (seen["state"], seen["state_reason"].split(" req_")[0]) == ("paused_budget", "summed up by")
        assert float(seen["spent_usd"]) <= 0.2

        more = {"unit": "usd", "limit": "0.4", "reason": "nearly there"}
        assert (await ask(gw, "POST", f"{at}/budgets", body=more))[1]["state"] == "running"
        assert (await until_summed_up(gw, headers, stream=True))[1] == "small"
        await gw.settle_all()
        landings = [e for e in await gw.entries() if e["rule"] == "summarize"]
        assert [(e["tier"], e["kind"], e["stream"]) for e in landings] == [
            ("small", "post", False),
            ("small", "post", True),
        ]
        assert (await gw.ledger_equals_bill()).differences == ()
        assert float((await ask(gw, "GET", at))[1]["spent_usd"]) <= 0.4
