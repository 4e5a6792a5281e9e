"""At every moment the own row is found where one holds, and else what was found before."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.core.price_overlay import overlaid
from gateway.core.prices import PriceBook, PriceRow
from gateway.core.rates import Rates

END = 40
RATES = Rates(1, 1)


@st.composite
def rows(draw: st.DrawFn, version: str) -> list[PriceRow]:
    """Rows of one price that do not overlap; some end before the next begins."""
    starts = sorted(draw(st.sets(st.integers(0, END - 1), max_size=5)))
    found = []
    for n, start in enumerate(starts):
        until = starts[n + 1] if n + 1 < len(starts) else END
        end = draw(st.one_of(st.none(), st.integers(start + 1, until)))
        found.append(PriceRow("p", f"{version}{n}", start, RATES, valid_to_ms=end))
    return found


@given(rows("below"), rows("above"))
def test_own_rows_go_before_while_they_hold(below: list[PriceRow], above: list[PriceRow]) -> None:
    under, over = PriceBook.of(below), PriceBook.of(above)
    book = overlaid(under, above)
    for at_ms in range(END + 2):
        wanted = over.find("p", at_ms) or under.find("p", at_ms)
        found = book.find("p", at_ms)
        assert (found and found.version) == (wanted and wanted.version)
    assert PriceBook.of(book.rows()) == book, "what remains overlaps nowhere"
