"""Configuration written over this API: kept as documents, laid over what the files say (core/config_overlay.py).

Before anything is written, the whole configuration is read with it as a start would read it, so that what is written can be
used; the state that it was tried on must still be the store's when it is written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from gateway.admin import config_bodies as bodies
from gateway.admin.call import Call, Json, Reply
from gateway.admin.in_force import (
    CredentialOut,
    DeploymentOut,
    ProviderOut,
    RuleOut,
    TierOut,
    VirtualModelOut,
    document_of,
    show,
    source_at,
    source_of_document,
    tag_of,
)
from gateway.admin.ports import Configured, Finding, Overlay
from gateway.admin.problems import Fault, Problem, invalid, not_found
from gateway.admin.records import listed
from gateway.admin.route import PAGED, Route
from gateway.admin.schemas import In
from gateway.admin.shown import InstantOut, Out, SourceOut, shown
from gateway.admin.store import Registry
from gateway.core.config_overlay import (
    Document,
    Documents,
    Key,
    Kind,
    Stored,
    Write,
    of_kind,
    patched,
    problem_place,
    title,
    users,
    written,
)
from gateway.core.errors import Unavailable
from gateway.core.offices import Moved, Right

TRIES = 5
DOCUMENTS_MAX = 2_000
#: The demo provider is the gateway's own.
_RESERVED = {(Kind.PROVIDER, "demo")}
_LISTS = {
    "credentials": Kind.CREDENTIAL,
    "providers": Kind.PROVIDER,
    "deployments": Kind.DEPLOYMENT,
    "tiers": Kind.TIER,
    "virtual_models": Kind.VIRTUAL_MODEL,
    "rules": Kind.RULE,
}
Plan = Callable[[Stored], Sequence[Write]]


class DocumentOut(Out):
    """What was written over this API. `shadowed_by`: a file declares it too, so that it does nothing."""

    kind: str
    name: str
    version: int
    created_at: InstantOut
    updated_at: InstantOut
    document: dict[str, Any]
    shadowed_by: SourceOut | None


class DeletedOut(Out):
    kind: str
    name: str
    version: int


# --- what is wanted -------------------------------------------------------------------------------------------


def _body(wanted: In) -> dict[str, Any]:
    """As the file would have it: what was not given, or null, is not there."""
    given = wanted.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    return {name: value for name, value in given.items() if name != "name"}


def _key(kind: Kind, wanted: Any) -> Key:
    name = wanted.name
    if kind is Kind.DEPLOYMENT and name is None:
        name = f"{wanted.provider}/{wanted.model}"
    return kind, str(name)


def _new(stored: Stored, key: Key, wanted: In, field: str) -> Write:
    if key in _RESERVED:
        raise invalid(field, f"{key[1]} is the gateway's own")
    there = stored.find(key)
    if there is not None:
        message = f"{title(key)} was written already, version {there.version}: PATCH it"
        raise Problem(409, f"{field}: {message}", [Fault(field, message)])
    return Write(key, _body(wanted), stored.next_version(key), made=True)


def _there(call: Call, stored: Stored, configured: Configured, key: Key) -> Document:
    """What was written, if the request's precondition holds. Problems: 404; 409 for what only a file says."""
    found = stored.find(key)
    if found is None or key in configured.shadowed:
        _refuse_declared(call, configured, key)
    if found is None:
        raise not_found(f"{key[0].words} that was written over this API: {key[1][:200]}")
    call.expect(
        {
            "name": found.name,
            "version": found.version,
            "source": shown(source_of_document(found)),
            "document": dict(found.body),
        },
        tag_of,
    )
    return found


def _refuse_declared(call: Call, configured: Configured, key: Key) -> None:
    there = show(configured, call.deps.health(), key)
    if there is None or document_of(configured, key) is not None:
        return
    source = there["source"]
    if source is None:
        if key[0] is Kind.TIER:
            return
        raise Problem(409, f"{title(key)} comes with the release: write one of that name to change it.")
    place = source["file"] + (f":{source['line']}" if source["line"] else "")
    raise Problem(409, f"{title(key)} is configured in {place}, so it cannot be changed here.")


# --- the write ------------------------------------------------------------------------------------------------


