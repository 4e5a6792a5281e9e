"""What can go wrong, as values. `edge/errors.py` alone turns these into HTTP bodies of a dialect.

The docstring of a class is its default message. `status` and `code` are what the caller sees; `kind` is a
bounded label for metrics and the ledger. Nothing here may hold a secret or an upstream's raw body.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from gateway.core.dialects import Reading
    from gateway.core.entry import Attempt, Refused


def provider_request_id(headers: Mapping[str, str]) -> str:
    """The provider's own id of a request, from its answer's headers (case-insensitive or lower-case); "" if none."""
    return headers.get("x-request-id") or headers.get("request-id") or headers.get("x-amzn-requestid") or ""


class GatewayError(Exception):
    """The gateway could not serve this request."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    kind: ClassVar[str] = "internal"
    #: False tells SDKs not to try again (`x-should-retry: false`); None says nothing.
    should_retry: ClassVar[bool | None] = None

    def __init__(
        self, message: str | None = None, *, param: str | None = None, retry_after_s: int | None = None
    ) -> None:
        self.message = message or (type(self).__doc__ or "").strip().splitlines()[0]
        self.param = param
        self.retry_after_s = retry_after_s
        super().__init__(self.message)


# --- the caller's side -------------------------------------------------------------------------------


class InvalidRequest(GatewayError):
    """The request is not valid."""

    status, code, kind, should_retry = 400, "invalid_request", "invalid_request", False


class UnboundableRequest(InvalidRequest):
    """This request has no price or no upper bound, so a hard budget cannot admit it."""

    code, kind = "unboundable_request", "unboundable"


class Unauthenticated(GatewayError):
    """No valid gateway key was given: send it as 'Authorization: Bearer <key>' or 'x-api-key: <key>'."""

    status, code, kind, should_retry = 401, "invalid_api_key", "unauthenticated", False


class Forbidden(GatewayError):
    """This key may not do that."""

    status, code, kind, should_retry = 403, "permission_denied", "forbidden", False


class NotFound(GatewayError):
    """There is nothing at this address."""

    status, code, kind, should_retry = 404, "not_found", "not_found", False


class ModelNotFound(NotFound):
    """The model does not exist or this key may not use it."""

    code, kind = "model_not_found", "model_not_found"


class MethodNotAllowed(GatewayError):
    """This address does not take that method."""

    status, code, kind, should_retry = 405, "method_not_allowed", "method_not_allowed", False


class BodyTimeout(GatewayError):
    """The request body did not arrive in time."""

    status, code, kind = 408, "request_timeout", "body_timeout"


class BodyTooLarge(GatewayError):
    """The request body is too large."""

    status, code, kind, should_retry = 413, "request_too_large", "too_large", False


class UnsupportedMedia(GatewayError):
    """The request body must be plain JSON; compressed bodies are not accepted."""

    status, code, kind, should_retry = 415, "unsupported_media_type", "unsupported_media", False


class UpgradeRequired(GatewayError):
    """Websockets are not served here; use POST."""

    status, code, kind, should_retry = 426, "upgrade_required", "upgrade_required", False


class RateLimited(GatewayError):
    """A rate limit is reached."""

    status, code, kind = 429, "rate_limit_exceeded", "rate_limited"


class BudgetExceeded(GatewayError):
    """A budget is used up."""

    status, code, kind, should_retry = 402, "budget_exceeded", "budget_exceeded", False

    def __init__(
        self,
        message: str | None = None,
        *,
        scope: str = "",
        unit: str = "usd",
        remaining: int = 0,
        resets_at: str | None = None,
        refused: Refused | None = None,
        used_up: bool = False,
    ) -> None:
        super().__init__(message)
        self.refused = refused  # what the ledger said
        self.used_up = used_up  # no hold that ends brings anything back
        #: what was refused, for those who count it: attempt, refusal, nano-dollars that it was to hold
        self.asked: tuple[Attempt, Refused, int | None] | None = None
        self.scope = scope
        self.unit = unit
        self.remaining = remaining  # in `unit`; nano-dollars if that is "usd"
        self.resets_at = resets_at


