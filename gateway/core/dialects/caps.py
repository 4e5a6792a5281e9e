"""What a rule may change in a request besides its output bound: service tier and reasoning effort."""

from __future__ import annotations

from gateway.core.catalog import Operation
from gateway.core.dialects.facts import Facts, Splice

#: From little to much, as OpenAI names them.
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def cap_edits(
    facts: Facts, service_tier: str | None, reasoning_effort: str | None
) -> tuple[tuple[Splice, ...], bytes]:
    """Replacements, and members to insert with the comma before each.

    An effort is only ever lowered; where it stands inside another object (responses, messages) it is set only if
    the request has no such object.
    """
    splices: list[Splice] = []
    inserts = b""
    wanted: list[tuple[str, bytes]] = []
    if service_tier is not None:
        wanted.append(("service_tier", b'"%b"' % service_tier.encode()))
    if reasoning_effort is not None and _lowers(facts.reasoning_effort, reasoning_effort):
        effort = b'"%b"' % reasoning_effort.encode()
        if facts.operation is Operation.CHAT:
            wanted.append(("reasoning_effort", effort))
        elif facts.operation is Operation.RESPONSES and "reasoning" not in facts.spans.members:
            wanted.append(("reasoning", b'{"effort":%b}' % effort))
    for name, value in wanted:
        span = facts.spans.members.get(name)
        if span is None:
            inserts += b',"%b":%b' % (name.encode(), value)
        else:
            splices.append((*span, value))
    return tuple(splices), inserts


def _lowers(own: str, cap: str) -> bool:
    if own not in _EFFORTS or cap not in _EFFORTS:
        return True
    return _EFFORTS.index(cap) < _EFFORTS.index(own)
