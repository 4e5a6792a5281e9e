"""The description of the API holds what the API does, and its page needs no other host."""

from __future__ import annotations

import re
from typing import Any

import jsonschema
import pytest

import gateway
from gateway.admin import openapi
from gateway.admin.routes import PREFIX, ROUTES
from tests.admin.office import Office

DOCUMENT = openapi.document(ROUTES, gateway.__version__)


def validator(schema: Any) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator({**schema, "components": DOCUMENT["components"]})


def reply_schema(method: str, path: str, status: int) -> Any:
    operation = DOCUMENT["paths"][path][method.lower()]
    if status >= 400:
        return DOCUMENT["components"]["schemas"]["Problem"]
    return operation["responses"][str(status)]["content"]["application/json"]["schema"]


async def test_it_is_served_openly_and_describes_every_route(it: Office) -> None:
    async with it.http.get("/admin/v1/openapi.json") as answer:
        assert (answer.status, answer.content_type) == (200, "application/json")
        found = await answer.json()
    assert found == DOCUMENT
    described = {(method.upper(), path) for path, methods in found["paths"].items() for method in methods}
    assert described == {(route.method, route.address) for route in ROUTES}
    operations = [op["operationId"] for methods in found["paths"].values() for op in methods.values()]
    assert len(set(operations)) == len(operations)
    references = set(re.findall(r"#/components/schemas/(\w+)", str(found)))
    assert references <= found["components"]["schemas"].keys()
    for schema in found["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)


async def test_the_page_runs_nothing_but_itself(it: Office) -> None:
    async with it.http.get("/") as answer:  # what a browser is pointed at
        assert answer.url.path == "/admin/v1/docs"
        assert (answer.status, answer.content_type) == (200, "text/html")
        policy, page = answer.headers["Content-Security-Policy"], await answer.text()
    assert "default-src 'none'; connect-src 'self'" in policy
    assert not re.findall(r"https?://|//[a-z]+\.", page)


@pytest.mark.parametrize(
    "route", [r for r in ROUTES if r.method == "GET" and r.under == PREFIX], ids=lambda r: r.path
)
async def test_every_read_answers_as_described(it: Office, route: Any) -> None:
    _, key = await it.ask("POST", "/keys", {"name": "ci", "labels": {"env": "test"}})
    _, budget = await it.ask("POST", "/budgets", {"scope": "team:default", "limit_calls": 5})
    _, admin = await it.ask("POST", "/admin_keys", {"name": "eva", "role": "viewer"})
    ids = {
        "tenant_id": "default",
        "team_id": "default",
        "key_id": key["key_id"],
        "budget_id": budget["budget_id"],
        "admin_key_id": admin["admin_key_id"],
    }
    path = re.sub(r"\{(\w+)\}", lambda m: ids.get(m[1], "unknown"), route.path)
    query = "?start_time=2026-09-01" if route.path in ("/costs", "/usage") else ""
    status, body = await it.ask("GET", path + query)
    assert status == (404 if "unknown" in path else 200), body
    validator(reply_schema("GET", PREFIX + route.path, status)).validate(body)
