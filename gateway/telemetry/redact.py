"""Keep secrets out of everything that is written down.

Three nets, each enough for what it knows: the value of a field whose name says secret, strings that look
like a known kind of key, and long strings that look random. The last one catches keys that nobody has
listed. Our own ids and UUIDs are no secrets and pass. When in doubt, text is lost rather than a secret shown.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TypeAlias

REDACTED = "[redacted]"

Json: TypeAlias = "bool | int | float | str | Mapping[str, Json] | Sequence[Json] | None"

#: Lower case, with dashes. What follows such a name is a secret whatever it looks like.
SECRET_NAMES = frozenset(
    {
        "access-token",
        "api-key",
        "api-secret",
        "apikey",
        "authorization",
        "client-secret",
        "cookie",
        "password",
        "pepper",
        "proxy-authorization",
        "refresh-token",
        "secret",
        "set-cookie",
        "x-api-key",
        "x-goog-api-key",
    }
)
#: Identifiers that are hex by design, in fields of their own.
_HEX_ID_FIELDS = frozenset({"trace_id", "span_id"})

_NAMES = "|".join(n.replace("-", "[-_]?") for n in sorted(SECRET_NAMES, key=len, reverse=True))
# `Cookie: a=b; c="d"`, `{'x-api-key': 'abc'}`, `(b"authorization", b"Bearer abc")`, `password=abc`. A quoted value
# goes up to its quote; any other up to the end of the line, because cookies and digests hold every separator.
_NAMED = re.compile(
    rf"""(?ix) (?P<name>{_NAMES}) (?P<sep> (?: \\*["'] \s* [:=,] | \s* [:=] ) \s* )
    (?: b?"[^"\\\n]*" | b?'[^'\\\n]*' | [^\n]+ )"""
)
_SCHEME = re.compile(
    r"(?i)\b(?:(bearer)(?:\s+|%20)[A-Za-z0-9._~+/=\-]{4,}|(basic|digest)(?:\s+|%20)[A-Za-z0-9+/=\-]{8,})"
)
_URL_PASSWORD = re.compile(r"(?<=://)[^/\s:@]*:[^/\s]+(?=@)")
_KNOWN = re.compile(
    r"""(?x) (?<![A-Za-z0-9]) (?:
        gw-[A-Za-z0-9_\-]{6,}               # ours
      | (?:sk|pk|rk|xai|gsk|csk|pplx|hf|r8|nvapi|tgp)[-_][A-Za-z0-9_\-]{8,}   # model providers
      | AIza[A-Za-z0-9_\-]{8,} | ya29\.[A-Za-z0-9_\-.]{8,}                    # Google
      | (?:AKIA|ASIA)[A-Z0-9]{8,}                                             # AWS
      | gh[opusr]_[A-Za-z0-9]{8,} | github_pat_[A-Za-z0-9_]{8,} | glpat-[A-Za-z0-9_\-]{8,}
      | xox[abeprs]-[A-Za-z0-9\-]{8,}                                         # Slack
      | eyJ[A-Za-z0-9_\-]{8,}\.[A-Za-z0-9_\-]{4,}(?:\.[A-Za-z0-9_\-]*)?       # JSON web tokens
    )"""
)
_LONG = re.compile(r"[A-Za-z0-9+/_\-]{24,}={0,2}")
_PUBLIC_ID = re.compile(r"[a-z]{2,6}_[0-9a-f]{32}|[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_HEX = re.compile(r"[0-9a-fA-F]{32,}")
_HEX_ID = re.compile(r"[0-9a-f]{16}|[0-9a-f]{32}")
# Where a word of a name would not break: before a capital inside a run, or at a digit's border.
_BREAK = re.compile(r"(?<=[a-z])(?=[A-Z0-9])|(?<=[A-Z])(?=[0-9])|(?<=[0-9])(?=[A-Za-z])")


def looks_random(token: str) -> bool:
    """True for what reads as key material: 128 bits of hex, or letters and digits that alternate throughout.

    Random base64 breaks at every second or third character; names (`StreamingResponseBody2`, `claude-sonnet-4-5`)
    and paths do so at less than every sixth.
    """
    parts = [p for p in token.rstrip("=").split("/") if not _PUBLIC_ID.fullmatch(p)]
    if any(_HEX.fullmatch(p) for p in parts):
        return True
    rest = "".join(parts)
    return len(rest) >= 24 and len(_BREAK.findall(rest)) * 6 >= len(rest)


def _without_random(match: re.Match[str]) -> str:
    return REDACTED if looks_random(match[0]) else match[0]


def redact(text: str) -> str:
    """`text` without anything that is or looks like a secret."""
    if len(text) < 8 or _PUBLIC_ID.fullmatch(text):
        return text
    # The cheap look for a character that a pattern needs saves 9/10 of the time on an access log's short values.
    if ":" in text or "=" in text or "'" in text or '"' in text:
        text = _NAMED.sub(rf"\g<name>\g<sep>{REDACTED}", text)
        text = _URL_PASSWORD.sub(REDACTED, text)
    if " " in text or "%20" in text:
        text = _SCHEME.sub(rf"\1\2 {REDACTED}", text)
    text = _KNOWN.sub(REDACTED, text)
    return _LONG.sub(_without_random, text) if len(text) >= 24 else text


def redact_field(name: str, value: object) -> Json:
    """The value of a field as something that JSON knows, without secrets; unknown types by their `str`."""
    if name.lower().replace("_", "-") in SECRET_NAMES:
        return REDACTED
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return value if name in _HEX_ID_FIELDS and _HEX_ID.fullmatch(value) else redact(value)
    if isinstance(value, bytes):
        return redact(value.decode("utf-8", "replace"))
    if isinstance(value, Mapping):
        return {redact(str(k)): redact_field(str(k), v) for k, v in value.items()}
    if isinstance(value, list | tuple) and len(value) == 2 and isinstance(value[0], str | bytes):
        # A header as a pair, the shape that HTTP libraries keep them in.
        first = value[0].decode("utf-8", "replace") if isinstance(value[0], bytes) else value[0]
        return [redact(first), redact_field(first, value[1])]
    if isinstance(value, list | tuple | set | frozenset):
        return [redact_field("", v) for v in value]
    return redact(str(value))
