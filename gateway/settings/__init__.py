"""Settings: the only reader of the environment and of configuration files."""

from __future__ import annotations

from gateway.settings.load import environment, foreign, listed_names, load, shipped, written
from gateway.settings.model import (
    BudgetSpec,
    ConfigError,
    Listen,
    LogLevel,
    Mode,
    Place,
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
from gateway.settings.rules import check_rules

__all__ = [
    "BudgetSpec",
    "ConfigError",
    "Listen",
    "LogLevel",
    "Mode",
    "Place",
    "Problem",
    "Routing",
    "Secret",
    "Settings",
    "TeamSpec",
    "Telemetry",
    "Timeouts",
    "WebhookSpec",
    "check_rules",
    "ensure_pepper",
    "environment",
    "foreign",
    "listed_names",
    "load",
    "shipped",
    "written",
]
