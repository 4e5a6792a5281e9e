"""Usage and costs in buckets of time, in the shape of OpenAI's organization API, with what it does not have beside it:
the cached, written and uncached tokens, what they would have cost without a cache, what retries and failures cost, what
was lost to caches by cause, and what budgets refused.

Everything comes from sums; see docs/admin-api.md.
"""

from __future__ import annotations

import asyncio
import csv
import io
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache
from itertools import pairwise
from typing import Any

import msgspec

from gateway.admin.call import TURN_REST_S, TURN_ROWS, Call, Json, Reply
from gateway.admin.problems import Problem, invalid
from gateway.admin.route import Param, Route, choice, local_moment, text, whole, words
from gateway.admin.shown import Out, instant
from gateway.core.buckets import DAY_MS, Width, bucket_at, edges, local_ms
from gateway.core.explanation import Cause
from gateway.core.money import usd_text
from gateway.core.offices import Right
from gateway.core.usage_facts import GROUPS, TASK_GROUPS, Question, UsageBucket

#: bucket width -> buckets of a page by default, and at most; as OpenAI's
WIDTHS = {Width.HOUR: (24, 168), Width.DAY: (7, 180)}
#: Of a page; an export may have more.
ROWS_MAX = 50_000
#: Rows that are read at once, in a millisecond or two: requests are served by the same process.
PART_ROWS = 100
#: How an export rests: so long after each few lines, and so many times as long as reading a part took.
EXPORT_REST_S, EXPORT_RESTS, EXPORT_REST_S_MAX = 0.005, 8, 0.5
#: The longest time that one export or list covers.
RANGE_DAYS_MAX = 3_660
#: What can be grouped by, with the names that OpenAI's API has for it.
_NAMES = {
    **{name: name for name in GROUPS},
    **{name.removesuffix("_id"): name for name in GROUPS},
    "project_id": "team_id",
    "api_key_id": "key_id",
    "label": "label",
}
_COLUMNS = (*GROUPS, "label")
_INCLUDED = ("misses", "refusals")
_SCOPES = ("tenant", "team", "key", "task")
_AT_ONCE_MAX = 366
_CSV_FORMULAS = ("=", "+", "-", "@", "\t", "\r")
_CSV, _JSON_LINES = "text/csv", "application/x-ndjson"


class BucketPage(Out):
    """Buckets with their results. `next_page` is the `page` of the next request."""

    object: str
    data: list[dict[str, Any]]
    has_more: bool
    next_page: str | None


@dataclass(frozen=True, slots=True)
class Asked:
    """`begin_ms` and `end_ms` are ends of buckets of `zone`."""

    by: tuple[str, ...]
    label: str
    width: Width
    zone: str
    begin_ms: int
    end_ms: int
    filters: Mapping[str, str]
    included: tuple[str, ...]

    def question(self, found: Sequence[int]) -> Question:
        """The same about these buckets."""
        return Question(
            tuple(name for name in self.by if name != "label"),
            found,
            self.filters,
            self.label,
            "misses" in self.included,
            "refusals" in self.included,
        )

    def edges(self, begin_ms: int, most: int) -> list[int]:
        """The edges of `most` buckets from there on, or of those that are left."""
        found: list[int] = []
        for edge in edges(self.width, self.zone, begin_ms, self.end_ms):
            found.append(edge)
            if len(found) > most:
                break
        return found


def _asked(call: Call) -> Asked:
    params = call.params
    width, zone = Width(params.get("bucket_width", "1d")), params.get("time_zone", "UTC")
    if "start_time" not in params:
        raise invalid("start_time", "is required")
    try:
        # Refuses a zone that does not exist, or whose days are not made of full hours.
        bucket_at(width, zone, call.deps.now_ms())
        start_ms, end_ms = (
            local_ms(given, zone) if isinstance(given, datetime) else given
            for given in (params["start_time"], params.get("end_time", call.deps.now_ms()))
        )
        if end_ms <= start_ms:
            raise invalid("end_time", "must be after start_time")
        if end_ms - start_ms > RANGE_DAYS_MAX * DAY_MS:
            raise invalid("end_time", f"must be within {RANGE_DAYS_MAX} days of start_time")
        # Buckets are whole, so the ends move outwards.
        begin_ms, last = bucket_at(width, zone, start_ms)[0], bucket_at(width, zone, end_ms)
    except ValueError as error:
        raise invalid("time_zone", str(error)) from None
    by, label = params.get("group_by", ()), params.get("label", "")
    if label and "label" not in by:
        by = (*by, "label")
    if "label" in by and not label:
        raise invalid("label", "say which: label=<name>")
    asked = Asked(
        by,
        label,
        width,
        zone,
        begin_ms,
        end_ms if last[0] == end_ms else last[1],
        {name: params[name] for name in GROUPS if name in params},
        params.get("include", ()),
    )
    _check_tasks(asked)
    return asked


