"""Who may use the admin API: whoever holds an admin key. Failures are slowed down and counted."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable

from aiohttp import web

from gateway.admin.problems import Problem
from gateway.core.offices import Admin, Right

#: Wrong keys that an address may send before it is told to wait.
FAILURES_PER_MIN = 10
_ADDRESSES = 1_024
_WINDOW_S = 60.0
_TOKEN_CHARS_MAX = 512


class Door:
    """Tells the admin behind a request, or raises `Problem` (401, 403, 429).

    `identify` takes a token and tells whose it is, or None; it must compare in constant time. An address that failed too
    often gets 429 for wrong keys, but a right key always opens: keys are 256 random bits, so that what needs limiting is
    noise, and nobody may lock an operator out by making some.
    """

    def __init__(
        self,
        identify: Callable[[str], Awaitable[Admin | None]],
        monotonic: Callable[[], float],
        per_min: int = FAILURES_PER_MIN,
    ) -> None:
        self._identify = identify
        self._monotonic = monotonic
        self._per_min = per_min
        #: address -> (start of its window, failures in it); the oldest goes when there are too many
        self._failures: OrderedDict[str, tuple[float, int]] = OrderedDict()

    async def admin(self, request: web.Request, right: Right) -> Admin:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        token = token.strip()
        admin = None
        if scheme.lower() == "bearer" and 0 < len(token) <= _TOKEN_CHARS_MAX:
            admin = await self._identify(token)
        if admin is None:
            raise self._refusal(request.remote or "")
        if not admin.may(right):
            raise Problem(
                403, f"A key with the role {admin.role} does not do that here: it needs {_NEEDS[right]}."
            )
        return admin

    def _refusal(self, address: str) -> Problem:
        wait_s = self._fail(address)
        if wait_s is not None:
            return Problem(
                429, "Too many wrong admin keys from this address.", headers={"Retry-After": str(wait_s)}
            )
        return Problem(
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


_NEEDS = {
    Right.READ: "any role",
    Right.CHANGE_IN_TEAM: "a team admin, an operator or an owner",
    Right.CHANGE: "an operator or an owner",
    Right.OPERATE: "an operator or an owner that reaches everything",
    Right.OWN: "an owner",
}
