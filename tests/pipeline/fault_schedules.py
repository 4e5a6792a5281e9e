"""Faults of three deployments played against a reference model of where each request must go.

python -m tests.pipeline.fault_schedules --requests 2000 --seed 7      (make faults)
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from gateway.core.entry import Kind
from gateway.core.retries import RetryBudget
from tests.support.recorder import Recorder, Script, sse
from tests.support.small_world import SmallWorld, deployment, provider

CHAT = "/v1/chat/completions"
NAMES = ("a", "b", "c")
_JSON = {"Content-Type": "application/json"}
_EVENTS = {"Content-Type": "text/event-stream"}
_FAULT = json.dumps({"error": {"message": "no", "type": "server_error"}}).encode()

#: name -> what the provider does, and what must be in the ledger for it: (kind, error)
FAULTS: dict[str, tuple[Script, Kind, str]] = {
    "5xx": (Script(500, [_FAULT]), Kind.VOID, "upstream_error"),
    "busy": (Script(503, [_FAULT]), Kind.VOID, "upstream_overloaded"),
    "429": (Script(429, [_FAULT]), Kind.VOID, "upstream_overloaded"),
    "429 after": (Script(429, [_FAULT], {**_JSON, "Retry-After": "60"}), Kind.VOID, "upstream_overloaded"),
    "reset": (Script(200, [b'{"id":'], _JSON, abort=True), Kind.CHARGE_UNKNOWN, "upstream_lost"),
    "no proof": (
        Script(502, [b"<html>"], {"Content-Type": "text/html"}),
        Kind.CHARGE_UNKNOWN,
        "upstream_error",
    ),
    "error in 200": (Script(200, [_FAULT]), Kind.VOID, "upstream_error"),
    "error event": (Script(200, [sse({"error": {"message": "no"}})], _EVENTS), Kind.VOID, "upstream_error"),
}
_COOLING = frozenset({"429", "429 after"})
#: Asked of a stream only, or of a whole answer only.
_STREAM_ONLY, _WHOLE_ONLY = frozenset({"error event"}), frozenset({"error in 200"})


@dataclass
class Model:
    """Where requests go, told by the rules of docs/routing.md and nothing else. Cooling and ejection outlast a
    schedule; deployments are asked in the order of their names."""

    attempts_max: int = 3
    failures: dict[str, int] = field(default_factory=dict)
    out: set[str] = field(default_factory=set)
    retries: dict[str, float] = field(default_factory=dict)

    def order(self) -> list[str]:
        return [name for name in NAMES if name not in self.out] or list(NAMES)

    def asked(self, name: str) -> None:
        self.retries[name] = self.retries.get(name, 5.0) + 0.1

    def saw(self, name: str, fault: str | None) -> None:
        if fault is None or fault in _COOLING:
            self.failures[name] = 0
        if fault in _COOLING:
            self.out.add(name)
        elif fault is not None:
            self.failures[name] = self.failures.get(name, 0) + 1
            if self.failures[name] >= 5:
                self.out.add(name)

    def request(self, faults: dict[str, list[str | None]]) -> list[tuple[str, str | None]]:
        """(deployment, its fault) of each attempt; takes what it uses from `faults`."""
        order = self.order()
        self.asked(order[0])
        attempts: list[tuple[str, str | None]] = []
        while True:
            name = order[len(attempts) % len(order)]  # each once, then from the first on
            fault = faults[name].pop(0) if faults[name] else None
            attempts.append((name, fault))
            self.saw(name, fault)
            if fault is None or len(attempts) == self.attempts_max:
                return attempts
            again = len(attempts) >= len(order)
            if again and fault == "429 after":  # that is longer than anybody waits here
                return attempts
            target = order[len(attempts) % len(order)]
            if self.retries.get(target, 5.0) < 1.0 - 1e-9:
                return attempts
            self.retries[target] = self.retries.get(target, 5.0) - 1.0


@dataclass(frozen=True)
class Played:
    """What happened, request by request, and what the model says should have."""

    seen: list[tuple[int, list[tuple[str, str]]]]  # (status, (deployment, error) of each attempt)
    expected: list[tuple[int, list[tuple[str, str]]]]
    money: list[tuple[Kind, bool]]  # (kind, it cost something) of each entry, in order of attempts
    expected_money: list[tuple[Kind, bool]]
    received: int  # by the providers


async def play(seed: int, requests: int, *, fault_share: float = 0.25) -> Played:
    """Random faults on all three, then none; whole answers and streams in turn."""
    random = Random(seed)
    model = Model()
    seen, expected, expected_money = [], [], []
    async with Recorder() as a, Recorder() as b, Recorder() as c:
        recorders = dict(zip(NAMES, (a, b, c), strict=True))
        deployments = [deployment(provider(r.base_url, name=n)) for n, r in recorders.items()]
        async with SmallWorld(deployments, retries=RetryBudget(grows_back_s=math.inf)) as gw:
            for n in range(requests):
                stream = n % 2 == 1
                last = {"a", "b", "c"} - model.out
                faults = {name: [_fault(random, stream, fault_share, len(last))] for name in NAMES}
                scripts = {name: list(found) for name, found in faults.items()}
                attempts = model.request(faults)
                for name, recorder in recorders.items():
                    fault = scripts[name][0]
                    recorder.scripts = [FAULTS[fault][0]] if fault and (name, fault) in attempts else []
                expected.append(_expected(attempts))
                expected_money += [_money(fault) for _, fault in attempts]
                before = len(gw.ledger.entries)
                doc = {
                    "model": "m",
                    "stream": stream,
                    "max_tokens": 50,
                    "messages": [{"role": "user", "content": f"ask {n}"}],
                }
                async with gw.http.post(CHAT, json=doc) as answer:
                    await answer.read()
                    status = answer.status
                await gw.settled()
                mine = gw.ledger.entries[before:]
                seen.append((status, [(a.provider, o.error) for a, o in mine]))
            money = [(o.kind, o.cost_nano_usd > 0) for _, o in gw.ledger.entries]
            assert gw.ledger.holds == {}
            received = sum(len(r.received) for r in recorders.values())
    return Played(seen, expected, money, expected_money, received)


def _fault(random: Random, stream: bool, share: float, healthy: int) -> str | None:
    if random.random() >= share:
        return None
    skipped = _WHOLE_ONLY if stream else _STREAM_ONLY
    kinds = [name for name in FAULTS if name not in skipped]
    if healthy == 1:  # the last one is not cooled: what then happens has a test of its own
        kinds = [name for name in kinds if name not in _COOLING]
    return random.choice(kinds)


def _expected(attempts: Sequence[tuple[str, str | None]]) -> tuple[int, list[tuple[str, str]]]:
    last = attempts[-1][1]
    status = 200 if last is None else 429 if last in _COOLING else 503 if last == "busy" else 502
    return status, [(name, "" if fault is None else FAULTS[fault][2]) for name, fault in attempts]


def _money(fault: str | None) -> tuple[Kind, bool]:
    kind = Kind.POST if fault is None else FAULTS[fault][1]
    return kind, kind is not Kind.VOID


@dataclass(frozen=True)
class Share:
    """What one bad deployment of three costs clients and providers."""

    requests: int
    failed: int
    attempts: int

    @property
    def text(self) -> str:
        extra = (self.attempts - self.requests) / self.requests
        return (
            f"{self.requests} requests, {self.failed} failed ({self.failed / self.requests:.3%}), "
            f"{extra:.2%} extra attempts"
        )


async def one_bad(requests: int, *, seed: int = 1) -> Share:
    """One deployment fails each call, the others none; equal weights, twenty calls at once."""
    random = Random(seed)
    bad = Script(500, [_FAULT])
    async with Recorder() as a, Recorder() as b, Recorder() as c:
        b.scripts = [bad] * requests
        deployments = [
            deployment(provider(r.base_url, name=n)) for n, r in zip(NAMES, (a, b, c), strict=True)
        ]
        async with SmallWorld(deployments, random=random.random) as gw:
            failed, left = 0, iter(range(requests))

            async def client() -> None:
                nonlocal failed
                for n in left:
                    doc = {"model": "m", "max_tokens": 50, "messages": [{"role": "user", "content": f"{n}"}]}
                    async with gw.http.post(CHAT, json=doc) as answer:
                        await answer.read()
                        failed += answer.status != 200

            await asyncio.gather(*(client() for _ in range(20)))
            attempts = len(await gw.settled())
    return Share(requests, failed, attempts)


async def _main(requests: int, seed: int) -> int:
    share = await one_bad(requests, seed=seed)
    print(f"one bad deployment of three: {share.text}")
    wrong = 0
    for n in range(max(1, requests // 40)):
        played = await play(seed + n, 40)
        if (played.seen, played.money) != (played.expected, played.expected_money):
            wrong += 1
            print(f"schedule {seed + n} differs from the model")
    print(f"{max(1, requests // 40)} schedules of 40 requests, {wrong} differ from the model")
    bad = wrong or share.failed > requests / 1_000 or share.attempts > 1.05 * requests
    return 1 if bad else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    raise SystemExit(asyncio.run(_main(given.requests, given.seed)))
