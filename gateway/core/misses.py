"""Why a prompt was not read from the provider's cache: where it differs from the one before, the cause, the price.

A request is compared with the one that it continues by digests alone: no text of a prompt is kept. A provider's cache
is a prefix cache over tools, system and messages in this order (Anthropic, OpenAI and vLLM, November 2026), so the
first segment that differs decides, and where none does, time and the provider's own rules are left.

`Memory` of requests is in `core/threads`; this module is the comparison.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import xxhash

from gateway.core import prices
from gateway.core.cache_rules import CacheRule, CacheRules, LookbackUnit, Style
from gateway.core.catalog import Deployment
from gateway.core.dialects.facts import Facts, Segment
from gateway.core.explanation import Cause, Explanation, Verdict
from gateway.core.prefix import digest, is_system
from gateway.core.prices import PriceRow
from gateway.core.usage import Usage

#: Bytes of a digest that is only ever compared within one task: a collision costs a wrong explanation.
DIGEST = 8
#: Lines of a system prompt and tools that are told apart; what comes later counts as one.
PIECES_MAX = 4_000
#: Losing fewer tokens than this, or than one in fifty, is no miss: providers cut at blocks of their own.
_SLACK_TOKENS = 32
_SLACK_SHARE = 50


class Rules(msgspec.Struct, frozen=True):
    """What a provider's cache does, as far as a miss can be explained by it. Not `known`: it may have none at all."""

    known: bool = True
    explicit: bool = False  # caches only at markers
    min_tokens: int = 1_024
    granularity_tokens: int = 1
    life_ms: int | None = None  # of the default class; None = best effort
    lookback_blocks: int | None = None


_UNKNOWN = Rules(known=False)
#: By the id of their row, which is kept beside them so that no other one gets its id.
_RULES: dict[int, tuple[CacheRule, Rules]] = {}
_RULES_MAX = 1_000


def rules_of(rule: CacheRule | None) -> Rules:
    """Of what is known about a model's cache; what is not known is taken for the common case."""
    if rule is None:
        return _UNKNOWN
    known = _RULES.get(id(rule))
    if known is None or known[0] is not rule:
        if len(_RULES) >= _RULES_MAX:
            _RULES.clear()
        known = _RULES[id(rule)] = (rule, _rules_of(rule))
    return known[1]


def _rules_of(rule: CacheRule) -> Rules:
    life_s = rule.lives[0].life_s if rule.lives else None
    counts_blocks = rule.lookback_unit is LookbackUnit.CONTENT_BLOCK
    return Rules(
        True,
        rule.style is Style.EXPLICIT,
        rule.min_prefix_tokens or _UNKNOWN.min_tokens,
        rule.granularity_tokens or 1,
        None if life_s is None else life_s * 1_000,
        rule.lookback if counts_blocks else None,
    )


def rules_for(known: CacheRules, deployment: Deployment | None, now_ms: int) -> Rules:
    """Of a deployment; None = it is no longer there."""
    if deployment is None:
        return _UNKNOWN
    provider = deployment.provider
    return rules_of(
        known.find(f"{provider.cache_rules or provider.name}/{deployment.upstream_model}", now_ms)
    )


class Prior(msgspec.Struct, frozen=True):
    """The request before on the same thread, when its answer was there."""

    request_id: str
    own: bytes  # a digest per segment
    head: int  # how many of them are tools and system
    settings: tuple[tuple[str, int], ...]
    deployment: str  # and model: what has a cache of its own
    reach_tokens: int  # what the provider's cache held after it
    life_ms: int | None
    answered_at_ms: int
    marked: bool = True  # its provider kept something of it, or keeps everything by itself


