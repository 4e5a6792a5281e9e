"""Who may use the admin API: whoever holds an admin key. Failures are slowed down and counted."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from aiohttp import web

from gateway.admin.problems import Problem

#: Wrong keys that an address may send before it is told to wait.
FAILURES_PER_MIN = 10
_ADDRESSES = 1_024
_WINDOW_S = 60.0


class Door:
    """Tells the actor behind a request, or raises `Problem` (401, 429).

    `verify` takes a token and returns the actor's name for the audit, or None; it must compare in constant
    time. An address that failed too often gets 429 for wrong keys, but a right key always opens: keys are 256
    random bits, so that what needs limiting is noise, and nobody may lock an operator out by making some.
    """

    def __init__(
        self,
        verify: Callable[[str], str | None],
        monotonic: Callable[[], float],
        per_min: int = FAILURES_PER_MIN,
    ) -> None:
        self._verify = verify
        self._monotonic = monotonic
        self._per_min = per_min
        #: address -> (start of its window, failures in it); the oldest goes when there are too many
        self._failures: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def actor(self, request: web.Request) -> str:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        actor = self._verify(token.strip()) if scheme.lower() == "bearer" and token else None
        if actor is not None:
            return actor
        wait_s = self._fail(request.remote or "")
        if wait_s is not None:
            raise Problem(
                429, "Too many wrong admin keys from this address.", headers={"Retry-After": str(wait_s)}
            )
        raise Problem(
            401,
            "Send an admin key as 'Authorization: Bearer <key>'. A virtual key does not open this API.",
            headers={"WWW-Authenticate": "Bearer"},
        )

    def _fail(self, address: str) -> int | None:
        """Count a failure; the seconds to wait if there were too many."""
        now_s = self._monotonic()
        start_s, count = self._failures.pop(address, (now_s, 0))
        if now_s - start_s >= _WINDOW_S:
            start_s, count = now_s, 0
        self._failures[address] = (start_s, count + 1)
        while len(self._failures) > _ADDRESSES:
            self._failures.popitem(last=False)
        return max(1, round(start_s + _WINDOW_S - now_s)) if count >= self._per_min else None
