"""HTTP bodies of errors, in the dialect of the caller. The only module that knows them.

Contract: clients.md section 6. A message is one line; it names what to do. Types follow the vendors' lists
(OpenAI `error.type`, Anthropic error types), November 2026.
"""

from __future__ import annotations

import msgspec

from gateway.core.errors import (
    BudgetExceeded,
    GatewayError,
    TaskStopped,
    UnboundableRequest,
    UpstreamOverloaded,
    UpstreamRefused,
)
from gateway.core.refusal import refusal_headers

#: Longest Retry-After that is ever sent: above it SDKs and agents wait for minutes or give up.
RETRY_AFTER_MAX_S = 60
#: 429 and 503 always carry one: without it Codex stops at a 429 and others use wild back-offs.
RETRY_AFTER_DEFAULT_S = 5

_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    415: "invalid_request_error",
    426: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_OPENAI_TYPES = {429: "rate_limit_error", 403: "permission_error"}

#: Refusals that no agent may repeat, for they stay so until a person does something.
OVER_BUDGET = (BudgetExceeded, TaskStopped, UnboundableRequest)

Headers = list[tuple[str, str]]


def status_of(error: GatewayError, dialect: str) -> int:
    """The HTTP status; `dialect` is "openai", "responses" or "anthropic"."""
    if isinstance(error, UpstreamRefused) and error.upstream_status:
        return error.upstream_status
    if isinstance(error, BudgetExceeded | TaskStopped) and dialect == "responses":
        return 400  # Codex repeats a 402 five times and stops at a 400 (money.md, decision 7)
    if isinstance(error, UpstreamOverloaded) and error.upstream_status in (503, 529):
        return 529 if dialect == "anthropic" else 503
    return error.status


def render(
    error: GatewayError, dialect: str, request_id: str, *, as_not_found: bool = False
) -> tuple[int, Headers, bytes]:
    """(status, headers, JSON body) of an error for a caller of that dialect.

    `as_not_found`: a refusal of `OVER_BUDGET` has the status 404, for a client that ends at no other; its body stays.
    """
    status = status_of(error, dialect)
    headers: Headers = []
    if status in (429, 503, 529):
        after = error.retry_after_s or RETRY_AFTER_DEFAULT_S
        headers.append(("retry-after", str(min(after, RETRY_AFTER_MAX_S))))
    if error.should_retry is not None and status not in (429, 503, 529):
        headers.append(("x-should-retry", "true" if error.should_retry else "false"))
    if isinstance(error, BudgetExceeded):
        headers += refusal_headers(error)
    message = " ".join(error.message.split())
    code = error.error_code or error.code if isinstance(error, UpstreamRefused) else error.code
    kind = error.error_type if isinstance(error, UpstreamRefused) else None
    if dialect == "anthropic":
        body = {
            "type": "error",
            "error": {
                "type": kind or _ANTHROPIC_TYPES.get(status, "api_error"),
                "message": message,
                "code": code,
            },
            "request_id": request_id,
        }
        if error.param:
            body["error"]["param"] = error.param  # type: ignore[index]
    else:
        default = "invalid_request_error" if status < 500 else "server_error"
        kind = kind or _OPENAI_TYPES.get(status, default)
        body = {"error": {"message": message, "type": kind, "param": error.param, "code": code}}
    if as_not_found and isinstance(error, OVER_BUDGET):
        status = 404
    return status, headers, msgspec.json.encode(body)
