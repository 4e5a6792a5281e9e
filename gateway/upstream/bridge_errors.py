"""A provider's error body, of whatever shape, as an error body of the client's dialect. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from gateway.core.catalog import Operation

_MESSAGE_LIMIT = 2000
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def error_body(
    operation: Operation, status: int, raw: bytes, secrets: Iterable[str] = (), param: str | None = None
) -> bytes:
    """`raw` may be OpenAI's, Anthropic's, Google's or AWS's JSON, or anything else. Secrets in it are masked."""
    told = _told(raw)
    text = told["message"] or f"the model provider answered with status {status}"
    for secret in secrets:
        if len(secret) >= 8:
            text = text.replace(secret, "***")
    text = text[:_MESSAGE_LIMIT]
    if operation.anthropic:
        kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
        return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": text}})
    kind = told["type"] or ("invalid_request_error" if status < 500 else "server_error")
    error = {"message": text, "type": kind, "param": param or told["param"], "code": told["code"]}
    return msgspec.json.encode({"error": error})


def _told(raw: bytes) -> dict[str, Any]:
    told: dict[str, Any] = {"message": "", "type": None, "param": None, "code": None}
    try:
        body = msgspec.json.decode(raw)
    except msgspec.DecodeError:
        return {**told, "message": raw.decode("utf-8", "replace").strip()}
    if isinstance(body, list) and body:  # Gemini streams wrap their error into a list
        body = body[0]
    if not isinstance(body, dict):
        return told
    error = body.get("error")
    if isinstance(error, str):
        return {**told, "message": error}
    source = error if isinstance(error, dict) else body
    message = source.get("message") or source.get("Message") or source.get("detail")
    told["message"] = message if isinstance(message, str) else ""
    for name in ("type", "param", "code"):
        if isinstance(source.get(name), str):
            told[name] = source[name]
    if isinstance(source.get("status"), str):  # Google: INVALID_ARGUMENT and the like
        told["code"] = source["status"]
    return told
