"""Scripts written for LiteLLM's proxy make keys and teams here, and are told what has no counterpart."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.core.litellm_words import decimal_text, seconds_of, window_of
from tests.admin.office import ADMIN_KEY, Office


async def ask(
    it: Office, method: str, path: str, body: object = None, key: str = ADMIN_KEY
) -> tuple[int, Any]:
    async with it.http.request(method, path, json=body, headers={"Authorization": f"Bearer {key}"}) as answer:
        return answer.status, await answer.json(content_type=None)


async def test_a_team_with_a_budget_and_a_key_in_it(on: Office) -> None:
    wanted = {
        "team_alias": "research",
        "models": ["mini"],
        "max_budget": 100,
        "budget_duration": "30d",
        "rpm_limit": 9,
    }
    status, team = await ask(on, "POST", "/team/new", wanted)
    assert (status, team["team_id"], team["max_budget"]) == (200, "research", 100)
    status, made = await ask(
        on,
        "POST",
        "/key/generate",
        {
            "key_alias": "ci",
            "team_id": "research",
            "max_budget": 0.1,
            "budget_duration": "24h",
            "duration": "7d",
            "metadata": {"env": "test"},
            "max_parallel_requests": 3,
        },
    )
    assert (status, made["key"][:12]) == (200, f"gw-{made['token']}-")
    _, budgets = await on.ask("GET", "/budgets")
    assert [(b["scope"], b["window"], b["limit_usd"]) for b in budgets["data"]] == [
        (f"key:{made['token']}", "day", "0.1"),
        ("team:research", "month", "100"),
    ]
    for key in (made["key"], made["token"]):
        _, info = await ask(on, "GET", f"/key/info?key={key}")
        assert (info["info"]["spend"], info["info"]["max_budget"], info["info"]["metadata"]) == (
            0.0,
            0.1,
            {"env": "test"},
        )
    assert (await ask(on, "GET", "/team/info?team_id=research"))[1]["keys"] == [
        {"token": made["token"], "key_alias": "ci"}
    ]
    _, updated = await ask(
        on, "POST", "/key/update", {"key": made["key"], "models": ["mini"], "rpm_limit": 5}
    )
    assert (updated["models"], updated["rpm_limit"], updated["max_parallel_requests"]) == (["mini"], 5, 3)
    assert (updated["spend"], updated["max_budget"]) == (0.0, 0.1)
    assert (await ask(on, "POST", "/key/delete", {"keys": [made["key"], "zzzzzzzz"]}))[0] == 404
    assert (await ask(on, "GET", f"/key/info?key={made['token']}"))[1]["info"]["blocked"] is False
    assert await ask(on, "POST", "/key/delete", {"keys": [made["key"]]}) == (
        200,
        {"deleted_keys": [made["token"]]},
    )
    assert (await ask(on, "GET", f"/key/info?key={made['token']}"))[1]["info"]["blocked"] is True


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/key/generate", {"soft_budget": 5}, "soft_budget"),
        ("/key/generate", {"max_budget": 5, "budget_duration": "soon"}, "budget_duration"),
        ("/key/generate", {"budget_duration": "1d"}, "budget_duration"),
        ("/key/generate", {"duration": "forever"}, "duration"),
        ("/key/generate", {"metadata": {"a": {"b": 1}}}, "metadata.a"),
        ("/key/generate", {"models": ["gpt-0"]}, "models.0"),
        ("/key/update", {"key": "x", "max_budget": 5}, "max_budget"),
        ("/team/new", {}, "team_id"),
    ],
)
async def test_what_has_no_counterpart_is_refused_by_name(
    it: Office, path: str, body: object, field: str
) -> None:
    status, problem = await ask(it, "POST", path, body)
    assert (status, problem["errors"][0]["field"]) == (422, field)
    assert await it.rows("SELECT count(*) FROM virtual_key") == [(0,)]


@pytest.mark.parametrize(
    ("path", "body", "instead"),
    [
        ("/key/generate", {"user_id": "eva"}, "there are no users here"),
        ("/key/update", {"key": "x", "max_budget": 5}, "/admin/v1/budgets"),
        ("/team/new", {"team_id": "a", "metadata": {}}, "teams have no labels"),
    ],
)
async def test_a_field_that_is_not_here_says_where_to_go(
    it: Office, path: str, body: object, instead: str
) -> None:
    status, problem = await ask(it, "POST", path, body)
    assert status == 422
    assert instead in problem["errors"][0]["message"]


async def test_an_address_that_is_not_here_says_where_to_go(it: Office) -> None:
    for method, path, instead in [
        ("GET", "/user/info?user_id=eva", "/key/info, /team/info"),
        ("GET", "/global/spend/report", "/admin/v1/costs"),
        ("POST", "/team/update", "/admin/v1/teams"),
        ("POST", "/model/new", "/admin/v1/deployments"),
    ]:
        status, problem = await ask(it, method, path, {} if method == "POST" else None)
        assert (status, instead in problem["detail"]) == (404, True)
    assert (await ask(it, "GET", "/nothing"))[1]["detail"] == "Not Found"
    status, problem = await ask(it, "POST", "/key/generate", {"team_id": "nobody"})
    assert (status, problem["errors"][0]["field"]) == (422, "team_id")


async def test_they_need_an_admin_key_like_all_others(it: Office) -> None:
    assert (await ask(it, "POST", "/key/generate", {}, key="sk-1234"))[0] == 401


def test_durations_and_numbers() -> None:
    durations = ("24h", "7d", "30d", "1mo", "12h", "2d", "90m", None)
    assert [window_of(d) for d in durations] == [
        "day",
        "week",
        "month",
        "month",
        "12h",
        "2d",
        "90m",
        "lifetime",
    ]
    assert [seconds_of(d) for d in ("30s", "5m", "1mo")] == [30, 300, 2_592_000]
    assert [decimal_text(n) for n in (10, 0.1, 1e-07, "3e-6", 2.50)] == [
        "10",
        "0.1",
        "0.0000001",
        "0.000003",
        "2.5",
    ]
    for wrong in ("1y", "", "0d", "-1d", "1.5h"):
        with pytest.raises(ValueError, match="duration"):
            seconds_of(wrong)
    for number in ("nan", "-1", "x"):
        with pytest.raises(ValueError):
            decimal_text(number)
