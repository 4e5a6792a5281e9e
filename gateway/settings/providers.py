"""Providers, deployments and prices out of three places: the shipped list, the configuration, the environment.

A known provider (config/providers.yaml) is switched on by its key; its models and prices come from
config/prices.yaml. Anything else names its base URL and its deployments itself.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gateway.core.catalog import Deployment, OnDisconnect, Operation, Provider, Tier, Wire
from gateway.core.gpu_price import GpuPrice
from gateway.core.prices import ListedModel, PriceRow, Rates
from gateway.core.rates import MAX_RATE_PICO_USD
from gateway.settings.model import Secret, Timeouts
from gateway.settings.replicas import read_replicas, what_is_wrong_with_url
from gateway.settings.section import Section
from gateway.settings.serving import read_gpu_price, read_serving

_MOST_TOKENS = 100_000_000
#: Prices written in the configuration live beside the listed ones, never in place of them.
OWN_PRICE = "own:"
_NEEDS_URL = (Wire.OPENAI, Wire.ANTHROPIC)


@dataclass(frozen=True, slots=True)
class Known:
    """One entry of config/providers.yaml: a provider that needs only a key."""

    provider: Provider
    key_env: tuple[str, ...]


@dataclass(slots=True)
class Found:
    """What the reading of providers adds up to."""

    providers: dict[str, Provider] = field(default_factory=dict)
    credentials: dict[str, Secret] = field(default_factory=dict)
    deployments: dict[str, Deployment] = field(default_factory=dict)
    own_prices: dict[str, PriceRow] = field(default_factory=dict)
    keyless: list[str] = field(default_factory=list)
    own_keys: set[str] = field(default_factory=set)  # credentials that have the name of their only provider


@dataclass(frozen=True, slots=True)
class Shipped:
    """The lists that come with the release."""

    known: Mapping[str, Known]
    listed: Mapping[str, Sequence[ListedModel]]  # by provider
    priced: frozenset[str]  # "provider/model"

    @property
    def model_names(self) -> tuple[str, ...]:
        """All listed models and their aliases, in the order of the list."""
        return tuple(n for ms in self.listed.values() for m in ms for n in (m.model, *m.aliases))


def read_known(root: Section) -> dict[str, Known]:
    """config/providers.yaml."""
    known = {}
    for name, entry in root.section("providers").named():
        key_env = entry.texts("key_env")
        blank = Provider(name, Wire.OPENAI, "", name if key_env else "")
        known[name] = Known(_options(entry, blank), key_env)
        entry.done()
    for name in root.texts("server_tools"):
        if name in known:
            known[name] = replace(
                known[name], provider=replace(known[name].provider, server_tools_tokens_max=None)
            )
    for name, entry in root.section("image_bounds").named():
        entry.text("source"), entry.text("checked_on")
        most = entry.optional_integer("tokens_max", 1, _MOST_TOKENS)
        if name in known:
            known[name] = replace(known[name], provider=replace(known[name].provider, image_tokens_max=most))
        entry.done()
    return known


def read_providers(
    section: Section,
    discover: bool,
    shipped: Shipped,
    env: Mapping[str, str],
    timeouts: Timeouts,
    credentials: Mapping[str, Secret],
) -> Found:
    """Configured providers in their order, then those whose key the environment holds. `credentials`: those with a name of
    their own.
    """
    found = Found(credentials=dict(credentials))
    for name, entry in section.named():
        if entry.flag("enabled", True):
            _configured(name, entry, shipped, env, timeouts, found)
        else:
            found.keyless.append(name)
    section.done()
    for name, known in shipped.known.items():
        if name in section.names:
            continue
        key = _key_in_environment(known, env)
        if key is None or not discover:
            found.keyless.append(name)
            continue
        provider = _timed(known.provider, timeouts)
        found.providers[name] = provider
        found.credentials[name] = key
        found.own_keys.add(name)
        for listed in shipped.listed.get(name, ()):
            _add(found, _listed_deployment(provider, listed))
    return found


def _configured(
    name: str, entry: Section, shipped: Shipped, env: Mapping[str, str], timeouts: Timeouts, found: Found
) -> None:
    known = shipped.known.get(name)
    blank = known.provider if known else Provider(name, Wire.OPENAI, "", "")
    provider = _timed(_options(entry, blank, own=known is None), timeouts)
    provider = replace(provider, **_timeout_overrides(entry.section("timeouts")))
    key = Secret(entry.text("key")) if "key" in entry else None
    named = entry.text("credential")
    if named and key is not None:
        entry.wrong("credential", "says with `key` twice what the secret is")
    elif named and named not in found.credentials:
        near = difflib.get_close_matches(named, found.credentials, n=1)
        hint = f"did you mean {near[0]}?" if near else "list it under `credentials:`"
        entry.wrong("credential", f"there is no credential {named!r}", hint)
    if key is None and known and not named:
        key = _key_in_environment(known, env)
        if key is None and known.key_env and not entry.unresolved("key"):
            names = " or ".join(known.key_env)
            entry.wrong("", "has no key", f"set {names} in the environment, or `enabled: false`")
    if key is not None:
        found.credentials[name] = key
        found.own_keys.add(name)
    provider = replace(provider, credential=name if key is not None else named)
    found.providers[name] = provider
    listed = {item.model: item for item in shipped.listed.get(name, ())}
    wanted = entry.texts("models") if "models" in entry else tuple(listed)
    for model in wanted:
        if model in listed:
            _add(found, _listed_deployment(provider, listed[model]))
        else:
            entry.wrong("models", f"{name} has no listed model {model!r}", "declare it under `deployments:`")
    own = list(entry.sections("deployments"))
    for item in own:
        _own_deployment(provider, item, listed, shipped, found)
    if not known and not own and entry.node.origin is None:
        entry.wrong(
            "", "has no deployments, so nothing can be called there", "list its models under `deployments:`"
        )
    entry.done()


def _options(entry: Section, blank: Provider, own: bool = False) -> Provider:
    """The provider with what the entry says of it."""
    wire = entry.choice("wire", Wire, blank.wire)
    base_url = entry.text("base_url", blank.base_url).rstrip("/")
    if base_url:
        _refuse_bad_url(entry, base_url)
    elif wire in _NEEDS_URL and not _only_replicas(entry):
        hint = "for example http://127.0.0.1:8000/v1"
        if own and not entry.names:
            hint = "only the providers of config/providers.yaml need no base_url"
        entry.wrong("base_url", "is required", hint)
    params = entry.section("litellm_params")
    litellm_params = {key: params.text(key) for key in params.names}
    return replace(
        blank,
        wire=wire,
        base_url=base_url,
        on_disconnect=entry.choice("on_disconnect", OnDisconnect, blank.on_disconnect),
        litellm_provider=entry.text("litellm_provider", blank.litellm_provider),
        litellm_params=litellm_params or blank.litellm_params,
        bridge=entry.flag("bridge", blank.bridge),
        usage_lookup=entry.text("usage_lookup", blank.usage_lookup),
        stream_usage=entry.flag("stream_usage", blank.stream_usage),
        image_tokens_max=entry.optional_integer("image_tokens_max", 1, _MOST_TOKENS)
        or blank.image_tokens_max,
        server_tools_tokens_max=_server_tools(entry, blank),
        cache_rules=entry.text("cache_rules", blank.cache_rules),
    )


def _server_tools(entry: Section, blank: Provider) -> int | None:
    most = entry.optional_integer("server_tools_tokens_max", 0, _MOST_TOKENS)
    return blank.server_tools_tokens_max if most is None else most


def _only_replicas(entry: Section) -> bool:
    """Every deployment of the provider says itself where it is."""
    own = list(entry.sections("deployments"))
    if entry.node.origin is not None and not own:
        return True  # those of the admin API come one by one
    return bool(own) and all("replicas" in item for item in own)


def _refuse_bad_url(entry: Section, base_url: str) -> None:
    wrong, hint = what_is_wrong_with_url(base_url)
    if wrong:
        entry.wrong("base_url", wrong, hint)


def _timed(provider: Provider, timeouts: Timeouts) -> Provider:
    return replace(
        provider,
        connect_timeout_s=timeouts.connect_s,
        first_byte_timeout_s=timeouts.first_byte_s,
        slow_first_byte_timeout_s=timeouts.slow_first_byte_s,
        idle_timeout_s=timeouts.idle_s,
        first_event_timeout_s=timeouts.first_event_s,
        event_idle_timeout_s=timeouts.event_idle_s,
        total_timeout_s=timeouts.total_s,
    )


def _timeout_overrides(section: Section) -> dict[str, Any]:
    overrides = {}
    names = ("connect", "first_byte", "slow_first_byte", "idle", "first_event", "event_idle", "total")
    for name in names:
        seconds = section.number(f"{name}_s", 0, 0.01, 86_400)
        if seconds:
            overrides[f"{name}_timeout_s"] = seconds
    section.done()
    return overrides


def _key_in_environment(known: Known, env: Mapping[str, str]) -> Secret | None:
    return next((Secret(env[name].strip()) for name in known.key_env if env.get(name, "").strip()), None)


def _add(found: Found, deployment: Deployment) -> None:
    found.deployments[deployment.name] = deployment


def _listed_deployment(provider: Provider, listed: ListedModel) -> Deployment:
    name = f"{provider.name}/{listed.model}"
    return Deployment(
        name=name,
        provider=provider,
        model=listed.model,
        upstream_model=listed.model,
        price=listed.price,
        tier=listed.tier or Tier.STANDARD,
        operations=frozenset(listed.operations) or frozenset(Operation),
        context_tokens=listed.context_tokens,
        max_output_tokens=listed.max_output_tokens,
        aliases=(name, *listed.aliases),
    )


def _own_deployment(
    provider: Provider, item: Section, listed: Mapping[str, ListedModel], shipped: Shipped, found: Found
) -> None:
    """A deployment written in the configuration; one that names a listed model only overrides it."""
    model = item.required("model", "the name that clients ask for")
    upstream_model = item.text("upstream_model", model)
    default_name = f"{provider.name}/{model}"
    base = _listed_deployment(provider, listed[upstream_model]) if upstream_model in listed else None
    blank = base or Deployment(default_name, provider, model, upstream_model, "")
    name = item.text("name", default_name)
    if name in found.deployments and not (base and name == base.name):
        item.wrong("name" if "name" in item else "model", f"there already is a deployment {name!r}")
    operations = [op for word in item.texts("operations") if (op := _operation(item, word))]
    gpu = read_gpu_price(item)
    deployment = replace(
        blank,
        name=name,
        provider=replace(provider, **_timeout_overrides(item.section("timeouts"))),
        model=model,
        upstream_model=upstream_model,
        price=_price(item, name, blank.price, shipped, found, gpu),
        tier=item.choice("tier", Tier, blank.tier),
        operations=frozenset(operations) or blank.operations,
        weight=item.integer("weight", blank.weight, 0, 10_000),
        priority=item.integer("priority", blank.priority, 0, 1_000),
        context_tokens=item.optional_integer("context_tokens", 1, _MOST_TOKENS) or blank.context_tokens,
        max_output_tokens=item.optional_integer("max_output_tokens", 1, _MOST_TOKENS)
        or blank.max_output_tokens,
        aliases=tuple(dict.fromkeys((default_name, *item.texts("aliases")))),
        concurrent=item.optional_integer("concurrent", 1, 100_000),
        replicas=read_replicas(item, provider.wire),
        serving=read_serving(item, gpu),
    )
    item.done()
    if model:
        _add(found, deployment)


def _price(
    item: Section,
    name: str,
    default: str,
    shipped: Shipped,
    found: Found,
    gpu: GpuPrice | None,
) -> str:
    """The price that the deployment is charged at: "provider/model" of the list, own rates, or none at all."""
    if "price" not in item:
        if not default:
            item.wrong(
                "price",
                "is required, because an unknown price is not zero",
                'give `price: {input_usd_per_mtok: "0.1", output_usd_per_mtok: "0.2"}`, or `price: none`',
            )
        return default
    if not item.is_single("price"):
        row = _own_rates(item.section("price"), f"{OWN_PRICE}{name}", gpu)
        found.own_prices[row.price] = row
        return row.price
    price = item.text("price")
    if price == "none":
        return ""
    if price not in shipped.priced:
        near = difflib.get_close_matches(price, shipped.priced, n=1)
        hint = f"did you mean {near[0]}?" if near else "`tollhouse prices` lists them"
        item.wrong("price", f"there is no listed price {price!r}", hint)
    return price


def _own_rates(section: Section, price: str, gpu: GpuPrice | None) -> PriceRow:
    if "gpu" in section:
        for key in section.names:
            if key.endswith("_usd_per_mtok") and key in section:
                section.wrong(key, "is given by `gpu` already: a price is per token or per hour")
        rates = Rates(0, 0) if gpu is None else gpu.rates
        per_request_nano_usd = section.nano_usd("per_request_usd") or 0
        section.done()
        return own_price(price, rates, per_request_nano_usd)

    def rate(key: str) -> int | None:
        return section.pico_usd_per_token(f"{key}_usd_per_mtok", MAX_RATE_PICO_USD)

    rates = Rates(
        input=rate("input") or 0,
        output=rate("output") or 0,
        cache_read=rate("cache_read"),
        cache_write_5m=rate("cache_write_5m"),
        cache_write_1h=rate("cache_write_1h"),
        cache_write_12h=rate("cache_write_12h"),
    )
    for key in ("input_usd_per_mtok", "output_usd_per_mtok"):
        if key not in section:
            section.wrong(key, "is required", 'dollars per million tokens, for example "0.1"')
    per_request_nano_usd = section.nano_usd("per_request_usd") or 0
    section.done()
    return own_price(price, rates, per_request_nano_usd)


def own_price(price: str, rates: Rates, per_request_nano_usd: int = 0) -> PriceRow:
    """A price row of the operator's own, valid always; its version is a digest of its rates."""
    digest = hashlib.sha256(repr((rates, per_request_nano_usd)).encode()).hexdigest()[:12]
    return PriceRow(price, f"own-{digest}", 0, rates, per_request_nano_usd=per_request_nano_usd)


def _operation(item: Section, word: str) -> Operation | None:
    try:
        return Operation(word)
    except ValueError:
        item.wrong("operations", f"{word!r} is none of {', '.join(Operation)}")
        return None
