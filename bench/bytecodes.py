"""Bytecodes and Python calls that the gateway's own code spends on a request, by file: the same on any machine.

    python -m bench.bytecodes                   # a 1 KB chat, the same by rule, and an agent's step of 400 KB
    python -m bench.bytecodes --only rules      # those with "rules" in their name
    python -m bench.bytecodes --by function --top 40
    python -m bench.bytecodes --connections 32
    python -m bench.bytecodes --save before.json; python -m bench.bytecodes --against before.json

CPU time swings with whatever else a machine does; what the interpreter is asked to do does not. It is no time: a call
into C counts as one bytecode, however long it takes. One request after the other, so that no batch is ever larger than
one; with `--connections 32` as many at once, which the ledger takes in batches, as under load. Gateway (SQLite), demo provider and client run in this process; only files
of `gateway/`, and the rules that it compiled, are counted, and those of the demo provider are not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import gateway
from bench.rules import no_match
from gateway.core.catalog import Catalog, Order, Tier
from gateway.core.money import NANO_PER_USD
from gateway.settings import Settings
from gateway.settings.model import Routing
from gateway.storage import schema
from gateway.storage.accounts import Accounts
from tests.support.running import Running, running

OURS = Path(gateway.__file__).parent
WARM_UP, COUNTED = 30, 40  # requests, at the least
_COMPILED = "<rules>"  # what `core.rules` makes of a set
_LINE = "def f(a, b):\\n    return a + b  # nothing to see\\n"


class Count:
    """What is run while it is `on`, in all threads that begin after `install`."""

    def __init__(self) -> None:
        self.on = False
        self.bytecodes: Counter[CodeType] = Counter()
        self.calls: Counter[CodeType] = Counter()
        self._ours: dict[str, bool] = {}

    def install(self) -> None:
        threading.settrace(self._called)
        sys.settrace(self._called)

    def _called(self, frame: FrameType, _event: str, _arg: object) -> Callable[..., Any] | None:
        code = frame.f_code
        if not self.on or not self._is_ours(code.co_filename):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self.calls[code] += 1
        return self._ran

    def _ran(self, frame: FrameType, event: str, _arg: object) -> Callable[..., Any]:
        if event == "opcode":
            self.bytecodes[frame.f_code] += 1
        return self._ran

    def _is_ours(self, name: str) -> bool:
        known = self._ours.get(name)
        if known is None and name == _COMPILED:
            known = self._ours[name] = True
        if known is None:
            path = Path(name)
            inside = path.is_relative_to(OURS)
            known = self._ours[name] = inside and path.relative_to(OURS).parts[0] != "demo"
        return known


def chat() -> list[dict[str, Any]]:
    """About 1 KB."""
    return [
        {"role": "system", "content": "You are brief. " * 20},
        {"role": "user", "content": _LINE * 12},
    ]


def agent(steps: int) -> list[dict[str, Any]]:
    """An agent's history of about 4 KB a step."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Fix the build."}]
    for n in range(steps):
        call = {
            "id": f"call_{n}",
            "type": "function",
            "function": {"name": "read", "arguments": f'{{"path":"src/{n}.py"}}'},
        }
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"call_{n}", "content": f"{n}\n" + _LINE * 80})
    return messages


@dataclass(frozen=True, slots=True)
class Workload:
    messages: Callable[[int], list[dict[str, Any]]]  # of the n-th request
    model: str = "demo-large"
    #: for 50 rules, none of which matches, and 20 deployments, ten of them in the tier that is asked; None: as shipped
    order: Order | None = None


WORKLOADS = {
    "1 KB chat": Workload(lambda _n: chat()),
    "1 KB chat to auto, 50 rules, 20 deployments": Workload(lambda _n: chat(), "auto", Order.WEIGHT),
    "1 KB chat to auto, 50 rules, 20 deployments by price": Workload(lambda _n: chat(), "auto", Order.PRICE),
    "400 KB agent, step by step": Workload(lambda n: agent(100 + n)),
    "400 KB agent to auto, 50 rules, 20 deployments by price": Workload(
        lambda n: agent(100 + n), "auto", Order.PRICE
    ),
}


