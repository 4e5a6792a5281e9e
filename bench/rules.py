"""What the rules cost a request: 50 of them, none of which matches, over one made-up context.

.venv/bin/python bench/rules.py
"""

from __future__ import annotations

import time
from collections.abc import Callable

from gateway.core.catalog import Tier
from gateway.core.rules import RequestFacts, RuleContext, RuleSet, RuleText, TaskFacts

RULES = 50
_SHAPES = (
    "task.budget_used > 0.8{n:02} && request.tools == {n}",
    "request.client == 'codex' && request.purpose in ['title', 'compaction'] && task.step > {m}",
    "request.context_tokens > {m}00000 && task.step > 10",
    "task.tool_errors >= {m} || task.repeats > {m}",
    "cache.fast.warm_tokens > {n}000 && request.model.startsWith('gpt-{n}')",
)


def best_us(call: Callable[[], object], rounds: int = 7, calls: int = 5_000) -> float:
    best = float("inf")
    for _ in range(rounds):
        began = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, time.perf_counter() - began)
    return best / calls * 1e6


def main() -> None:
    texts = [RuleText(f"rule {n}", _SHAPES[n % 5].format(n=n, m=100 - n), Tier.SMALL) for n in range(RULES)]
    rules = RuleSet.compile(texts)

    def context() -> RuleContext:
        return RuleContext(
            request=RequestFacts(model="auto", client="codex", context_tokens=250, tools=12),
            task=TaskFacts(step=3),
        )

    made = context()
    print(f"{RULES} rules, none matches: {best_us(lambda: rules.decide(made)):6.2f} us (target: under 20)")
    print(f"their context:            {best_us(context):6.2f} us")


if __name__ == "__main__":
    main()
