"""All routes under /admin/v1."""

from __future__ import annotations

from gateway.admin import accounts, budgets, records, tasks, usage
from gateway.admin.route import Route

PREFIX = "/admin/v1"
ROUTES: tuple[Route, ...] = (
    *accounts.ROUTES,
    *budgets.ROUTES,
    *tasks.ROUTES,
    *usage.ROUTES,
    *records.ROUTES,
)
