"""All routes of the admin listener, and those under names of LiteLLM."""

from __future__ import annotations

from gateway.admin import (
    accounts,
    aliases,
    budgets,
    configuration,
    health,
    prices,
    records,
    replicas,
    tasks,
    usage,
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
    *health.ROUTES,
    *replicas.ROUTES,
    *aliases.ROUTES,
)
