"""What routing costs a request: 50 rules, none of which matches, and the order of 20 deployments.

.venv/bin/python bench/rules.py
"""

from __future__ import annotations

import time
from collections.abc import Callable

from gateway.core import routing
from gateway.core.catalog import Catalog, Deployment, Operation, Provider, Tier, Wire
from gateway.core.pools import Pools
from gateway.core.rules import RequestFacts, RuleContext, RuleSet, RuleText, TaskFacts

RULES = 50
DEPLOYMENTS = 20
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


def no_match() -> RuleSet:
    """Rules none of which matches a plain chat."""
    texts = [RuleText(f"rule {n}", _SHAPES[n % 5].format(n=n, m=100 - n), Tier.SMALL) for n in range(RULES)]
    return RuleSet.compile(texts)


def main() -> None:
    rules = no_match()

    def context() -> RuleContext:
        return RuleContext(
            request=RequestFacts(model="auto", client="codex", context_tokens=250, tools=12),
            task=TaskFacts(step=3),
        )

    made = context()
    print(f"{RULES} rules, none matches: {best_us(lambda: rules.decide(made)):6.2f} us (target: under 20)")
    print(f"their context:            {best_us(context):6.2f} us")
    provider = Provider("p", Wire.OPENAI, "http://127.0.0.1:1/v1", "")
    deployments = tuple(
        Deployment(f"d{n}", provider, "m", f"m{n}", "p/m", priority=n // 10) for n in range(DEPLOYMENTS)
    )
    catalog = Catalog.of(deployments)
    decision = rules.decide(made)

    def ordered(pools: Pools | None) -> object:
        return routing.route(
            "auto", Operation.CHAT, catalog, decision, {}, lambda *_: True, pick=0.37, now_s=0.0, pools=pools
        )

    pools = Pools(catalog)
    from_pool = best_us(lambda: ordered(pools), calls=1_000)
    one_by_one = best_us(lambda: ordered(None), calls=1_000)
    print(f"{DEPLOYMENTS} deployments in order: {from_pool:6.2f} us (looked at one by one: {one_by_one:.2f})")


if __name__ == "__main__":
    main()