def _check_tasks(asked: Asked) -> None:
    """What tasks cannot be asked for together with."""
    names = {*asked.by, *asked.filters}
    if "task_id" not in names:
        return
    if asked.included:
        raise invalid("include", "is not summed up by task; /tasks/{task_id}/steps tells what one has lost")
    if "task_id" in asked.filters:
        return
    for field, given in (("group_by", asked.by), ("", asked.filters)):
        for name in given:
            if name not in (*TASK_GROUPS, "label"):
                raise invalid(
                    field or name,
                    f"{name} does not go with group_by=task, which knows {', '.join(TASK_GROUPS)} and label; "
                    "with task_id=<one task> everything does",
                )


async def costs(call: Call) -> Reply:
    """What was spent, by bucket; `amount` is what providers bill."""
    return await _answer(call, _cost_result)


async def usage(call: Call) -> Reply:
    """What was used, by bucket."""
    return await _answer(call, _usage_result)


async def _answer(call: Call, result: Callable[[UsageBucket, Asked], Json]) -> Reply:
    asked = _asked(call)
    form = call.params.get("format") or _accepted(call.accept)
    if form != "json":
        return await _export(call, asked, form)
    default, most = WIDTHS[asked.width]
    limit = call.params.get("limit", default)
    if limit > most:
        raise invalid("limit", f"must be at most {most} buckets of this width")
    filters = {k: v for k, v in call.params.items() if k not in ("limit", "page")}
    begin = asked.begin_ms
    if "page" in call.params:
        (begin,) = call.opened(filters, call.params["page"], "page")
    found = asked.edges(begin, limit)
    by_start: dict[int, list[msgspec.Raw]] = {start: [] for start in found[:-1]}
    count = 0
    async with aclosing(_parts(call, replace(asked, begin_ms=begin, end_ms=found[-1]), rests=False)) as parts:
        async for part in parts:
            count += len(part)
            if count > ROWS_MAX:
                raise Problem(
                    422,
                    f"That is more than {ROWS_MAX:,} rows: ask for a shorter time, wider buckets, fewer groups or "
                    "format=csv.",
                )
            for _, row in part:
                by_start[row.start_ms].append(msgspec.Raw(msgspec.json.encode(result(row, asked))))
    more = found[-1] < asked.end_ms
    return Reply(
        {
            "object": "page",
            "data": [
                {
                    "object": "bucket",
                    "start_time": start // 1000,
                    "end_time": end // 1000,
                    "results": by_start[start],
                }
                for start, end in pairwise(found)
            ],
            "has_more": more,
            "next_page": call.cursor(filters, (found[-1],)) if more else None,
        }
    )


def _accepted(accept: str) -> str:
    """The format that an `Accept` header names first, of those that there are."""
    for media in accept.lower().split(","):
        match media.partition(";")[0].strip():
            case "text/csv":
                return "csv"
            case "application/x-ndjson" | "application/jsonl" | "application/jsonlines":
                return "jsonl"
            case "application/json":
                return "json"
    return "json"


# --- exports ---------------------------------------------------------------------------------------------------


async def _export(call: Call, asked: Asked, form: str) -> Reply:
    """The whole time, one line for each bucket and group, a part after the other."""
    parts = _parts(call, asked, rests=True)
    first = await anext(parts)  # what fails at once is still told as a problem
    if form == "jsonl":
        return Reply({}, content_type=_JSON_LINES, stream=_json_lines(first, parts, asked))
    return Reply({}, content_type=f"{_CSV}; charset=utf-8", stream=_csv(first, parts, asked))


_Part = Sequence[tuple[int, UsageBucket]]


