"""What a PromQL expression needs of a metrics page: metrics, labels and, where a label has few values, those values.

Not a parser: it knows what the dashboards and alerts of this repository use, and rejects any other word.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

#: What Prometheus adds when it scrapes.
SCRAPE = frozenset({"job", "instance"})
_WORDS = frozenset({"and", "or", "unless"})
_FUNCTIONS = frozenset(
    {"sum", "min", "max", "count", "rate", "increase", "histogram_quantile", "max_over_time", "vector"}
    | {"label_values"}
)
_GROUPING = re.compile(r"\b(?:by|on)\s*\(([^)]*)\)")
_NO_NAMES = re.compile(r"\[[^\]]*\]|\boffset\s+\w+|\b[0-9][0-9.e]*\b")
_NAME = re.compile(r"([A-Za-z_:][\w:]*)\s*(\{[^}]*\})?\s*(\()?")
_MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
_LEGEND = re.compile(r"\{\{\s*(?:\$labels\.)?(\w+)\s*\}\}")


@dataclass(frozen=True, slots=True)
class Exported:
    """`labels`: sample name -> its labels. `values`: (metric, label) -> all that it may be, for labels with few."""

    labels: Mapping[str, frozenset[str]]
    values: Mapping[tuple[str, str], frozenset[str]]


def exported(page: str, values: Mapping[tuple[str, str], frozenset[str]]) -> Exported:
    """Of a page in the text format. A metric without any sample is an error: its labels are not to be seen."""
    labels: dict[str, frozenset[str]] = {"up": frozenset()}
    families = set(re.findall(r"^# TYPE (\w+)", page, re.MULTILINE))
    for name, inside in re.findall(r"^(\w+)(\{.*\})? \S+$", page, re.MULTILINE):
        labels[name] = frozenset(re.findall(r'(\w+)="', inside))
    silent = {f for f in families if not {f, f"{f}_bucket"} & labels.keys()}
    if silent:
        raise ValueError(f"no sample of {sorted(silent)}")
    return Exported(labels, values)


def problems(expression: str, on: Exported, legend: str = "") -> list[str]:
    """What the expression, or the labels in its legend or annotation, ask for in vain."""
    found: list[str] = []
    groups = [
        label.strip()
        for inside in _GROUPING.findall(expression)
        for label in inside.split(",")
        if label.strip()
    ]
    rest = _NO_NAMES.sub(" ", _GROUPING.sub(" ", expression))
    every: list[frozenset[str]] = []
    for name, matchers, opened in _NAME.findall(_without_grafana(rest)):
        if opened and not matchers:
            if name not in _FUNCTIONS:
                found.append(f"no function {name}")
        elif name in _WORDS:
            continue
        elif name not in on.labels:
            found.append(f"no metric {name}")
        else:
            has = on.labels[name] | SCRAPE
            every.append(has)
            found += _wrong_matchers(name, matchers, has, on)
    common = frozenset.intersection(*every) if every else frozenset()
    found += [f"no label {label} to group by" for label in groups if label not in common]
    told = frozenset(groups) if groups else common
    shown = set(_LEGEND.findall(legend)) | set(re.findall(r"\$labels\.(\w+)", legend))
    return found + [f"no label {label} in the result" for label in sorted(shown - told)]


def _without_grafana(expression: str) -> str:
    return re.sub(r'"\$\w+"', '""', expression)


def _wrong_matchers(name: str, matchers: str, has: frozenset[str], on: Exported) -> list[str]:
    found = []
    for label, operator, value in _MATCHER.findall(matchers):
        possible = on.values.get((name, label))
        if label not in has:
            found.append(f"{name} has no label {label}")
        elif possible is not None and not any(
            re.fullmatch(value, one) if "~" in operator else value == one for one in possible
        ):
            found.append(f"{name} has no {label} {value}")
    return found
