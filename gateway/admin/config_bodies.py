"""Bodies that write configuration: fields as in the configuration file, which docs/configuration.md explains. What they mean
together is judged where files are read, not here.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from gateway.admin.bodies import Patch
from gateway.admin.schemas import Id, In, Name, Reason
from gateway.core.addresses import is_metadata_service
from gateway.core.catalog import OnDisconnect, Operation, Tier
from gateway.core.protection import PRIORITY_MAX
from gateway.core.rules import Switch
from gateway.core.serving import CacheSalt, Urgency

ROWS_AT_ONCE = 200
RULES_MAX = 100
_SECRETS = ("key", "api_key", "secret", "token", "password", "value")


def _address(url: str) -> str:
    if is_metadata_service(url):
        raise ValueError("leads to a cloud's own services, which hold its secrets")
    return url


Url = Annotated[
    str, StringConstraints(min_length=1, max_length=2_048, pattern=r"^[!-~]+$"), AfterValidator(_address)
]
Word = Annotated[str, StringConstraints(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._-]+$")]
Usd = Annotated[str, StringConstraints(pattern=r"^\d{1,9}(\.\d{1,9})?$")]
Seconds = Annotated[float, Field(gt=0, le=86_400, strict=False, allow_inf_nan=False)]
Tokens = Annotated[int, Field(ge=1, le=100_000_000)]
TierName = Annotated[Tier, Field(strict=False)]
Models = Annotated[list[Name], Field(max_length=500)]
#: A rule's expression in CEL.
When = Annotated[str, StringConstraints(min_length=1, max_length=10_000)]
Target = Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]+$")]


class TimeoutsIn(In):
    connect_s: Seconds | None = None
    first_byte_s: Seconds | None = None
    slow_first_byte_s: Seconds | None = None
    idle_s: Seconds | None = None
    first_event_s: Seconds | None = None
    event_idle_s: Seconds | None = None
    total_s: Seconds | None = None


class _Provider(In):
    wire: Literal["openai", "anthropic", "litellm"] | None = None
    base_url: Url | None = None
    credential: Id | None = None
    models: Models | None = None
    timeouts: TimeoutsIn | None = None
    on_disconnect: Annotated[OnDisconnect, Field(strict=False)] | None = None
    litellm_provider: Word | None = None
    litellm_params: Annotated[dict[Word, Reason], Field(max_length=20)] | None = None
    bridge: bool | None = None
    usage_lookup: Annotated[str, StringConstraints(max_length=500, pattern=r"^[!-~]*$")] | None = None
    stream_usage: bool | None = None
    image_tokens_max: Tokens | None = None
    server_tools_tokens_max: Annotated[int, Field(ge=0, le=100_000_000)] | None = None
    cache_rules: Word | None = None

    @model_validator(mode="after")
    def _no_secret(self) -> Self:
        for name in self.litellm_params or {}:
            if any(word in name.lower() for word in ("key", "secret", "token", "password")):
                raise ValueError(f"litellm_params.{name}: secrets are not kept here; use a credential")
        return self


class ProviderIn(_Provider):
    """Who bills. Its deployments are written apart; `credential` is the name of one."""

    name: Id


class ProviderPatch(_Provider, Patch):
    pass


class _Credential(In):
    env: Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,199}$")] | None = None
    file: Annotated[str, StringConstraints(min_length=1, max_length=500, pattern=r"^[!-~]+$")] | None = None

    @model_validator(mode="before")
    @classmethod
    def _no_secret(cls, given: Any) -> Any:
        for name in _SECRETS:
            if isinstance(given, dict) and name in given:
                raise ValueError(
                    f"{name}: secrets are not kept here. Put it into a variable of the gateway's environment or into a "
                    "file that is mounted there, and give the variable's name as `env` or the file's as `file`"
                )
        return given


class CredentialIn(_Credential):
    """Where a provider's secret is: `env`, a variable of the gateway's environment, or `file`, below the folder that the
    configuration names (`admin_credentials`). The secret itself is never sent here, and never shown.
    """

    name: Id


class CredentialPatch(_Credential, Patch):
    pass


class GpuPriceIn(In):
    usd_per_replica_hour: Usd
    input_tokens_per_s: Tokens
    output_tokens_per_s: Tokens
    cached_tokens_per_s: Tokens | None = None
    utilisation: Annotated[str, StringConstraints(pattern=r"^[01](\.\d{1,3})?$")] | None = None


class OwnRatesIn(In):
    """Dollars per million tokens as texts, or `gpu`: by the replica-hour."""

    input_usd_per_mtok: Usd | None = None
    output_usd_per_mtok: Usd | None = None
    cache_read_usd_per_mtok: Usd | None = None
    cache_write_5m_usd_per_mtok: Usd | None = None
    cache_write_1h_usd_per_mtok: Usd | None = None
    cache_write_12h_usd_per_mtok: Usd | None = None
    per_request_usd: Usd | None = None
    gpu: GpuPriceIn | None = None


class QueueIn(In):
    wait_max_s: Seconds | None = None
    batch_wait_max_s: Seconds | None = None
    waiting_max: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    batch_turn_after_s: Annotated[float, Field(ge=0, le=86_400, strict=False)] | None = None


class DnsIn(In):
    host: Name
    port: Annotated[int, Field(ge=1, le=65_535)]


class KubernetesIn(In):
    service: Word
    namespace: Word | None = None
    port: Annotated[int, Field(ge=1, le=65_535)] | Word | None = None


class ReplicasIn(In):
    urls: Annotated[list[Url], Field(max_length=256)] | None = None
    dns: DnsIn | None = None
    kubernetes: KubernetesIn | None = None
    scheme: Literal["http", "https"] | None = None
    path: Reason | None = None
    health_path: Reason | None = None
    metrics_path: Reason | None = None
    refresh_s: Seconds | None = None
    poll_s: Seconds | None = None
    prefill_tokens_per_s: Annotated[float, Field(gt=0, le=10_000_000, strict=False)] | None = None
    first_token_max_s: Seconds | None = None
    tau_tokens: Annotated[int, Field(ge=0, le=10**9)] | None = None
    warm_ratio: Annotated[float, Field(gt=0, le=1, strict=False)] | None = None
    exploration: Annotated[float, Field(ge=0, le=1, strict=False)] | None = None
    decode_bound: bool | None = None
    kv_tokens: Annotated[int, Field(ge=1, le=10**9)] | None = None


class _Deployment(In):
    upstream_model: Name | None = None
    #: "provider/model" of the price list, "none", or rates of its own
    price: Name | OwnRatesIn | None = None
    tier: TierName | None = None
    operations: list[Annotated[Operation, Field(strict=False)]] | None = None
    weight: Annotated[int, Field(ge=0, le=10_000)] | None = None
    priority: Annotated[int, Field(ge=0, le=1_000)] | None = None
    context_tokens: Tokens | None = None
    max_output_tokens: Tokens | None = None
    aliases: Models | None = None
    timeouts: TimeoutsIn | None = None
    concurrent: Annotated[int, Field(ge=1, le=100_000)] | None = None
    concurrent_per_replica: Annotated[int, Field(ge=1, le=100_000)] | None = None
    queue: QueueIn | None = None
    cache_salt: Annotated[CacheSalt, Field(strict=False)] | None = None
    takes_priority: bool | None = None
    replicas: Annotated[list[Url], Field(min_length=1, max_length=256)] | ReplicasIn | None = None


class DeploymentIn(_Deployment):
    """One model at one provider. `name` is "provider/model", if it is left out."""

    name: Id | None = None
    provider: Id
    model: Name


class DeploymentPatch(_Deployment, Patch):
    provider: Id | None = None
    model: Name | None = None


class _Tier(In):
    fallbacks: Annotated[list[TierName], Field(max_length=3)] | None = None
    default: bool | None = None


class TierIn(_Tier):
    """Where requests go that find nothing in a tier, and whether it is the one for requests that no rule matches. Which
    deployments are in it, they say themselves.
    """

    name: TierName


class TierPatch(_Tier, Patch):
    pass


class _RuleFields(In):
    when: When | None = None
    tier: TierName | None = None
    model: Target | None = None
    why: Reason | None = None
    switch: Annotated[Switch, Field(strict=False)] | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=10**9)] | None = None
    reasoning_effort: Word | None = None
    service_tier: Word | None = None
    urgency: Annotated[Urgency, Field(strict=False)] | None = None
    priority: Annotated[int, Field(ge=-PRIORITY_MAX, le=PRIORITY_MAX)] | None = None


class _Rule(_RuleFields):
    order: Annotated[int, Field(ge=-1_000_000, le=1_000_000)] | None = None


class RuleIn(_Rule):
    """A rule for requests for "auto". The file's rules stand at 0: one with an `order` below that is asked before them, any
    other behind them (100, if it is left out); those of the same order by name. The first that matches wins.
    """

    name: Name


class RulePatch(_Rule, Patch):
    pass


class VirtualRuleIn(_RuleFields):
    name: Name


class _VirtualModel(In):
    otherwise: Target | None = None
    rules: Annotated[list[VirtualRuleIn], Field(max_length=RULES_MAX)] | None = None


class VirtualModelIn(_VirtualModel):
    """A name that clients may ask for in place of a model, with rules of its own."""

    name: Id


class VirtualModelPatch(_VirtualModel, Patch):
    pass


class ConfigurationIn(In):
    """Several resources at once, all or none; they may name one another."""

    credentials: list[CredentialIn] = Field(default_factory=list)
    providers: list[ProviderIn] = Field(default_factory=list)
    deployments: list[DeploymentIn] = Field(default_factory=list)
    tiers: list[TierIn] = Field(default_factory=list)
    virtual_models: list[VirtualModelIn] = Field(default_factory=list)
    rules: list[RuleIn] = Field(default_factory=list)

    @model_validator(mode="after")
    def _some(self) -> Self:
        count = sum(len(getattr(self, name)) for name in type(self).model_fields)
        if not 1 <= count <= ROWS_AT_ONCE:
            raise ValueError(f"give from 1 to {ROWS_AT_ONCE} resources, not {count}")
        return self
