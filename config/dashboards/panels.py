"""The words that dashboards are written in. Expressions name no job: `build` puts the chosen one into each selector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

GREEN, YELLOW, RED, BLUE = "green", "yellow", "red", "blue"
RATE = "[$__rate_interval]"


@dataclass(frozen=True, slots=True)
class Query:
    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """`unit` is a unit of Grafana. The first color holds from below, each other one from its place in `turns_at` on."""

    title: str
    description: str
    unit: str
    queries: Sequence[Query]
    kind: str = "timeseries"  # or "stat"
    width: int = 12
    height: int = 8
    stacked: bool = False
    below_zero: bool = False
    colors: Sequence[str] = (GREEN,)
    turns_at: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of Postgres. `units`: column -> unit; `links`: column -> where a click on its value leads.

    In `sql`, $__from and $__to are the chosen time in milliseconds, and ${name:sqlstring} is a variable as SQL text.
    """

    title: str
    description: str
    sql: str
    units: Mapping[str, str] = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)
    width: int = 24
    height: int = 9


@dataclass(frozen=True, slots=True)
class Variable:
    """Chosen on the dashboard: one of the rows of `sql`, or several; without `sql` a text."""

    name: str
    label: str
    sql: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    panels: Sequence[Panel | Table]


@dataclass(frozen=True, slots=True)
class Dashboard:
    uid: str
    title: str
    description: str
    sections: Sequence[Section]
    variables: Sequence[Variable] = ()


#: A click keeps sources and time.
_KEPT = "${datasource:queryparam}&${postgres:queryparam}&${__url_time_range}"
TO_TEAM = f"/d/tollhouse-tasks?var-team=${{__value.raw}}&{_KEPT}"
TO_TASK = f"/d/tollhouse-task?var-task=${{__value.raw}}&{_KEPT}"
TO_REQUEST = f"/d/tollhouse-task?${{task:queryparam}}&var-request=${{__value.raw}}&{_KEPT}"
TEAM = Variable("team", "Team", "SELECT team_id FROM team ORDER BY team_id")


def stat(
    title: str,
    description: str,
    unit: str,
    expr: str,
    colors: Sequence[str] = (BLUE,),
    turns_at: Sequence[float] = (),
) -> Panel:
    query = Query(expr, title)
    return Panel(title, description, unit, [query], "stat", 4, 4, colors=colors, turns_at=turns_at)


def by(
    label: str,
    metric: str,
    title: str,
    description: str,
    unit: str,
    *,
    per_hour: bool = False,
    stacked: bool = True,
) -> Panel:
    """A counter's rate by one label."""
    window, factor = ("[1h]", " * 3600") if per_hour else (RATE, "")
    expr = f"sum by ({label}) (rate({metric}{window})){factor}"
    return Panel(title, description, unit, [Query(expr, "{{" + label + "}}")], stacked=stacked)


def percentiles(
    metric: str, title: str, description: str, label: str = "", tops: Sequence[int] = (50, 95, 99)
) -> Panel:
    """Of a histogram in seconds, over all or by one label."""
    kept = f"le, {label}" if label else "le"
    legend = " {{" + label + "}}" if label else ""
    queries = [
        Query(
            f"histogram_quantile({top / 100}, sum by ({kept}) (rate({metric}_bucket{RATE})))",
            f"p{top}{legend}",
        )
        for top in tops
    ]
    return Panel(title, description, "s", queries)
