"""The stub provider: what reaches it, it bills, and its bill is only ever added to."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import Context

from tests.simulator.calls import Amounts
from tests.simulator.loop import VirtualLoop


class Provider:
    """`on_arrival` is told of each attempt before it is billed."""

    def __init__(self, loop: VirtualLoop, on_arrival: Callable[[str, Amounts | None], None]) -> None:
        self.bill: dict[str, Amounts] = {}
        self.arrived: set[str] = set()
        self._loop = loop
        self._on_arrival = on_arrival
        self._outside = Context()

    async def ask(self, attempt_id: str, bill: Amounts | None, takes_s: float) -> None:
        """Returns when it is answered. `bill` None: turned away, and not billed.

        The request is on its way, and then billed, whatever becomes of the process that sent it.
        """
        answered = self._loop.create_future()

        def arrive() -> None:
            self.arrived.add(attempt_id)
            self._on_arrival(attempt_id, bill)
            if bill is not None:
                self.bill[attempt_id] = bill
            self._loop.call_later(takes_s, answer, context=self._outside)

        def answer() -> None:
            if not answered.done():
                answered.set_result(None)

        self._loop.call_later(takes_s * 0.1, arrive, context=self._outside)
        await answered
