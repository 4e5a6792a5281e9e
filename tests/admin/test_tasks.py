"""Tasks, as people look at them and change them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gateway.core import secrets
from gateway.core.outcomes import Run, Statistics, statistics
from gateway.storage.ledger import SqlLedger
from gateway.storage.tasks import Tasks
from tests.admin.office import PEPPER, Office
from tests.storage import worlds


async def declared(it: Office, key_id: str, name: str, limit: str, **more: Any) -> dict[str, Any]:
    body = {"key_id": key_id, "name": name, "budgets": [{"limit_usd": limit}], **more}
    status, made = await it.ask("POST", "/tasks", body)
    assert status == 201, made
    found: dict[str, Any] = made
    return found


async def spend(it: Office, folder: Path, calls: list[tuple[dict[str, Any], int]]) -> None:
    ledger = await SqlLedger.open(it.database, replica_id="r1", journal_dir=folder)
    for facts, cost in calls:
        attempt = worlds.attempt(**facts)
        await worlds.reserve(ledger, attempt, 50_000_000)
        await ledger.settle(attempt, worlds.outcome(cost))
    await ledger.close()


async def key(it: Office) -> str:
    return str((await it.ask("POST", "/keys", {"name": "ci"}))[1]["key_id"])


async def test_a_task_is_declared_changed_raised_and_stopped(on: Office, tmp_path: Path) -> None:
    key_id = await key(on)
    sent = {"Idempotency-Key": "run-1"}
    body = {"key_id": key_id, "name": "fix", "budgets": [{"limit_usd": "0.05"}], "labels": {"repo": "a"}}
    status, made, told = await on.told("POST", "/tasks", body, headers=sent)
    assert (status, made["state"], made["labels"]) == (201, "running", {"repo": "a"})
    assert (await on.told("POST", "/tasks", body, headers=sent))[1] == made, "once, with the same key"
    own_key, secret = secrets.parse_key(made["key"]) or ("", "")
    assert await on.rows(f"SELECT task_id, secret_hmac FROM virtual_key WHERE key_id = '{own_key}'") == [
        (made["task_id"], secrets.hmac_of(PEPPER, secret))
    ]
    address = f"/tasks/{made['task_id']}"
    status, changed, _ = await on.told(
        "PATCH", address, {"labels": {"repo": "b"}}, headers={"If-Match": told["ETag"]}
    )
    assert (status, changed["labels"], changed["name"]) == (200, {"repo": "b"}, "fix")
    assert (await on.told("PATCH", address, {"name": "x"}, headers={"If-Match": told["ETag"]}))[0] == 412

    await spend(on, tmp_path, [({"task_id": made["task_id"], "key_id": key_id}, 50_000_000)])
    await Tasks(on.database, actor="test", pepper=PEPPER).pause(made["task_id"], "look at it")
    for wrong, field in (
        ({"limit_usd": "0.04", "reason": "x"}, "limit_usd"),
        ({"limit_calls": 5, "reason": "x"}, "limit_calls"),
        ({"limit_usd": "9"}, "reason"),
    ):
        status, problem = await on.ask("POST", f"{address}/raise", wrong)
        assert (status, problem["errors"][0]["field"]) == (422, field)
    status, raised = await on.ask("POST", f"{address}/raise", {"limit_usd": "1", "reason": "nearly there"})
    assert (status, raised["budgets"][0]["limit_usd"], raised["steps_left"]) == (200, "1", 19)
    status, found = await on.ask("POST", f"{address}/resume", {"reason": "fine"})
    assert (found["state"], found["changed"]) == ("running", [made["task_id"]])
    status, found = await on.ask("POST", f"{address}/stop", {"reason": "enough"})
    assert (status, found["state"], found["state_reason"]) == (200, "done", "enough")
    trail = await on.rows(f"SELECT action FROM audit WHERE subject = 'task:{made['task_id']}'")
    assert sorted(row[0] for row in trail) == [
        "budget.raise",
        "task.change",
        "task.create",
        "task.end",
        "task.pause",
        "task.resume",
    ]


async def test_a_task_is_handed_over_with_what_is_known_of_it(on: Office, tmp_path: Path) -> None:
    key_id = await key(on)
    root = await declared(on, key_id, "fix", "9")
    child = await declared(on, key_id, "look", "3", parent=root["task_id"])
    await spend(on, tmp_path, [({"task_id": root["task_id"], "key_id": key_id}, 2_000_000_000)])
    address = f"/tasks/{root['task_id']}"
    status, found = await on.ask("POST", f"{address}/handover", {"to": "eva", "reason": "it is stuck"})
    assert (status, found["changed"]) == (200, [root["task_id"], child["task_id"]])
    request_id = found["last"][0]["request_id"]
    assert found["summary"] == [
        f"Task fix ({root['task_id']}) is paused_admin: handed over to eva: it is stuck.",
        "It took 1 steps in 1 attempts and cost $2 ($6 without any cache).",
        f"Its last request {request_id}, step 1, went to sonnet (sonnet-main) and ended with stop after 20 output tokens.",
        f"Of the budget of task:{root['task_id']}, $2 of $9 is spent and $4 left.",
        "That pays for about 2 more steps as the last ones were.",
        "Below it: look is paused_admin after 0 steps and $0.",
    ]
    assert (found["to"], found["task"]["state"]) == ("eva", "paused_admin")
    assert [t["name"] for t in found["below"]] == ["look"]
    status, said = await on.ask("POST", f"{address}/outcome", {"success": True, "score": 0.5})
    assert (status, said["outcome"]["success"], said["outcome"]["score"]) == (200, True, 0.5)
    _, trail = await on.ask("GET", f"/audit?subject=task:{root['task_id']}")
    latest, *before = [(e["actor"], e["action"]) for e in trail["data"]][:3]
    assert latest == ("admin", "task.outcome")
    # Both are of one transaction, and may be of one millisecond.
    assert set(before) == {("admin", "task.handover"), ("admin", "task.pause")}


async def test_what_runs_by_spend_slope_and_steps(on: Office, tmp_path: Path) -> None:
    key_id = await key(on)
    tasks = {name: (await declared(on, key_id, name, "9"))["task_id"] for name in ("cheap", "dear", "long")}
    costs = {"cheap": [1], "dear": [40_000_000], "long": [5, 5, 5]}
    await spend(
        on, tmp_path, [({"task_id": tasks[n], "key_id": key_id}, c) for n, cs in costs.items() for c in cs]
    )

    async def names(query: str) -> list[str]:
        found: list[str] = []
        more = ""
        while True:
            status, page = await on.ask("GET", f"/tasks?state=running&limit=1&{query}{more}")
            assert status == 200, page
            found += [task["name"] for task in page["data"]]
            if not page["has_more"]:
                return found
            more = f"&cursor={page['next_cursor']}"

    assert await names("sort=spend") == ["dear", "long", "cheap"]
    assert await names("sort=slope") == ["dear", "long", "cheap"]
    assert (await names("sort=steps"))[0] == "long"
    assert sorted(await names("sort=last_at")) == ["cheap", "dear", "long"]
    assert await names("parent_task_id=none") == []


async def test_a_task_as_a_tree_and_step_by_step(on: Office, tmp_path: Path) -> None:
    key_id = await key(on)
    root = await declared(on, key_id, "root", "9")
    child = await declared(on, key_id, "child", "3", parent=root["task_id"])
    grandchild = await declared(on, key_id, "grandchild", "1", parent=child["task_id"])
    await spend(
        on,
        tmp_path,
        [
            ({"task_id": root["task_id"], "key_id": key_id}, 1),
            ({"task_id": root["task_id"], "key_id": key_id, "tier": "small"}, 20),
            ({"task_id": child["task_id"], "key_id": key_id, "parent_task_id": root["task_id"]}, 300),
            ({"task_id": grandchild["task_id"], "key_id": key_id, "parent_task_id": child["task_id"]}, 4_000),
        ],
    )
    _, tree = await on.ask("GET", f"/tasks/{root['task_id']}/tree")

    def outline(node: dict[str, Any]) -> Any:
        return node["name"], node["cost_usd"], node["total_cost_usd"], [outline(n) for n in node["tasks"]]

    assert outline(tree) == (
        "root",
        "0.000000021",
        "0.000004321",
        [
            (
                "child",
                "0.0000003",
                "0.0000043",
                [("grandchild", "0.000004", "0.000004", [])],
            )
        ],
    )
    _, steps = await on.ask("GET", f"/tasks/{root['task_id']}/steps")
    assert [(s["step"], s["cost_usd"], [a["tier"] for a in s["attempts"]]) for s in steps["steps"]] == [
        (1, "0.000000001", ["standard"]),
        (2, "0.00000002", ["small"]),
    ]
    assert steps["complete"] is True


async def test_how_runs_turned_out_by_model_and_label(on: Office, tmp_path: Path) -> None:
    key_id = await key(on)
    desk = Tasks(on.database, actor="test", pepper=PEPPER)
    for n, (model, success, repo) in enumerate(
        [("sonnet", True, "a"), ("sonnet", True, "a"), ("mini", False, "a"), ("mini", True, "b")]
    ):
        task = await declared(on, key_id, "fix", "9", labels={"repo": repo})
        await spend(
            on,
            tmp_path / str(n),
            [({"task_id": task["task_id"], "key_id": key_id, "model": model}, 10 ** (n + 1))],
        )
        await desk.record_outcome(task["task_id"], success, n / 4)
        if n == 1:
            await on.ask("POST", f"/tasks/{task['task_id']}/raise", {"limit_usd": "99", "reason": "x"})
    _, found = await on.ask("GET", "/outcomes?group_by=model&label=repo")
    assert found["data"] == [
        {
            "group": {"model": "sonnet", "label:repo": "a"},
            "runs": 2,
            "successes": 2,
            "success_rate": 1.0,
            "first_passes": 1,
            "first_pass_rate": 0.5,
            "interventions": 1,
            "mean_score": 0.125,
            "cost_usd": "0.00000011",
            "cost_per_success_usd": "0.000000055",
            "output_tokens_per_success": 20,
            "steps_per_success": 1,
            "cost_min_usd": "0.00000001",
            "cost_median_usd": "0.00000001",
            "cost_max_usd": "0.0000001",
        },
        {
            "group": {"model": "mini", "label:repo": "a"},
            "runs": 1,
            "successes": 0,
            "success_rate": 0.0,
            "first_passes": 0,
            "first_pass_rate": 0.0,
            "interventions": 0,
            "mean_score": 0.5,
            "cost_usd": "0.000001",
            "cost_per_success_usd": None,
            "output_tokens_per_success": None,
            "steps_per_success": None,
            "cost_min_usd": None,
            "cost_median_usd": None,
            "cost_max_usd": None,
        },
        {
            "group": {"model": "mini", "label:repo": "b"},
            "runs": 1,
            "successes": 1,
            "success_rate": 1.0,
            "first_passes": 1,
            "first_pass_rate": 1.0,
            "interventions": 0,
            "mean_score": 0.75,
            "cost_usd": "0.00001",
            "cost_per_success_usd": "0.00001",
            "output_tokens_per_success": 20,
            "steps_per_success": 1,
            "cost_min_usd": "0.00001",
            "cost_median_usd": "0.00001",
            "cost_max_usd": "0.00001",
        },
    ]
    assert (await on.ask("GET", "/outcomes?since=2020-01-01&until=2020-02-01"))[1] == {"data": []}


def test_failures_are_part_of_what_a_success_costs() -> None:
    runs = [Run(str(n), (), n > 1, None, 100 + n, 2, 7, n % 2) for n in range(4)]
    assert statistics(runs) == [
        Statistics((), 4, 2, 1, 2, None, 406, 203, 14, 4, 102, 102, 103),
    ]
