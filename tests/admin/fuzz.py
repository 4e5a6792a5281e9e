"""Cases out of the OpenAPI document: what is made is read, changed and deleted by the document's own links, among nonsense.

    python -m tests.admin.fuzz --cases 20000 --seed 0        (make fuzz-admin)

Each answer is held against the document: no 5xx, a status that it names, a body of that status' schema.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jsonschema

import gateway
from gateway.admin import openapi
from gateway.admin.routes import ROUTES
from gateway.storage.schema import migrate
from tests.admin.office import ADMIN_KEY, Office, office

DOCUMENT = openapi.document(ROUTES, gateway.__version__)
SCHEMAS: dict[str, Any] = DOCUMENT["components"]["schemas"]
#: Things of a kind that are remembered, and cases that one store is used for: a list that grows slows every case.
KEPT = 30
CASES_OF_ONE_STORE = 2_500
#: What breaks parsers, databases and arithmetic.
NASTY: list[Any] = [
    *("", " ", "\x00", "\ud83d\ude00", "'; DROP TABLE team; --", "%s%n", "../../etc/passwd", "a" * 5_000),
    *("-1", "0", "1e309", "NaN", "9" * 30, "2026-13-45", "9999-12-31T23:59:59Z", "0001-01-01T00:00:00Z"),
    *(None, True, False, 0, -1, 1, 2**31, 2**53, 2**63, 2**64, 10**30, 1.5, 1e300),
    *([], {}, [None], [[]], {"": ""}, {"a": {"b": []}}, [1] * 2_000),
]
#: Texts that come far, by the names of fields.
GOOD = {
    "price": ["acme/large", "acme/mini"],
    "scope": ["team:default", "tenant:default"],
    "window": ["day", "month", "30d", "lifetime"],
    "url": ["https://hooks.acme-corp.com/x"],
    "models": ["large", "mini"],
    "reason": ["because"],
    "team": ["default"],
    "tenant": ["default"],
    "zone": ["UTC", "Europe/Berlin"],
    "env": ["LOCAL_API_KEY"],
    "provider": ["acme", "known"],
    "credential": ["first", "acme"],
    "base_url": ["http://127.0.0.1:8000/v1"],
    "urls": ["http://127.0.0.1:8001/v1"],
    "otherwise": ["small", "large"],
    "when": ["task.step > 7", "task.step == 3", 'client == "codex"', "task.step >"],
}


#: Fields that hold ids of another name.
ALIASES = {"parent": "task_id", "team": "team_id", "tenant": "tenant_id"}
#: What there is from the beginning, so that its like can be asked for.
FIRST = (
    ("create_key", "/admin/v1/keys", {"name": "first"}),
    ("create_task", "/admin/v1/tasks", {"name": "first", "budgets": [{"limit_usd": "5"}]}),
    ("create_budget", "/admin/v1/budgets", {"scope": "team:default", "limit_calls": 5}),
    ("create_credential", "/admin/v1/credentials", {"name": "first", "env": "LOCAL_API_KEY"}),
    ("create_deployment", "/admin/v1/deployments", {"provider": "acme", "model": "first", "price": "none"}),
    ("create_rule", "/admin/v1/rules", {"name": "first", "when": "task.step == 1", "tier": "small"}),
)


@dataclass(frozen=True, slots=True)
class Case:
    """One request, and what the document says of its answers."""

    operation: str
    method: str
    address: str
    body: bytes | None
    headers: dict[str, str]
    #: parameters of its path
    ids: dict[str, str]


@dataclass
class Fuzz:
    """Makes cases; what they made is in `known`, ids by the names of parameters; `next` are links to follow."""

    dice: random.Random
    known: dict[str, list[str]] = field(default_factory=dict)
    next: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    etags: dict[str, str] = field(default_factory=dict)

    def case(self) -> Case:
        operations = [(path, method) for path, methods in DOCUMENT["paths"].items() for method in methods]
        given: dict[str, str] = {}
        if self.next and self.dice.random() < 0.6:
            name, given = self.next.pop(self.dice.randrange(len(self.next)))
            path, method = next(
                pm for pm in operations if DOCUMENT["paths"][pm[0]][pm[1]]["operationId"] == name
            )
        else:
            path, method = self.dice.choice(operations)
        operation = DOCUMENT["paths"][path][method]
        ids = {n: given.get(n) or self.an_id(n) for n in re.findall(r"\{(\w+)\}", path)}
        filled = re.sub(r"\{(\w+)\}", lambda m: _quoted(ids[m[1]]), path)
        query = self.query(operation, path)
        headers = {"Authorization": f"Bearer {ADMIN_KEY}", "Content-Type": "application/json"}
        if self.dice.random() < 0.2:
            seen = self.etags.get(filled, '"x"')
            headers["If-Match"] = self.dice.choice(['"x"', "*", 'W/"a", b', seen, seen])
        if self.dice.random() < 0.1:
            headers["Idempotency-Key"] = self.dice.choice(["a", "b", "c"])
        body = self.body(operation) if "requestBody" in operation else None
        address = filled + (f"?{query}" if query else "")
        return Case(operation["operationId"], method.upper(), address, body, headers, ids)

    def an_id(self, name: str) -> str:
        if self.dice.random() < 0.1:
            nasty = [text for text in NASTY if isinstance(text, str) and text not in ("", "../../etc/passwd")]
            return self.dice.choice(nasty)
        everything = [text for texts in self.known.values() for text in texts]
        return self.dice.choice(self.known.get(name) or everything or ["default"])

    def query(self, operation: Any, path: str) -> str:
        found = []
        for param in operation["parameters"]:
            if param["in"] == "query" and self.dice.random() < 0.25:
                value = self.value(param["schema"], param["name"])
                text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
                found.append(f"{param['name']}={_quoted(text[:2_000])}")
        if path.endswith(("/costs", "/usage")) and self.dice.random() < 0.8:
            found.append("start_time=2026-09-01")
        return "&".join(found)

    def body(self, operation: Any) -> bytes:
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        wanted = self.dice.choice(NASTY) if self.dice.random() < 0.05 else self.object(_resolved(schema))
        return json.dumps(wanted).encode()

    def object(self, schema: Any) -> dict[str, Any]:
        required = schema.get("required", ())
        return {
            name: self.value(part, name)
            for name, part in schema.get("properties", {}).items()
            if self.dice.random() < (0.98 if name in required else 0.35)
        }

    def value(self, schema: Any, name: str) -> Any:
        """Mostly of the right kind, so that it comes far enough to do harm."""
        if self.dice.random() < 0.06:
            return self.dice.choice(NASTY)
        chosen = _resolved(self.dice.choice(schema.get("anyOf", [schema])))
        kind = chosen.get("type")
        if "const" in chosen:
            return chosen["const"]
        if "enum" in chosen:
            return self.dice.choice(chosen["enum"])
        if kind == "integer":
            return self.dice.choice([1, 5, chosen.get("minimum", 0), chosen.get("maximum", 10**6)])
        if kind == "number":
            return self.dice.choice([0.5, 1, 0])
        if kind == "array":
            return [self.value(chosen.get("items", {}), name) for _ in range(self.dice.randrange(3))]
        if kind == "object":
            return self.object(chosen)
        if kind == "boolean":
            return self.dice.choice([True, False])
        if kind == "null":
            return None
        return self.text(chosen, name)

    def text(self, schema: Any, name: str) -> str:
        if schema.get("format") == "date-time":
            return self.dice.choice(
                ["2099-01-01T00:00:00Z", "2027-01-01T00:00:00Z", "2020-01-01T00:00:00+14:00"]
            )
        if "examples" in schema or "usd" in name or name == "ratio":
            return self.dice.choice(["12.50", "0.5", "1", "0"])
        if name in GOOD:
            return self.dice.choice(GOOD[name])
        known = self.known.get(ALIASES.get(name, name), self.known.get(f"{name}_id", []))
        fresh = f"n{self.dice.randrange(10**6)}"
        return self.dice.choice([*known, fresh, fresh])

    def learn(self, case: Case, status: int, body: Any, etag: str | None) -> None:
        """Remember what was made, and the links that lead on from there."""
        if etag is not None:
            self.etags[case.address] = etag
            while len(self.etags) > 10 * KEPT:
                del self.etags[next(iter(self.etags))]
        if status not in (200, 201, 202) or not isinstance(body, dict):
            return
        for name, text in body.items():
            named = name.endswith("_id") or (name == "name" and "source" in body)
            if named and isinstance(text, str) and text:
                kept = self.known.setdefault(name, [])
                if text not in kept:
                    kept.append(text)
                    del kept[:-KEPT]
        for link in _answer(case.operation, status).get("links", {}).values():
            (parameter, place), *_ = link["parameters"].items()
            made = body.get(place.rpartition("/")[2])
            if isinstance(made, str):
                self.next.append((link["operationId"], {parameter: made}))
                del self.next[: -10 * KEPT]


def _resolved(schema: Any) -> Any:
    while "$ref" in schema:
        schema = SCHEMAS[schema["$ref"].rpartition("/")[2]]
    return schema


def _quoted(text: str) -> str:
    return quote(text.encode("utf-8", "surrogatepass"), safe="")


_OPERATIONS = {op["operationId"]: op for methods in DOCUMENT["paths"].values() for op in methods.values()}
_VALIDATORS: dict[tuple[str, int], Any] = {}


def _answer(operation: str, status: int) -> Any:
    return _OPERATIONS[operation]["responses"].get(str(status), {})


def validator(operation: str, status: int) -> Any:
    if (operation, status) not in _VALIDATORS:
        schema = SCHEMAS["Problem"]
        if status < 400:
            schema = _answer(operation, status)["content"]["application/json"]["schema"]
        full = {**schema, "components": DOCUMENT["components"]}
        _VALIDATORS[operation, status] = jsonschema.Draft202012Validator(full)
    return _VALIDATORS[operation, status]


async def play(it: Office, fuzz: Fuzz, cases: int) -> Counter[tuple[str, int]]:
    """So many cases, one after the other; how often each operation had each status. AssertionError says what was wrong."""
    seen: Counter[tuple[str, int]] = Counter()
    for operation, path, body in FIRST:
        more = {"key_id": fuzz.known["key_id"][0]} if operation == "create_task" else {}
        status, made = await it.ask("POST", path.removeprefix("/admin/v1"), {**body, **more})
        fuzz.learn(Case(operation, "POST", path, None, {}, {}), status, made, None)
    for _ in range(cases):
        case = fuzz.case()
        async with it.http.request(case.method, case.address, data=case.body, headers=case.headers) as answer:
            raw = await answer.read()
        where = (case.method, case.address, case.body, case.headers, answer.status, raw[:500], it.faults)
        assert answer.status < 500, where
        seen[case.operation, answer.status] += 1
        if answer.content_type in ("text/csv", "application/x-ndjson"):
            continue
        assert str(answer.status) in _OPERATIONS[case.operation]["responses"], where
        wanted = "application/json" if answer.status < 400 else "application/problem+json"
        assert answer.content_type == wanted, where
        body = json.loads(raw)
        wrong = next(validator(case.operation, answer.status).iter_errors(body), None)
        assert wrong is None, (where, wrong.message, list(wrong.absolute_path))
        fuzz.learn(case, answer.status, body, answer.headers.get("ETag"))
    assert it.faults == []
    return seen


async def _main(cases: int, seed: int) -> int:
    seen: Counter[tuple[str, int]] = Counter()
    played = 0
    while played < cases:
        part = min(CASES_OF_ONE_STORE, cases - played)
        with tempfile.TemporaryDirectory(prefix="tollhouse-fuzz-") as folder:
            url = f"sqlite:///{Path(folder) / 'fuzz.db'}"
            await migrate(url)
            async with office(url) as it:
                try:
                    seen += await play(it, Fuzz(random.Random(f"{seed}/{played}")), part)
                except AssertionError as wrong:
                    print(f"seed {seed}, cases from {played} on: {wrong}", file=sys.stderr)
                    return 1
        played += part
        print(f"{played:,} of {cases:,} cases", flush=True)
    statuses: Counter[int] = Counter()
    for (_, status), count in seen.items():
        statuses[status] += count
    missed = sorted(_OPERATIONS.keys() - {operation for operation, status in seen if status < 400})
    print(", ".join(f"{status}: {count:,}" for status, count in sorted(statuses.items())))
    print(f"no 5xx, every answer as described; never done: {', '.join(missed) or 'none'}")
    return 0


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--cases", type=int, default=20_000)
    options.add_argument("--seed", type=int, default=0)
    given = options.parse_args()
    sys.exit(asyncio.run(_main(given.cases, given.seed)))
