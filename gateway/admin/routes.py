"""All routes of the admin listener, and those under names of LiteLLM."""

from __future__ import annotations

from gateway.admin import (
    accounts,
    aliases,
    budgets,
    clients,
    config_writes,
    configuration,
    gpu,
    health,
    in_force,
    prices,
    records,
    replicas,
    tasks,
    usage,
    webhooks,
)
from gateway.admin.route import Route

PREFIX = "/admin/v1"
ROUTES: tuple[Route, ...] = (
    *accounts.ROUTES,
    *budgets.ROUTES,
    *tasks.ROUTES,
    *usage.ROUTES,
    *records.ROUTES,
    *in_force.ROUTES,
    *config_writes.ROUTES,
    *configuration.ROUTES,
    *prices.ROUTES,
    *webhooks.ROUTES,
    *clients.ROUTES,
    *health.ROUTES,
    *replicas.ROUTES,
    *gpu.ROUTES,
    *aliases.ROUTES,
)
