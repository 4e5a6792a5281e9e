"""identify: virtual key -> Caller; header, client's session signal or prefix lineage -> Task."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.core import clients, secrets
from gateway.core.errors import Unauthenticated
from gateway.core.identity import Caller, KeyRecord, TaskRef, TaskSource
from gateway.core.prefix import anchor, chain
from gateway.pipeline.exchange import Exchange, World

_DAY_MS = 86_400_000
_REMINDS = frozenset({"system", "developer"})
_UNKNOWN = "this gateway key is not known here"


def key_text(headers: Mapping[str, str]) -> str:
    """The key as the client sent it: `Authorization: Bearer` or `x-api-key`, on every address alike."""
    authorization = headers.get("authorization", "")
    if authorization:
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() == "bearer":
            return token.strip()
    return headers.get("x-api-key", "").strip()


async def authenticate(world: World, headers: Mapping[str, str]) -> Caller:
    """The caller behind the key. Raises `Unauthenticated` (which of the reasons is said only for one's own key)."""
    text = key_text(headers)
    parsed = secrets.parse_key(text)
    if parsed is None:
        raise Unauthenticated(
            "this is not a gateway key; gateway keys begin with 'gw-' and are made with 'tollhouse keys create'"
            if text
            else None
        )
    key_id, secret = parsed
    record = await world.keys.find(key_id)
    if record is None:
        raise Unauthenticated(_UNKNOWN)
    if not world.verified.knows(text, record.secret_hmac):
        if not secrets.matches(world.pepper, secret, record.secret_hmac):
            raise Unauthenticated(_UNKNOWN)
        world.verified.remember(text, record.secret_hmac)
    refuse_ended(record, world.clock.now_ms())
    # A task-scoped key is its owner's: otherwise declaring tasks would be a way around the owner's budgets and limits.
    return Caller(record.tenant_id, record.team_id, record.declared_by or record.key_id, record)


def refuse_ended(record: KeyRecord, now_ms: int) -> None:
    if record.revoked_at_ms is not None:
        raise Unauthenticated("this gateway key was revoked")
    if record.expires_at_ms is not None and now_ms >= record.expires_at_ms:
        raise Unauthenticated("this gateway key has expired")


async def identify(world: World, x: Exchange) -> None:
    """Name the task, first match wins: task-scoped key, path or header, client signal, lineage, else a new one."""
    signal = clients.recognise(
        x.incoming.headers, x.facts.session_hints, x.incoming.path_task, x.facts.tool_count
    )
    x.signal = signal
    segments = x.facts.segments
    x.chain = chain(segments)
    if x.facts.last_role in _REMINDS:  # a client's trailing reminder, which moves every turn
        x.chain = x.chain[: anchor(segments)]
    key = x.caller.key
    if key.task_id is not None:
        x.task = TaskRef(key.task_id, TaskSource.KEY)
    elif signal.external_id:
        parent = signal.parent_external_id
        task_id, name = await named(world, key.key_id, signal.external_id)
        above = (await named(world, key.key_id, parent))[0] if parent else None
        x.task = TaskRef(task_id, signal.source, name, above if above != task_id else None)
    elif not x.chain:
        # Calls without a history (embeddings, counts) that name no task share one per key, kind and day:
        # a task each would bury the real ones.
        name = f"untasked:{x.operation}:{x.received_ms // _DAY_MS}"
        x.task = TaskRef(clients.task_id_of(key.key_id, name), TaskSource.NEW, name)
    else:
        found = await world.prefixes.find(_lineage(x), x.chain)
        if found is not None:
            task_id = found[1]
        else:
            # A run whose tools come in another order, or whose clock moved on, is still that run.
            scope = (x.caller.key_id, x.client, "")
            task_id = world.shaper.task_of(scope, x.operation, x.facts, x.incoming.body)
        if task_id:
            x.task = TaskRef(task_id, TaskSource.LINEAGE)
        else:
            x.task = TaskRef(world.new_id("task"), TaskSource.NEW)


async def named(world: World, key_id: str, name: str) -> tuple[str, str]:
    """(task id, name that its client gives it): a task that the key owns may be named by its id as well."""
    if clients.is_task_id(name) and await world.task_owners.owner(name) == key_id:
        return name, ""
    return clients.task_id_of(key_id, name), name


def remember(world: World, x: Exchange) -> None:
    """The next request of this run extends this one. Called when a provider has accepted the request."""
    if x.chain:
        world.prefixes.put(_lineage(x), x.chain, x.task.task_id)


def _lineage(x: Exchange) -> str:
    """Whose conversations this one may continue: those of the same kind of client under the same key.

    Two clients that begin with the same words (a script in two languages) are two runs.
    """
    return f"{x.caller.key_id}/{x.client}"
