"""read: dialect facts out of the raw body; nothing is decoded that is not needed."""

from __future__ import annotations

from gateway.core import dialects
from gateway.pipeline.exchange import Exchange


def read(x: Exchange) -> None:
    """Raises `InvalidRequest` naming the field."""
    x.facts = dialects.read(x.operation, x.incoming.body)