async def _change(
    call: Call,
    plan: Plan,
    show_written: Callable[[Configured | None, Documents], Json],
    *,
    prefixes: Mapping[Key, str] | None = None,
    status: int = 200,
) -> Reply:
    """`plan` says what to write, given what there is; `prefixes`: where in the request each resource stands."""
    overlay = call.deps.overlay
    if overlay is None:
        raise Problem(409, "This gateway was not started from a file, so nothing can be laid over it.")
    await overlay.turn()
    tried: list[Configured | None] = []

    async def act(registry: Registry) -> Documents:
        async with overlay.writing:
            return await attempt(registry)

    async def attempt(registry: Registry) -> Documents:
        await registry.expect_new()
        for _ in range(TRIES):
            stored = await registry.documents()
            writes = plan(stored)
            tried.append(await _tried(overlay, stored, writes, prefixes or {}))
            try:
                return await registry.write_documents(stored.stamp, writes)
            except Moved:
                continue
        raise Problem(409, "Others change the configuration at this moment; send it again.")

    reply = await call.change(
        act, lambda done: show_written(tried[-1] if tried else None, done), status=status, tag=tag_of
    )
    try:
        await overlay.turn()
    except Unavailable:
        pass  # it is written; this process takes it over when the store answers again
    return reply


async def _tried(
    overlay: Overlay, stored: Stored, writes: Sequence[Write], prefixes: Mapping[Key, str]
) -> Configured | None:
    """The configuration with the writes; None if a deletion leaves faults that were there before. Problems: 409, 422."""
    after = written(stored.documents, writes)
    _refuse_too_many(after)
    gone = [write.key for write in writes if write.body is None]
    for key in gone:
        _refuse_used(key, [title(user) for user in users(after, key)])
    found = await overlay.tried(after)
    if found.configured is None:
        new = found.problems
        if len(gone) == len(writes):
            before = (await overlay.tried(stored.documents)).problems
            new = [problem for problem in new if problem not in before]
            if not new:
                return None
            _refuse_used(gone[0], [_told(problem) for problem in new])
        faults = [
            _fault(problem, {problem_place(w.key): prefixes.get(w.key, "") for w in writes})
            for problem in new
        ]
        raise Problem(422, "Nothing was changed: " + "; ".join(f.message for f in faults[:5]), faults)
    for write in writes:
        place = found.configured.shadowed.get(write.key)
        if place is not None and write.body is not None:
            field = f"{prefixes.get(write.key, '')}name"
            message = f"{title(write.key)} is declared in {place[0]}:{place[1]}: change it there"
            raise Problem(409, f"{field}: {message}", [Fault(field, message)])
    return found.configured


def _refuse_used(key: Key, by: Sequence[str]) -> None:
    if by:
        raise Problem(
            409,
            f"{title(key)} is in use: {'; '.join(by[:10])}.",
            [Fault("name", f"is in use: {user}") for user in by],
        )


def _refuse_too_many(after: Documents) -> None:
    rules = len(of_kind(after, Kind.RULE))
    rules += sum(len(d.body.get("rules", ())) for d in of_kind(after, Kind.VIRTUAL_MODEL))
    if rules > bodies.RULES_MAX:
        raise Problem(422, f"More than {bodies.RULES_MAX} rules belong into a file.")
    if len(after) > DOCUMENTS_MAX:
        raise Problem(422, f"More than {DOCUMENTS_MAX} resources belong into a file.")


def _fault(problem: Finding, own: Mapping[str, str]) -> Fault:
    """A field of the request if it is one of its resources that is wrong."""
    hint = f" ({problem.hint})" if problem.hint else ""
    if problem.file in own:
        place = f"line {problem.line}, column {problem.column}: " if problem.column else ""
        field = own[problem.file] + problem.key
        return Fault(field.removesuffix(".") or "body", f"{place}{problem.message}{hint}")
    return Fault(problem.key or "configuration", _told(problem))


def _told(problem: Finding) -> str:
    place = problem.file + (f":{problem.line}" if problem.line else "")
    return f"{place}: {problem.key + ': ' if problem.key else ''}{problem.message}"


# --- resources ------------------------------------------------------------------------------------------------


def _shown(call: Call, configured: Configured | None, done: Document) -> Json:
    found = None if configured is None else show(configured, call.deps.health(), done.key)
    times = shown(DocumentOut(**_document(done), shadowed_by=None))
    return {**(found or {}), **{name: times[name] for name in ("version", "created_at", "updated_at")}}


