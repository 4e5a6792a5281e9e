"""What a person is told about the cache in one attempt: its ledger entry, and the explanation kept with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.core.explanation import Cause, Explanation, Verdict, advice, prevented_by
from gateway.core.misses import Rules
from gateway.core.money import usd_text

_LEVELS = ("observe", "safe", "relocate")
_WRITES = ("cache_write_5m", "cache_write_1h", "cache_write_12h")
_PLACES = {
    Cause.TOOLS_ADDED: "a tool was added at place {index} of the list",
    Cause.TOOLS_REMOVED: "a tool was taken out at place {index} of the list",
    Cause.TOOLS_REORDERED: "the same tools came in another order, from place {index} on",
    Cause.TOOLS_SCHEMA_CHANGED: "the definition of the tool at place {index} changed",
    Cause.SYSTEM_LINE_CHANGED: "line {index} of the system prompt changed",
    Cause.HISTORY_REWRITTEN: "message {index} is not what it was in the request before",
    Cause.COMPACTION: "the history was compacted: it differs from message {index} on",
    Cause.SETTINGS_CHANGED: "the setting {setting} changed",
    Cause.MODEL_OR_DEPLOYMENT_CHANGED: "the request before went to another model or deployment",
    Cause.EXPIRED: "the request before was answered {gap} earlier, longer than the entry lives",
    Cause.BELOW_MINIMUM: "the prompt is shorter than the {minimum} tokens that this model caches",
    Cause.LOOKBACK_OVERRUN: "more content blocks were added at once than the provider looks back from a marker",
    Cause.FIRST_OF_ITS_KIND: "nothing that begins like this was sent and answered before in this task",
    Cause.NOT_MARKED: "this provider caches only at markers, and the request had none",
    Cause.PROVIDER_SIDE: "the prefix is unchanged and in time, and the provider still did not read it",
}


def attempt_report(
    entry: Mapping[str, Any], miss: Explanation | None, rules: Rules, *, kept: bool = True
) -> dict[str, Any]:
    """One attempt as a document: verdict, cause, place, tokens, dollars, what to change.

    `entry` has the columns of the ledger. `kept`: explanations of its age are still there, so that having none says
    that nothing was lost. `verdict` is "unknown" where no usage was read, or what was said is no
    longer kept. `index` is of a tool or message from 0, of a line of the system prompt from 1.
    """
    written = sum(entry[name] for name in _WRITES)
    total = entry["input_uncached"] + entry["cache_read"] + written
    cause = None if miss is None else miss.cause
    verdict = "unknown" if miss is None else miss.verdict.value
    if miss is None and entry["kind"] == "post" and entry["quality"] == "exact":
        if entry["cache_read"]:
            verdict = Verdict.HIT.value
        elif 0 < total < rules.min_tokens:
            verdict, cause = Verdict.MISS.value, Cause.BELOW_MINIMUM
        elif total and kept and rules.known:
            verdict, cause = Verdict.MISS.value, Cause.FIRST_OF_ITS_KIND
    place = miss or Explanation(Verdict.HIT, Cause.PROVIDER_SIDE)
    return {
        "attempt_id": entry["attempt_id"],
        "attempt_no": entry["attempt_no"],
        "model": entry["model"],
        "deployment": entry["deployment"],
        "verdict": verdict,
        "cause": None if cause is None else cause.value,
        "segment": place.segment or None,
        "index": None if place.index < 0 else place.index,
        "offset_bytes": place.offset if place.segment and place.segment != "settings" else None,
        "setting": place.setting or None,
        "previous_request_id": place.previous_request_id or None,
        "gap_ms": place.gap_ms if place.previous_request_id else None,
        "tokens": {
            "input": total,
            "read": entry["cache_read"],
            "written": written,
            "uncached": entry["input_uncached"],
            "expected": place.expected_tokens if miss else entry["cache_read"],
            "lost": place.lost_tokens,
        },
        "lost_usd": usd_text(place.lost_nano_usd),
        "saved_usd": usd_text(entry["list_cost_nano_usd"] - entry["amount_nano_usd"]),
        "why": _why(verdict, cause, place, rules),
        "advice": None if cause is None else advice(cause),
        "level": place.level or None,
        "transforms": list(place.applied),
        "vendor_says": place.vendor or None,
        "prevented_by": _prevented_by(cause, place.level),
    }


def _prevented_by(cause: Cause | None, level: str) -> str | None:
    """A higher level that would have read what was lost."""
    found = "" if cause is None else prevented_by(cause)
    return found if found and _LEVELS.index(level or _LEVELS[0]) < _LEVELS.index(found) else None


def _why(verdict: str, cause: Cause | None, place: Explanation, rules: Rules) -> str:
    if place.unseen:
        return "the task had requests before, but this process remembers none: it had just started, or shares the work"
    if cause is not None:
        gap = f"{place.gap_ms / 1000:,.0f} s"
        return _PLACES[cause].format(
            index=place.index, setting=place.setting, gap=gap, minimum=f"{rules.min_tokens:,}"
        )
    if verdict == Verdict.HIT:
        return "all of the prompt that the cache held was read from it"
    return "nothing is known: no usage was told, the model's cache is not known, or it is too long ago"
