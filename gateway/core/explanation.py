"""What is said about an attempt that read less from its provider's cache than it could have. No text of a prompt."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Verdict(StrEnum):
    HIT = "hit"
    PARTIAL = "partial"  # read from the cache, but less than it held
    MISS = "miss"


class Cause(StrEnum):
    """Why tokens that a cache could have held were not read from it."""

    TOOLS_ADDED = "tools_added"
    TOOLS_REMOVED = "tools_removed"
    TOOLS_REORDERED = "tools_reordered"
    TOOLS_SCHEMA_CHANGED = "tools_schema_changed"
    SYSTEM_LINE_CHANGED = "system_line_changed"
    HISTORY_REWRITTEN = "history_rewritten"
    COMPACTION = "compaction"
    SETTINGS_CHANGED = "settings_changed"
    MODEL_OR_DEPLOYMENT_CHANGED = "model_or_deployment_changed"
    EXPIRED = "expired"
    BELOW_MINIMUM = "below_minimum"
    LOOKBACK_OVERRUN = "lookback_overrun"
    FIRST_OF_ITS_KIND = "first_of_its_kind"
    NOT_MARKED = "not_marked"  # the provider caches only at markers, and there was none
    PROVIDER_SIDE = "provider_side"  # the same prefix, in time, and still not read


_ADVICE = {
    Cause.TOOLS_ADDED: "Declare all tools from the first request on, or add new ones through the provider's own "
    "way of adding tools in mid-conversation; a changed list rewrites the whole prefix.",
    Cause.TOOLS_REMOVED: "Keep the list of tools and forbid single ones with tool_choice or allowed_tools; a "
    "changed list rewrites the whole prefix.",
    Cause.TOOLS_REORDERED: "Send the tools in one fixed order, or let the gateway do so with cache level safe.",
    Cause.TOOLS_SCHEMA_CHANGED: "Serialise each tool the same way in every request, key order included; keep "
    "dates and ids out of descriptions.",
    Cause.SYSTEM_LINE_CHANGED: "Move what changes (time, directory, git status, ids) behind the stable part of the "
    "prompt, or let the gateway do so with cache level relocate.",
    Cause.HISTORY_REWRITTEN: "Only append to the history; cut or shorten tool results when they first appear, not "
    "later.",
    Cause.COMPACTION: "Compact rarely and by much; let the compacting request repeat the old prefix and append its "
    "instruction.",
    Cause.SETTINGS_CHANGED: "Keep settings that are part of the cached prefix the same throughout a run.",
    Cause.MODEL_OR_DEPLOYMENT_CHANGED: "Stay with one model and one deployment in a run; each has a cache of its own.",
    Cause.EXPIRED: "Send the next request earlier, or ask for the longer life (1h at Anthropic, 24h or 12h at OpenAI) "
    "where turns are that far apart.",
    Cause.BELOW_MINIMUM: "Nothing to change: prompts this short are not cached by this model.",
    Cause.LOOKBACK_OVERRUN: "Place a second marker within the provider's look-back of the last one, or let the "
    "gateway do so with cache level safe.",
    Cause.FIRST_OF_ITS_KIND: "Nothing to change: nothing with this beginning was sent before in this task.",
    Cause.NOT_MARKED: "Mark the end of the stable part and of the conversation with cache_control, or let the gateway "
    "do so with cache level safe.",
    Cause.PROVIDER_SIDE: "Nothing in the prompt explains it: the provider dropped the entry, or served from another "
    "machine; a stable prompt_cache_key helps where it steers routing.",
}


#: The level of shaping that keeps a cause from happening, as far as the prompt allows it.
_PREVENTED_BY = {
    Cause.TOOLS_REORDERED: "safe",
    Cause.LOOKBACK_OVERRUN: "safe",
    Cause.NOT_MARKED: "safe",
    Cause.SYSTEM_LINE_CHANGED: "relocate",
}


def prevented_by(cause: Cause) -> str:
    """The lowest level that keeps it from happening; "" = none does."""
    return _PREVENTED_BY.get(cause, "")


def advice(cause: Cause) -> str:
    """What to change, in one sentence."""
    return _ADVICE[cause]


class Explanation(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why an attempt read less than it could have. Holds digests' verdicts only: kinds, indexes, lengths.

    `segment` is "tools", "system", "message", "settings" or "" (the prefix itself did not change). `index` is that of
    the first tool or message, from 0, or of the first line of the system prompt, from 1, that differs. `offset` is how
    many bytes of the prompt are in front of it, as the client sent it.
    """

    verdict: Verdict
    cause: Cause
    segment: str = ""
    index: int = -1
    offset: int = 0
    setting: str = ""  # the member of the request that differs
    input_tokens: int = 0
    read_tokens: int = 0
    expected_tokens: int = 0  # what the cache could have held of this prompt
    lost_tokens: int = 0
    lost_nano_usd: int = 0
    previous_request_id: str = ""
    gap_ms: int = 0  # since the request before was answered
    unseen: bool = False  # the task had requests before, but not in the memory of this process
    level: str = ""  # at which its prompt was shaped (core/shaping.py)
    applied: tuple[str, ...] = ()  # the transforms that changed it
    vendor: str = ""  # the provider's own word on it (core/second_opinion.py)