class Pieces(msgspec.Struct, frozen=True):
    """The parts of tools or of the system prompt: a digest of each, and of its name if it has one."""

    names: tuple[bytes, ...]
    digests: tuple[bytes, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """Where two prompts begin to differ, and why; `known_bytes` of the new one were in the old one somewhere."""

    cause: Cause | None  # None: nowhere, one continues the other
    segment: str = ""
    index: int = -1
    offset: int = 0
    setting: str = ""
    known_bytes: int = 0
    all_bytes: int = 1


# --- digests ------------------------------------------------------------------------------------------------

#: Members of a request, of any dialect, that are part of what its provider caches by or change what is rendered.
SETTINGS = frozenset(
    {
        "chat_template_kwargs", "context_management", "functions", "output_config", "output_format",
        "parallel_tool_calls", "prompt_cache_key", "reasoning", "reasoning_effort", "response_format", "service_tier",
        "speed", "text", "thinking", "tool_choice", "verbosity",
    }
)  # fmt: skip


def settings_of(facts: Facts, body: bytes) -> tuple[tuple[str, int], ...]:
    """The settings that a request names, each with a hash of its value."""
    spans = facts.spans.members
    if SETTINGS.isdisjoint(spans):
        return ()
    named = [name for name in spans if name in SETTINGS]
    return tuple([(name, xxhash.xxh3_64_intdigest(body[slice(*spans[name])])) for name in named])


def own_digests(segments: Sequence[Segment]) -> bytes:
    """`DIGEST` bytes for each segment, whatever is in front of it."""
    return b"".join([digest(segment)[:DIGEST] for segment in segments])


def head_of(segments: Sequence[Segment]) -> int:
    """How many segments are tools and system prompt, the leading messages of the system role included."""
    for i, segment in enumerate(segments):
        if segment.kind == "message" and not is_system(segment):
            return i
    return len(segments)


def pieces_of(segment: Segment) -> Pieces:
    """The tools of a list, or the lines of a system prompt; one piece for what is neither."""
    if segment.kind == "tools":
        return _tool_pieces(segment.raw)
    texts = _texts(segment.raw)
    lines = "\n".join(texts).split("\n", PIECES_MAX)
    encoded = [line.encode("utf-8", "replace") for line in lines]
    return Pieces((), tuple(map(_short, encoded)), tuple(len(line) + 1 for line in encoded))


def _tool_pieces(raw: memoryview) -> Pieces:
    try:
        tools = msgspec.json.decode(raw, type=list[msgspec.Raw])[:PIECES_MAX]
    except msgspec.DecodeError:
        return Pieces((), (_short(bytes(raw)),), (len(raw),))
    names = tuple(_short(_tool_name(tool)) for tool in tools)
    # A marker moves to the last tool, whichever that is: no change of a tool.
    canonical = [digest(Segment("tools", memoryview(b"[" + bytes(tool) + b"]"))) for tool in tools]
    return Pieces(names, tuple(d[:DIGEST] for d in canonical), tuple(len(bytes(tool)) for tool in tools))


class _Named(msgspec.Struct):
    name: Any = None


class _Tool(msgspec.Struct):
    name: Any = None
    type: Any = None
    function: _Named | None = None


def _tool_name(raw: msgspec.Raw) -> bytes:
    try:
        tool = msgspec.json.decode(raw, type=_Tool)
    except msgspec.DecodeError:
        return b""
    name = tool.function.name if tool.function is not None else tool.name
    return str(name or tool.type).encode("utf-8", "replace")


def _texts(raw: memoryview) -> list[str]:
    """The texts of a system prompt: a string, a list of blocks, or a message that has one of these."""
    try:
        value = msgspec.json.decode(raw)
    except msgspec.DecodeError:
        return [bytes(raw).decode("utf-8", "replace")]
    if isinstance(value, Mapping):
        value = value.get("content")
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        return [str(value)]
    return [str(b.get("text", "")) if isinstance(b, Mapping) else str(b) for b in value]


def _short(text: bytes) -> bytes:
    return xxhash.xxh3_64_digest(text)


# --- comparison ---------------------------------------------------------------------------------------------


def locate(
    prior: Prior,
    segments: Sequence[Segment],
    own: bytes,
    settings: Sequence[tuple[str, int]],
    pieces: Mapping[bytes, Pieces],
    *,
    compacted: bool = False,
) -> Place:
    """The first difference between a request and the one before, in the order in which providers hash.

    `pieces` by a segment's digest, of as many tools and system prompts as are remembered. `compacted`: the client has
    said that it was about to compact.
    """
    old, new = _cut(prior.own), _cut(own)
    head = head_of(segments)
    sizes = [len(segment.raw) for segment in segments]
    same = next(
        (i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new))
    )
    seen = set(old)
    known = [size if mine in seen else 0 for size, mine in zip(sizes, new, strict=True)]
    place = Place(None, known_bytes=sum(known), all_bytes=sum(sizes) or 1)
    # One without tools may have its system prompt where the other has tools.
    if same < max(head, prior.head) and same < len(new):
        return _in_head(place, old, new, same, segments, sizes, known, pieces)
    setting = _setting(prior.settings, settings)
    if setting:
        return replace(place, cause=Cause.SETTINGS_CHANGED, segment="settings", setting=setting)
    if same >= min(len(old), len(new)):
        return place
    shrunk = len(new) < len(old) and (compacted or 2 * (len(new) - head) <= len(old) - prior.head)
    return replace(
        place,
        cause=Cause.COMPACTION if shrunk else Cause.HISTORY_REWRITTEN,
        segment="message",
        index=same - sum(segment.kind != "message" for segment in segments[:2]),
        offset=sum(sizes[:same]),
    )


