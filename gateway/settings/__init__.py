"""Settings: the only reader of the environment and of configuration files."""

from __future__ import annotations

from gateway.settings.load import environment, foreign, listed_names, load, shipped, written
from gateway.settings.model import (
    BudgetSpec,
    ConfigError,
    Listen,
    LogLevel,
    Mode,
    Problem,
    Routing,
    Secret,
    Settings,
    TeamSpec,
    Telemetry,
    Timeouts,
    WebhookSpec,
)
from gateway.settings.pepper import ensure_pepper

__all__ = [
    "BudgetSpec",
    "ConfigError",
    "Listen",
    "LogLevel",
    "Mode",
    "Problem",
    "Routing",
    "Secret",
    "Settings",
    "TeamSpec",
    "Telemetry",
    "Timeouts",
    "WebhookSpec",
    "ensure_pepper",
    "environment",
    "foreign",
    "listed_names",
    "load",
    "shipped",
    "written",
]
