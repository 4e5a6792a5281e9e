"""What can be called: providers, deployments, tiers and models, as one immutable snapshot.

A reload builds a new Catalog and swaps it whole. Secrets are not in here: a provider names its credential,
and only the sender resolves it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from gateway.core.serving import PLAIN, Serving


class Operation(StrEnum):
    """One kind of model call, named by the dialect that asks for it."""

    CHAT = "chat"  # POST /v1/chat/completions
    RESPONSES = "responses"  # POST /v1/responses
    MESSAGES = "messages"  # POST /v1/messages
    EMBEDDINGS = "embeddings"  # POST /v1/embeddings
    COUNT_TOKENS = "count_tokens"  # POST /v1/messages/count_tokens

    @property
    def path(self) -> str:
        return _PATHS[self]

    @property
    def anthropic(self) -> bool:
        """Errors and streams of this operation follow Anthropic's shapes."""
        return self in (Operation.MESSAGES, Operation.COUNT_TOKENS)


_PATHS = {
    Operation.CHAT: "/chat/completions",
    Operation.RESPONSES: "/responses",
    Operation.MESSAGES: "/messages",
    Operation.EMBEDDINGS: "/embeddings",
    Operation.COUNT_TOKENS: "/messages/count_tokens",
}


class Wire(StrEnum):
    """How a provider is spoken to."""

    OPENAI = "openai"  # any OpenAI-compatible base URL
    ANTHROPIC = "anthropic"
    DEMO = "demo"  # both of the above at one base URL: the built-in demo provider
    LITELLM = "litellm"  # everything else, through the litellm library


NATIVE: Mapping[Wire, frozenset[Operation]] = {
    Wire.OPENAI: frozenset({Operation.CHAT, Operation.RESPONSES, Operation.EMBEDDINGS}),
    Wire.ANTHROPIC: frozenset({Operation.MESSAGES, Operation.COUNT_TOKENS}),
    Wire.DEMO: frozenset(Operation),
    Wire.LITELLM: frozenset(),
}


class OnDisconnect(StrEnum):
    """What to do with the upstream when the client is gone (resilience: client disconnect)."""

    DRAIN = "drain"  # the provider bills to the end anyway: read on, settle exactly
    CANCEL_ESTIMATE = "cancel_estimate"  # stop, charge input and the output counted so far
    CANCEL_FREE = "cancel_free"  # stop; the provider does not bill what it did not finish


class Tier(StrEnum):
    FAST = "fast"
    STANDARD = "standard"
    SMALL = "small"


class Order(StrEnum):
    """Which of several healthy deployments of the same priority is asked first."""

    WEIGHT = "weight"  # by chance, as their weights say
    PRICE = "price"  # the cheapest
    LATENCY = "latency"  # the one whose first answers came soonest lately; unknown ones first


@dataclass(frozen=True, slots=True)
class Provider:
    """Who bills. `base_url` has no trailing slash and ends where `Operation.path` begins (usually in /v1); "" if every
    deployment of it has replicas, which have their own."""

    name: str
    wire: Wire
    base_url: str
    credential: str  # name of the credential; "" = none needed
    on_disconnect: OnDisconnect = OnDisconnect.CANCEL_ESTIMATE
    #: Prefix of litellm's model ids ("gemini", "bedrock", "azure"); also how litellm reaches openai and
    #: anthropic wires when it bridges a dialect that they do not speak.
    litellm_provider: str = ""
    #: Extra litellm parameters (api_version, region ...), never secrets.
    litellm_params: Mapping[str, str] = field(default_factory=dict)
    #: Serve dialects that the wire does not speak by translating through litellm.
    bridge: bool = False
    #: URL that tells the usage of a past request by its id (OpenRouter: /generation?id=), or "".
    usage_lookup: str = ""
    #: False: this provider answers 400 to stream_options (then usage of streams is estimated).
    stream_usage: bool = True
    #: The most input tokens that it bills for one image; None = nobody knows, so nothing bounds a request with images.
    image_tokens_max: int | None = None
    #: Tools that it runs itself (web search): the most input tokens that their results add to one request. 0 = it runs
    #: none; None = nobody knows, so nothing bounds a request that offers one.
    server_tools_tokens_max: int | None = 0
    #: Whose cache rules this one follows, if not those under its own name: a vLLM server's are those of "vllm".
    cache_rules: str = ""
    connect_timeout_s: float = 5.0
    first_byte_timeout_s: float = 60.0
    slow_first_byte_timeout_s: float = 300.0  # reasoning, or more than 100k tokens of input
    idle_timeout_s: float = 120.0
    #: Of streams, where keep-alives come and nothing else: until the first event (the first token of one's own replicas),
    #: and between two events.
    first_event_timeout_s: float = 600.0
    event_idle_timeout_s: float = 600.0
    total_timeout_s: float = 3600.0


class ReplicaKind(StrEnum):
    """How the addresses of a deployment's replicas are found."""

    STATIC = "static"  # as written
    DNS = "dns"  # every address of a host name: a headless Service
    KUBERNETES = "kubernetes"  # the ready endpoints of a Service, asked of the cluster this gateway runs in


