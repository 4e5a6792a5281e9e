"""Rounds of load and faults, and what the bill says about the ledger after each."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial

from gateway import settings as config
from gateway.core.budget import OnExceed
from gateway.core.entry import Unit
from gateway.core.errors import Unavailable
from gateway.crash import Point
from gateway.jobs.reconcile import Reconcile
from gateway.storage import reports
from gateway.storage.ledger import SqlLedger
from gateway.storage.uncertain import uncertain
from gateway.upstream.lookup import UsageLookup
from tests.crash.checker import Billed, Line, Violation, judge
from tests.crash.plan import REAP, Fault, Round, What
from tests.crash.site import PEPPER, Gateway, Site
from tests.e2e.traffic import Call, Tally, calls, send
from tests.storage.worlds import rows
from tests.support.relay import Break

#: A few calls at once fit, and not all of a round's.
TIGHT_NANO_USD = 200_000_000
#: After the load, how long an order to die waits for its point.
LATE_S = 1.5
#: How long everything may take to end by itself.
PATIENCE_S = 60.0
_CALL_S = 30.0
#: Calls that the provider is answering when a gateway is cut off from Postgres past its lease.
UNDER_WAY = 8
_OPEN = "SELECT attempt_id FROM hold WHERE state = 'held' ORDER BY attempt_id"
_LEASED = "SELECT 1 FROM replica WHERE replica_id LIKE $1 AND expires_at_ms > now_ms()"
_HELD_OF = "SELECT attempt_id FROM hold WHERE state = 'held' AND replica_id LIKE $1"
_CHARGED = "SELECT attempt_id FROM ledger WHERE kind = 'charge_unknown' AND attempt_id = ANY($1::text[])"
_ENTRIES = (
    "SELECT attempt_id, kind, amount_nano_usd, quality, tenant_id, team_id, key_id, task_id FROM ledger "
    "WHERE key_id = ANY($1::text[]) ORDER BY at_ms, entry_id"
)


@dataclass(slots=True)
class Evidence:
    """What a round left behind: enough to judge it."""

    ledger: list[Line]
    bill: list[Billed]
    limits: dict[str, int]
    open_holds: list[str]
    drift: list[reports.Drift]

    def judged(self) -> list[Violation]:
        return judge(self.ledger, self.bill, self.limits, open_holds=self.open_holds, drift=self.drift)


@dataclass(slots=True)
class Played:
    round: Round
    evidence: Evidence
    violations: list[Violation]
    statuses: Counter[int]
    cut: int = 0
    #: Deaths at the named point that was ordered.
    reached: Counter[str] = field(default_factory=Counter)
    corrected: int = 0
    #: Attempts that the others charged while their gateway stood still, or was cut off from Postgres, past its lease.
    charged_paused: frozenset[str] = frozenset()
    charged_apart: frozenset[str] = frozenset()

    def late(self, charged: frozenset[str]) -> int:
        """How many of them were corrected, by what their gateway settled late or by what the provider was asked."""
        return sum(
            1 for line in self.evidence.ledger if line.kind == "correct" and line.attempt_id in charged
        )


async def play(
    site: Site,
    todo: Round,
    *,
    tight_nano_usd: int = TIGHT_NANO_USD,
    on_exceed: OnExceed = OnExceed.ERROR,
) -> Played:
    """One round, from fresh keys to a verdict. All gateways live before it and after it.

    One of its two keys has a hard budget of `tight_nano_usd`; another `on_exceed` takes its guard away, and the verdict
    is as if it were there.
    """
    accounts = site.accounts
    first_bill = len(site.provider.bill())
    keys = [
        await accounts.create_key(pepper=PEPPER.encode(), name=f"{todo.seed} {kind}")
        for kind in ("tight", "wide")
    ]
    tight = f"key:{keys[0][0].key_id}"
    await accounts.set_budget(tight, tight_nano_usd, on_exceed=on_exceed)
    tally, reached = Tally(), Counter[str]()
    outlived: dict[What, frozenset[str]] = {}
    wide = keys[1][1]
    over = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        for fault in todo.faults:
            group.create_task(_inflict(site, todo, fault, over, reached, outlived, wide), name=str(fault))
        await _load(site, todo, [text for _, text in keys], tally)
        over.set()
    await _end(site, todo, reached)
    await site.provider.settled()
    corrected = await _reconcile(site)
    evidence = await _evidence(site, [record.key_id for record, _ in keys], first_bill)
    evidence.limits[tight] = tight_nano_usd
    return Played(
        todo,
        evidence,
        evidence.judged(),
        tally.statuses,
        tally.cut,
        reached,
        corrected,
        outlived.get(What.PAUSE, frozenset()),
        outlived.get(What.POSTGRES_WAY, frozenset()),
    )


# --- load ----------------------------------------------------------------------------------------------------


async def _load(site: Site, todo: Round, keys: Sequence[str], tally: Tally) -> None:
    waiting = calls(todo.calls, todo.seed, todo.leaving)
    rnd = random.Random(f"clients {todo.seed}")

    async def client() -> None:
        for call in waiting:
            awake = [g for g in site.gateways if not g.paused] or site.gateways
            await _send(rnd.choice(awake), rnd.choice(keys), call, tally)

    async with asyncio.TaskGroup() as group:
        for n in range(todo.at_once):
            group.create_task(client(), name=f"client {n}")


async def _send(gateway: Gateway, key: str, call: Call, tally: Tally, patience_s: float = _CALL_S) -> None:
    try:
        async with asyncio.timeout(patience_s):
            await send(gateway.url, key, call, tally)
    except OSError:
        tally.cut += 1
        await asyncio.sleep(0.02)  # as a client that finds nobody there


# --- faults --------------------------------------------------------------------------------------------------


async def _inflict(
    site: Site,
    todo: Round,
    fault: Fault,
    over: asyncio.Event,
    reached: Counter[str],
    outlived: dict[What, frozenset[str]],
    key: str,
) -> None:
    await asyncio.sleep(fault.after_s)
    gateway = site.gateways[fault.gateway]
    match fault.what:
        case What.KILL:
            while todo.reaping and not over.is_set() and not await _holds(site, gateway):
                await asyncio.sleep(0.02)
            await gateway.kill()
        case What.KILL_AT if fault.point not in REAP:
            await _kill_at(gateway, fault, over, reached)
        case What.RESTART_POSTGRES:
            await site.stop_postgres()
            await asyncio.sleep(fault.lasts_s)
            await site.start_postgres()
        case What.CUT:
            gateway.way.cut(fault.cut, fault.times)
        case What.FLUSH_REDIS:
            await site.flush_redis()
        case What.KILL_REDIS:
            site.redis.kill()
        case What.PAUSE if fault.past_lease:
            while not over.is_set() and not await _holds(site, gateway):
                await asyncio.sleep(0.02)
            gateway.pause()
            outlived[fault.what] = await _charged_by_others(site, gateway)
            gateway.resume()
        case What.PAUSE:
            gateway.pause()
            await asyncio.sleep(fault.lasts_s)
            gateway.resume()
        case What.POSTGRES_WAY if fault.past_lease:
            outlived[fault.what] = await _apart(site, todo, gateway, key)
        case What.POSTGRES_WAY:
            gateway.to_postgres.break_(fault.how)
            await asyncio.sleep(fault.lasts_s)
            gateway.to_postgres.mend()
        case What.REDIS_WAY:
            gateway.to_redis.break_(fault.how)
            await asyncio.sleep(fault.lasts_s)
            gateway.to_redis.mend()


async def _apart(site: Site, todo: Round, gateway: Gateway, key: str) -> frozenset[str]:
    """Cut off from Postgres with calls under way at the provider; the attempts that the others charged meanwhile.

    What the provider says stays on its way until then. It arrives while the gateway is still cut off, so the gateway
    has settled all of it, in its journal, under a lease that is long over when Postgres hears of it.
    """
    under_way = [c for c in calls(2 * UNDER_WAY, todo.seed + 1, leaving=0) if c.operation != "count_tokens"]
    seen = Tally()
    gateway.to_provider.break_(Break.ONE_WAY)
    async with asyncio.TaskGroup() as group:
        for call in under_way[:UNDER_WAY]:
            group.create_task(_send(gateway, key, call, seen, PATIENCE_S))
        await _until_under_way(site, gateway)
        gateway.to_postgres.break_(Break.SILENT)
        charged = await _charged_by_others(site, gateway)
        gateway.to_provider.mend()
    gateway.to_postgres.mend()
    return charged


async def _until_under_way(site: Site, gateway: Gateway) -> None:
    """Returns when the gateway holds as much as is to be under way, or after a while, whatever it holds then."""
    try:
        async with asyncio.timeout(LATE_S):
            while len(await _held(site, gateway)) < UNDER_WAY or not gateway.to_provider.held:
                await asyncio.sleep(0.02)
    except (TimeoutError, Unavailable):
        pass


async def _charged_by_others(site: Site, gateway: Gateway) -> frozenset[str]:
    """The attempts of the gateway that were charged as lost since it went silent: returns when its lease is over."""
    name = f"%-{gateway.port}-0"
    held = set[str]()
    try:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    held |= await _held(site, gateway)
                    if not await rows(site.database, _LEASED, name) and not await _held(site, gateway):
                        break
                except Unavailable:
                    pass  # Postgres is one of the round's faults
                await asyncio.sleep(0.1)
    except TimeoutError:
        pass  # what is still held is on record
    return frozenset(row[0] for row in await rows(site.database, _CHARGED, list(held)))


async def _held(site: Site, gateway: Gateway) -> set[str]:
    """The attempts that it has under way. Raises `Unavailable`."""
    return {row[0] for row in await rows(site.database, _HELD_OF, f"%-{gateway.port}-0")}


async def _holds(site: Site, gateway: Gateway) -> bool:
    """It has attempts under way. True as well if Postgres cannot say."""
    try:
        return bool(await _held(site, gateway))
    except Unavailable:
        return True


async def _kill_at(gateway: Gateway, fault: Fault, over: asyncio.Event, reached: Counter[str]) -> None:
    """At its point; if that does not come in time, wherever it is."""
    assert fault.point is not None
    gateway.order_death(fault.point)
    late_s = 0.0
    while gateway.alive and late_s < LATE_S:
        await asyncio.sleep(0.02)
        late_s += 0.02 if over.is_set() else 0.0
    reached[fault.point] += not gateway.alive and not gateway.ordered
    gateway.cancel_order()
    await gateway.kill()


# --- the end -------------------------------------------------------------------------------------------------


async def _end(site: Site, todo: Round, reached: Counter[str]) -> None:
    """Returns when all live again and nothing is held or waits in a journal, or when patience is at its end."""
    for gateway in site.gateways:
        gateway.way.cut(gateway.way.how, 0)
        gateway.resume()
        gateway.to_postgres.mend()
        gateway.to_redis.mend()
        gateway.to_provider.mend()
    # Whoever reaps first dies of it, so the living have the order before the dead, whose holds are reaped, are back.
    reaping = todo.reaping
    for gateway in site.gateways:
        if reaping and gateway.alive:
            gateway.order_death(reaping)
    await site.revive(but=todo.stays_away, order=reaping)
    try:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                _count_reapers(site, reaping, reached)
                await site.revive(but=todo.stays_away)
                if not any(g.journalled for g in site.gateways if g.alive) and not await rows(
                    site.database, _OPEN
                ):
                    break
                await asyncio.sleep(0.1)
    except TimeoutError:
        pass  # what is still open is on record
    _count_reapers(site, reaping, reached)
    for gateway in site.gateways:
        gateway.cancel_order()
    await site.revive()


def _count_reapers(site: Site, reaping: Point | None, reached: Counter[str]) -> None:
    """Those who have died of their order since they were last started."""
    if reaping:
        reached[reaping] += sum(1 for g in site.gateways if not g.alive and not g.ordered)


async def _reconcile(site: Site) -> int:
    """Ask the provider about every charge that is a guess, beside the gateways, which do so themselves."""
    settings = config.load(site.gateways[0].config, {"TOLLHOUSE_PEPPER": PEPPER})
    deployments = {d.name: d for d in settings.catalog.deployments}
    async with AsyncExitStack() as stack:
        lookup = UsageLookup({})
        await lookup.start()
        stack.push_async_callback(lookup.stop)
        ledger = await SqlLedger.open(
            site.database, replica_id="campaign", journal_dir=site.directory / "journal"
        )
        stack.push_async_callback(ledger.close)
        reconcile = Reconcile(
            uncertain=partial(uncertain, site.database),
            settle=ledger.settle,
            deployments=lambda: deployments,
            price_book=lambda: settings.prices,
            find=lookup.find,
            now_ms=site.database.clock.now_ms,
        )
        return await reconcile.once()


async def _evidence(site: Site, key_ids: list[str], first_bill: int) -> Evidence:
    ledger = [
        Line(
            attempt_id,
            kind,
            amount,
            quality == "exact",
            (f"tenant:{tenant}", f"team:{team}", f"key:{key}", f"task:{task}"),
        )
        for attempt_id, kind, amount, quality, tenant, team, key, task in await rows(
            site.database, _ENTRIES, key_ids
        )
    ]
    bill = [Billed(line.client_request_id, line.nano_usd) for line in site.provider.bill(first_bill)]
    return Evidence(
        ledger,
        bill,
        await _limits(site, {s for line in ledger for s in line.scopes}),
        [row[0] for row in await rows(site.database, _OPEN)],
        await reports.drift(site.database),
    )


async def _limits(site: Site, scopes: set[str]) -> dict[str, int]:
    return {
        b.scope: b.limit
        for b in await site.accounts.list_budgets()
        if b.hard and b.unit is Unit.USD and b.window == "lifetime" and b.scope in scopes
    }
