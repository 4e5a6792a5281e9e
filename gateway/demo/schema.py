"""Minimal instances of JSON schemas: what the demo model answers when it is told a format.

Covers what structured output allows: objects, arrays, enums, const, unions, references, and the usual bounds and
formats. `pattern` is met only by the few texts tried below; a schema that nothing satisfies gets some value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

Schema = Mapping[str, Any]

_MAX_DEPTH = 24
_FORMATS = {
    "date-time": "2026-01-01T00:00:00Z",
    "date": "2026-01-01",
    "time": "00:00:00Z",
    "duration": "PT1S",
    "email": "demo@example.com",
    "hostname": "example.com",
    "ipv4": "127.0.0.1",
    "ipv6": "::1",
    "uuid": "00000000-0000-4000-8000-000000000000",
    "uri": "http://example.com/",
}
_PATTERN_GUESSES = ("demo", "a", "A", "0", "1", "2026-01-01", "00000", "a-b", "a/b", "v1.0.0", "")
_COMMANDS = ("command", "cmd", "script", "commands")


def minimal(schema: object, root: Schema | None = None, depth: int = 0) -> Any:
    """The smallest value that satisfies `schema`; optional properties are left out."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return {}
    root = schema if root is None else root
    schema = _resolve(schema, root)
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return schema["enum"][0]
    for union in ("anyOf", "oneOf"):
        if schema.get(union):
            # A branch without children first: it ends recursive schemas.
            branches = sorted(schema[union], key=lambda branch: _has_children(branch, root))
            return minimal(branches[0], root, depth + 1)
    kind = schema.get("type")
    if isinstance(kind, list):
        kind = kind[0] if kind else "string"
    kind = str(kind or _guess_type(schema)).lower()
    if kind == "object":
        properties = schema.get("properties") or {}
        return {
            k: minimal(properties.get(k, {"type": "string"}), root, depth + 1)
            for k in schema.get("required", ())
        }
    if kind == "array":
        return _array(schema, root, depth)
    if kind in ("integer", "number"):
        return _number(schema, kind == "integer")
    return {"boolean": False, "null": None}.get(kind, _string(schema))


def arguments(schema: Schema, command: str) -> dict[str, Any]:
    """Minimal valid arguments of a tool; a property that takes a shell command gets `command`."""
    filled = minimal({"type": "object", **schema}, schema)
    if not isinstance(filled, dict):
        filled = {}
    for name, prop in (schema.get("properties") or {}).items():
        if name in _COMMANDS and isinstance(prop, Mapping):
            filled[name] = _command(name, _resolve(prop, schema), command)
    return filled


def takes_command(schema: Schema) -> bool:
    return any(name in (schema.get("properties") or {}) for name in _COMMANDS)


def _command(name: str, prop: Schema, command: str) -> object:
    kinds = [prop, *(b for b in prop.get("anyOf") or () if isinstance(b, Mapping))]
    is_array = any("array" in (k.get("type") or "") for k in kinds)
    if not is_array:
        return command
    return [command] if name == "commands" else ["bash", "-lc", command]


def _resolve(schema: Schema, root: Schema) -> Schema:
    """Follow local references and merge allOf."""
    for _ in range(_MAX_DEPTH):
        ref = schema.get("$ref")
        if not isinstance(ref, str) or not ref.startswith("#"):
            break
        target: Any = root
        for step in ref[1:].strip("/").split("/") if len(ref) > 1 else ():
            target = (
                target.get(step.replace("~1", "/").replace("~0", "~"), {})
                if isinstance(target, Mapping)
                else {}
            )
        schema = target if isinstance(target, Mapping) else {}
    merged = dict(schema)
    for branch in schema.get("allOf") or ():
        branch = _resolve(branch, root)
        properties = {**(merged.get("properties") or {}), **(branch.get("properties") or {})}
        required = [*(merged.get("required") or ()), *(branch.get("required") or ())]
        merged = {**merged, **branch}
        if properties:
            merged |= {"properties": properties, "required": list(dict.fromkeys(required))}
    return merged


def _has_children(branch: object, root: Schema) -> bool:
    if not isinstance(branch, Mapping):
        return True
    branch = _resolve(branch, root)
    return bool(branch.get("properties") or branch.get("items") or branch.get("anyOf") or branch.get("oneOf"))


def _guess_type(schema: Schema) -> str:
    if "properties" in schema or "required" in schema:
        return "object"
    return "array" if "items" in schema or "prefixItems" in schema else "string"


def _array(schema: Schema, root: Schema, depth: int) -> list[Any]:
    values = [minimal(item, root, depth + 1) for item in schema.get("prefixItems") or ()]
    items = schema.get("items") or {"type": "string"}
    while len(values) < int(schema.get("minItems") or 0):
        values.append(minimal(items, root, depth + 1))
    return values


def _number(schema: Schema, whole: bool) -> int | float:
    step = schema.get("multipleOf") or (1 if whole else 0)
    low, above = schema.get("minimum"), schema.get("exclusiveMinimum")
    high, below = schema.get("maximum"), schema.get("exclusiveMaximum")
    unit = step or 0.5
    value: int | float = step or 1
    if low is not None or isinstance(above, int | float):
        floor = max(x for x in (low, above) if isinstance(x, int | float))
        value = -(-floor // unit) * unit if step else floor
        if isinstance(above, int | float) and value <= above:
            value += unit
    ceiling = [x for x in (high, below) if isinstance(x, int | float)]
    if ceiling and value > min(ceiling):
        value = min(ceiling) // unit * unit
    if isinstance(below, int | float) and value >= below:
        value -= unit
    return int(value) if whole else value


def _string(schema: Schema) -> str:
    text = _FORMATS.get(str(schema.get("format")), "demo")
    pattern = schema.get("pattern")
    if isinstance(pattern, str):
        try:
            matching = [guess for guess in (text, *_PATTERN_GUESSES) if re.search(pattern, guess)]
        except re.error:
            matching = []
        text = matching[0] if matching else text
    least, most = int(schema.get("minLength") or 0), schema.get("maxLength")
    text = text.ljust(least, "x")
    return text[: int(most)] if isinstance(most, int) else text