@dataclass(frozen=True, slots=True)
class ReplicaSource:
    """Where the replicas of a self-hosted deployment are, how they are looked after, and how one is picked.

    A replica's address is its base URL, of the form of `Provider.base_url`. Shipped numbers are those of
    docs/gpu-tier.md; the rate of prefill belongs to one model on one kind of GPU, so it has none.
    """

    kind: ReplicaKind
    urls: tuple[str, ...] = ()  # static: the base URLs
    host: str = ""  # dns
    service: str = ""  # kubernetes
    namespace: str = ""  # kubernetes; "" = the gateway's own
    port: str = ""  # dns: a number; kubernetes: a number or the name of a port
    scheme: str = "http"  # dns and kubernetes
    path: str = "/v1"  # dns and kubernetes: what comes between the port and `Operation.path`
    health_path: str = "/health"  # from the root of the server; "" = a replica that answers /metrics is well
    metrics_path: str = "/metrics"
    refresh_s: float = 5.0  # how often addresses are looked up
    poll_s: float = 1.0  # how often each replica is asked for its health and metrics
    #: R_peak: uncached prompt tokens that one idle replica reads in a second; None = not measured
    prefill_tokens_per_s: float | None = None
    #: T_max: how long a first token may wait behind the backlog of a warm replica before a cold one is preferred
    first_token_max_s: float = 14.0
    #: uncached tokens by which a warm replica may be behind a cold one; None = `prefill_tokens_per_s` x `first_token_max_s`
    tau_tokens: int | None = None
    warm_ratio: float = 0.8  # share of the prompt in its cache that makes a replica warm
    exploration: float = 0.005  # share of requests that go elsewhere, to seed a second copy
    decode_bound: bool = False  # short prompts, long answers: calls in flight are the load, not prompt tokens
    kv_tokens: int = 500_000  # that a replica's cache holds, until it says so itself


@dataclass(frozen=True, slots=True)
class Deployment:
    """One model at one endpoint with one credential and a price; or at several that are alike (`replicas`).

    `model` is the public name that clients ask for, `upstream_model` what the provider is told.
    `price` names the row family in the price book as "provider/model".
    """

    name: str
    provider: Provider
    model: str
    upstream_model: str
    price: str
    tier: Tier = Tier.STANDARD
    operations: frozenset[Operation] = frozenset(Operation)
    weight: int = 100
    priority: int = 0  # lower is tried first
    context_tokens: int | None = None
    max_output_tokens: int | None = None
    aliases: tuple[str, ...] = ()
    concurrent: int | None = None  # calls at once from one process of the gateway; None = as many as come
    replicas: ReplicaSource | None = None  # None: it is one endpoint, at its provider's base URL
    serving: Serving = PLAIN  # of a server of one's own

    @property
    def limited(self) -> bool:
        """Only so many calls at once go there."""
        return self.concurrent is not None or self.serving.concurrent_per_replica is not None

    def native(self, operation: Operation) -> bool:
        return operation in NATIVE[self.provider.wire] and operation in self.operations

    def serves(self, operation: Operation) -> bool:
        if operation not in self.operations:
            return False
        if operation in NATIVE[self.provider.wire]:
            return True
        bridged = self.provider.wire is Wire.LITELLM or self.provider.bridge
        return bridged and operation in (Operation.CHAT, Operation.MESSAGES, Operation.EMBEDDINGS)


@dataclass(frozen=True, slots=True)
class Catalog:
    """All deployments, with the look-ups that a request needs."""

    deployments: tuple[Deployment, ...]
    #: public model name or alias -> its deployments, in configuration order
    by_model: Mapping[str, tuple[Deployment, ...]]
    by_tier: Mapping[Tier, tuple[Deployment, ...]]
    default_tier: Tier = Tier.STANDARD
    #: where a request of a tier may go when nothing in it answers; only what is written here
    fallbacks: Mapping[Tier, tuple[Tier, ...]] = field(default_factory=dict)
    order: Order = Order.WEIGHT
    by_name: Mapping[str, Deployment] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        deployments: tuple[Deployment, ...],
        default_tier: Tier = Tier.STANDARD,
        fallbacks: Mapping[Tier, tuple[Tier, ...]] = MappingProxyType({}),
        order: Order = Order.WEIGHT,
    ) -> Catalog:
        names = [d.name for d in deployments]
        if len(set(names)) != len(names):
            raise ValueError(
                f"deployment names must be unique: {sorted(n for n in names if names.count(n) > 1)}"
            )
        by_model: dict[str, list[Deployment]] = {}
        by_tier: dict[Tier, list[Deployment]] = {}
        for d in deployments:
            for name in dict.fromkeys((d.model, *d.aliases)):
                by_model.setdefault(name, []).append(d)
            by_tier.setdefault(d.tier, []).append(d)
        return cls(
            deployments,
            {k: tuple(v) for k, v in by_model.items()},
            {k: tuple(v) for k, v in by_tier.items()},
            default_tier,
            fallbacks,
            order,
            {d.name: d for d in deployments},
        )

    @property
    def needs_litellm(self) -> bool:
        return any(d.provider.wire is Wire.LITELLM or d.provider.bridge for d in self.deployments)