async def _parts(call: Call, asked: Asked, *, rests: bool) -> AsyncGenerator[_Part, None]:
    """(end of its bucket, row) of all, at least one part. So many buckets are read at once as have a part's rows.

    `rests`: so that an export takes a tenth of a core at most. Each line of it is time in which a request waits.
    """
    begin, at_once = asked.begin_ms, 1
    while begin < asked.end_ms:
        found = asked.edges(begin, at_once)
        ends = dict(pairwise(found))
        after: tuple[Any, ...] | None = None
        more = True
        while more:
            began_s = call.deps.monotonic()
            rows, more = await call.registry.usage(asked.question(found), after, PART_ROWS)
            took_s = call.deps.monotonic() - began_s
            if more:
                at_once = max(1, at_once // 2)
            elif len(rows) < PART_ROWS // 4:
                at_once = min(2 * at_once, _AT_ONCE_MAX)
            for i in range(0, max(1, len(rows)), TURN_ROWS):
                yield [(ends[row.start_ms], row) for row in rows[i : i + TURN_ROWS]]
                await asyncio.sleep(EXPORT_REST_S if rests else TURN_REST_S)
            after = rows[-1].place if rows else None
            if rests:
                await asyncio.sleep(min(EXPORT_REST_S_MAX, EXPORT_RESTS * took_s))
        begin = found[-1]


async def _json_lines(
    first: _Part, rest: AsyncGenerator[_Part, None], asked: Asked
) -> AsyncGenerator[bytes, None]:
    def written(part: _Part) -> bytes:
        return b"".join(msgspec.json.encode(_line(end, row, asked)) + b"\n" for end, row in part)

    yield written(first)
    async with aclosing(rest):
        async for part in rest:
            yield written(part)


async def _csv(first: _Part, rest: AsyncGenerator[_Part, None], asked: Asked) -> AsyncGenerator[bytes, None]:
    grouped = [name for name in _COLUMNS if name in asked.by]
    names = ["start", "end", *grouped, *_SUMS, *_csv_included(asked)]
    yield _csv_lines([names])
    yield _csv_lines(_csv_row(names, end, row, asked) for end, row in first)
    async with aclosing(rest):
        async for part in rest:
            yield _csv_lines(_csv_row(names, end, row, asked) for end, row in part)


def _csv_lines(rows: Iterable[Iterable[Any]]) -> bytes:
    out = io.StringIO()
    csv.writer(out, lineterminator="\r\n").writerows(rows)
    return out.getvalue().encode()


def _csv_row(names: Sequence[str], end_ms: int, row: UsageBucket, asked: Asked) -> list[Any]:
    line = _line(end_ms, row, asked)
    for miss in row.misses:
        line[f"lost_{miss.cause}_usd"] = usd_text(miss.lost_nano_usd)
    for refused in row.refused:
        line[f"refusals_{refused.scope_kind}"] = refused.refusals
        line[f"refused_{refused.scope_kind}_usd"] = usd_text(refused.nano_usd)
    return [_cell(line.get(name, 0)) for name in names]


def _csv_included(asked: Asked) -> list[str]:
    """A column for each cause and each kind of scope."""
    names: list[str] = []
    if "misses" in asked.included:
        names += ["lost_usd", *(f"lost_{cause}_usd" for cause in Cause)]
    if "refusals" in asked.included:
        names += ["refusals", "refused_usd"]
        names += [name for kind in _SCOPES for name in (f"refusals_{kind}", f"refused_{kind}_usd")]
    return names


def _cell(value: Any) -> Any:
    """A name may begin like a formula; a spreadsheet must not run it. Numbers are only digits here."""
    if (
        isinstance(value, str)
        and value.startswith(_CSV_FORMULAS)
        and not value[1:].replace(".", "").isdigit()
    ):
        return f"'{value}"
    return value


# --- one row ---------------------------------------------------------------------------------------------------


def _sums(row: UsageBucket) -> dict[str, Any]:
    tokens = row.tokens
    written = tokens["cache_write_5m"] + tokens["cache_write_1h"] + tokens["cache_write_12h"]
    return {
        "attempts": row.attempts,
        "errors": row.errors,
        "retries": row.retries,
        "input_tokens": tokens["input_uncached"] + tokens["cache_read"] + written,
        "input_uncached_tokens": tokens["input_uncached"],
        "input_cached_tokens": tokens["cache_read"],
        "input_written_tokens": written,
        "input_written_5m_tokens": tokens["cache_write_5m"],
        "input_written_1h_tokens": tokens["cache_write_1h"],
        "input_written_12h_tokens": tokens["cache_write_12h"],
        "output_tokens": tokens["output"],
        "reasoning_tokens": tokens["reasoning"],
        **_money(row),
    }


def _money(row: UsageBucket) -> dict[str, str]:
    return {
        "cost_usd": usd_text(row.cost_nano_usd),
        "list_cost_usd": usd_text(row.list_cost_nano_usd),
        "saved_usd": usd_text(row.list_cost_nano_usd - row.cost_nano_usd),
        "retries_cost_usd": usd_text(row.retries_cost_nano_usd),
        "failed_cost_usd": usd_text(row.failed_cost_nano_usd),
    }


def _included(row: UsageBucket, asked: Asked) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if "misses" in asked.included:
        found["lost_usd"] = usd_text(sum(miss.lost_nano_usd for miss in row.misses))
        found["misses"] = [
            {
                "cause": miss.cause,
                "attempts": miss.attempts,
                "lost_tokens": miss.lost_tokens,
                "lost_usd": usd_text(miss.lost_nano_usd),
            }
            for miss in row.misses
        ]
    if "refusals" in asked.included:
        found["refusals"] = sum(refused.refusals for refused in row.refused)
        found["refused_usd"] = usd_text(sum(refused.nano_usd for refused in row.refused))
        found["refused"] = [
            {
                "scope": refused.scope_kind,
                "refusals": refused.refusals,
                "unbounded": refused.unbounded,
                "refused_usd": usd_text(refused.nano_usd),
            }
            for refused in row.refused
        ]
    return found


_SUMS = (
    "attempts",
    "errors",
    "retries",
    "input_tokens",
    "input_uncached_tokens",
    "input_cached_tokens",
    "input_written_tokens",
    "input_written_5m_tokens",
    "input_written_1h_tokens",
    "input_written_12h_tokens",
    "output_tokens",
    "reasoning_tokens",
    "cost_usd",
    "list_cost_usd",
    "saved_usd",
    "retries_cost_usd",
    "failed_cost_usd",
)


def _group(row: UsageBucket) -> dict[str, Any]:
    return {name: row.group.get(name) for name in _COLUMNS}


def _cost_result(row: UsageBucket, asked: Asked) -> Json:
    return {
        "object": "organization.costs.result",
        # The exact decimal as a JSON number, where OpenAI has a float.
        "amount": {"value": msgspec.Raw(usd_text(row.cost_nano_usd).encode()), "currency": "usd"},
        "line_item": None,
        "project_id": row.group.get("team_id"),
        **_group(row),
        "attempts": row.attempts,
        **_money(row),
        **_included(row, asked),
    }


def _usage_result(row: UsageBucket, asked: Asked) -> Json:
    return {
        "object": "organization.usage.completions.result",
        "num_model_requests": row.attempts,
        "project_id": row.group.get("team_id"),
        "api_key_id": row.group.get("key_id"),
        "user_id": None,
        "batch": None,
        **_group(row),
        **_sums(row),
        **_included(row, asked),
    }


#: All rows of a bucket have the same two.
_edge = lru_cache(maxsize=64)(instant)


def _line(end_ms: int, row: UsageBucket, asked: Asked) -> dict[str, Any]:
    span = {"start": _edge(row.start_ms), "end": _edge(end_ms)}
    return {**span, **row.group, **_sums(row), **_included(row, asked)}


def _width(given: str) -> str:
    if given not in tuple(Width):
        raise ValueError("must be 1h or 1d: sums are kept by hours")
    return given


_PARAMS = (
    local_moment("start_time", "required; widened to whole buckets. A day or time without an offset is of `time_zone`"),
    local_moment("end_time", "exclusive; default: now"),
    Param("bucket_width", _width, {"type": "string", "enum": [*Width]}, "default: 1d"),
    text("time_zone", "whose days the buckets are, as Europe/Berlin; default: UTC"),
    words("group_by", _NAMES, "several: separated by commas, or given several times"),
    *(text(name) for name in GROUPS),
    text("label", "group by what this label says of the keys"),
    words("include", {name: name for name in _INCLUDED}, "what was lost to caches by cause, what budgets refused"),
    choice("format", ("json", "csv", "jsonl"), "csv and jsonl: the whole time, streamed; also by `Accept`"),
    whole("limit", 180, "buckets of a page; default 7 days or 24 hours"),
    Param("page", str, {"type": "string"}, "`next_page` of the page before"),
)  # fmt: skip
_MEDIA = (_CSV, _JSON_LINES)
ROUTES = (
    Route("GET", "/costs", costs, Right.READ, "usage", BucketPage, params=_PARAMS, media=_MEDIA),
    Route("GET", "/usage", usage, Right.READ, "usage", BucketPage, params=_PARAMS, media=_MEDIA),
)
