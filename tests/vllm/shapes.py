"""The shape of an answer: keys in their order and kinds of values, so that two servers can be held together."""

from __future__ import annotations

import json
import re
from itertools import groupby
from typing import Any

#: Values that clients and the gateway decide by: two servers must have the same ones, not only the same kind.
_TOLD = frozenset({"object", "type", "role", "finish_reason", "stop_reason", "code", "index", "param"})
_METRIC = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})? \S+$")
_LABEL = re.compile(r'(\w+)="[^"]*"')


def shape(value: object, name: str = "") -> Any:
    """Members of objects keep their order. Of a list the different shapes count, not how many there are."""
    if isinstance(value, dict):
        return [(key, shape(inner, key)) for key, inner in value.items()]
    if isinstance(value, list):
        seen: list[Any] = []
        for inner in map(shape, value):
            if inner not in seen:
                seen.append(inner)
        return ["list of", *seen]
    if name in _TOLD:
        return value
    return type(value).__name__


def events(stream: str) -> list[tuple[str, Any]]:
    """(name, shape of the data) of each event of a stream; a run of equal ones counts once, comments do not count."""
    found = []
    for text in stream.replace("\r\n", "\n").split("\n\n"):
        name, data = "", ""
        for line in text.split("\n"):
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                data = line.removeprefix("data: ")
        if data:
            found.append((name, shape(json.loads(data)) if data.startswith("{") else data))
    return [of for of, _ in groupby(found)]


def metric_families(text: str) -> dict[str, tuple[str, frozenset[str]]]:
    """vLLM's own metrics: name -> (type, names of labels). Of a histogram only its count and its sum."""
    kinds: dict[str, str] = {}
    found: dict[str, tuple[str, frozenset[str]]] = {}
    for line in text.splitlines():
        if line.startswith("# TYPE vllm:"):
            _, _, name, kind = line.split(" ")
            kinds[name] = kind
        elif (row := _METRIC.match(line)) and row["name"].startswith("vllm:"):
            name = row["name"]
            if not name.endswith(("_bucket", "_created")):
                kind = kinds.get(name) or kinds.get(re.sub("_(count|sum)$", "", name), "")
                found[name] = kind, frozenset(_LABEL.findall(row["labels"] or ""))
    return found
