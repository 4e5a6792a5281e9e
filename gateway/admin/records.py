"""What can only be read: the configuration in force, the ledger, requests, the audit trail, misses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gateway.admin.call import PAGE, Call, Json, Reply
from gateway.admin.problems import not_found
from gateway.admin.route import PAGED, Param, Route, choice, moment, text
from gateway.admin.shown import (
    AuditOut,
    DeploymentOut,
    Out,
    SourceOut,
    entry_out,
    miss_out,
    shown,
)
from gateway.core.catalog import Deployment, Provider, Tier
from gateway.core.errors import NotFound
from gateway.core.offices import Page, Right
from gateway.core.rules import RuleText

_END_OF_TIME_MS = 2**53

# --- the configuration in force ------------------------------------------------------------------------------


class ProviderOut(Out):
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
    source: SourceOut | None


class CredentialOut(Out):
    """A secret that the gateway sends to providers: its name, never itself."""

    name: str
    present: bool
    providers: list[str]
    source: SourceOut | None


class TierOut(Out):
    name: str
    default: bool
    deployments: list[str]
    source: SourceOut | None


class RuleOut(Out):
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
    source: SourceOut | None


async def list_providers(call: Call) -> Reply:
    catalog = call.deps.catalog()

    def show(provider: Provider) -> Json:
        own = [d.name for d in catalog.deployments if d.provider.name == provider.name]
        return shown(
            ProviderOut(
                name=provider.name,
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
                deployments=own,
                source=source_of(call, f"provider:{provider.name}"),
            )
        )

    return await listed(call, [show(p) for p in call.deps.configured().providers.values()])


async def list_credentials(call: Call) -> Reply:
    configured = call.deps.configured()
    users: dict[str, list[str]] = {name: [] for name in sorted(configured.credentials)}
    for provider in configured.providers.values():
        if provider.credential:
            users.setdefault(provider.credential, []).append(provider.name)
    rows = [
        shown(
            CredentialOut(
                name=name,
                present=name in configured.credentials,
                providers=providers,
                source=source_of(call, f"credential:{name}"),
            )
        )
        for name, providers in users.items()
    ]
    return await listed(call, rows)


async def list_deployments(call: Call) -> Reply:
    """Each with its health: `closed` = in use."""
    health, wanted = call.deps.health(), call.params
    rows = [
        _deployment(call, d, health)
        for d in call.deps.catalog().deployments
        if wanted.get("tier") in (None, d.tier.value) and wanted.get("provider") in (None, d.provider.name)
        if wanted.get("model") is None or wanted["model"] in (d.model, *d.aliases)
    ]
    return await listed(call, rows)


def _deployment(call: Call, d: Deployment, health: Mapping[str, str]) -> Json:
    source = source_of(call, f"deployment:{d.name}")
    return shown(DeploymentOut.of(d, health.get(d.name, "closed"), source))


async def get_catalog(call: Call) -> Reply:
    """All deployments at once, and the default tier."""
    health, catalog = call.deps.health(), call.deps.catalog()
    rows = [_deployment(call, d, health) for d in catalog.deployments]
    return Reply({"data": rows, "default_tier": catalog.default_tier.value})


async def list_tiers(call: Call) -> Reply:
    catalog = call.deps.catalog()
    rows = [
        shown(
            TierOut(
                name=tier.value,
                default=tier is catalog.default_tier,
                deployments=[d.name for d in catalog.by_tier.get(tier, ())],
                source=source_of(call, "default_tier") if tier is catalog.default_tier else None,
            )
        )
        for tier in Tier
    ]
    return await listed(call, rows)


async def list_rules(call: Call) -> Reply:
    """Those of "auto", then those of each virtual model."""
    configured = call.deps.configured()
    rows = [
        rule_out(n, rule, name, source_of(call, f"rule:{name}/{rule.name}" if name else f"rule:{rule.name}"))
        for name, rules in {"": configured.rules, **configured.virtual}.items()
        for n, rule in enumerate(rules, 1)
    ]
    reply = await listed(call, rows)
    assert isinstance(reply.body, Mapping)
    return Reply({**reply.body, "mode": configured.rules_mode})


def rule_out(position: int, rule: RuleText, virtual_model: str, source: SourceOut | None) -> Json:
    return shown(
        RuleOut(
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
            source=source,
        )
    )


def source_of(call: Call, name: str) -> SourceOut | None:
    place = call.deps.configured().places.get(name)
    return None if place is None else SourceOut(file=place[0], line=place[1] or None)


def _without_identity(url: str) -> str:
    """An address may hold a user and a password, or a key in its query."""
    scheme, found, rest = url.partition("://")
    if not found:
        return url
    address = rest.partition("?")[0]
    place, slash, path = address.partition("/")
    return f"{scheme}://{place.rpartition('@')[2]}{slash}{path}"


# --- what happened --------------------------------------------------------------------------------------------


async def list_ledger(call: Call) -> Reply:
    """Entries, the latest first: one terminal one for every attempt, and corrections."""
    return await call.page(call.registry.entries, entry_out)


async def get_request(call: Call) -> Reply:
    """Every ledger entry of one request, in the order of its attempts, and how it fared with its provider's cache."""
    request_id = call.path["request_id"]
    page = await call.registry.entries({"request_id": request_id}, None, PAGE)
    if not page.rows:
        raise not_found(f"request in the ledger: {request_id[:200]}")
    try:
        prefix: Json | None = await call.deps.prefix(request_id)
    except NotFound:
        prefix = None
    rows = sorted(page.rows, key=lambda e: (e["attempt_no"], e["kind"] == "correct", e["posted_at_ms"]))
    return Reply({"request_id": request_id, "entries": [entry_out(row) for row in rows], "prefix": prefix})


