"""The ledger on SQLite or Postgres: what `ports.Ledger` promises, out of batches, a journal and a lease.

    reserve -> negative cache -> batcher -> admission.admit   one transaction per flight
    settle  -> batcher -> settlement.settle                   one transaction per flight
                  store down -> journal -> replay             when it is back, and at the next start

A failed COMMIT may have happened. Holds are then looked for by attempt id; settlements go to the journal, whose
replay does nothing to what is already ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from gateway.core.budget import AMOUNT_MAX, Budget, may_fit_soon
from gateway.core.entry import Amounts, Attempt, Granted, Kind, Outcome, Refused, Settled
from gateway.core.errors import LedgerUnavailable
from gateway.core.ids import ms_of
from gateway.core.task import TaskDefault
from gateway.core.usage import Quality, Usage
from gateway.storage import budget_rows
from gateway.storage import lease as leases
from gateway.storage.admission import Ask, Budgeted, admit, granted_before
from gateway.storage.batcher import BATCH_MAX, Batcher
from gateway.storage.database import Database
from gateway.storage.entry_rows import storable
from gateway.storage.journal import Journal, read_segment
from gateway.storage.lease import Fenced, Lease, LeaseExpired
from gateway.storage.partitions import ensure_partitions
from gateway.storage.refusals import Refusals
from gateway.storage.settlement import Ending, settle
from gateway.storage.transact import CommitUnknown, Conflict, StoreDown, Tx

T = TypeVar("T")

#: How long a request waits for a store that does not answer.
STORE_TIMEOUT_S = 2.0
#: Nobody waits for a settlement, and each commit costs a sync: they gather company first. What a crash in this time
#: takes along is charged at its hold, like any attempt whose end nobody saw.
SETTLE_LINGER_S = 0.01
#: An agent asks again within milliseconds of its answer: so long it waits for ended attempts that still hold their bounds.
ENDING_S = 0.25
LEASE_TTL_S = 30.0
LEASE_RENEW_S = 10.0
REPLAY_EVERY_S = 0.5
WRITE_KEPT_EVERY_S = 1.0
_CONFLICTS_MAX = 5
_PARENTS_MAX = 50_000
_log = logging.getLogger(__name__)


class SqlLedger:
    """The authority for money. Made by `open`; `close` drains it, and leaves the database open.

    `task_default` is the budget of every task that nobody gave one.
    """

    def __init__(
        self,
        database: Database,
        replica_id: str,
        journal: Journal,
        task_default: TaskDefault = TaskDefault(),  # noqa: B008 - frozen
        store_timeout_s: float = STORE_TIMEOUT_S,
    ) -> None:
        self._store_timeout_s = store_timeout_s
        self._database = database
        self._clock = database.clock
        self._journal = journal
        self._task_default = task_default
        self._writer = database.writer
        self._lease = Lease(replica_id, 0)
        self._budgeted: Budgeted | None = None
        #: of tasks whose clients named one before; a row's parent never changes
        self._parents: dict[str, str] = {}
        self.refusals = Refusals(database.clock)
        self.held_nano_usd = 0  # by all holds that this process was granted
        flights = self._writer.flights
        self._admissions: Batcher[Ask, Granted | Refused] = Batcher(
            self._admit, flights, "admit", self._give_back
        )
        # One flight: two would wait for one another at the rows of the hour and of the task.
        self._settlements: Batcher[Ending, Settled] = Batcher(
            self._settle, 1, "settle", linger_s=SETTLE_LINGER_S
        )
        #: A SQLite file has no standby that could be behind it.
        self._keeps = database.postgres_dsn is not None
        self._failed_at = float("-inf")
        self._adrift: list[Ending] = []  # what neither the store nor the journal took
        self._replaying = asyncio.Lock()
        self._closing = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def open(
        cls,
        database: Database,
        *,
        replica_id: str,
        journal_dir: Path,
        task_default: TaskDefault = TaskDefault(),  # noqa: B008 - frozen
        make_journal: Callable[[Path, str], Journal] = Journal,
        store_timeout_s: float = STORE_TIMEOUT_S,
    ) -> SqlLedger:
        """Take the lease, post what the last run of this replica left in its journal, and begin.

        On SQLite, holds of former runs are then charged at their bounds: nobody else can end them. Raises
        `LedgerUnavailable` if the store does not answer.
        """
        journal = make_journal(journal_dir, replica_id)
        ledger = cls(database, replica_id, journal, task_default, store_timeout_s)
        alone = database.sqlite_path is not None
        try:
            ledger._lease = await ledger._run_again(
                partial(leases.register, replica_id, _ms(LEASE_TTL_S), alone)
            )
            await ledger.replay()
            if alone:
                await ledger.reap(0)
            await ledger.ensure_partitions()
        except StoreDown as e:
            raise LedgerUnavailable(f"the ledger's database does not answer: {e}") from e
        ledger._tasks = [
            asyncio.create_task(ledger._every(LEASE_RENEW_S, ledger._heartbeat), name="lease"),
            asyncio.create_task(ledger._every(REPLAY_EVERY_S, ledger._replay_if_pending), name="replay"),
        ]
        if ledger._keeps:
            writing = ledger._every(WRITE_KEPT_EVERY_S, ledger._journal.write_kept)
            ledger._tasks.append(asyncio.create_task(writing, name="kept"))
        return ledger

    async def close(self) -> None:
        """Finish what is under way, end the lease, and keep what could not be posted in the journal."""
        self._closing.set()
        await self._admissions.drain()
        await self._settlements.drain()
        await asyncio.gather(*self._tasks)
        try:
            await self._replay_if_pending()
            await self._run_again(partial(leases.renew, self._lease, 0))
        except StoreDown as e:
            _log.warning("the ledger's database did not answer at the end: %s", e)
        if self._adrift:
            await self._journal.append(self._adrift)
        await self._journal.close()

    @property
    def available(self) -> bool:
        """False while the last thing that the store was asked for failed, or the journal's disk does."""
        return self._failed_at == float("-inf") and not self._adrift

    @property
    def journal_records(self) -> int:
        """Settlements that wait for the store, on disk or, if the disk fails as well, in memory."""
        return self._journal.records + len(self._adrift)

    def queues(self) -> dict[tuple[str, ...], float]:
        """(batcher, "waiting" or "flights") -> items that wait, and transactions under way."""
        return {
            (name, what): float(count)
            for name, batcher in (("admit", self._admissions), ("settle", self._settlements))
            for what, count in (("waiting", batcher.waiting), ("flights", batcher.flying))
        }

    # --- ports.Ledger ----------------------------------------------------------------------------------

    async def reserve(
        self,
        attempt: Attempt,
        scopes: Sequence[str],
        ask: Amounts,
        least: Amounts,
        *,
        landing: bool = False,
    ) -> Granted | Refused:
        own = f"task:{attempt.task_id}"
        known = self.refusals.find(own, scopes, ask, least, landing)
        if known is not None:
            return known
        if self._adrift:
            raise LedgerUnavailable("the ledger's journal cannot be written")
        ms_of(attempt.attempt_id)
        _refuse_unstorable(ask.nano_usd or 0, ask.input_tokens or 0, ask.output_tokens or 0, ask.calls)
        wish = Ask(storable(attempt), tuple(scopes), ask, least, landing)
        answer = await self._asked(wish)
        if isinstance(answer, Refused) and self._settlements.flying and may_fit_soon(answer, least):
            await self._settlements.drain(ENDING_S)
            answer = await self._asked(wish)
        if isinstance(answer, Refused):
            self.refusals.add(own, answer, least, landing)
        else:
            self.held_nano_usd += answer.amount_nano_usd
        return answer

    async def _asked(self, wish: Ask) -> Granted | Refused:
        future = self._admissions.submit(wish)
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self._give_back(wish, future.result())
            raise

    @property
    def changes(self) -> int:
        return self.refusals.changes

    def post(self, attempt: Attempt, outcome: Outcome) -> None:
        self._settlements.hand_over(Ending(storable(attempt), storable(outcome)))

    async def idle(self) -> None:
        """Wait until all that was posted so far has been written down."""
        await self._settlements.drain()

    async def settle(self, attempt: Attempt, outcome: Outcome) -> Settled:
        ms_of(attempt.attempt_id)
        _refuse_unstorable(outcome.cost_nano_usd, outcome.list_cost_nano_usd)
        # Shielded: a caller that is cancelled must not take its settlement out of the queue.
        return await asyncio.shield(self._settlements.submit(Ending(storable(attempt), storable(outcome))))

    # --- for operators and jobs ------------------------------------------------------------------------

    async def snapshot(self, scope: str) -> list[Budget]:
        """The budgets of a scope as they stand now. Raises `LedgerUnavailable`."""
        try:
            return await self._run_again(partial(budget_rows.read, scope))
        except StoreDown as e:
            raise LedgerUnavailable from e

    def revision_changed(self) -> None:
        """A key, team or budget changed somewhere: known refusals may be wrong now."""
        self.refusals.forget()

    async def reap(self, grace_ms: int) -> int:
        """Charge all holds of replicas that are dead for `grace_ms`, at their bounds. Returns how many."""
        return await self._until_none(partial(leases.reap, self._lease.replica_id, grace_ms))

    async def forget_holds(self, older_than_ms: int) -> int:
        """Delete holds that ended, if they began longer ago than that. Returns how many."""
        return await self._until_none(lambda: leases.forget(older_than_ms))

    async def forget_misses(self, older_than_ms: int) -> int:
        """Delete what was said about prompts longer ago than that. Returns how many."""
        return await self._until_none(lambda: leases.forget_misses(older_than_ms))

    async def ensure_partitions(self) -> None:
        """Make the ledger's monthly partitions of Postgres for the months to come; nothing on SQLite.

        Raises `LedgerUnavailable`.
        """
        try:
            await self._run_again(partial(ensure_partitions, self._database.postgres_dsn is not None))
        except StoreDown as e:
            raise LedgerUnavailable from e

    async def replay(self) -> int:
        """Post all that waits in the journal. Returns how much; raises `StoreDown` if the store is still down."""
        async with self._replaying:
            adrift, self._adrift = self._adrift, []
            posted = 0
            try:
                posted += await self._post_again(adrift)
            except StoreDown:
                self._adrift += adrift
                raise
            for segment in await self._journal.close_segment():
                posted += await self._post_again(await asyncio.to_thread(read_segment, segment))
                await self._journal.drop(segment)
        return posted

    # --- flights ---------------------------------------------------------------------------------------

    async def _admit(self, asks: list[Ask]) -> list[Granted | Refused | Exception]:
        careful = False
        deadline = self._clock.monotonic() + self._store_timeout_s
        for _ in range(_CONFLICTS_MAX):
            tx = partial(
                admit,
                asks,
                self._lease,
                self._budgeted,
                self._task_default,
                self._parents,
                careful,
            )
            try:
                admitted = await self._run(tx, deadline)
            except Conflict:
                careful = True
            except LeaseExpired:
                await self._renew_quietly(deadline)
            except Fenced as e:
                return self._unavailable(asks, e)
            except CommitUnknown as e:
                return await self._look_for(asks, e.result.answers, deadline)
            except StoreDown as e:
                self._admissions.fail_waiting(lambda: LedgerUnavailable())
                return self._unavailable(asks, e)
            except Exception as e:
                if len(asks) == 1:
                    return [e]
                return [answer for ask in asks for answer in await self._admit([ask])]
            else:
                self._budgeted = admitted.budgeted
                self.refusals.revision = admitted.budgeted.revision
                self._remember_parents(admitted.parents)
                return [*admitted.answers]
        return self._unavailable(asks, "the store was too busy")

    async def _look_for(
        self, asks: list[Ask], answers: list[Granted | Refused], deadline: float
    ) -> list[Granted | Refused | Exception]:
        """After a COMMIT without an answer: the answers, if it happened; else nothing may be left held."""
        granted = [ask for ask, answer in zip(asks, answers, strict=True) if isinstance(answer, Granted)]
        ids = [ask.attempt.attempt_id for ask in granted]
        try:
            found = await self._run(partial(granted_before, ids), deadline + self._store_timeout_s / 2)
            if found or not ids:
                return [*answers]
        except (StoreDown, Conflict):
            pass  # not known even now: told below, and voided when the store is back
        for ask in granted:
            self._void(ask.attempt)
        return self._unavailable(asks, "the answer to a COMMIT was lost")

    async def _settle(self, endings: list[Ending]) -> list[Settled | Exception]:
        # Right after a failure the store is not asked again: each flight would wait for its time-out.
        if self._clock.monotonic() - self._failed_at < REPLAY_EVERY_S:
            return await self._to_journal(endings)
        first, again = _split(endings)
        answers: dict[int, Settled | Exception] = {}
        try:
            answers.update(zip(map(id, first), await self._post(first), strict=True))
            if self._keeps:
                self._journal.keep(first)
        except StoreDown:
            return await self._to_journal(endings)
        except Exception as e:
            if len(endings) == 1:
                await self._set_aside(endings[0], e)
                return [e]
            return [answer for ending in endings for answer in await self._settle([ending])]
        if again:
            answers.update(zip(map(id, again), await self._settle(again), strict=True))
        return [answers[id(ending)] for ending in endings]

    async def _post(self, endings: Sequence[Ending]) -> list[Settled]:
        careful = False
        for _ in range(_CONFLICTS_MAX):
            try:
                return await self._run(partial(settle, endings, self._lease.replica_id, careful))
            except Conflict:
                careful = True
        raise StoreDown("the store was too busy")

    async def _post_again(self, endings: Sequence[Ending]) -> int:
        waiting = list(endings)
        while waiting:
            batch, later = _split(waiting[:BATCH_MAX])
            waiting = later + waiting[BATCH_MAX:]
            try:
                await self._post(batch)
            except StoreDown:
                raise
            except Exception:
                for ending in batch:
                    await self._post_or_set_aside(ending)
        return len(endings)

    async def _post_or_set_aside(self, ending: Ending) -> None:
        try:
            await self._post([ending])
        except StoreDown:
            raise
        except Exception as e:
            await self._set_aside(ending, e)

    async def _set_aside(self, ending: Ending, why: Exception) -> None:
        _log.error("the store refuses the settlement of %s", ending.attempt.attempt_id, exc_info=why)
        try:
            await self._journal.set_aside(ending)
        except Exception:  # must not harm the settlements beside it
            _log.exception("it could not be set aside either: %s", ending)

    async def _to_journal(self, endings: list[Ending]) -> list[Settled | Exception]:
        try:
            await self._journal.append(endings)
        except OSError:
            _log.exception("the journal cannot be written; %d settlements are kept in memory", len(endings))
            self._adrift += endings
        return [Settled.SETTLED] * len(endings)

    def _give_back(self, ask: Ask, answer: Granted | Refused) -> None:
        """The caller went away while its hold was made, so nothing was sent."""
        if isinstance(answer, Granted):
            self._void(ask.attempt)

    def _void(self, attempt: Attempt) -> None:
        self._settlements.hand_over(Ending(attempt, _never_sent()))

    # --- the store -------------------------------------------------------------------------------------

    async def _run(self, tx: Callable[[], Tx[T]], deadline: float | None = None) -> T:
        timeout_s = self._store_timeout_s if deadline is None else deadline - self._clock.monotonic()
        if timeout_s <= 0:
            raise StoreDown("out of time")
        try:
            result = await self._writer.run(tx, timeout_s)
        except StoreDown as e:
            self._failed_at = self._clock.monotonic()
            _log.warning("the ledger's database failed: %s", e)
            raise
        self._failed_at = float("-inf")
        return result

    async def _run_again(self, tx: Callable[[], Tx[T]]) -> T:
        """The same, again if another transaction was there first."""
        for _ in range(_CONFLICTS_MAX):
            try:
                return await self._run(tx)
            except Conflict:
                continue
        raise StoreDown("the store was too busy")

    async def _until_none(self, tx: Callable[[], Tx[int]]) -> int:
        total = 0
        try:
            while n := await self._run_again(tx):
                total += n
        except StoreDown as e:
            raise LedgerUnavailable from e
        return total

    def _remember_parents(self, parents: Mapping[str, str]) -> None:
        if parents:
            if len(self._parents) >= _PARENTS_MAX:
                self._parents.clear()
            self._parents.update(parents)

    def _unavailable(self, asks: Sequence[Ask], why: object) -> list[Granted | Refused | Exception]:
        _log.warning("%d holds refused: %s", len(asks), why)
        return [LedgerUnavailable() for _ in asks]

    async def _renew_quietly(self, deadline: float) -> None:
        """If this fails, the next try to admit says why."""
        try:
            await self._run(partial(leases.renew, self._lease, _ms(LEASE_TTL_S)), deadline)
        except (StoreDown, Conflict):
            pass

    async def _heartbeat(self) -> None:
        if not await self._run(partial(leases.renew, self._lease, _ms(LEASE_TTL_S))):
            _log.error(
                "another process has registered as replica %s; admitting nothing", self._lease.replica_id
            )

    async def _replay_if_pending(self) -> None:
        if self._journal.pending or self._adrift:
            _log.info("posted %d settlements from the journal", await self.replay())

    async def _every(self, seconds: float, do: Callable[[], Awaitable[None]]) -> None:
        while not self._closing.is_set():
            try:
                await asyncio.wait_for(self._closing.wait(), seconds)
            except TimeoutError:
                pass
            else:
                return
            try:
                await do()
            except (StoreDown, Conflict):
                pass  # logged where it failed; the next turn tries again
            except OSError:
                _log.exception("the journal's disk failed; trying again in %g s", seconds)


def _split(endings: Sequence[Ending]) -> tuple[list[Ending], list[Ending]]:
    """The first ending of each attempt, and the rest: one transaction settles no attempt twice."""
    first: dict[str, Ending] = {}
    again = []
    for ending in endings:
        if first.setdefault(ending.attempt.attempt_id, ending) is not ending:
            again.append(ending)
    return list(first.values()), again


def _refuse_unstorable(*amounts: int) -> None:
    if min(amounts) < 0 or max(amounts) > AMOUNT_MAX:
        raise ValueError(f"an amount must be from 0 to {AMOUNT_MAX}, unlike one of {amounts}")


def _never_sent() -> Outcome:
    return Outcome(
        kind=Kind.VOID,
        usage=Usage(),
        quality=Quality.EXACT,
        cost_nano_usd=0,
        list_cost_nano_usd=0,
        price_version="",
        finish="error",
        status=0,
        error="never_sent",
        latency_ms=0,
        first_token_ms=None,
        upstream_request_id="",
        note="nothing was sent: the caller did not get the answer to its hold",
    )


def _ms(seconds: float) -> int:
    return round(seconds * 1_000)
