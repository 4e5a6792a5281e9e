"""Who may use the admin API for what, and the facts that its stores and resources share."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, TypeVar

T = TypeVar("T")
_ADMIN_KEY = re.compile(r"gwadm-([a-z2-7]{8})-([A-Za-z0-9_-]{43})", re.ASCII)


class Role(StrEnum):
    OWNER = "owner"  # everything, admin keys too
    OPERATOR = "operator"  # everything but admin keys
    TEAM_ADMIN = "team_admin"  # keys and tasks of one team, and their budgets
    VIEWER = "viewer"  # reads


class Right(StrEnum):
    """What a route asks for; each includes what it needs to see."""

    READ = "read"
    #: change what belongs to a team: its keys, its tasks, and the budgets of these
    CHANGE_IN_TEAM = "change_in_team"
    #: change tenants, teams, their budgets
    CHANGE = "change"
    #: what belongs to nobody in particular: tenants as such, the audit trail, providers and credentials
    OPERATE = "operate"
    #: make and revoke admin keys
    OWN = "own"


RIGHTS: Mapping[Role, frozenset[Right]] = {
    Role.OWNER: frozenset(Right),
    Role.OPERATOR: frozenset(Right) - {Right.OWN},
    Role.TEAM_ADMIN: frozenset({Right.READ, Right.CHANGE_IN_TEAM}),
    Role.VIEWER: frozenset({Right.READ}),
}


@dataclass(frozen=True, slots=True)
class Reach:
    """What somebody sees: one tenant's, one team's, or everything (both ""). The rest does not exist for them."""

    tenant_id: str = ""
    team_id: str = ""

    @property
    def everything(self) -> bool:
        return not self.tenant_id and not self.team_id

    def holds(self, tenant_id: str, team_id: str) -> bool:
        return self.tenant_id in ("", tenant_id) and self.team_id in ("", team_id)


@dataclass(frozen=True, slots=True)
class Admin:
    """A proven user of the admin API. `actor` names them in the audit trail."""

    actor: str
    role: Role = Role.OWNER
    reach: Reach = Reach()

    def may(self, right: Right) -> bool:
        if right is Right.OPERATE and not self.reach.everything:
            return False
        return right in RIGHTS[self.role]


@dataclass(frozen=True, slots=True)
class AdminKey:
    """An admin key as stored, without its secret."""

    admin_key_id: str
    name: str
    role: Role
    reach: Reach
    created_at_ms: int
    expires_at_ms: int | None = None
    revoked_at_ms: int | None = None

    def __post_init__(self) -> None:
        if self.role is Role.TEAM_ADMIN and not self.reach.team_id:
            raise ValueError("a team admin needs a team")

    @property
    def admin(self) -> Admin:
        return Admin(f"admin:{self.admin_key_id}", self.role, self.reach)

    def in_force(self, now_ms: int) -> bool:
        return self.revoked_at_ms is None and (self.expires_at_ms is None or now_ms < self.expires_at_ms)


def admin_key_text(admin_key_id: str, secret: str) -> str:
    return f"gwadm-{admin_key_id}-{secret}"


def parse_admin_key(text: str) -> tuple[str, str] | None:
    """(id, secret), or None if the text does not have the form of an admin key. Proves nothing."""
    match = _ADMIN_KEY.fullmatch(text)
    return (match[1], match[2]) if match else None


@dataclass(frozen=True, slots=True)
class Tenant:
    tenant_id: str
    name: str
    created_at_ms: int


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """Who changed what. `body` never holds a secret; `hash` is that of the chain (core/audit_chain.py), if it is in it."""

    audit_id: str
    at_ms: int
    actor: str
    action: str
    subject: str
    body: Mapping[str, Any]
    hash: str | None = None


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """Some rows, and where the next page begins; None = there is none."""

    rows: Sequence[T]
    after: tuple[Any, ...] | None = None


@dataclass(frozen=True, slots=True)
class Once:
    """A change that is to happen once, however often it is asked for.

    The key that the client sent is stored as a digest only: what is secret in a reply (a new key's text) is made from
    the key itself under the pepper, so that a repetition gets the same text and no secret is at rest.
    """

    key: str
    actor: str
    request_digest: bytes
    #: (status, body) of what the change returned; the body is stored, so it holds no secret
    reply: Callable[[Any], tuple[int, bytes]]

    @property
    def key_digest(self) -> bytes:
        return hashlib.sha256(f"{self.actor}\0{self.key}".encode()).digest()

    def secret_bytes(self, pepper: bytes, number: int = 0) -> bytes:
        """Of the so manieth key that the request makes."""
        parts = (b"tollhouse once", str(number).encode(), self.actor.encode(), self.key.encode())
        seed = b"\0".join((*parts, self.request_digest))
        return hmac.digest(pepper, seed, hashlib.sha256)


class Replayed(Exception):
    """The change was already made; this was its reply."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(status)
        self.status, self.body = status, body


class KeyReused(Exception):
    """The same idempotency key came with another request."""


class Taken(Exception):
    """What was to be made is already there. `field` of the request names it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field, self.message = field, message


class Moved(Exception):
    """What was looked at has changed meanwhile: look again."""


class InUse(Exception):
    """What was to be deleted is still used; the message says by what."""
