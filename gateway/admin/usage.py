"""Usage and costs in buckets of time, in the shape of OpenAI's organization API, with what it does not have beside it:
the cached, written and uncached tokens, what they would have cost without a cache, and what retries cost.

Everything comes from the hourly sums; see docs/admin-api.md.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from gateway.admin.call import Call, Json, Reply
from gateway.admin.problems import Problem, invalid
from gateway.admin.route import Param, Route, choice, moment, text, whole, words
from gateway.admin.shown import Out, instant
from gateway.admin.store import UsageRow
from gateway.core.money import usd_text
from gateway.core.offices import Right

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
#: bucket width -> (milliseconds, buckets of a page by default, and at most); as OpenAI's
WIDTHS = {"1h": (HOUR_MS, 24, 168), "1d": (DAY_MS, 7, 180)}
ROWS_MAX = 50_000
#: The longest time that one export or list covers.
RANGE_DAYS_MAX = 3_660
#: What can be grouped by, with the names that OpenAI's API has for it.
GROUPS = {
    "tenant_id": "tenant_id",
    "team_id": "team_id",
    "key_id": "key_id",
    "model": "model",
    "provider": "provider",
    "deployment": "deployment",
    "tier": "tier",
    "client": "client",
    "tenant": "tenant_id",
    "team": "team_id",
    "key": "key_id",
    "project_id": "team_id",
    "api_key_id": "key_id",
    "label": "label",
}
_COLUMNS = tuple(name for name in dict.fromkeys(GROUPS.values()) if name != "label")
_CSV_FORMULAS = ("=", "+", "-", "@", "\t", "\r")


class BucketPage(Out):
    """Buckets with their results. `next_page` is the `page` of the next request."""

    object: str
    data: list[dict[str, Any]]
    has_more: bool
    next_page: str | None


@dataclass(frozen=True, slots=True)
class Asked:
    by: tuple[str, ...]
    label: str
    width_ms: int
    from_ms: int
    to_ms: int
    filters: Mapping[str, str]


def _asked(call: Call) -> Asked:
    width_ms, _, _ = WIDTHS[call.params.get("bucket_width", "1d")]
    if "start_time" not in call.params:
        raise invalid("start_time", "is required")
    start_ms: int = call.params["start_time"]
    end_ms: int = call.params.get("end_time", call.deps.now_ms())
    if end_ms <= start_ms:
        raise invalid("end_time", "must be after start_time")
    if end_ms - start_ms > RANGE_DAYS_MAX * DAY_MS:
        raise invalid("end_time", f"must be within {RANGE_DAYS_MAX} days of start_time")
    by = call.params.get("group_by", ())
    filters = {name: call.params[name] for name in _COLUMNS if name in call.params}
    # Sums are of whole hours and buckets are whole, so the ends move outwards.
    label = call.params.get("label", "")
    if label and "label" not in by:
        by = (*by, "label")
    if "label" in by and not label:
        raise invalid("label", "say which: label=<name>")
    return Asked(
        by, label, width_ms, start_ms // width_ms * width_ms, -(-end_ms // width_ms) * width_ms, filters
    )


async def costs(call: Call) -> Reply:
    """What was spent, by bucket; `amount` is what providers bill."""
    return await _answer(call, _cost_result)


async def usage(call: Call) -> Reply:
    """What was used, by bucket."""
    return await _answer(call, _usage_result)


async def _answer(call: Call, result: Callable[[UsageRow], Json]) -> Reply:
    asked = _asked(call)
    form = call.params.get("format", "json")
    if form != "json":
        return await _export(call, asked, form)
    _, default, most = WIDTHS[call.params.get("bucket_width", "1d")]
    limit = call.params.get("limit", default)
    if limit > most:
        raise invalid("limit", f"must be at most {most} buckets of this width")
    filters = {k: v for k, v in call.params.items() if k not in ("limit", "page")}
    begin = asked.from_ms
    if "page" in call.params:
        (begin,) = call.opened(filters, call.params["page"])
    end = min(asked.to_ms, begin + limit * asked.width_ms)
    rows = await _rows(call, asked, begin, end)
    by_start: dict[int, list[Json]] = {start: [] for start in range(begin, end, asked.width_ms)}
    for row in rows:
        by_start[row.start_ms].append(result(row))
    more = end < asked.to_ms
    return Reply(
        {
            "object": "page",
            "data": [
                {
                    "object": "bucket",
                    "start_time": start // 1000,
                    "end_time": (start + asked.width_ms) // 1000,
                    "results": results,
                }
                for start, results in by_start.items()
            ],
            "has_more": more,
            "next_page": call.cursor(filters, (end,)) if more else None,
        }
    )


async def _rows(call: Call, asked: Asked, begin: int, end: int) -> Sequence[UsageRow]:
    rows = await call.registry.usage(
        by=[name for name in asked.by if name != "label"],
        label=asked.label,
        width_ms=asked.width_ms,
        from_ms=begin,
        to_ms=end,
        filters=asked.filters,
        limit=ROWS_MAX + 1,
    )
    if len(rows) > ROWS_MAX:
        raise Problem(
            422,
            f"That is more than {ROWS_MAX:,} rows: ask for a shorter time, wider buckets or fewer groups.",
        )
    return rows


async def _export(call: Call, asked: Asked, form: str) -> Reply:
    """The whole time at once, one line for each bucket and group."""
    lines = [_flat(row, asked.width_ms) for row in await _rows(call, asked, asked.from_ms, asked.to_ms)]
    if form == "jsonl":
        return Reply(
            b"".join(msgspec.json.encode(line) + b"\n" for line in lines), content_type="application/x-ndjson"
        )
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\r\n")
    names = ["start", "end", *(n for n in (*_COLUMNS, "label") if n in asked.by), *_SUMS]
    writer.writerow(names)
    writer.writerows([_cell(line[name]) for name in names] for line in lines)
    return Reply(out.getvalue().encode(), content_type="text/csv; charset=utf-8")


def _cell(value: Any) -> Any:
    """A name may begin like a formula; a spreadsheet must not run it. Numbers are only digits here."""
    if (
        isinstance(value, str)
        and value.startswith(_CSV_FORMULAS)
        and not value[1:].replace(".", "").isdigit()
    ):
        return f"'{value}"
    return value


def _sums(row: UsageRow) -> dict[str, Any]:
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


def _money(row: UsageRow) -> dict[str, str]:
    return {
        "cost_usd": usd_text(row.cost_nano_usd),
        "list_cost_usd": usd_text(row.list_cost_nano_usd),
        "saved_usd": usd_text(row.list_cost_nano_usd - row.cost_nano_usd),
        "retries_cost_usd": usd_text(row.retries_cost_nano_usd),
    }


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
)


def _group(row: UsageRow) -> dict[str, Any]:
    return {name: row.group.get(name) for name in (*_COLUMNS, "label")}


def _cost_result(row: UsageRow) -> Json:
    return {
        "object": "organization.costs.result",
        # The exact decimal as a JSON number, where OpenAI has a float.
        "amount": {"value": msgspec.Raw(usd_text(row.cost_nano_usd).encode()), "currency": "usd"},
        "line_item": None,
        "project_id": row.group.get("team_id"),
        **_group(row),
        "attempts": row.attempts,
        **_money(row),
    }


def _usage_result(row: UsageRow) -> Json:
    return {
        "object": "organization.usage.completions.result",
        "num_model_requests": row.attempts,
        "project_id": row.group.get("team_id"),
        "api_key_id": row.group.get("key_id"),
        "user_id": None,
        "batch": None,
        **_group(row),
        **_sums(row),
    }


def _flat(row: UsageRow, width_ms: int) -> dict[str, Any]:
    span = {"start": instant(row.start_ms), "end": instant(row.start_ms + width_ms)}
    return {**span, **row.group, **_sums(row)}


_PARAMS = (
    moment("start_time", "required; widened to whole buckets (UTC)"),
    moment("end_time", "exclusive; default: now"),
    choice("bucket_width", tuple(WIDTHS), "default: 1d"),
    words("group_by", GROUPS, "several: separated by commas, or given several times"),
    *(text(name) for name in _COLUMNS),
    text("label", "group by what this label says of the keys"),
    choice("format", ("json", "csv", "jsonl"), "csv and jsonl: the whole time at once"),
    whole("limit", 180, "buckets of a page; default 7 days or 24 hours"),
    Param("page", str, {"type": "string"}, "`next_page` of the page before"),
)
_MEDIA = ("text/csv", "application/x-ndjson")
ROUTES = (
    Route("GET", "/costs", costs, Right.READ, "usage", BucketPage, params=_PARAMS, media=_MEDIA),
    Route("GET", "/usage", usage, Right.READ, "usage", BucketPage, params=_PARAMS, media=_MEDIA),
)