class TaskStopped(GatewayError):
    """A breaker has stopped this task."""

    status, code, kind, should_retry = 402, "task_stopped", "task_stopped", False


class Unavailable(GatewayError):
    """The gateway cannot serve this request at the moment."""

    status, code, kind = 503, "service_unavailable", "unavailable"


class LedgerUnavailable(Unavailable):
    """The ledger cannot be reached, so nothing may be spent."""

    code, kind = "ledger_unavailable", "ledger_unavailable"


# --- the provider's side -------------------------------------------------------------------------------


class UpstreamError(GatewayError):
    """The model provider failed.

    `billed` is what is known about the provider's bill for the attempt: False with proof that nothing was
    billed (never sent, or answered with an error before any token), None when the answer was lost.
    `retryable`: another attempt may succeed, here or on another deployment.
    """

    status, code, kind = 502, "upstream_error", "upstream_error"

    def __init__(
        self,
        message: str | None = None,
        *,
        billed: bool | None = None,
        retryable: bool = True,
        upstream_status: int | None = None,
        upstream_request_id: str | None = None,
        param: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message, param=param, retry_after_s=retry_after_s)
        self.billed = billed
        self.retryable = retryable
        self.upstream_status = upstream_status
        self.upstream_request_id = upstream_request_id


class UpstreamUnreachable(UpstreamError):
    """No connection to the model provider could be made."""

    code, kind = "upstream_unreachable", "upstream_unreachable"


class UpstreamLost(UpstreamError):
    """The model provider closed the connection before it answered."""

    code, kind = "upstream_lost", "upstream_lost"


class UpstreamAborted(UpstreamError):
    """The model provider broke its answer off and said so, with status 200.

    `reading` is the usage that it reported for what it had done until then.
    """

    code, kind = "upstream_aborted", "upstream_aborted"

    def __init__(
        self,
        message: str = "the model provider broke its answer off",
        *,
        upstream_status: int | None = None,
        upstream_request_id: str | None = None,
        reading: Reading | None = None,
    ) -> None:
        super().__init__(message, upstream_status=upstream_status, upstream_request_id=upstream_request_id)
        self.reading = reading


class UpstreamTimeout(UpstreamError):
    """The model provider did not answer in time."""

    status, code, kind = 504, "upstream_timeout", "upstream_timeout"


class UpstreamMalformed(UpstreamError):
    """The model provider's answer could not be understood."""

    code, kind = "upstream_malformed", "upstream_malformed"


class UpstreamAuthFailed(UpstreamError):
    """The gateway's own credential was refused by the model provider; the operator must look at it."""

    code, kind = "upstream_auth", "upstream_auth"


class UpstreamOverloaded(UpstreamError):
    """The model provider is overloaded or limits the gateway."""

    status, code, kind = 429, "upstream_overloaded", "upstream_overloaded"


class UpstreamRefused(UpstreamError):
    """The model provider refused the request.

    A 4xx that is about the request itself: passed to the caller with the provider's own (redacted) message,
    code and field, and the provider's status.
    """

    code, kind = "upstream_refused", "upstream_refused"

    def __init__(
        self,
        message: str | None = None,
        *,
        upstream_status: int,
        error_type: str | None = None,
        error_code: str | None = None,
        param: str | None = None,
        upstream_request_id: str | None = None,
    ) -> None:
        super().__init__(
            message,
            billed=False,
            retryable=False,
            upstream_status=upstream_status,
            upstream_request_id=upstream_request_id,
            param=param,
        )
        self.error_type = error_type
        self.error_code = error_code


def is_refusal(kind: str) -> bool:
    """Whether an error of that kind was said before anything was spent: all but providers' failures and our own."""
    return kind not in _NO_REFUSALS


def _kinds(of: type[GatewayError]) -> set[str]:
    return {of.kind}.union(*(_kinds(each) for each in of.__subclasses__()))


_NO_REFUSALS = frozenset({"", GatewayError.kind, *_kinds(UpstreamError)})
