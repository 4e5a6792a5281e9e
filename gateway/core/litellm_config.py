"""A configuration of LiteLLM's proxy as one of ours, and what could not be carried.

Nothing is guessed: what has no counterpart, or means something else here, is named with the place where it stands. A
secret that is written out is not copied; a variable takes its place. Names as in LiteLLM's documentation, November 2026.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any
from urllib.parse import quote

from gateway.core.litellm_words import decimal_text, window_of

Yaml = Mapping[str, Any]

#: LiteLLM's provider prefix -> the name of the provider that we know.
_KNOWN = {
    "openai": "openai",
    "anthropic": "anthropic",
    "openrouter": "openrouter",
    "deepseek": "deepseek",
    "gemini": "gemini",
    "mistral": "mistral",
    "xai": "xai",
    "groq": "groq",
    "moonshot": "moonshot",
    "together_ai": "together",
    "fireworks_ai": "fireworks",
}
#: Prefixes of servers that speak OpenAI's dialect at an address of one's own.
_SELF_HOSTED = frozenset(
    {
        "hosted_vllm",
        "openai",
        "openai_like",
        "custom_openai",
        "lm_studio",
        "llamafile",
        "xinference",
        "docker_model_runner",
    }
)
_SECRETS = re.compile(r"key|secret|token|password|credential", re.IGNORECASE)
_REFERENCE = re.compile(r"os\.environ/([A-Za-z_][A-Za-z0-9_]*)")
_PRICES = {
    "input_cost_per_token": "input_usd_per_mtok",
    "output_cost_per_token": "output_usd_per_mtok",
    "cache_read_input_token_cost": "cache_read_usd_per_mtok",
    "cache_creation_input_token_cost": "cache_write_5m_usd_per_mtok",
    "cache_creation_input_token_cost_above_1hr": "cache_write_1h_usd_per_mtok",
}
#: What litellm needs to know to call a provider, besides secrets.
_CARRIED_PARAMS = frozenset(
    {"api_version", "aws_region_name", "region_name", "vertex_project", "vertex_location", "organization"}
)
_OPERATIONS = {"chat": None, "completion": None, "responses": None, "embedding": ["embeddings"]}
#: `routing_strategy` -> which of several deployments is asked first.
_ORDERS = {"simple-shuffle": "weight", "cost-based-routing": "price", "latency-based-routing": "latency"}
_WHY = {
    "model_list.litellm_params.rpm": "a deployment has no rate; `concurrent` says how many calls it takes at once, and more wait",
    "model_list.litellm_params.tpm": "a deployment has no rate; `concurrent` says how many calls it takes at once, and more wait",
    "model_list.litellm_params.cache_control_injection_points": "markers are set where they pay by themselves: see `caching` (docs/prompt-caching.md)",
    "model_list.model_info.base_model": "prices are not guessed: give the deployment a `price`",
    "router_settings.enable_pre_call_checks": "it is always so: a prompt goes only where it fits; set context_tokens",
    "router_settings.retry_policy": "retries are decided by what the provider billed, not by a number",
    "litellm_settings.default_internal_user_params": "there are no users: give a key to each, with a budget of its own",
    "litellm_settings.default_team_settings": "a team has a budget of its own: `tollhouse budgets set team:NAME ...`",
    "router_settings.routing_strategy": "candidates are tried by priority, weight, health and where the cache is warm",
    "router_settings.fallbacks": "deployments of one model name stand in for one another; others by tier: see `fallbacks` and virtual_models",
    "router_settings.context_window_fallbacks": "a prompt that is too long goes to a model with a larger window by itself; set context_tokens",
    "router_settings.content_policy_fallbacks": "a refusal by the provider goes to the caller",
    "router_settings.num_retries": "retries are decided by what the provider billed, not by a number",
    "router_settings.cooldown_time": "deployments are ejected and probed by their own record",
    "router_settings.allowed_fails": "deployments are ejected and probed by their own record",
    "litellm_settings.drop_params": "parameters reach the provider as they were sent",
    "litellm_settings.cache": "give keys the label response_cache_s (docs/routing.md); nothing is answered from a cache unasked",
    "litellm_settings.cache_params": "answers are kept in the memory of each process, for keys with the label response_cache_s",
    "litellm_settings.callbacks": "metrics are always at the admin port; for traces set telemetry.otlp_endpoint",
    "litellm_settings.success_callback": "metrics are always at the admin port; for traces set telemetry.otlp_endpoint",
    "litellm_settings.failure_callback": "metrics are always at the admin port; for traces set telemetry.otlp_endpoint",
    "litellm_settings.set_verbose": "set log_level: debug",
    "general_settings.alerting": "set webhook: {url, secret}, or POST /admin/v1/webhooks",
    "general_settings.store_model_in_db": "models stand in the configuration file, or are made at /admin/v1/deployments",
    "general_settings.database_url": "keys, teams and spend stay in that database: make them anew; ours needs a database of its own",
    "environment_variables": "set them in the environment of the process",
}


@dataclass(frozen=True, slots=True)
class Left:
    """Something that was not carried. `where` is its place in their file."""

    where: str
    why: str


@dataclass(slots=True)
class Imported:
    """`config` is what our file says; `left` what theirs said besides; `variables` must be set in the environment."""

    config: dict[str, Any] = field(default_factory=dict)
    left: list[Left] = field(default_factory=list)
    variables: list[str] = field(default_factory=list)

    def leave(self, where: str, why: str = "") -> None:
        generic = re.sub(r"\[\d+\]", "", where)
        alike = generic.replace("litellm_settings.", "router_settings.")  # some may stand in either
        self.left.append(Left(where, why or _WHY.get(generic) or _WHY.get(alike) or "has no counterpart"))

    def secret(self, value: Any, where: str) -> str:
        """A reference to the environment for a secret, wherever it stood."""
        found = _REFERENCE.fullmatch(str(value))
        if found:
            name = found[1]
        else:
            name = "IMPORTED_" + re.sub(r"\W+", "_", where).strip("_").upper()
            self.leave(where, f"is a secret in the file: it was not copied; put it into ${name}")
        if name not in self.variables:
            self.variables.append(name)
        return f"${{{name}}}"


def imported(theirs: Yaml, listed: Collection[str]) -> Imported:
    """`listed`: the models with a shipped price, as "provider/model". ValueError for what is no such configuration."""
    if not isinstance(theirs.get("model_list", []), list):
        raise ValueError("model_list must be a list")
    out = Imported()
    providers = _Providers(out, listed)
    for n, item in enumerate(theirs.get("model_list", [])):
        where = f"model_list[{n}]"
        if not isinstance(item, Mapping) or not isinstance(item.get("litellm_params"), Mapping):
            out.leave(where, "is not a model with litellm_params")
            continue
        providers.add(item, where)
    out.config["discover_providers"] = False
    out.config["demo"] = "off"
    out.config["providers"] = providers.found
    _router(out, theirs.get("router_settings") or {}, providers)
    _library(out, theirs.get("litellm_settings") or {})
    _general(out, theirs.get("general_settings") or {})
    sections = ("model_list", "router_settings", "litellm_settings", "general_settings")
    for name in theirs:
        if name not in sections:
            out.leave(name)
    return out


class _Providers:
    """Groups models by who bills for them, at which address, with which key."""

    def __init__(self, out: Imported, listed: Collection[str]) -> None:
        self._out = out
        self._listed = listed
        self._names: dict[tuple[str, str, str, str], str] = {}
        self._deployments: set[str] = set()
        self.found: dict[str, Any] = {}

    def add(self, item: Yaml, where: str) -> None:
        params: dict[str, Any] = dict(item["litellm_params"])
        place = f"{where}.litellm_params"
        public = item.get("model_name")
        upstream = params.pop("model", None)
        if not isinstance(public, str) or not isinstance(upstream, str):
            self._out.leave(where, "has no model_name or no litellm_params.model")
            return
        if "*" in public or "*" in upstream:
            self._out.leave(where, "wildcards: list the models by name")
            return
        prefix, slash, model = upstream.partition("/")
        if not slash:
            prefix, model = params.pop("custom_llm_provider", None) or _guessed(upstream), upstream
        at_home = not (params.get("api_base") or params.get("base_url"))
        provider = self._provider(prefix, params, place)
        if provider is None:
            return
        listed = _KNOWN.get(prefix, "") if at_home else ""
        deployment: dict[str, Any] = {"model": public}
        if model != public:
            deployment["upstream_model"] = model
        name = f"{provider}/{public}"
        if name in self._deployments:
            number = 2
            while f"{name}-{number}" in self._deployments:
                number += 1
            name = f"{name}-{number}"
            deployment["name"] = name
        self._deployments.add(name)
        info = dict(item.get("model_info") or {})
        self._limits(deployment, params, info, where)
        self._price(deployment, params, info, f"{listed}/{model}", where)
        self.found[provider].setdefault("deployments", []).append(deployment)
        for key in params:
            self._out.leave(f"{place}.{key}")
        for key in info:
            if key not in ("id", "db_model"):
                self._out.leave(f"{where}.model_info.{key}")
        for key in item:
            if key not in ("model_name", "litellm_params", "model_info"):
                self._out.leave(f"{where}.{key}")

    def _provider(self, prefix: str, params: dict[str, Any], place: str) -> str | None:
        base = params.pop("api_base", None) or params.pop("base_url", None)
        key = params.pop("api_key", None)
        secret = None if key in (None, "", "none", "None") else self._out.secret(key, f"{place}.api_key")
        address = ""
        if base is not None:
            found = _REFERENCE.fullmatch(str(base))
            address = f"${{{found[1]}}}" if found else str(base).rstrip("/")
            if found and found[1] not in self._out.variables:
                self._out.variables.append(found[1])
        extra = {name: str(params.pop(name)) for name in sorted(_CARRIED_PARAMS & params.keys())}
        for name in [
            n for n in params if _SECRETS.search(n) and not n.endswith(("_cost", "_token", "_tokens", "_1hr"))
        ]:
            del params[name]
            self._out.leave(
                f"{place}.{name}", "litellm reads it from the environment: set the variable that it documents"
            )
        seen = (prefix, address, secret or "", repr(extra))
        if seen in self._names:
            return self._names[seen]
        entry: dict[str, Any] = {}
        known = _KNOWN.get(prefix)
        if known and not address and known not in self.found:
            name = known
            entry["models"] = []
        else:
            wire = "openai" if prefix in _SELF_HOSTED else "anthropic" if prefix == "anthropic" else "litellm"
            if wire == "openai" and not address and prefix != "openai":
                self._out.leave(place, f"{prefix} needs an api_base")
                return None
            name = self._free(known or prefix.replace("_", "-"))
            entry["wire"] = wire
            if wire == "litellm":
                entry["litellm_provider"] = prefix
            elif not address:
                address = f"https://api.{prefix}.com/v1"
            if prefix == "hosted_vllm":
                entry["cache_rules"] = "vllm"
        if address:
            entry["base_url"] = address
        if secret is not None:
            entry["key"] = secret
        if extra:
            entry["litellm_params"] = extra
        self._names[seen] = name
        self.found[name] = entry
        return name

    def _free(self, name: str) -> str:
        number = 1
        found = name
        while found in self.found or (number == 1 and found in _KNOWN.values()):
            number += 1
            found = f"{name}-{number}"
        return found

    def _limits(
        self, deployment: dict[str, Any], params: dict[str, Any], info: dict[str, Any], where: str
    ) -> None:
        for theirs, ours in (
            ("max_input_tokens", "context_tokens"),
            ("max_output_tokens", "max_output_tokens"),
        ):
            value = info.pop(theirs, params.pop(theirs, None))
            if isinstance(value, int) and value > 0:
                deployment[ours] = value
        info.pop("max_tokens", None)
        limits = (("weight", "weight"), ("order", "priority"), ("max_parallel_requests", "concurrent"))
        for theirs, ours in limits:
            value = params.pop(theirs, None)
            if isinstance(value, int):
                deployment[ours] = value
        mode = info.pop("mode", "chat")
        if mode not in _OPERATIONS:
            self._out.leave(f"{where}.model_info.mode", f"{mode} is not served")
        elif _OPERATIONS[mode]:
            deployment["operations"] = _OPERATIONS[mode]

    def _price(
        self,
        deployment: dict[str, Any],
        params: dict[str, Any],
        info: dict[str, Any],
        listed: str,
        where: str,
    ) -> None:
        rates: dict[str, str] = {}
        for theirs, ours in _PRICES.items():
            value = params.pop(theirs, info.pop(theirs, None))
            info.pop(theirs, None)
            if value is not None:
                try:
                    rates[ours] = decimal_text(f"{Decimal(decimal_text(value)) * 1_000_000:f}")
                except ValueError as error:
                    self._out.leave(f"{where}.{theirs}", str(error))
        base = info.pop("base_model", None)
        if {"input_usd_per_mtok", "output_usd_per_mtok"} <= rates.keys():
            deployment["price"] = rates
            return
        if rates:
            self._out.leave(where, "a price of one's own needs a rate for input and for output")
        for candidate in (base, listed):
            if candidate in self._listed:
                deployment["price"] = candidate
                return
        deployment["price"] = "none"
        self._out.leave(
            where,
            "no price is known, and an unknown price is not zero: hard budgets refuse it until you give it one",
        )


def _guessed(model: str) -> str:
    return "anthropic" if model.startswith("claude") else "gemini" if model.startswith("gemini") else "openai"


def _router(out: Imported, router: Yaml, providers: _Providers) -> None:
    for name, value in router.items():
        where = f"router_settings.{name}"
        if name == "model_group_alias" and isinstance(value, Mapping):
            _aliases(out, value, providers, where)
        elif name == "timeout" and isinstance(value, int | float):
            out.config.setdefault("timeouts", {})["total_s"] = value
        elif name == "routing_strategy" and value in _ORDERS:
            out.config["candidate_order"] = _ORDERS[value]
        elif name == "redis_url":
            out.config["redis_url"] = out.secret(value, where)
        elif name == "redis_host":
            _redis(out, router)
        elif name not in ("redis_port", "redis_password"):
            out.leave(where)


def _redis(out: Imported, router: Yaml) -> None:
    def text_of(name: str, default: str) -> str:
        value = router.get(name)
        if value is None:
            return default
        found = _REFERENCE.fullmatch(str(value))
        if found:
            if found[1] not in out.variables:
                out.variables.append(found[1])
            return f"${{{found[1]}}}"
        return quote(str(value), safe=".")

    password = ""
    if router.get("redis_password"):
        password = f":{out.secret(router['redis_password'], 'router_settings.redis_password')}@"
    out.config["redis_url"] = (
        f"redis://{password}{text_of('redis_host', '')}:{text_of('redis_port', '6379')}/0"
    )


def _aliases(out: Imported, aliases: Yaml, providers: _Providers, where: str) -> None:
    for alias, target in aliases.items():
        name = target.get("model") if isinstance(target, Mapping) else target
        found = [d for p in providers.found.values() for d in p.get("deployments", []) if d["model"] == name]
        for deployment in found:
            deployment.setdefault("aliases", []).append(str(alias))
        if not found:
            out.leave(f"{where}.{alias}", f"there is no model {name}")


def _library(out: Imported, library: Yaml) -> None:
    for name, value in library.items():
        where = f"litellm_settings.{name}"
        if name == "request_timeout" and isinstance(value, int | float):
            out.config.setdefault("timeouts", {}).setdefault("total_s", value)
        elif name == "max_budget":
            _budget(out, library, where)
        elif name != "budget_duration" or "max_budget" not in library:
            out.leave(where)


def _budget(out: Imported, library: Yaml, where: str) -> None:
    """Their budget of the whole proxy is that of our default tenant."""
    try:
        limit = decimal_text(library["max_budget"])
        window = window_of(library.get("budget_duration"))
    except ValueError as error:
        out.leave(where, str(error))
        return
    out.config["budgets"] = [{"scope": "tenant:default", "limit_usd": limit, "window": window}]


def _general(out: Imported, general: Yaml) -> None:
    for name, value in general.items():
        where = f"general_settings.{name}"
        if name == "master_key":
            out.config["admin_key"] = out.secret(value, where)
        else:
            out.leave(where)
