"""The gateway's own shaping of a run that is played again: the code that shapes live requests, at one level."""

from __future__ import annotations

from gateway.core.cache_rules import CacheRule
from gateway.core.dialects import Edits, read, render
from gateway.core.prefix import chain
from gateway.core.replay import Request, Shape
from gateway.core.shaping import Level, Shaper
from gateway.core.shaping import Request as ToShape


def shape_at(level: Level, rule: CacheRule, run: str) -> Shape:
    """Shapes the requests of one run in their order, as one process would that has served nothing before."""
    shaper = Shaper()

    def shape(request: Request) -> bytes:
        facts = read(request.operation, request.body)
        shaped = shaper.shape(
            ToShape(
                request.operation,
                facts,
                request.body,
                chain(facts.segments),
                ("replay", run),
                rule,
                level=level,
                group=run,
                now_s=request.at_ms / 1_000,
            )
        )
        edits = Edits(splices=shaped.splices, members=shaped.members)
        return b"".join(bytes(piece) for piece in render(facts, request.body, edits))

    return shape
