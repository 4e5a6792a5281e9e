"""Whatever is sent to whichever route: no answer is a 5xx, each is as the OpenAPI document says, and says why."""

from __future__ import annotations

import json
import random
import re
from typing import Any
from urllib.parse import quote

import jsonschema  # type: ignore[import-untyped]
import pytest

import gateway
from gateway.admin import openapi
from gateway.admin.route import Route
from gateway.admin.routes import ROUTES
from tests.admin.office import ADMIN_KEY, Office

DOCUMENT = openapi.document(ROUTES, gateway.__version__)
CASES = 300
#: What breaks parsers, databases and arithmetic.
NASTY: list[Any] = [
    *(
        "",
        " ",
        "\x00",
        "\ud83d\ude00",
        "'; DROP TABLE team; --",
        "%s%n",
        "../../etc/passwd",
        "a" * 5_000,
        "null",
    ),
    *("-1", "0", "1e309", "NaN", "9" * 30, "2026-13-45", "9999-12-31T23:59:59Z", "0001-01-01T00:00:00Z"),
    *(None, True, False, 0, -1, 1, 2**31, 2**53, 2**63, 2**64, 10**30, 1.5, 1e300),
    *([], {}, [None], [[]], {"": ""}, {"a": {"b": []}}, [1] * 2_000),
]


def properties(schema: Any) -> dict[str, Any]:
    while "$ref" in schema:
        schema = DOCUMENT["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    found: dict[str, Any] = schema.get("properties", {})
    return found


def value(dice: random.Random, schema: Any, ids: list[str]) -> Any:
    """Mostly of the right kind, so that it comes far enough to do harm."""
    if dice.random() < 0.25:
        return dice.choice(NASTY)
    options = schema.get("anyOf", [schema])
    chosen = dice.choice(options)
    while "$ref" in chosen:
        chosen = DOCUMENT["components"]["schemas"][chosen["$ref"].rpartition("/")[2]]
    kind = chosen.get("type")
    if "enum" in chosen:
        return dice.choice(chosen["enum"])
    if kind == "integer":
        return dice.choice([1, 5, chosen.get("minimum", 0), chosen.get("maximum", 10**6)])
    if kind == "array":
        return [value(dice, chosen.get("items", {}), ids) for _ in range(dice.randrange(3))]
    if kind == "object":
        return {
            name: value(dice, part, ids) for name, part in properties(chosen).items() if dice.random() < 0.5
        }
    if kind == "boolean":
        return dice.choice([True, False])
    if kind == "null":
        return None
    if chosen.get("format") == "date-time":
        return dice.choice(["2027-01-01T00:00:00Z", "2020-01-01T00:00:00+14:00"])
    return dice.choice([*ids, "12.50", "month", "team:default", "lifetime", "mini", "default"])


def request(dice: random.Random, route: Route, ids: list[str]) -> tuple[str, str, bytes | None]:
    operation = DOCUMENT["paths"][route.address][route.method.lower()]

    def part(_: re.Match[str]) -> str:
        text = dice.choice(
            [*ids, *ids, *(x for x in NASTY if isinstance(x, str) and x not in ("", "../../etc/passwd"))]
        )
        return quote(text.encode("utf-8", "surrogatepass"), safe="")

    path = re.sub(r"\{\w+\}", part, route.address)
    query = []
    for param in operation["parameters"]:
        if param["in"] == "query" and dice.random() < 0.4:
            given = value(dice, param["schema"], ids)
            text = ",".join(map(str, given)) if isinstance(given, list) else str(given)
            query.append(f"{param['name']}={quote(text[:2_000].encode('utf-8', 'surrogatepass'))}")
    if route.path in ("/costs", "/usage") and dice.random() < 0.8:
        query.append("start_time=2026-09-01")
    body = None
    if route.body is not None:
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        wanted: Any = {
            name: value(dice, part_schema, ids)
            for name, part_schema in properties(schema).items()
            if dice.random() < 0.7
        }
        if dice.random() < 0.1:
            wanted = dice.choice(NASTY)
        body = json.dumps(wanted).encode()
    return route.method, path + ("?" + "&".join(query) if query else ""), body


@pytest.mark.parametrize("seed", range(3))
async def test_no_nonsense_is_our_fault(on: Office, seed: int) -> None:
    dice = random.Random(seed)
    _, key = await on.ask("POST", "/keys", {"name": "ci"})
    _, task = await on.ask(
        "POST", "/tasks", {"key_id": key["key_id"], "name": "t", "budgets": [{"limit_usd": "5"}]}
    )
    _, budget = await on.ask("POST", "/budgets", {"scope": "team:default", "limit_usd": "5"})
    ids = ["default", key["key_id"], task["task_id"], budget["budget_id"], f"key:{key['key_id']}"]
    seen: dict[int, int] = {}
    for _ in range(CASES // 3):
        route = dice.choice(ROUTES)
        method, path, body = request(dice, route, ids)
        headers = {"Authorization": f"Bearer {ADMIN_KEY}", "Content-Type": "application/json"}
        if dice.random() < 0.2:
            headers["If-Match"] = dice.choice(['"x"', "*", "", 'W/"a", b'])
        if dice.random() < 0.2:
            headers["Idempotency-Key"] = dice.choice(["a", "b", "c"])
        async with on.http.request(method, path, data=body, headers=headers) as answer:
            raw = await answer.read()
            where = (method, path, body, answer.status, raw[:500], on.faults)
            assert answer.status < 500, where
            seen[answer.status] = seen.get(answer.status, 0) + 1
            if answer.content_type in ("text/csv", "application/x-ndjson"):
                continue
            schema: Any = DOCUMENT["components"]["schemas"]["Problem"]
            if answer.status < 400:
                described = DOCUMENT["paths"][route.address][route.method.lower()]["responses"]
                assert str(answer.status) in described, where
                schema = described[str(answer.status)]["content"]["application/json"]["schema"]
            else:
                assert answer.content_type == "application/problem+json", where
                assert str(answer.status) in openapi.PROBLEMS, where
            full = {**schema, "components": DOCUMENT["components"]}
            jsonschema.Draft202012Validator(full).validate(json.loads(raw))
    assert on.faults == []
    assert seen.get(200, 0) > 10, "they come far enough to matter"
