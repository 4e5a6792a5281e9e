"""All routes of the admin listener, and those under names of LiteLLM."""

from __future__ import annotations

from gateway.admin import (
    accounts,
    aliases,
    budgets,
    clients,
    configuration,
    gpu,
    health,
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
    *configuration.ROUTES,
    *prices.ROUTES,
    *webhooks.ROUTES,
    *clients.ROUTES,
    *health.ROUTES,
    *replicas.ROUTES,
    *gpu.ROUTES,
    *aliases.ROUTES,
)
