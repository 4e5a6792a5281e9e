"""Bytecodes and Python calls that the gateway's own code spends on a request, by file: the same on any machine.

    python -m bench.bytecodes                   # a 1 KB chat, and an agent's step of 400 KB
    python -m bench.bytecodes --by function --top 40
    python -m bench.bytecodes --save before.json; python -m bench.bytecodes --against before.json

CPU time swings with whatever else a machine does; what the interpreter is asked to do does not. It is no time: a call
into C counts as one bytecode, however long it takes. One request after the other, so that no batch is ever larger than
one: under load the ledger's part is smaller. Gateway (SQLite), demo provider and client run in this process; only files
of `gateway/` are counted, and those of the demo provider are not.
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
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import gateway
from gateway.core.money import NANO_PER_USD
from gateway.storage import schema
from gateway.storage.accounts import Accounts
from tests.support.running import running

OURS = Path(gateway.__file__).parent
WARM_UP, COUNTED = 30, 40
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


#: name -> the messages of the n-th request
WORKLOADS: dict[str, Callable[[int], list[dict[str, Any]]]] = {
    "1 KB chat": lambda _n: chat(),
    "400 KB agent, step by step": lambda n: agent(100 + n),
}


async def counted(workload: str, count: Count) -> None:
    """`count` of COUNTED requests, after WARM_UP others."""
    messages = WORKLOADS[workload]
    with tempfile.TemporaryDirectory(prefix="tollhouse-bytecodes-") as directory:
        store_url = f"sqlite:///{directory}/ledger.db"
        await schema.migrate(store_url)
        async with running(store_url) as gw:
            accounts = Accounts(gw.app.database, actor="bench")
            await accounts.set_budget("tenant:default", 1_000 * NANO_PER_USD, "month")
            for n in range(WARM_UP + COUNTED):
                body = {"model": "demo-large", "max_tokens": 64, "messages": messages(n)}
                count.on = n >= WARM_UP
                async with gw.http.post("/v1/chat/completions", json=body) as answer:
                    text = await answer.text()
                    assert answer.status == 200, text
                await gw.app.quiet()
            count.on = False


def table(count: Count, by: str) -> dict[str, tuple[float, float]]:
    """file, or file and function -> (bytecodes, calls) a request."""
    found: dict[str, tuple[float, float]] = {}
    for code, bytecodes in count.bytecodes.items():
        name = str(Path(code.co_filename).relative_to(OURS))
        if by == "function":
            name = f"{name}:{code.co_qualname}"
        before = found.get(name, (0.0, 0.0))
        found[name] = before[0] + bytecodes / COUNTED, before[1] + count.calls[code] / COUNTED
    return found


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--by", choices=("file", "function"), default="file")
    ap.add_argument("--top", type=int, default=25, help="lines of the table")
    ap.add_argument("--save", type=Path, help="write all figures as JSON")
    ap.add_argument("--against", type=Path, help="figures of an earlier --save: show what changed")
    args = ap.parse_args()
    before = json.loads(args.against.read_text()) if args.against else {}
    saved = {}
    for workload in WORKLOADS:
        count = Count()
        count.install()
        asyncio.run(counted(workload, count))
        found = saved[workload] = table(count, args.by)
        old = before.get(workload, {})
        total = [sum(column) for column in zip(*found.values(), strict=True)]
        print(f"\n{workload}: {total[0]:,.0f} bytecodes and {total[1]:,.0f} calls a request", end="")
        print(f" (before: {sum(v[0] for v in old.values()):,.0f})" if old else "")
        for name in sorted(found, key=lambda name: -found[name][0])[: args.top]:
            change = f"{found[name][0] - old[name][0]:+9,.0f}" if name in old else ""
            print(f"{found[name][0]:9,.0f} {found[name][1]:7.1f}  {name} {change}")
    if args.save:
        args.save.write_text(json.dumps(saved))


if __name__ == "__main__":
    main()
