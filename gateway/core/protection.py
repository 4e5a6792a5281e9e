"""What keeps the users of one's own servers apart: `cache_salt` and `priority`, which the gateway says and no client.

vLLM 0.32 takes both in the body of chat and responses (docs.vllm.ai, online serving, November 2026): the salt is hashed
with the first block of a prompt, so that nobody finds another's blocks or can tell by time that they are there; a lower
priority is served earlier, and the header X-Vllm-Priority, which the gateway does not forward, would win over the body.
Its /v1/messages has neither.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from gateway.core.catalog import Operation
from gateway.core.dialects.facts import Facts, Splice
from gateway.core.serving import Urgency
from gateway.core.shaping import Shaped

SALT, PRIORITY = "cache_salt", "priority"
#: What a change is called; the number is its version.
SALTED, PRIORITISED = "cache_salt@1", "priority@1"
#: Lower is earlier. 0 is what requests without one have.
PRIORITIES: Mapping[Urgency, int] = {Urgency.INTERACTIVE: 0, Urgency.BATCH: 10}
PRIORITY_MAX = 1_000_000
_TAKES_BOTH = frozenset({Operation.CHAT, Operation.RESPONSES})


def own_words(facts: Facts) -> tuple[str, ...]:
    """What of the two the client has said itself."""
    members = facts.spans.members
    return tuple(name for name in (SALT, PRIORITY) if name in members)


def protected(shaped: Shaped, facts: Facts, *, salt: str, priority: int, native: bool) -> Shaped:
    """`shaped`, and the two members as the gateway wants them. `salt` "" = none; 0 is no priority.

    A client's own are replaced where they stand, by what means nothing if there is nothing to say. `native`: the body
    leaves in the dialect in which it came.
    """
    if not native or facts.operation not in _TAKES_BOTH:
        salt, priority = "", 0
    wanted: tuple[tuple[str, str, bytes, bytes], ...] = (
        (SALT, SALTED, msgspec.json.encode(salt) if salt else b"", b"null"),
        (PRIORITY, PRIORITISED, b"%d" % priority if priority else b"", b"0" if native else b"null"),
    )
    splices: list[Splice] = []
    members, said = shaped.members, []
    for name, change, value, nothing in wanted:
        span = facts.spans.members.get(name)
        if span is not None:
            splices.append((*span, value or nothing))
        elif value:
            members += b',"%b":%b' % (name.encode(), value)
        else:
            continue
        said.append(change)
    if not said:
        return shaped
    return replace(
        shaped,
        splices=tuple(sorted((*shaped.splices, *splices))),
        members=members,
        protections=(*shaped.protections, *said),
    )
