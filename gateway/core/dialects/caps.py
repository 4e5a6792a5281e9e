"""What a rule may change in a request besides its output bound: service tier and reasoning effort."""

from __future__ import annotations

import msgspec

from gateway.core.catalog import Operation
from gateway.core.dialects.facts import Facts, Splice
from gateway.core.dialects.json_slices import DuplicateMember, members

#: From little to much, as OpenAI names them; Anthropic's `output_config.effort` knows low to max of these.
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_ANTHROPICS_LEAST = "low"
#: Tokens for thinking where they are named instead of a word; 1,024 is the least that Anthropic takes. As litellm
#: translates the same words (`upstream.bridge_messages`). A higher word leaves the client's number.
_BUDGETS = {"none": 1_024, "minimal": 1_024, "low": 1_024, "medium": 4_096}


def cap_edits(
    facts: Facts, body: bytes, service_tier: str | None, reasoning_effort: str | None
) -> tuple[tuple[Splice, ...], bytes]:
    """Replacements, and members to insert with the comma before each.

    An effort is only ever lowered. In messages only what the client said itself is: an `output_config.effort` and the
    `budget_tokens` of its thinking; a model that knows neither would answer 400 to them.
    """
    splices: list[Splice] = []
    inserts = b""
    wanted: list[tuple[str, bytes]] = []
    if service_tier is not None:
        wanted.append(("service_tier", b'"%b"' % service_tier.encode()))
    if reasoning_effort is not None:
        effort = b'"%b"' % reasoning_effort.encode()
        lowers = _lowers(facts.reasoning_effort, reasoning_effort)
        if facts.operation is Operation.CHAT and lowers:
            wanted.append(("reasoning_effort", effort))
        elif facts.operation is Operation.RESPONSES and lowers:
            splice = _inside(body, facts, "reasoning", "effort", effort)
            if splice is not None:
                splices.append(splice)
            elif _open(body, facts, "reasoning"):
                wanted.append(("reasoning", b'{"effort":%b}' % effort))
        elif facts.operation is Operation.MESSAGES:
            splices += _in_messages(facts, body, reasoning_effort)
    for name, value in wanted:
        span = facts.spans.members.get(name)
        if span is None:
            inserts += b',"%b":%b' % (name.encode(), value)
        else:
            splices.append((*span, value))
    return tuple(splices), inserts


def _in_messages(facts: Facts, body: bytes, effort: str) -> list[Splice]:
    found = []
    if facts.reasoning_effort and _lowers(facts.reasoning_effort, effort):
        # It has no words below its least.
        word = _ANTHROPICS_LEAST if effort in ("none", "minimal") else effort
        if _lowers(facts.reasoning_effort, word):
            found.append(_inside(body, facts, "output_config", "effort", b'"%b"' % word.encode()))
    budget = _BUDGETS.get(effort)
    if budget is not None and facts.thinking_budget > budget:
        found.append(_inside(body, facts, "thinking", "budget_tokens", b"%d" % budget))
    return [splice for splice in found if splice is not None]


def _inside(body: bytes, facts: Facts, name: str, inner: str, value: bytes) -> Splice | None:
    """Sets a member of an object that the request has; None if it has none, or one that is not clear."""
    span = facts.spans.members.get(name)
    if span is None or body[span[0] : span[0] + 1] != b"{":
        return None
    start, end = span
    try:
        there = members(body[start:end]).get(inner)
    except (DuplicateMember, ValueError, msgspec.MsgspecError):
        return None
    if there is not None:
        return (start + there[0], start + there[1], value)
    comma = b"" if body[start + 1 : end - 1].strip() == b"" else b","
    return (start + 1, start + 1, b'"%b":%b%b' % (inner.encode(), value, comma))


def _open(body: bytes, facts: Facts, name: str) -> bool:
    """The request says nothing there."""
    span = facts.spans.members.get(name)
    return span is None or body[span[0] : span[1]] == b"null"


def _lowers(own: str, cap: str) -> bool:
    if own not in _EFFORTS or cap not in _EFFORTS:
        return True
    return _EFFORTS.index(cap) < _EFFORTS.index(own)
