"""The configuration in force: providers, credentials, deployments, tiers, rules and virtual models, each with where it is
configured. What was written over this API is caught up with before anything is shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.admin.call import Call, Json, Reply, etag_of
from gateway.admin.ports import Configured
from gateway.admin.problems import not_found
from gateway.admin.records import listed
from gateway.admin.route import PAGED, Route, choice, text
from gateway.admin.shown import InstantOut, Out, SourceOut, shown
from gateway.core.catalog import Operation, Tier
from gateway.core.config_overlay import Document, Key, Kind
from gateway.core.errors import Unavailable
from gateway.core.offices import Right
from gateway.core.rules import RuleText


class ConfiguredOut(Out):
    """`document`: as it was written over this API, with its version and times; null for what files say."""

    source: SourceOut | None = None
    version: int | None = None
    created_at: InstantOut = None
    updated_at: InstantOut = None
    document: dict[str, Any] | None = None


class ProviderOut(ConfiguredOut):
    name: str
    wire: str
    base_url: str
    credential: str
    bridge: bool
    on_disconnect: str
    cache_rules: str
    connect_timeout_s: float
    first_byte_timeout_s: float
    idle_timeout_s: float
    first_event_timeout_s: float
    event_idle_timeout_s: float
    total_timeout_s: float
    deployments: list[str]


class CredentialOut(ConfiguredOut):
    """A secret that the gateway sends to providers: its name, never itself."""

    name: str
    present: bool
    providers: list[str]


class DeploymentOut(ConfiguredOut):
    """A deployment and its health: `closed` = in use."""

    name: str
    model: str
    upstream_model: str
    aliases: list[str]
    provider: str
    tier: str
    price: str
    operations: list[str]
    weight: int
    priority: int
    context_tokens: int | None
    max_output_tokens: int | None
    health: str


class TierOut(ConfiguredOut):
    name: str
    default: bool
    deployments: list[str]
    fallbacks: list[str]


class RuleOut(ConfiguredOut):
    """A routing rule as written; the first that matches wins. `virtual_model`: for whom asks for that instead of "auto"."""

    position: int
    virtual_model: str | None
    name: str
    when: str
    target: str
    why: str
    switch: str
    max_output_tokens: int | None
    reasoning_effort: str | None
    service_tier: str | None


class VirtualModelOut(ConfiguredOut):
    name: str
    otherwise: str
    rules: list[str]


# --- one of each ----------------------------------------------------------------------------------------------


def show(configured: Configured, health: Mapping[str, str], key: Key) -> Json | None:
    """One resource as it is configured; None if there is none of that name."""
    kind, name = key
    found: ConfiguredOut | None = None
    match kind:
        case Kind.PROVIDER:
            found = _provider(configured, name)
        case Kind.CREDENTIAL:
            found = _credential(configured, name)
        case Kind.DEPLOYMENT:
            found = _deployment(configured, health, name)
        case Kind.TIER:
            found = _tier(configured, name)
        case Kind.VIRTUAL_MODEL:
            found = _virtual_model(configured, name)
        case Kind.RULE:
            found = _rule(configured, name)
    if found is None:
        return None
    body = shown(found)
    return {"name": body["name"], **body}  # the name first, for people


def _provider(configured: Configured, name: str) -> ProviderOut | None:
    provider = configured.providers.get(name)
    if provider is None:
        return None
    return ProviderOut(
        name=name,
        wire=provider.wire.value,
        base_url=_without_identity(provider.base_url),
        credential=provider.credential,
        bridge=provider.bridge,
        on_disconnect=provider.on_disconnect.value,
        cache_rules=provider.cache_rules,
        connect_timeout_s=provider.connect_timeout_s,
        first_byte_timeout_s=provider.first_byte_timeout_s,
        idle_timeout_s=provider.idle_timeout_s,
        first_event_timeout_s=provider.first_event_timeout_s,
        event_idle_timeout_s=provider.event_idle_timeout_s,
        total_timeout_s=provider.total_timeout_s,
        deployments=[d.name for d in configured.catalog.deployments if d.provider.name == name],
        **_written(configured, (Kind.PROVIDER, name)),
    )


def _credential(configured: Configured, name: str) -> CredentialOut | None:
    users = [p.name for p in configured.providers.values() if p.credential == name]
    if not users and name not in configured.credentials:
        return None
    return CredentialOut(
        name=name,
        present=name in configured.credentials,
        providers=users,
        **_written(configured, (Kind.CREDENTIAL, name)),
    )


def _deployment(configured: Configured, health: Mapping[str, str], name: str) -> DeploymentOut | None:
    d = next((d for d in configured.catalog.deployments if d.name == name), None)
    if d is None:
        return None
    return DeploymentOut(
        name=d.name,
        model=d.model,
        upstream_model=d.upstream_model,
        aliases=list(d.aliases),
        provider=d.provider.name,
        tier=d.tier.value,
        price=d.price,
        operations=sorted(op.value for op in Operation if d.serves(op)),
        weight=d.weight,
        priority=d.priority,
        context_tokens=d.context_tokens,
        max_output_tokens=d.max_output_tokens,
        health=health.get(d.name, "closed"),
        **_written(configured, (Kind.DEPLOYMENT, name)),
    )


def _tier(configured: Configured, name: str) -> TierOut | None:
    if name not in list(Tier):
        return None
    tier, catalog = Tier(name), configured.catalog
    default = tier is catalog.default_tier
    written = _written(configured, (Kind.TIER, name), f"fallbacks:{name}")
    if written["source"] is None and default:
        written["source"] = source_of(configured, "default_tier")
    return TierOut(
        name=name,
        default=default,
        deployments=[d.name for d in catalog.by_tier.get(tier, ())],
        fallbacks=[to.value for to in catalog.fallbacks.get(tier, ())],
        **written,
    )


def _virtual_model(configured: Configured, name: str) -> VirtualModelOut | None:
    if name not in configured.virtual:
        return None
    return VirtualModelOut(
        name=name,
        otherwise=configured.otherwise.get(name, ""),
        rules=[rule.name for rule in configured.virtual[name]],
        **_written(configured, (Kind.VIRTUAL_MODEL, name)),
    )


def _rule(configured: Configured, name: str) -> RuleOut | None:
    """Of "auto"."""
    for n, rule in enumerate(configured.rules, 1):
        if rule.name == name:
            return _rule_out(n, rule, "", _written(configured, (Kind.RULE, name)))
    return None


def rule_out(position: int, rule: RuleText, virtual_model: str, source: SourceOut | None) -> Json:
    return shown(_rule_out(position, rule, virtual_model, {"source": source}))


def _rule_out(position: int, rule: RuleText, virtual_model: str, written: Mapping[str, Any]) -> RuleOut:
    return RuleOut(
        position=position,
        virtual_model=virtual_model or None,
        name=rule.name,
        when=rule.when,
        target=rule.target,
        why=rule.why,
        switch=rule.switch.value,
        max_output_tokens=rule.caps.max_output_tokens,
        reasoning_effort=rule.caps.reasoning_effort,
        service_tier=rule.caps.service_tier,
        **written,
    )


def _written(configured: Configured, key: Key, place: str = "") -> dict[str, Any]:
    source = source_of(configured, place or f"{key[0]}:{key[1]}")
    document = document_of(configured, key)
    if document is None:
        return {"source": source}
    return {
        "source": source_of_document(document),
        "version": document.version,
        "created_at": document.created_at_ms,
        "updated_at": document.updated_at_ms,
        "document": dict(document.body),
    }


def document_of(configured: Configured, key: Key) -> Document | None:
    """What was written over this API and is in force; not what a file declares too."""
    if key in configured.shadowed:
        return None
    return next((document for document in configured.documents if document.key == key), None)


def source_of(configured: Configured, name: str) -> SourceOut | None:
    return source_at(configured.places.get(name))


def source_at(place: tuple[str, int] | None) -> SourceOut | None:
    """Of a file and a line in it, 0 if none is known."""
    return None if place is None else SourceOut(file=place[0], line=place[1] or None)


def source_of_document(document: Document) -> SourceOut:
    return SourceOut(file=f"admin API, version {document.version}", line=None)


def tag_of(body: Json) -> str:
    """Of what was decided; health and what others do with it change without it."""
    return etag_of({name: body.get(name) for name in ("kind", "name", "version", "source", "document")})


def _without_identity(url: str) -> str:
    """An address may hold a user and a password, or a key in its query."""
    scheme, found, rest = url.partition("://")
    if not found:
        return url
    address = rest.partition("?")[0]
    place, slash, path = address.partition("/")
    return f"{scheme}://{place.rpartition('@')[2]}{slash}{path}"


# --- resources ------------------------------------------------------------------------------------------------


async def in_force(call: Call) -> Configured:
    """The configuration, with everything that was written over this API up to now, if it can be had."""
    if call.deps.overlay is not None:
        try:
            await call.deps.overlay.turn()
        except Unavailable:
            pass  # what is known is better than nothing
    return call.deps.configured()


async def _list(call: Call, kind: Kind, names: list[str], configured: Configured) -> Reply:
    health = call.deps.health()
    rows = [show(configured, health, (kind, name)) for name in names]
    return await listed(call, [row for row in rows if row is not None])


async def list_providers(call: Call) -> Reply:
    configured = await in_force(call)
    return await _list(call, Kind.PROVIDER, list(configured.providers), configured)


async def list_credentials(call: Call) -> Reply:
    configured = await in_force(call)
    named = {provider.credential for provider in configured.providers.values()} - {""}
    return await _list(call, Kind.CREDENTIAL, sorted(named | configured.credentials), configured)


async def list_deployments(call: Call) -> Reply:
    """Each with its health: `closed` = in use."""
    configured, wanted = await in_force(call), call.params
    names = [
        d.name
        for d in configured.catalog.deployments
        if wanted.get("tier") in (None, d.tier.value) and wanted.get("provider") in (None, d.provider.name)
        if wanted.get("model") is None or wanted["model"] in (d.model, *d.aliases)
    ]
    return await _list(call, Kind.DEPLOYMENT, names, configured)


async def get_catalog(call: Call) -> Reply:
    """All deployments at once, and the default tier."""
    configured, health = await in_force(call), call.deps.health()
    rows = [show(configured, health, (Kind.DEPLOYMENT, d.name)) for d in configured.catalog.deployments]
    return Reply({"data": rows, "default_tier": configured.catalog.default_tier.value})


async def list_tiers(call: Call) -> Reply:
    return await _list(call, Kind.TIER, [tier.value for tier in Tier], await in_force(call))


async def list_virtual_models(call: Call) -> Reply:
    configured = await in_force(call)
    return await _list(call, Kind.VIRTUAL_MODEL, list(configured.virtual), configured)


async def list_rules(call: Call) -> Reply:
    """Those of "auto", then those of each virtual model."""
    configured = await in_force(call)
    rows: list[Json] = [
        shown(_rule_out(n, rule, "", _written(configured, (Kind.RULE, rule.name))))
        for n, rule in enumerate(configured.rules, 1)
    ]
    rows += [
        rule_out(n, rule, name, source_of(configured, f"rule:{name}/{rule.name}"))
        for name, rules in configured.virtual.items()
        for n, rule in enumerate(rules, 1)
    ]
    reply = await listed(call, rows)
    assert isinstance(reply.body, Mapping)
    return Reply({**reply.body, "mode": configured.rules_mode})


async def _get(call: Call, kind: Kind) -> Reply:
    found = show(await in_force(call), call.deps.health(), (kind, call.path["name"]))
    if found is None:
        raise not_found(f"{kind.words}: {call.path['name'][:200]}")
    return Reply(found, etag=tag_of(found))


async def get_provider(call: Call) -> Reply:
    return await _get(call, Kind.PROVIDER)


async def get_credential(call: Call) -> Reply:
    return await _get(call, Kind.CREDENTIAL)


async def get_deployment(call: Call) -> Reply:
    return await _get(call, Kind.DEPLOYMENT)


async def get_tier(call: Call) -> Reply:
    return await _get(call, Kind.TIER)


async def get_virtual_model(call: Call) -> Reply:
    return await _get(call, Kind.VIRTUAL_MODEL)


async def get_rule(call: Call) -> Reply:
    """Of "auto"."""
    return await _get(call, Kind.RULE)


_TAG = "configuration"
_DEPLOYMENTS = (choice("tier", Tier), text("provider"), text("model"), *PAGED)
ROUTES = (
    Route("GET", "/providers", list_providers, Right.OPERATE, _TAG, ProviderOut, params=PAGED, listed=True),
    Route("GET", "/credentials", list_credentials, Right.OPERATE, _TAG, CredentialOut, params=PAGED, listed=True),
    Route("GET", "/deployments", list_deployments, Right.READ, _TAG, DeploymentOut, params=_DEPLOYMENTS, listed=True),
    Route("GET", "/catalog", get_catalog, Right.READ, _TAG),
    Route("GET", "/tiers", list_tiers, Right.READ, _TAG, TierOut, params=PAGED, listed=True),
    Route("GET", "/rules", list_rules, Right.READ, _TAG, RuleOut, params=PAGED, listed=True),
    Route("GET", "/virtual_models", list_virtual_models, Right.READ, _TAG, VirtualModelOut, params=PAGED, listed=True),
    Route("GET", "/providers/{name}", get_provider, Right.OPERATE, _TAG, ProviderOut, tagged=True),
    Route("GET", "/credentials/{name}", get_credential, Right.OPERATE, _TAG, CredentialOut, tagged=True),
    Route("GET", "/deployments/{name}", get_deployment, Right.READ, _TAG, DeploymentOut, tagged=True),
    Route("GET", "/tiers/{name}", get_tier, Right.READ, _TAG, TierOut, tagged=True),
    Route("GET", "/virtual_models/{name}", get_virtual_model, Right.READ, _TAG, VirtualModelOut, tagged=True),
    Route("GET", "/rules/{name}", get_rule, Right.READ, _TAG, RuleOut, tagged=True),
)  # fmt: skip
