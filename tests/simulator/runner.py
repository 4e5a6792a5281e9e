"""`transact.Runner` over the simulated store: the same shape as `postgres_runner.PostgresRunner`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from gateway.storage.transact import CommitUnknown, StoreDown, Tx
from tests.simulator.store import Gone, Session, Store

T = TypeVar("T")


class SimulatedRunner:
    def __init__(self, store: Store, flights: int) -> None:
        self.flights = flights
        self._store = store

    async def run(self, tx: Callable[[], Tx[T]], timeout_s: float) -> T:
        session: Session | None = None
        committing = False
        result: Any = None
        try:
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + timeout_s):
                session = await self._store.begin()
                result = await session.drive(tx())
                committing = True
                await session.commit()
        except (TimeoutError, Gone) as e:
            reason = str(e) or type(e).__name__
            raise (CommitUnknown(reason, result) if committing else StoreDown(reason)) from e
        finally:
            # Runs for a killed process as well: its connection breaks, and what it sent to be committed will be.
            if session is not None:
                session.leave()
        answer: T = result
        return answer

    async def close(self) -> None:
        """There is nothing to close."""
