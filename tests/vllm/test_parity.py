"""The comparison itself, in front of the demo provider: what it finds, and that it would notice a loss."""

from __future__ import annotations

from gateway.core.catalog import Wire
from gateway.demo.provider import DemoProvider
from tests.vllm.parity import CLOCKS, LATER_RUNS, STEPS, Step, parity


async def test_no_step_reads_less_and_shuffled_tools_read_more() -> None:
    async with DemoProvider() as upstream:
        steps = await parity(upstream.base_url, "demo-fast", "demo", Wire.DEMO)
    assert [s for s in steps if s.lost] == []
    read = {
        (kind, level): (sum(s.direct for s in mine), sum(s.through for s in mine))
        for kind in (
            "plain",
            "stable tools",
            "shuffled tools",
            *CLOCKS,
            *(f"{k}, later run {n}" for k in CLOCKS for n in (1, 2)),
        )
        for level in ("safe", "relocate")
        if (mine := [s for s in steps if (s.conversation, s.level) == (kind, level)])
    }
    assert len(steps) == (2 * (3 + len(CLOCKS)) + LATER_RUNS * len(CLOCKS)) * STEPS
    direct, through = read["stable tools", "safe"]
    assert direct == through > 0
    assert read["shuffled tools", "safe"][0] < read["shuffled tools", "safe"][1]
    assert read["clock", "safe"] == (0, 0)
    assert read["clock", "relocate"][1] > read["clock", "relocate"][0] == 0
    assert all(read[f"{kind}, later run 1", "relocate"][1] > 0 for kind in CLOCKS)


def test_less_is_a_loss() -> None:
    assert Step("plain", 1, "safe", 100, 64, 48).lost
    assert Step("clock", 1, "relocate", 100, 64, 63).lost
    assert not Step("plain", 1, "safe", 100, 64, 64).lost
    assert not Step("clock, later run 1", 0, "relocate", 100, 64, 32, 32).lost
    assert Step("clock, later run 1", 0, "relocate", 100, 64, 31, 32).lost