def _document(document: Document) -> dict[str, Any]:
    return {
        "kind": document.kind.value,
        "name": document.name,
        "version": document.version,
        "created_at": document.created_at_ms,
        "updated_at": document.updated_at_ms,
        "document": dict(document.body),
    }


async def _create(call: Call, kind: Kind, model: type[In]) -> Reply:
    wanted = model.model_validate(call.body)
    key = _key(kind, wanted)
    return await _change(
        call,
        lambda stored: [_new(stored, key, wanted, "name")],
        lambda configured, done: _shown(call, configured, done[0]),
        status=201,
    )


async def _patch(call: Call, kind: Kind, model: type[In]) -> Reply:
    patch = model.model_validate(call.body)
    changes = patch.model_dump(mode="json", exclude_unset=True)
    # Parts are replaced whole: in them, null says the same as nothing.
    changes |= _body(patch)
    key = (kind, call.path["name"])

    def plan(stored: Stored) -> Sequence[Write]:
        configured = call.deps.configured()
        if kind is Kind.TIER and stored.find(key) is None and show(configured, {}, key) is not None:
            _refuse_declared(call, configured, key)
            call.expect(show(configured, {}, key) or {}, tag_of)
            return [Write(key, patched({}, changes), stored.next_version(key), made=True)]
        before = _there(call, stored, configured, key)
        return [Write(key, patched(before.body, changes), stored.next_version(key))]

    return await _change(call, plan, lambda configured, done: _shown(call, configured, done[0]))


async def _delete(call: Call, kind: Kind) -> Reply:
    key = (kind, call.path["name"])

    def plan(stored: Stored) -> Sequence[Write]:
        configured = call.deps.configured()
        if key not in configured.shadowed or stored.find(key) is None:
            _there(call, stored, configured, key)
        return [Write(key, None, stored.next_version(key))]

    return await _change(
        call, plan, lambda _, done: {"kind": kind.value, "name": done[0].name, "version": done[0].version}
    )


async def create_provider(call: Call) -> Reply:
    """As under `providers:` in the configuration; requests reach its deployments, which are written apart."""
    return await _create(call, Kind.PROVIDER, bodies.ProviderIn)


async def change_provider(call: Call) -> Reply:
    return await _patch(call, Kind.PROVIDER, bodies.ProviderPatch)


async def delete_provider(call: Call) -> Reply:
    """409 while it has deployments."""
    return await _delete(call, Kind.PROVIDER)


async def create_credential(call: Call) -> Reply:
    """Name the variable or the file that holds a secret; the secret itself is refused."""
    return await _create(call, Kind.CREDENTIAL, bodies.CredentialIn)


async def change_credential(call: Call) -> Reply:
    return await _patch(call, Kind.CREDENTIAL, bodies.CredentialPatch)


async def delete_credential(call: Call) -> Reply:
    """409 while a provider uses it."""
    return await _delete(call, Kind.CREDENTIAL)


async def create_deployment(call: Call) -> Reply:
    """As under a provider's `deployments:`; gateways send requests to it within a second."""
    return await _create(call, Kind.DEPLOYMENT, bodies.DeploymentIn)


async def change_deployment(call: Call) -> Reply:
    return await _patch(call, Kind.DEPLOYMENT, bodies.DeploymentPatch)


async def delete_deployment(call: Call) -> Reply:
    """409 while a rule, a virtual model or a team leads to nothing else. Running calls end as they would."""
    return await _delete(call, Kind.DEPLOYMENT)


async def create_tier(call: Call) -> Reply:
    """Where a tier's requests go that find nothing in it, and whether it is the default."""
    return await _create(call, Kind.TIER, bodies.TierIn)


async def change_tier(call: Call) -> Reply:
    """Also of a tier of which nothing was written yet."""
    return await _patch(call, Kind.TIER, bodies.TierPatch)


async def delete_tier(call: Call) -> Reply:
    """Takes back what was written of it; the tier is there as long as deployments are in it."""
    return await _delete(call, Kind.TIER)


async def create_virtual_model(call: Call) -> Reply:
    return await _create(call, Kind.VIRTUAL_MODEL, bodies.VirtualModelIn)


