"""Texts of tool results without what differs by itself, so that "the same result again" can be told by a hash.

Texts are bytes as they stand in JSON, escapes included. What is taken out is narrow on purpose: a number or a date
that has changed is mostly what the agent waits for, and a run that moves on must not look like one that does not.
"""

from __future__ import annotations

import re

#: What a result differs by although nothing has changed. It begins with a digit outside of any group, because the
#: search for one is several times as fast as any other; the look-behind says that it is the number's first. Possessive,
#: because most numbers are none of these and must fail without a second try.
_CLOCK = re.compile(
    rb"[0-9](?<![0-9]{2})(?:"
    # 2026-11-30T13:20:00.123Z; a date alone is no clock: it may be what was asked for
    rb"[0-9]{3}-[0-9]{2}-[0-9]{2}[T ][0-9]{2}:[0-9]{2}(?::[0-9]{2}(?:[.,][0-9]{1,9})?)?"
    rb"(?:Z|[+-][0-9]{2}:?[0-9]{2})?"
    # 13:20:00.123
    rb"|[0-9]?:[0-9]{2}:[0-9]{2}(?:[.,][0-9]{1,9})?"
    # seconds, milli-, micro- or nanoseconds since 1970, from 2017 to 2033
    rb"|(?<=1)[5-9][0-9]{8}(?:[0-9]{3}){0,3}(?:\.[0-9]{1,9})?(?![0-9])"
    # 0.12s, 350 ms, 0m1.204s
    rb"|[0-9]{0,8}+(?:\.[0-9]{1,9}+)?+(?:m[0-9.]{1,9}+s| ?+(?:[mun]?s|m?secs?|seconds?))(?![0-9A-Za-z]))"
)
_LABELS = (b"hunk", b"quest", b"race")  # "Chunk ID: 5f3a2b" begins each output of Codex's shell (2026-11)
_LABELLED_ID = re.compile(rb"((?:hunk|quest|race)[ _-]?[iI][dD]\W{0,5})[0-9A-Za-z_-]{4,64}")
#: In failures only, for the id of something that was made is a result: addresses, UUIDs, long hexadecimal ids.
_ID = re.compile(
    rb"[0-9a-fA-F](?<![0-9A-Za-z]{2})(?:(?<=0)x[0-9a-fA-F]{1,16}"
    rb"|[0-9a-fA-F]{7}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}|[0-9a-f]{11,63}(?![0-9A-Za-z]))"
)
_NAMES = (b"/tmp/", b"pid", b"req_", b"trace_")
_NAMED_ID = re.compile(rb"(/tmp/|[pP][iI][dD]\W{1,3}|req_|trace_)[0-9A-Za-z._-]{1,64}")
#: Longer texts are compared without any digits, and as above only in this many lines at each end, where the counts
#: of a summary stand; lines, because what comes before may be longer or shorter each time.
_LONG_BYTES = 8_192
_END_LINES = 8
_END_BYTES = 2_048
_LINE_END = rb"\n"
_DIGITS = b"0123456789"

#: No dialect but messages says whether a call failed; clients say it in words, at one of the ends.
_FAILED_WORDS = (b"error", b"exception", b"traceback", b"fatal", b"fail", b"denied", b"not found")
_FAILED = re.compile(
    rb"\W{0,16}(?:(?:\\n|tool_use_error\W|output\W{1,8}){0,4}\W{0,8})"
    rb"(?:[a-z0-9_.]{0,40}(?:error|exception)\b|traceback\b|fatal\b|fail(?:ed|ure)\b"
    rb"|permission denied|[a-z0-9_./: -]{0,60}command not found\b)"
)
_START_REACH = 96
_STATUS_WORDS = (b"code", b"status", b"false", b"true")
_FAILED_STATUS = re.compile(
    rb"(?:exit(?:ed)?|return)[ _-]?(?:with )?(?:code|status)\W{1,6}(?!0\b)-?[0-9]"
    rb"|(?:success|ok)\W{1,6}false\b|is_?error\W{1,6}true\b"
)
_STATUS_REACH = 256


def steady(text: bytes, failed: bool = False) -> bytes:
    """`text` without times of day and durations; of a failure without ids as well, which it may name anew."""
    if len(text) <= _LONG_BYTES:
        return _without_noise(text, failed)
    start = _LINE_END.join(text.split(_LINE_END, _END_LINES)[:_END_LINES])[:_END_BYTES]
    end = _LINE_END.join(text.rsplit(_LINE_END, _END_LINES)[-_END_LINES:])[-_END_BYTES:]
    ends = (_without_noise(start, failed), _without_noise(end, failed))
    return b"\0".join((*ends, text.translate(None, _DIGITS)))


def _without_noise(text: bytes, failed: bool) -> bytes:
    if any(label in text for label in _LABELS):
        text = _LABELLED_ID.sub(rb"\1#", text)
    if failed:
        text = _ID.sub(b"#", text)
        if any(name in text for name in _NAMES):
            text = _NAMED_ID.sub(rb"\1#", text)
    return _CLOCK.sub(b"#", text)


def looks_failed(text: bytes) -> bool:
    """Whether a result reads like a failure: begins with an error, or tells an exit status other than 0."""
    start = text[:_STATUS_REACH].lower()
    head = start[:_START_REACH]
    if any(word in head for word in _FAILED_WORDS) and _FAILED.match(head):
        return True
    ends = start + text[_STATUS_REACH:][-_STATUS_REACH:].lower()
    return any(word in ends for word in _STATUS_WORDS) and _FAILED_STATUS.search(ends) is not None
