"""What every resource gets and gives: one request by a proven admin, parsed parameters, pages, preconditions, and changes
that happen once. No HTTP here.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from gateway.admin.ports import AdminDeps
from gateway.admin.problems import Fault, Problem, invalid
from gateway.admin.store import Registry
from gateway.core.offices import Admin, InUse, KeyReused, Once, Page, Replayed, Taken

T = TypeVar("T")
Json = Mapping[str, Any]

PAGE = 100
PAGE_MAX = 1_000
#: Requests are served by the same thread, and each takes many turns of its loop: a large answer is made so many rows at a
#: time, a fraction of a millisecond, and leaves the loop alone in between.
TURN_ROWS = 10
TURN_REST_S = 0.001


@dataclass(frozen=True, slots=True)
class Reply:
    """`body` is JSON, or bytes of `content_type`. `etag` names the version of what is shown."""

    body: Json | bytes
    status: int = 200
    etag: str | None = None
    content_type: str = "application/json"
    #: instead of a body: the parts of a long one, as they are ready
    stream: AsyncGenerator[bytes, None] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Call:
    """`params` holds the query's parameters that the route declares and that were given; `body` is JSON that nobody has
    looked at yet. `digest` tells this request from another with the same idempotency key.
    """

    deps: AdminDeps
    admin: Admin
    path: Mapping[str, str]
    params: Mapping[str, Any]
    body: object
    route: str = ""
    if_match: str | None = None
    idempotency_key: str | None = None
    digest: bytes = b""
    accept: str = ""

    @property
    def registry(self) -> Registry:
        return self.deps.registry(self.admin, None)

    async def page(
        self,
        rows: Callable[[Mapping[str, Any], Any, int], Awaitable[Page[T]]],
        show: Callable[[T], Json],
    ) -> Reply:
        """One page of a list: `limit`, `cursor`, and all other parameters as filters."""
        filters = {k: v for k, v in self.params.items() if k not in ("limit", "cursor")}
        after = self.opened(filters, self.params["cursor"]) if "cursor" in self.params else None
        page = await rows(filters, after, self.params.get("limit", PAGE))
        cursor = None if page.after is None else self.cursor(filters, page.after)
        body = {
            "data": await shown_in_turns(page.rows, show),
            "has_more": cursor is not None,
            "next_cursor": cursor,
        }
        return Reply(body)

    def cursor(self, filters: Json, after: Sequence[Any]) -> str:
        """Where the list goes on; good for this list, these filters, and whoever sees the same."""
        return (
            base64.urlsafe_b64encode(msgspec.json.encode([self._seal(filters, after), *after]))
            .decode()
            .rstrip("=")
        )

    def opened(self, filters: Json, text: str, field: str = "cursor") -> list[Any]:
        """What `cursor` was given. Problem 422 for any other text; `field` is the parameter that it came in."""
        try:
            raw = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
            seal, *after = msgspec.json.decode(raw, type=list[str | int])
        except ValueError:
            raise invalid(field, "is not one that this API gave") from None
        if not hmac.compare_digest(str(seal).encode(), self._seal(filters, after).encode()):
            raise invalid(field, "belongs to another list: use it with the filters and the key it came with")
        return after

    def _seal(self, filters: Json, after: Sequence[Any]) -> str:
        # Sealed, so that only values which the store itself gave ever reach it again.
        reach = self.admin.reach
        text = repr((self.route, sorted(filters.items()), reach.tenant_id, reach.team_id, tuple(after)))
        return hmac.digest(self.deps.pepper, text.encode(), hashlib.sha256).hex()[:24]

    async def change(
        self,
        act: Callable[[Registry], Awaitable[T]],
        show: Callable[[T], Json],
        *,
        status: int = 200,
        secret: Callable[[T], Json] | None = None,
        again: Callable[[Json, Once], Json] | None = None,
        tag: Callable[[Json], str] | None = None,
    ) -> Reply:
        """Make a change, once if the request has an idempotency key. `secret` is what only the first reply may hold; it
        is not stored, and `again` makes it anew for a repetition.
        """
        tagged = tag or etag_of
        once = None
        if self.idempotency_key is not None:
            once = Once(
                self.idempotency_key,
                self.admin.actor,
                self.digest,
                lambda result: (status, msgspec.json.encode(show(result))),
            )
        try:
            result = await act(self.deps.registry(self.admin, once))
        except Replayed as before:
            body: Json = msgspec.json.decode(before.body)
            etag = tagged(body)
            if again is not None and once is not None:
                body = {**body, **again(body, once)}
            return Reply(body, before.status, etag, headers={"Idempotency-Replayed": "true"})
        except KeyReused:
            raise Problem(
                409,
                "This Idempotency-Key came with another request before.",
                [Fault("Idempotency-Key", "was used for another request")],
            ) from None
        except Taken as taken:
            raise Problem(409, taken.message, [Fault(taken.field, taken.message)]) from None
        except InUse as used:
            raise Problem(409, f"{used}.") from None
        self.deps.on_change()
        body = show(result)
        etag = tagged(body)
        return Reply({**body, **(secret(result) if secret is not None else {})}, status, etag)

    def expect(self, shown: Json, tag: Callable[[Json], str] | None = None) -> None:
        """Problem 412 unless the request's If-Match, if there is one, names what is there."""
        if self.if_match is None or self.if_match.strip() == "*":
            return
        now = (tag or etag_of)(shown)
        if now not in (given.strip() for given in self.if_match.split(",")):
            raise Problem(
                412, f"It was changed meanwhile: it is {now} now.", [Fault("If-Match", f"is not {now}")]
            )


async def shown_in_turns(rows: Sequence[T], show: Callable[[T], Json]) -> list[Json]:
    """All rows, with rests."""
    found: list[Json] = []
    for i in range(0, len(rows), TURN_ROWS):
        if i:
            await asyncio.sleep(TURN_REST_S)
        found += [show(row) for row in rows[i : i + TURN_ROWS]]
    return found


Resource = Callable[[Call], Awaitable[Reply]]


def etag_of(shown: Json) -> str:
    """The version of what is shown, as a strong entity tag."""
    return f'"{hashlib.sha256(msgspec.json.encode(shown, order="sorted")).hexdigest()[:20]}"'
