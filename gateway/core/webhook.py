"""What a webhook says, how it is signed, and when it is tried again.

A receiver checks `X-Tollhouse-Signature` ("t=<unix seconds>,v1=<hex>") by computing HMAC-SHA-256 over
"<t>.<body as received>" with the shared secret, refuses a `t` that is too old, and drops an event whose id
(`X-Tollhouse-Event-Id`, also in the body) it has seen: messages come at least once, in no order.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import msgspec

SIGNATURE_HEADER = "X-Tollhouse-Signature"
EVENT_ID_HEADER = "X-Tollhouse-Event-Id"

#: What messages are about.
KINDS = (
    "budget_alert",
    "budget_shadow",
    "budget_warning",
    "bound_breach",
    "task_paused",
    "breaker_tripped",
    "breaker_warning",
    "credential_refused",
)
#: A message that somebody asks for, to see whether messages arrive.
TEST = "test"

#: A receiver that has been away for longer than this is not told any more.
GIVE_UP_MS = 24 * 3_600_000
_FIRST_DELAY_MS = 1_000
_MAX_DELAY_MS = 3_600_000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Message:
    """One row of the outbox, claimed for an attempt to deliver it."""

    message_id: str
    kind: str
    dedupe: str  # one event, one key: what makes a second delivery recognisable
    body: str  # JSON
    created_at_ms: int
    attempts: int  # this one included
    age_ms: int  # at this attempt, by the store's clock

    @property
    def event_id(self) -> str:
        """Fit for a header."""
        return self.dedupe if self.dedupe.isascii() and self.dedupe.isprintable() else self.message_id

    @property
    def expired(self) -> bool:
        return self.age_ms >= GIVE_UP_MS


def secret_of(pepper: bytes, webhook_id: str, version: int) -> str:
    """The secret of a webhook that was added over the admin API: made anew whenever it is needed, stored nowhere."""
    seed = b"\0".join((b"tollhouse webhook", webhook_id.encode(), str(version).encode()))
    return f"whsec_{hmac.digest(pepper, seed, hashlib.sha256).hex()}"


def envelope(message: Message) -> bytes:
    """The body as sent: {"id", "type", "created_at", "data"}."""
    at = _EPOCH + timedelta(milliseconds=message.created_at_ms)
    return msgspec.json.encode(
        {
            "id": message.event_id,
            "type": message.kind,
            "created_at": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "data": msgspec.Raw(message.body.encode()),
        }
    )


def signature(secret: bytes, body: bytes, now_s: int) -> str:
    """The value of `X-Tollhouse-Signature`. ValueError for an empty secret."""
    if not secret:
        raise ValueError("the secret of a webhook must not be empty")
    digest = hmac.digest(secret, b"%d." % now_s + body, hashlib.sha256)
    return f"t={now_s},v1={digest.hex()}"


def retry_in_ms(message: Message, rand: float) -> int | None:
    """How long to wait after this attempt failed; None = give up.

    Twice as long each time, from 1 s to 1 h, of which up to half is left to chance. `rand` is in [0, 1).
    """
    ceiling_ms = min(_MAX_DELAY_MS, _FIRST_DELAY_MS << min(message.attempts - 1, 20))
    delay_ms = ceiling_ms - round(ceiling_ms * rand / 2)
    return delay_ms if message.age_ms + delay_ms < GIVE_UP_MS else None
