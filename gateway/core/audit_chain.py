"""The audit trail as a chain: each entry's hash covers it and the hash before it, so that none can be changed, left out or
slipped in later without every hash behind it changing, too. Whoever keeps a hash elsewhere can tell.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec


@dataclass(frozen=True, slots=True)
class Link:
    """An entry as stored. `body` is its JSON as text."""

    number: int
    audit_id: str
    at_ms: int
    actor: str
    action: str
    subject: str
    body: str
    hash: str = ""


@dataclass(frozen=True, slots=True)
class Broken:
    """Where the chain does not hold, and why."""

    audit_id: str
    number: int
    why: str


def hash_of(before: str, link: Link) -> str:
    """SHA-256 over the hash before it and what it says, as hexadecimal digits."""
    said = (before, link.number, link.audit_id, link.at_ms, link.actor, link.action, link.subject, link.body)
    return hashlib.sha256(msgspec.json.encode(said)).hexdigest()


class Chain:
    """Takes entries in the order of their numbers and finds the first that does not fit; `head` is the last hash."""

    def __init__(self, head: str = "") -> None:
        self.head = head
        self.entries = 0
        self.broken: Broken | None = None
        self.seen: set[str] = set()

    def take(self, links: Iterable[Link], known: str = "") -> None:
        """`known`: a hash that somebody kept; it is noted in `seen` when it comes."""
        for link in links:
            wanted = hash_of(self.head, link)
            if link.hash != wanted and self.broken is None:
                self.broken = Broken(
                    link.audit_id, link.number, "it, or what was before it, is not what was written"
                )
            # From what is stored, so that one wrong entry is told once.
            self.head = link.hash
            self.entries += 1
            if known and link.hash == known:
                self.seen.add(known)
