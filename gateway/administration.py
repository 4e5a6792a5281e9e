"""Wires the admin listener: who may use it, and the stores behind its resources."""

from __future__ import annotations

import hmac
import logging
import os
import secrets
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from gateway.admin.ports import (
    AdminDeps,
    Configured,
    Finding,
    GpuCost,
    Overlay,
    Reloaded,
    ReplicaState,
    SubjectHealth,
)
from gateway.all_workers import costs_of_all, rows_of_all
from gateway.core.addresses import judge
from gateway.core.health import HealthState, drain, subjects
from gateway.core.offices import Admin, Once
from gateway.core.rules import RuleText
from gateway.fleets import Fleets
from gateway.gpu import GpuTier
from gateway.pipeline.exchange import World
from gateway.reload import found
from gateway.settings import Settings, check_rules
from gateway.storage import reports
from gateway.storage.admin_keys import AdminKeys
from gateway.storage.database import Database
from gateway.storage.explained import Explained
from gateway.storage.registry import Registry
from gateway.storage.tasks import Tasks
from gateway.telemetry.page import Family

_log = logging.getLogger("gateway")
#: The actor of whoever holds the key of the configuration or of `state_dir/admin-key`.
ROOT = Admin("admin")


#: What all workers of this gateway count; None = this process is the only one.
Workers = Callable[[], Awaitable[list[Family]]] | None


def admin_deps(
    settings: Callable[[], Settings],
    database: Database,
    world: World,
    pepper: bytes,
    *,
    explained: Explained,
    readiness: Callable[[], list[str]],
    metrics: Callable[[str], Awaitable[tuple[str, bytes]]],
    on_change: Callable[[], None],
    on_fault: Callable[[str, BaseException], None],
    fleets: Fleets,
    gpu: GpuTier,
    workers: Workers,
    reload: Callable[[], Reloaded | None],
    overlay: Overlay | None,
    webhook_loopback: bool = False,
) -> AdminDeps:
    """Everything that the admin listener needs. `settings` are those in force, which a reload changes."""
    task_default = settings().task_default

    def registry(admin: Admin, once: Once | None) -> Registry:
        return Registry(
            database,
            admin,
            pepper=pepper,
            once=once,
            task_default=task_default,
        )

    def check(text: str) -> tuple[Sequence[RuleText], Sequence[Finding]]:
        routing, problems = check_rules(text, settings().catalog)
        return routing.texts, tuple(found(problem) for problem in problems)

    return AdminDeps(
        identify=identify(admin_token(settings()), AdminKeys(database, pepper)),
        readiness=readiness,
        metrics=metrics,
        registry=registry,
        prefix=explained.request,
        misses=partial(reports.misses, database),
        tasks=lambda actor: Tasks(
            database,
            actor=actor,
            pepper=pepper,
            task_default=task_default,
        ),
        on_change=on_change,
        pepper=pepper,
        catalog=world.catalog,
        configured=lambda: configured(settings()),
        health=lambda: {
            name: state.status(world.clock.monotonic()).value for name, state in world.health.items()
        },
        now_ms=world.clock.now_ms,
        monotonic=world.clock.monotonic,
        on_fault=on_fault,
        subjects=partial(health_of, world),
        change_health=partial(change_health, world),
        replicas=partial(_replicas, fleets, workers),
        drain_replica=fleets.drain,
        gpu_costs=partial(_gpu_costs, gpu, workers),
        reload=reload,
        overlay=overlay,
        check_rules=check,
        judge_url=lambda url: judge(url, loopback=webhook_loopback).reason,
    )


def configured(now: Settings) -> Configured:
    """What the admin API shows of the settings."""
    return Configured(
        now.providers,
        frozenset(now.credentials),
        now.routing.texts,
        now.routing.mode.value,
        now.prices,
        {name: tuple(rule.text for rule in rules.rules) for name, rules in now.routing.virtual.items()},
        {name: (place.file, place.line) for name, place in now.places.items()},
        now.webhook.url if now.webhook is not None else "",
        now.catalog,
        {
            name: rules.default_model or rules.default_tier.value
            for name, rules in now.routing.virtual.items()
        },
        now.overlaid.documents,
        {key: (place.file, place.line) for key, place in now.overlaid.shadowed.items()},
    )


async def _replicas(fleets: Fleets, workers: Workers) -> list[ReplicaState]:
    rows = fleets.rows()
    return rows if workers is None or not rows else rows_of_all(rows, await workers())


async def _gpu_costs(gpu: GpuTier, workers: Workers) -> list[GpuCost]:
    costs = gpu.costs()
    return costs if workers is None or not costs else costs_of_all(costs, await workers())


def health_of(world: World) -> list[SubjectHealth]:
    """All deployments of the catalog, and credentials of which something is known."""
    now_s = world.clock.monotonic()
    names = dict.fromkeys((*(d.name for d in world.catalog().deployments), *world.health))
    rows = []
    for name in names:
        state = world.health.get(name, HealthState())
        until_s = max(state.open_until_s or 0.0, state.cooling_until_s)
        rows.append(
            SubjectHealth(
                name,
                state.status(now_s).value,
                state.cause,
                state.failures_in_a_row,
                state.ejections,
                round(max(0.0, until_s - now_s), 1),
                round(state.share(now_s), 2),
            )
        )
    return rows


def change_health(world: World, subject: str, action: str, who: str) -> bool:
    """Reset, drain or undrain, here and wherever health is shared; False if there is no such subject."""
    known = {name for d in world.catalog().deployments for name in subjects(d)}
    if subject not in known:
        return False
    state = world.health.get(subject, HealthState())
    world.health[subject] = HealthState() if action == "reset" else drain(state, drained=action == "drain")
    world.health_changed({subject: world.health[subject]})
    _log.warning("%s: %s, by %s", subject, action, who)
    return True


def identify(token: str, keys: AdminKeys) -> Callable[[str], Awaitable[Admin | None]]:
    """The root key opens everything, even while the database is down; others are looked up."""

    async def admin(given: str) -> Admin | None:
        if hmac.compare_digest(given.encode(), token.encode()):
            return ROOT
        return await keys.identify(given)

    return admin


def admin_token(settings: Settings) -> str:
    """The configured admin key, else the one in `state_dir/admin-key` (mode 0600), made there the first time.

    There is no default secret.
    """
    if settings.admin_key is not None:
        return settings.admin_key.reveal()
    path = settings.state_dir / "admin-key"
    if not path.exists():
        draft = path.with_name(f"admin-key.{os.getpid()}")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(f"gwadm-{secrets.token_urlsafe(32)}\n")
        try:
            os.link(draft, path)  # of two workers that start at once one wins, and both read the same
        except FileExistsError:
            pass
        finally:
            os.unlink(draft)
    return path.read_text("ascii").strip()
