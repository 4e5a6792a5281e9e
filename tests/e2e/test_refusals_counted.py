"""What counts as a refusal: what the gateway answers before anything is spent, and not what a provider failed at."""

from __future__ import annotations

from gateway.demo.faults import Fault, FaultKind, FaultPlan
from tests.support.running import running

CHAT = "/v1/chat/completions"
HI = {"model": "demo-fast", "max_tokens": 16, "messages": [{"role": "user", "content": "hi"}]}


async def test_a_providers_failure_is_no_refusal(sqlite_url: str) -> None:
    async with running(sqlite_url, faults=FaultPlan((Fault(FaultKind.REFUSE, 400),))) as gw:
        for body, status in ((HI, 400), ({**HI, "n": 99}, 400), ({**HI, "model": "none"}, 404), (HI, 200)):
            async with gw.http.post(CHAT, json=body) as answer:
                assert answer.status == status
        counted = [
            line
            for line in gw.app.metrics.render().decode().splitlines()
            if line.startswith("tollhouse_refusals_total")
        ]
    assert counted == [
        'tollhouse_refusals_total{kind="invalid_request"} 1',
        'tollhouse_refusals_total{kind="model_not_found"} 1',
    ]