async def change_virtual_model(call: Call) -> Reply:
    """`rules` are replaced whole."""
    return await _patch(call, Kind.VIRTUAL_MODEL, bodies.VirtualModelPatch)


async def delete_virtual_model(call: Call) -> Reply:
    """409 while a rule leads to it."""
    return await _delete(call, Kind.VIRTUAL_MODEL)


async def create_rule(call: Call) -> Reply:
    """A rule of "auto", before or behind those of the file by its `order`."""
    return await _create(call, Kind.RULE, bodies.RuleIn)


async def change_rule(call: Call) -> Reply:
    return await _patch(call, Kind.RULE, bodies.RulePatch)


async def delete_rule(call: Call) -> Reply:
    return await _delete(call, Kind.RULE)


async def create_configuration(call: Call) -> Reply:
    """Several resources that may name one another, all or none; `errors` names the one that cannot be."""
    wanted = bodies.ConfigurationIn.model_validate(call.body)
    rows: list[tuple[Key, In, str]] = [
        (_key(kind, row), row, f"{name}.{n}.")
        for name, kind in _LISTS.items()
        for n, row in enumerate(getattr(wanted, name))
    ]
    prefixes: dict[Key, str] = {}
    for key, _, prefix in rows:
        if key in prefixes:
            raise invalid(f"{prefix}name", f"{title(key)} is there twice")
        prefixes[key] = prefix
    return await _change(
        call,
        lambda stored: [_new(stored, key, row, f"{prefix}name") for key, row, prefix in rows],
        lambda configured, done: {"data": [_shown(call, configured, document) for document in done]},
        prefixes=prefixes,
        status=201,
    )


async def list_documents(call: Call) -> Reply:
    """Everything that was written over this API, in force or not. `in_force`: whether this process could take it over, and
    `trouble` why not.
    """
    overlay = call.deps.overlay
    if overlay is not None:
        await overlay.turn()
    shadowed = call.deps.configured().shadowed
    rows = []
    for document in (await call.registry.documents()).documents:
        source = source_at(shadowed.get(document.key))
        rows.append(shown(DocumentOut(**_document(document), shadowed_by=source)))
    reply = await listed(call, rows)
    assert isinstance(reply.body, Mapping)
    trouble = "" if overlay is None else overlay.trouble
    return Reply({**reply.body, "in_force": not trouble, "trouble": trouble})


def _routes() -> list[Route]:
    """POST, PATCH and DELETE of each kind."""
    kinds: Sequence[tuple[str, Sequence[Any], type[BaseModel], type[BaseModel], type[BaseModel]]] = (
        ("/credentials", (create_credential, change_credential, delete_credential), CredentialOut, bodies.CredentialIn, bodies.CredentialPatch),
        ("/providers", (create_provider, change_provider, delete_provider), ProviderOut, bodies.ProviderIn, bodies.ProviderPatch),
        ("/deployments", (create_deployment, change_deployment, delete_deployment), DeploymentOut, bodies.DeploymentIn, bodies.DeploymentPatch),
        ("/tiers", (create_tier, change_tier, delete_tier), TierOut, bodies.TierIn, bodies.TierPatch),
        ("/virtual_models", (create_virtual_model, change_virtual_model, delete_virtual_model), VirtualModelOut, bodies.VirtualModelIn, bodies.VirtualModelPatch),
        ("/rules", (create_rule, change_rule, delete_rule), RuleOut, bodies.RuleIn, bodies.RulePatch),
    )  # fmt: skip
    routes = []
    for path, (create, change, delete), out, wanted, patch in kinds:
        one, tag = f"{path}/{{name}}", "configuration"
        routes += [
            Route("POST", path, create, Right.OPERATE, tag, out, wanted, status=201, once=True),
            Route("PATCH", one, change, Right.OPERATE, tag, out, patch, once=True, tagged=True),
            Route("DELETE", one, delete, Right.OPERATE, tag, DeletedOut, once=True, tagged=True),
        ]
    return routes


ROUTES = (
    *_routes(),
    Route("POST", "/configuration/bulk", create_configuration, Right.OPERATE, "configuration", body=bodies.ConfigurationIn, status=201, once=True),
    Route("GET", "/configuration", list_documents, Right.OPERATE, "configuration", DocumentOut, params=PAGED, listed=True),
)  # fmt: skip
