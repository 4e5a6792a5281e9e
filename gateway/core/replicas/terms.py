"""What a fleet is asked, answers, is told and shows."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import msgspec

from gateway.core.replicas.chain import BLOCK_BYTES, EMPTY, Chain
from gateway.core.replicas.scrape import Scrape


class Why(Enum):
    """Why a replica was picked."""

    WARM = "warm"  # it holds the prefix
    RELEASED = "released"  # others hold the prefix, and are saturated
    LEAST_LOADED = "least_loaded"  # nobody holds the prefix, or a new thread that may go anywhere
    EXPLORED = "explored"  # by chance, for a second copy of the prefix
    LAST_RESORT = "last_resort"  # all have failed lately; this one is the first that is due


class EndKind(Enum):
    OK = "ok"
    FAILED = "failed"  # refused connection, 500, a stream that broke
    ABORTED = "aborted"  # `finish_reason: "abort"`: the replica is being shut down
    REFUSED = "refused"  # 503 of its own admission: full
    CANCELLED = "cancelled"  # the client left


class Health(Enum):
    READY = "ready"
    RETURNING = "returning"  # new or back; gets little at first
    FULL = "full"
    COOLING = "cooling"  # failed or refused lately
    UNREACHABLE = "unreachable"
    DRAINED = "drained"
    GONE = "gone"  # no longer found, kept for a while because its cache may come back


@dataclass(frozen=True, slots=True)
class FleetPolicy:
    """Of one deployment. Never carry `tau_tokens` or `r_peak_tokens_per_s` from one model, GPU or engine to another."""

    #: Affinity is given up when the best warm replica has so many more uncached tokens before it than the best cold one.
    #: None: `r_peak_tokens_per_s * t_max_s`.
    tau_tokens: int | None = None
    r_peak_tokens_per_s: float = 16_000.0  # prefill of one replica; `tollhouse calibrate` measures it
    t_max_s: float = 14.0
    warm_ratio: float = 0.8  # of the prompt, from which on a replica counts as warm
    exploration: float = 0.0  # of the requests that have a warm replica, at most 0.01
    decode_bound: bool = False  # short prompts, long outputs: load is requests in flight, not uncached tokens
    block_bytes: int = BLOCK_BYTES
    default_capacity_tokens: int = 500_000  # of a replica that does not tell its `kv_cache_size_tokens`
    index_blocks_max: int = 131_072  # per replica, whatever it tells
    slow_start_s: float = 30.0
    cooldown_s: float = 2.0  # after the first failure; doubles with each further one
    cooldown_max_s: float = 60.0
    refused_s: float = 1.0  # after a 503 without Retry-After
    scrape_life_s: float = 10.0  # what was read longer ago says nothing about load
    full_kv_usage: float = 0.95  # with requests waiting: full
    gone_keep_s: float = 60.0
    peer_life_s: float = 10.0
    members_max: int = 256
    threads_max: int = 20_000
    in_flight_max: int = 50_000

    def __post_init__(self) -> None:
        if not 0 <= self.exploration <= 0.01:
            raise ValueError("exploration must be between 0 and 0.01")
        if not 0 < self.warm_ratio <= 1:
            raise ValueError("warm_ratio must be above 0 and at most 1")
        if self.tau_tokens is not None and self.tau_tokens < 0:
            raise ValueError("tau_tokens must not be negative")
        positive = (
            self.r_peak_tokens_per_s,
            self.t_max_s,
            self.block_bytes,
            self.default_capacity_tokens,
            self.index_blocks_max,
            self.cooldown_s,
            self.members_max,
            self.threads_max,
            self.in_flight_max,
        )
        if min(positive) <= 0:
            raise ValueError("rates, sizes and times of a fleet must be positive")

    @property
    def tau(self) -> int:
        """Tokens."""
        return int(self.r_peak_tokens_per_s * self.t_max_s) if self.tau_tokens is None else self.tau_tokens


@dataclass(frozen=True, slots=True)
class Ask:
    """A request that needs a replica."""

    chain: Chain = EMPTY
    thread: str = ""  # its lineage: a session's main run, or one of its sub-agents
    session: str = ""  # for counting; "" = the thread is the session
    streams: bool = True  # its first chunk tells when prefill is over; else that is estimated

    @property
    def prompt_chars(self) -> int:
        return self.chain.chars


@dataclass(frozen=True, slots=True)
class Pick:
    address: str
    prompt_tokens: int  # estimated
    predicted_cached_tokens: int
    uncached_tokens: int  # what it adds to the replica's backlog
    why: Why
    matched_blocks: int = 0


@dataclass(frozen=True, slots=True)
class End:
    """How an attempt ended. Usage is what the replica reported; None = nothing."""

    kind: EndKind
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    retry_after_s: float | None = None
    calls: bool = False  # the answer calls tools


@dataclass(frozen=True, slots=True)
class Membership:
    """What a look-up has changed."""

    joined: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    kept: bool = False  # nothing was found, so those known before stay
    over: int = 0  # found beyond `members_max`, and left out


class Placed(msgspec.Struct, frozen=True, array_like=True):
    """Where a thread's last prompt is."""

    thread: int
    address: str
    link: int  # the last one of its chain
    blocks: int
    chars: int
    tokens: int
    output_tokens: int
    calls: bool = False  # that output calls tools: the next prompt renders them anew, perhaps in another form


class Digest(msgspec.Struct, frozen=True, array_like=True):
    """What one gateway process tells the others. Encode with msgspec (JSON or MessagePack)."""

    placed: tuple[Placed, ...] = ()
    #: (address, uncached tokens in flight, requests in flight)
    load: tuple[tuple[str, int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class ReplicaShown:
    """A replica as `tollhouse replicas` and the admin API show it. Token counts are sums since it joined."""

    address: str
    health: Health
    drained: bool
    active: int  # own requests in flight
    backlog_tokens: int  # own uncached tokens in flight
    peer_active: int
    peer_backlog_tokens: int
    sessions: int  # whose last request went here
    prompt_tokens: int
    predicted_cached_tokens: int
    reported_cached_tokens: int
    predictions: int  # that could be held against a report
    predictions_close: int  # of them, those less than one block of the engine apart
    index_blocks: int
    index_capacity_blocks: int
    index_bytes: int
    failures: int  # in a row
    aborts: int
    refusals: int
    restarts: int
    lies: int  # usage that cannot be
    notes: tuple[str, ...] = ()  # what is odd about it
    seen: Scrape = field(default_factory=Scrape)
    seen_age_s: float | None = None
