"""The OpenAPI 3.1 document, made from the routes and the models that they use."""

from __future__ import annotations

import inspect
import re
from typing import Any, Literal

from pydantic import BaseModel

from gateway.admin.route import Param, Route
from gateway.core.offices import RIGHTS, Right

_REF = "#/components/schemas/{model}"
_PATH_PARAM = re.compile(r"\{(\w+)\}")
Json = dict[str, Any]

_PROBLEM: Json = {
    "type": "object",
    "required": ["type", "title", "status", "detail"],
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "errors": {
            "type": "array",
            "description": "The fields that are wrong.",
            "items": {
                "type": "object",
                "required": ["field", "message"],
                "properties": {"field": {"type": "string"}, "message": {"type": "string"}},
            },
        },
    },
}
PROBLEMS = {
    "400": "The request cannot be understood or what it asks for cannot be.",
    "401": "No admin key, or a wrong one.",
    "403": "The key's role does not allow it.",
    "404": "It does not exist, or not for this key.",
    "409": "It is there already, is in use, or the idempotency key came with another request.",
    "412": "It was changed since the given entity tag.",
    "413": "The body is too large.",
    "415": "The body is not plain JSON.",
    "422": "A field or a parameter is wrong; `errors` names it.",
    "429": "Too many wrong keys.",
    "503": "The database does not answer.",
}


def document(routes: tuple[Route, ...], version: str) -> Json:
    """The whole document."""
    schemas: dict[str, Any] = {"Problem": _PROBLEM}
    paths: dict[str, Any] = {}
    for route in routes:
        paths.setdefault(route.address, {})[route.method.lower()] = _operation(route, schemas)
    _link(routes, paths)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Tollhouse admin API",
            "version": version,
            "description": "Money is an exact decimal text in dollars, instants are RFC 3339 in UTC. Lists come in pages: "
            "send `next_cursor` as `cursor`. See docs/admin-api.md.",
        },
        "security": [{"adminKey": []}],
        "tags": [{"name": name} for name in dict.fromkeys(route.tag for route in routes)],
        "paths": paths,
        "components": {
            "securitySchemes": {
                "adminKey": {"type": "http", "scheme": "bearer", "description": "An admin key."}
            },
            "schemas": dict(sorted(schemas.items())),
            "responses": {
                "Problem": {
                    "description": "An error, as problem details (RFC 9457).",
                    "content": {
                        "application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}
                    },
                }
            },
        },
    }


def _link(routes: tuple[Route, ...], paths: Json) -> None:
    """From what makes a thing to what reads, changes and deletes it: its id in the reply is the one in their path."""
    for made in routes:
        if made.method != "POST" or made.reply is None or _PATH_PARAM.search(made.path):
            continue
        links = {}
        for other in routes:
            names = _PATH_PARAM.findall(other.path)
            below = other.under == made.under and other.path.startswith(f"{made.path}/{{")
            if below and len(names) == 1 and names[0] in made.reply.model_fields:
                name = paths[other.address][other.method.lower()]["operationId"]
                links[name] = {
                    "operationId": name,
                    "parameters": {names[0]: f"$response.body#/{names[0]}"},
                }
        if links:
            paths[made.address]["post"]["responses"][str(made.status)]["links"] = links


def _operation(route: Route, schemas: dict[str, Any]) -> Json:
    summary, _, more = (inspect.getdoc(route.resource) or "").partition("\n\n")
    summary = summary.replace("\n", " ")
    roles = ", ".join(role for role, rights in RIGHTS.items() if route.right in rights)
    everything = "; only with a key that reaches everything" if route.right is Right.OPERATE else ""
    operation: Json = {
        "operationId": route.resource.__name__ + ("_by_post" if route.path.endswith("/revoke") else ""),
        "summary": route.summary or summary or route.resource.__name__.replace("_", " ").capitalize() + ".",
        "description": f"{more}\n\nRoles: {roles}{everything}.".strip(),
        "tags": [route.tag],
        "parameters": _parameters(route),
        "responses": _responses(route, schemas),
    }
    if route.body is not None:
        operation["requestBody"] = {
            "required": route.path.rpartition("/")[2] not in ("pause", "resume"),
            "content": {"application/json": {"schema": _reference(route.body, "validation", schemas)}},
        }
    return operation


def _parameters(route: Route) -> list[Json]:
    found: list[Json] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in _PATH_PARAM.findall(route.path)
    ]
    found += [_query(param) for param in route.params]
    if route.once:
        found.append(
            _header(
                "Idempotency-Key",
                "The change happens once, however often it is sent with this key in 24 hours.",
            )
        )
    if route.tagged and route.method != "GET":
        found.append(_header("If-Match", "Change only what still has this ETag."))
    return found


def _query(param: Param) -> Json:
    shown: Json = {"name": param.name, "in": "query", "schema": dict(param.schema)}
    if param.about:
        shown["description"] = param.about
    if param.many and param.schema["type"] == "array":
        shown |= {"style": "form", "explode": False}
    return shown


def _header(name: str, about: str) -> Json:
    schema = {"type": "string", "minLength": 1, "maxLength": 200}
    return {"name": name, "in": "header", "description": about, "schema": schema}


def _responses(route: Route, schemas: dict[str, Any]) -> Json:
    schema: Json = {"type": "object"}
    if route.reply is not None:
        schema = _reference(route.reply, "serialization", schemas)
    if route.listed:
        schema = {
            "type": "object",
            "required": ["data", "has_more", "next_cursor"],
            "properties": {
                "data": {"type": "array", "items": schema},
                "has_more": {"type": "boolean"},
                "next_cursor": {"type": ["string", "null"]},
            },
        }
    good: Json = {"description": "Done.", "content": {"application/json": {"schema": schema}}}
    for media in route.media:
        good["content"][media] = {"schema": {"type": "string"}}
    if route.tagged:
        good["headers"] = {"ETag": {"schema": {"type": "string"}}}
    problems = {
        status: {"$ref": "#/components/responses/Problem", "description": meaning}
        for status, meaning in PROBLEMS.items()
        if route.body is not None or status not in ("413", "415")
    }
    return {str(route.status): good, **problems}


def _reference(
    model: type[BaseModel], mode: Literal["validation", "serialization"], schemas: dict[str, Any]
) -> Json:
    if model.__name__ not in schemas:
        schema = model.model_json_schema(mode=mode, ref_template=_REF)
        for name, part in schema.pop("$defs", {}).items():
            schemas.setdefault(name, part)
        schemas[model.__name__] = schema
    return {"$ref": _REF.format(model=model.__name__)}
