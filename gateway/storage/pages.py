"""Lists in pages: a statement with filters, restricted to what somebody may see, continued after the last row's keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.core.offices import Page, Reach
from gateway.storage.transact import Fetch, Row, Sql, Tx


@dataclass(frozen=True, slots=True)
class Listing:
    """`select` without WHERE; `order`: columns that together are unique, in whose order rows come.

    `filters`: name -> condition, with {} for the value. `within`: the same for "tenant" and "team", of a reach.
    `order` columns must be among the selected ones, at `places`.
    """

    select: str
    order: tuple[str, ...]
    places: tuple[int, ...]
    filters: Mapping[str, str]
    within: Mapping[str, str]
    descending: bool = False
    always: str = ""

    def page(
        self,
        reach: Reach,
        filters: Mapping[str, Any],
        after: Sequence[Any] | None,
        limit: int,
    ) -> Tx[Page[Row]]:
        """Up to `limit` rows. A filter whose value is None or "" does not filter."""
        args: list[Any] = []

        def arg(value: Any) -> str:
            args.append(value)
            return f"${len(args)}"

        conditions = [self.always] if self.always else []
        for side, value in (("tenant", reach.tenant_id), ("team", reach.team_id)):
            if value:
                conditions.append(self.within[side].format(arg(value)))
        for name, value in filters.items():
            if value is not None and value != "":
                condition = self.filters[name]
                conditions.append(condition.format(arg(value)) if "{}" in condition else condition)
        if after is not None:
            sign = "<" if self.descending else ">"
            conditions.append(f"({', '.join(self.order)}) {sign} ({', '.join(map(arg, after))})")
        where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
        direction = " DESC" if self.descending else ""
        order = ", ".join(f"{column}{direction}" for column in self.order)
        sql = Sql(f"{self.select}{where} ORDER BY {order} LIMIT {arg(limit + 1)}")
        rows = list((yield Fetch(sql, args)))
        more = len(rows) > limit
        rows = rows[:limit]
        return Page(rows, tuple(rows[-1][i] for i in self.places) if more else None)