async def get_prefix(call: Call) -> Reply:
    """Whether a request was read from its provider's cache, attempt by attempt, and why not."""
    request_id = call.path["request_id"]
    if not (await call.registry.entries({"request_id": request_id}, None, 1)).rows:
        raise not_found(f"request in the ledger: {request_id[:200]}")
    return Reply(await call.deps.prefix(request_id))


async def misses(call: Call) -> Reply:
    """What was lost over [since, until) by prompts that were not read from a cache, by the keys in `by` and the cause."""
    by = call.params.get("by", ("team",))
    reach = call.admin.reach
    team_id = call.params.get("team_id", "")
    if reach.team_id and team_id not in ("", reach.team_id):
        return Reply({"data": []})
    rows = await call.deps.misses(
        by=by,
        from_ms=call.params.get("since", 0),
        to_ms=call.params.get("until", _END_OF_TIME_MS),
        tenant_id=reach.tenant_id,
        team_id=reach.team_id or team_id,
        key_id=call.params.get("key_id", ""),
        task_id=call.params.get("task_id", ""),
    )
    return Reply({"data": [miss_out(by, row) for row in rows]})


async def list_audit(call: Call) -> Reply:
    """Who changed what, the latest first."""
    return await call.page(call.registry.audit, lambda entry: shown(AuditOut.of(entry)))


async def listed(call: Call, rows: Sequence[Json]) -> Reply:
    """A list that is in memory, in pages like any other."""

    async def part(_: Mapping[str, Any], after: Any, limit: int) -> Page[Json]:
        begin = after[0] if after else 0
        end = begin + limit
        return Page(rows[begin:end], (end,) if end < len(rows) else None)

    return await call.page(part, dict)


def _words(name: str) -> Param:
    """As `tollhouse usage --misses --by`; which words there are is known to the store."""

    def parse(given: str) -> tuple[str, ...]:
        found: Iterable[str] = (word.strip() for word in given.split(","))
        return tuple(dict.fromkeys(word for word in found if word))

    return Param(name, parse, {"type": "string"}, "words with commas between", many=True)


_TIMES = (moment("since"), moment("until", "exclusive"))
_LEDGER = tuple(
    text(name)
    for name in ("request_id", "task_id", "key_id", "team_id", "tenant_id", "model", "kind", "error")
)
_DEPLOYMENTS = (choice("tier", Tier), text("provider"), text("model"), *PAGED)
ROUTES = (
    Route("GET", "/providers", list_providers, Right.OPERATE, "configuration", ProviderOut, params=PAGED, listed=True),
    Route("GET", "/credentials", list_credentials, Right.OPERATE, "configuration", CredentialOut, params=PAGED, listed=True),
    Route("GET", "/deployments", list_deployments, Right.READ, "configuration", DeploymentOut, params=_DEPLOYMENTS, listed=True),
    Route("GET", "/catalog", get_catalog, Right.READ, "configuration"),
    Route("GET", "/tiers", list_tiers, Right.READ, "configuration", TierOut, params=PAGED, listed=True),
    Route("GET", "/rules", list_rules, Right.READ, "configuration", RuleOut, params=PAGED, listed=True),
    Route("GET", "/ledger", list_ledger, Right.READ, "requests", params=(*_LEDGER, *_TIMES, *PAGED), listed=True),
    Route("GET", "/requests/{request_id}", get_request, Right.READ, "requests"),
    Route("GET", "/requests/{request_id}/prefix", get_prefix, Right.READ, "requests"),
    Route("GET", "/misses", misses, Right.READ, "usage", params=(_words("by"), text("team_id"), text("key_id"), text("task_id"), *_TIMES)),
    Route("GET", "/audit", list_audit, Right.OPERATE, "audit", AuditOut, params=(text("actor"), text("action"), text("subject"), *_TIMES, *PAGED), listed=True),
)  # fmt: skip
