"""What a provider's error answer means: one place decides, for every wire.

Sources for the statuses and shapes: the vendors' public error pages as captured in the client recordings
(OpenAI `{"error":{message,type,code,param}}`, Anthropic `{"type":"error","error":{type,message}}`, vLLM
`{"error":{...}}` or `{"object":"error","message":...}`), November 2026.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from gateway.core.errors import (
    UpstreamAuthFailed,
    UpstreamError,
    UpstreamOverloaded,
    UpstreamRefused,
    provider_request_id,
)

MESSAGE_CHARS_MAX = 1_000

# Providers echo keys in their error texts ("Incorrect API key provided: sk-..."). Mask anything key-like.
_SECRET = re.compile(
    r"(?i)\b(?:bearer\s+)?(?:sk|gw|pk|rk|xai|gsk|ak|key|AIza)[-_A-Za-z0-9*.]{12,}|[A-Za-z0-9+/_-]{40,}={0,2}"
)


def masked(text: str) -> str:
    """The text with key-like strings masked, on one line, at most 1,000 characters."""
    return " ".join(_SECRET.sub("[masked]", text).split())[:MESSAGE_CHARS_MAX]


def retry_after_s(headers: Mapping[str, str]) -> int | None:
    """Seconds from `retry-after-ms` or `retry-after` (delta seconds only), rounded up; None if absent or odd."""
    ms = headers.get("retry-after-ms", "")
    if ms.replace(".", "", 1).isdigit():
        return max(1, -(-int(float(ms)) // 1000))
    text = headers.get("retry-after", "")
    if text.replace(".", "", 1).isdigit():
        return max(1, int(-(-float(text) // 1)))
    return None


class _Fields(msgspec.Struct):
    message: str = ""
    type: str = ""
    code: str = ""
    param: str = ""


def _fields(body: bytes) -> _Fields | None:
    """The error object of any known shape, or None if the body is not a JSON error."""
    try:
        doc = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if not isinstance(doc, dict):
        return None
    error = doc.get("error", doc.get("detail", doc))
    if isinstance(error, str):
        return _Fields(message=error)
    if not isinstance(error, dict):
        return None

    def text(name: str) -> str:
        value = error.get(name)
        return value if isinstance(value, str) else "" if value is None else str(value)

    found = _Fields(text("message"), text("type"), text("code"), text("param"))
    return found if found.message or found.type or found.code else None


def classify(status: int, headers: Mapping[str, str], body: bytes) -> UpstreamError:
    """The error for an HTTP answer with status >= 400 (or an error object inside a 200).

    `billed` is False when the provider answered with an error body, which it does not bill; None when the
    answer carries no proof (a 5xx without a JSON error: a proxy in between may have lost a billed answer).
    """
    fields = _fields(body)
    request_id = provider_request_id(headers)
    said = masked(fields.message) if fields else ""
    suffix = f": {said}" if said else ""
    if status in (401, 402, 403):
        return UpstreamAuthFailed(
            f"the gateway's credential for this model was refused by the provider (HTTP {status}); "
            "the operator has to look at it, your key is fine",
            billed=False,
            upstream_status=status,
            upstream_request_id=request_id,
        )
    if status in (429, 529) or (status == 503 and fields is not None):
        after = retry_after_s(headers)
        return UpstreamOverloaded(
            f"the model provider is overloaded or limits the gateway (HTTP {status}){suffix}",
            billed=False,
            upstream_status=status,
            upstream_request_id=request_id,
            retry_after_s=after,
        )
    if 400 <= status < 500 and status not in (408, 409, 425):
        return UpstreamRefused(
            said or f"the model provider refused the request (HTTP {status})",
            upstream_status=status,
            error_type=fields.type if fields else None,
            error_code=fields.code if fields else None,
            param=(fields.param or None) if fields else None,
            upstream_request_id=request_id,
        )
    return UpstreamError(
        f"the model provider failed (HTTP {status}){suffix}",
        billed=False if fields is not None else None,
        upstream_status=status,
        upstream_request_id=request_id,
        retry_after_s=retry_after_s(headers),
    )