def crowded(settings: Settings, order: Order) -> Settings:
    """50 rules and 20 deployments, ten of them in the default tier."""
    large = next(d for d in settings.catalog.deployments if d.model == "demo-large")
    tiers = (Tier.STANDARD, Tier.SMALL, Tier.STANDARD, Tier.FAST)
    deployments = tuple(
        replace(large, name=f"d{n}", tier=tiers[n % 4], weight=50 + n, aliases=()) for n in range(20)
    )
    catalog = Catalog.of(deployments, Tier.STANDARD, order=order)
    return replace(settings, catalog=catalog, routing=Routing(rules=no_match()))


async def counted(workload: Workload, count: Count, connections: int) -> int:
    """`count` of COUNTED requests or more, after WARM_UP others, `connections` at once. Returns of how many."""
    warm_up, rounds = -(-WARM_UP // connections), -(-COUNTED // connections)
    with tempfile.TemporaryDirectory(prefix="tollhouse-bytecodes-") as directory:
        store_url = f"sqlite:///{directory}/ledger.db"
        await schema.migrate(store_url)
        async with running(store_url) as gw:
            accounts = Accounts(gw.app.database, actor="bench")
            await accounts.set_budget("tenant:default", 1_000 * NANO_PER_USD, "month")
            if workload.order is not None:
                gw.app.settings = crowded(gw.app.settings, workload.order)
            for n in range(warm_up + rounds):
                body = {"model": workload.model, "max_tokens": 64, "messages": workload.messages(n)}
                count.on = n >= warm_up
                await asyncio.gather(*(_ask(gw, body) for _ in range(connections)))
                await gw.app.quiet()
            count.on = False
    return rounds * connections


async def _ask(gw: Running, body: dict[str, Any]) -> None:
    async with gw.http.post("/v1/chat/completions", json=body) as answer:
        text = await answer.text()
        assert answer.status == 200, text


def table(count: Count, by: str, requests: int) -> dict[str, tuple[float, float]]:
    """file, or file and function -> (bytecodes, calls) a request."""
    found: dict[str, tuple[float, float]] = {}
    for code, bytecodes in count.bytecodes.items():
        compiled = code.co_filename == _COMPILED
        name = _COMPILED if compiled else str(Path(code.co_filename).relative_to(OURS))
        if by == "function":
            name = f"{name}:{code.co_qualname}"
        before = found.get(name, (0.0, 0.0))
        found[name] = before[0] + bytecodes / requests, before[1] + count.calls[code] / requests
    return found


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--by", choices=("file", "function"), default="file")
    ap.add_argument("--top", type=int, default=25, help="lines of the table")
    ap.add_argument("--only", default="", help="workloads with this in their name")
    ap.add_argument("--connections", type=int, default=1, help="requests at once (default: 1)")
    ap.add_argument("--save", type=Path, help="write all figures as JSON")
    ap.add_argument("--against", type=Path, help="figures of an earlier --save: show what changed")
    args = ap.parse_args()
    before = json.loads(args.against.read_text()) if args.against else {}
    saved = {}
    for name, workload in WORKLOADS.items():
        if args.only not in name:
            continue
        count = Count()
        count.install()
        requests = asyncio.run(counted(workload, count, args.connections))
        found = saved[name] = table(count, args.by, requests)
        old = before.get(name, {})
        total = [sum(column) for column in zip(*found.values(), strict=True)]
        print(f"\n{name}: {total[0]:,.0f} bytecodes and {total[1]:,.0f} calls a request", end="")
        print(f" (before: {sum(v[0] for v in old.values()):,.0f})" if old else "")
        for part in sorted(found, key=lambda part: -found[part][0])[: args.top]:
            change = f"{found[part][0] - old[part][0]:+9,.0f}" if part in old else ""
            print(f"{found[part][0]:9,.0f} {found[part][1]:7.1f}  {part} {change}")
    if args.save:
        args.save.write_text(json.dumps(saved))


if __name__ == "__main__":
    main()
