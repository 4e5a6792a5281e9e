"""Price rows of one's own over a price book: they go before its rows of the same price, while they hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from gateway.core.prices import PriceBook, PriceRow

#: Later than any price ends.
_NEVER_MS = 2**62


def _spans(rows: Sequence[PriceRow]) -> Iterator[tuple[int, int, PriceRow]]:
    """Each row with the time during which it is found, [from, to)."""
    for n, row in enumerate(rows):
        ends = [later.valid_from_ms for later in rows[n + 1 : n + 2]]
        yield row.valid_from_ms, min([_NEVER_MS if row.valid_to_ms is None else row.valid_to_ms, *ends]), row


def _laid(below: Sequence[PriceRow], above: Sequence[PriceRow]) -> tuple[PriceRow, ...]:
    """`above`, and what it leaves of `below`; both in the order of time."""
    taken = list(_spans(above))
    pieces = list(above)
    for from_ms, to_ms, row in _spans(below):
        for begin_ms, end_ms, _ in taken:
            if from_ms < begin_ms:
                pieces += _piece(row, from_ms, min(to_ms, begin_ms))
            from_ms = max(from_ms, end_ms)
        pieces += _piece(row, from_ms, to_ms)
    return tuple(sorted(pieces, key=lambda row: row.valid_from_ms))


def _piece(row: PriceRow, from_ms: int, to_ms: int) -> list[PriceRow]:
    if from_ms >= to_ms:
        return []
    return [replace(row, valid_from_ms=from_ms, valid_to_ms=None if to_ms == _NEVER_MS else to_ms)]


def overlaid(book: PriceBook, own: Iterable[PriceRow]) -> PriceBook:
    """Raises `PriceError` where own rows overlap."""
    above = PriceBook.of(own).by_price
    laid = {price: _laid(book.by_price.get(price, ()), rows) for price, rows in above.items()}
    return PriceBook({**book.by_price, **laid})