def extends(prior: Prior, sizes: Sequence[int], settings: Sequence[tuple[str, int]]) -> Place:
    """`locate` for a request that is known to continue the one before, from the sizes of its segments."""
    known, setting = sum(sizes[: len(prior.own) // DIGEST]), _setting(prior.settings, settings)
    if setting:
        return Place(Cause.SETTINGS_CHANGED, "settings", -1, 0, setting, known, sum(sizes) or 1)
    return Place(None, known_bytes=known, all_bytes=sum(sizes) or 1)


def _in_head(
    place: Place,
    old: Sequence[bytes],
    new: Sequence[bytes],
    same: int,
    segments: Sequence[Segment],
    sizes: Sequence[int],
    known: Sequence[int],
    pieces: Mapping[bytes, Pieces],
) -> Place:
    """Tools or system differ at segment `same`."""
    now = pieces.get(new[same]) or pieces_of(segments[same])
    before = pieces.get(old[same]) if same < len(old) else None
    offset = sum(sizes[:same])
    is_tools = segments[same].kind == "tools"
    was_tools = before is not None and bool(before.names)
    if is_tools != was_tools:
        cause = Cause.TOOLS_ADDED if is_tools else Cause.TOOLS_REMOVED
        if is_tools or was_tools:
            return replace(place, cause=cause, segment="tools", index=0, offset=offset)
    if before is None:
        return replace(place, cause=Cause.SYSTEM_LINE_CHANGED, segment="system", index=1, offset=offset)
    at = next(
        (i for i, (a, b) in enumerate(zip(before.digests, now.digests, strict=False)) if a != b),
        min(len(before.digests), len(now.digests)),
    )
    seen = set(before.digests)
    kept = sum(size for size, piece in zip(now.sizes, now.digests, strict=True) if piece in seen)
    # The sizes of pieces are those of their text, a segment's are those of its JSON.
    kept = kept * sizes[same] // (sum(now.sizes) or 1)
    place = replace(
        place,
        offset=offset + sum(now.sizes[:at]),
        known_bytes=place.known_bytes - known[same] + kept,
    )
    if is_tools:
        return replace(place, cause=_tools_cause(before, now), segment="tools", index=at)
    return replace(place, cause=Cause.SYSTEM_LINE_CHANGED, segment="system", index=at + 1)


def _tools_cause(before: Pieces, now: Pieces) -> Cause:
    old, new = set(before.names), set(now.names)
    if new - old:
        return Cause.TOOLS_ADDED
    if old - new:
        return Cause.TOOLS_REMOVED
    if sorted(before.digests) == sorted(now.digests):
        return Cause.TOOLS_REORDERED
    return Cause.TOOLS_SCHEMA_CHANGED


def _setting(old: Sequence[tuple[str, int]], new: Sequence[tuple[str, int]]) -> str:
    """The first setting, by name, that differs; "" if none does."""
    return min((name for name, _ in set(old) ^ set(new)), default="")


def _cut(own: bytes) -> list[bytes]:
    return [own[i : i + DIGEST] for i in range(0, len(own), DIGEST)]


# --- the verdict --------------------------------------------------------------------------------------------


def reach_of(usage: Usage, rules: Rules) -> int:
    """How many tokens of a prompt its provider's cache holds once it has answered."""
    cached = usage.cache_read + usage.cache_write
    if usage.cache_write or (rules.explicit and cached) or not rules.known:
        return cached
    # Without markers nothing was cached; what marking would have kept is what a miss is measured by.
    reach = usage.input_total // rules.granularity_tokens * rules.granularity_tokens
    return reach if reach >= rules.min_tokens else 0


def is_hit(usage: Usage, expected_tokens: int, rules: Rules) -> bool:
    """All but a little of what could be read was read."""
    slack = max(_SLACK_TOKENS, rules.granularity_tokens, expected_tokens // _SLACK_SHARE)
    return expected_tokens - usage.cache_read <= slack


def explain(
    prior: Prior | None,
    place: Place,
    usage: Usage,
    rules: Rules,
    *,
    deployment: str,
    started_at_ms: int,
    row: PriceRow | None,
    service_tier: str = "",
    blocks_since: int = 0,
) -> Explanation | None:
    """What to say about an attempt; None if it is a hit, or too short to be cached.

    `blocks_since`: content blocks from the end of the request before to this one's next marker.
    """
    total = usage.input_total
    if total < rules.min_tokens:
        return None
    if prior is None or prior.answered_at_ms > started_at_ms:
        # An entry can be read only once the answer to its writer has begun.
        if usage.cache_read:
            return None
        return Explanation(Verdict.MISS, Cause.FIRST_OF_ITS_KIND, input_tokens=total)
    expected = min(prior.reach_tokens, total)
    if place.cause is not None and place.segment != "settings":
        expected = min(expected, total * place.known_bytes // place.all_bytes)
    if is_hit(usage, expected, rules):
        return None
    gap_ms = started_at_ms - prior.answered_at_ms
    cause = place.cause
    if prior.deployment != deployment:
        cause, place = Cause.MODEL_OR_DEPLOYMENT_CHANGED, Place(None)
    elif cause is None:
        cause = _unchanged(prior, usage, rules, gap_ms, blocks_since)
    lost = expected - usage.cache_read
    return Explanation(
        Verdict.PARTIAL if usage.cache_read else Verdict.MISS,
        cause,
        place.segment,
        place.index,
        place.offset,
        place.setting,
        total,
        usage.cache_read,
        expected,
        lost,
        lost_nano_usd(row, usage, lost, started_at_ms, service_tier),
        prior.request_id,
        gap_ms,
    )


def _unchanged(prior: Prior, usage: Usage, rules: Rules, gap_ms: int, blocks_since: int) -> Cause:
    """Why a prefix that did not change was not read."""
    if rules.explicit and not (prior.marked and usage.cache_read + usage.cache_write):
        return Cause.NOT_MARKED
    if prior.life_ms is not None and gap_ms > prior.life_ms:
        return Cause.EXPIRED
    if rules.lookback_blocks is not None and blocks_since >= rules.lookback_blocks:
        return Cause.LOOKBACK_OVERRUN
    return Cause.PROVIDER_SIDE


def lost_nano_usd(row: PriceRow | None, usage: Usage, tokens: int, at_ms: int, service_tier: str) -> int:
    """What `usage` cost more than it would have, had so many of its tokens been read: written ones first."""
    if row is None or tokens <= 0:
        return 0
    left, moved = tokens, {}
    for name in ("cache_write_5m", "cache_write_1h", "cache_write_12h", "input_uncached"):
        taken = min(left, getattr(usage, name))
        moved[name] = getattr(usage, name) - taken
        left -= taken
    ideal = msgspec.structs.replace(usage, cache_read=usage.cache_read + tokens - left, **moved)
    paid = prices.cost(row, usage, at_ms, service_tier=service_tier).nano_usd
    return max(0, paid - prices.cost(row, ideal, at_ms, service_tier=service_tier).nano_usd)


def blocks_between(segments: Sequence[Segment], start: int, end: int) -> int:
    """Content blocks from segment `start` to the first one that has a marker; to `end` if none has."""
    count = 0
    for i in range(start, end):
        segment = segments[i]
        count += _blocks(segment)
        if b'"cache_control"' in bytes(segment.raw):
            break
    return count


class _Content(msgspec.Struct):
    content: Any = None
    tool_calls: Any = None


def _blocks(segment: Segment) -> int:
    if segment.kind != "message":
        return 1
    try:
        message = msgspec.json.decode(segment.raw, type=_Content)
    except msgspec.DecodeError:
        return 1
    count = len(message.content) if isinstance(message.content, list) else int(message.content is not None)
    return max(1, count + (len(message.tool_calls) if isinstance(message.tool_calls, list) else 0))
