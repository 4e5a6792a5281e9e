"""What a gateway process keeps of a deployment's replicas: its fleet, and what discovery and probes say beside it."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass, field, replace

from gateway.core.catalog import ReplicaSource
from gateway.core.replicas.chain import Chains
from gateway.core.replicas.fleet import Fleet
from gateway.core.replicas.terms import Ask, FleetPolicy, Pick

NOT_ASKED = "not asked yet what it serves"


@dataclass(slots=True)
class Group:
    """The replicas of one deployment."""

    deployment: str
    source: ReplicaSource
    fleet: Fleet
    #: address -> why it is no replica of this deployment; never picked
    unfit: dict[str, str] = field(default_factory=dict)
    silent: dict[str, str] = field(default_factory=dict)  # address -> why it could not be asked the last time
    versions: dict[str, str] = field(default_factory=dict)  # of engines, by address
    problem: str = ""  # why the addresses could not be found the last time
    #: some answer has reported tokens read from its cache; until then a 0 may mean that nobody counts
    tells_cached: bool = False
    #: (address, why) -> how many requests were sent there for that reason
    picks: dict[tuple[str, str], int] = field(default_factory=dict)

    def pick(self, ask: Ask, now_s: float, chance: float, avoid: Collection[str] = ()) -> Pick | None:
        if self.unfit:
            avoid = {*avoid, *self.unfit}
        return self.fleet.pick(ask, now_s, chance, avoid)

    def sent(self, attempt_id: str, ask: Ask, pick: Pick, now_s: float) -> None:
        self.fleet.sent(attempt_id, ask, pick, now_s)
        key = pick.address, pick.why.value
        self.picks[key] = self.picks.get(key, 0) + 1

    def gone(self, address: str) -> None:
        self.unfit.pop(address, None)
        self.silent.pop(address, None)
        self.versions.pop(address, None)
        for key in [key for key in self.picks if key[0] == address]:
            del self.picks[key]


@dataclass(slots=True)
class Groups:
    """Of all deployments with replicas, by deployment. `chains` are of all prompts that go to any of them."""

    by_deployment: dict[str, Group] = field(default_factory=dict)
    chains: Chains = field(default_factory=Chains)

    def get(self, deployment: str) -> Group | None:
        return self.by_deployment.get(deployment)


def policy_of(source: ReplicaSource) -> FleetPolicy:
    """The numbers of the configuration; those that nobody has measured are the fleet's own."""
    found = FleetPolicy(
        tau_tokens=source.tau_tokens,
        t_max_s=source.first_token_max_s,
        warm_ratio=source.warm_ratio,
        exploration=source.exploration,
        decode_bound=source.decode_bound,
        default_capacity_tokens=source.kv_tokens,
    )
    if source.prefill_tokens_per_s is not None:
        found = replace(found, r_peak_tokens_per_s=source.prefill_tokens_per_s)
    return found


def short_name(address: str) -> str:
    """What a client may see of a replica: the same for the same address, and nothing of where it is."""
    return f"r-{hashlib.sha256(address.encode()).hexdigest()[:8]}"


def label(address: str) -> str:
    """What an operator reads: host and port, and a path only if it is none of the usual."""
    return address.partition("://")[2].removesuffix("/v1")
