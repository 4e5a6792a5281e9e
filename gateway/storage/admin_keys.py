"""Keys of the admin API: who holds one, and what it opens. Only the HMAC of a secret is stored."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gateway.core import secrets
from gateway.core.errors import InvalidRequest, NotFound
from gateway.core.offices import Admin, AdminKey, Page, Reach, Role, admin_key_text, parse_admin_key
from gateway.storage import audit
from gateway.storage.database import Database
from gateway.storage.pages import Listing
from gateway.storage.transact import Fetch, Row, Sql, Tx

_COLUMNS = "admin_key_id, name, role, tenant_id, team_id, created_at_ms, expires_at_ms, revoked_at_ms"
KEYS = Listing(
    f"SELECT {_COLUMNS} FROM admin_key",  # noqa: S608
    ("created_at_ms", "admin_key_id"),
    (5, 0),
    {"role": "role = {}"},
    {"tenant": "tenant_id = {}", "team": "team_id = {}"},
)
_KEY = Sql(f"SELECT {_COLUMNS} FROM admin_key WHERE admin_key_id = $1")  # noqa: S608
_PROOF = Sql(f"SELECT {_COLUMNS}, secret_hmac, now_ms() FROM admin_key WHERE admin_key_id = $1")  # noqa: S608
_TENANT = Sql("SELECT 1 FROM tenant WHERE tenant_id = $1")
_TEAM = Sql("SELECT tenant_id FROM team WHERE team_id = $1")
_ADD = Sql(
    "INSERT INTO admin_key (admin_key_id, secret_hmac, name, role, tenant_id, team_id, created_at_ms, expires_at_ms) "
    "VALUES ($1, $2, $3, $4, $5, $6, $7, $8)"
)
_REVOKE = Sql("UPDATE admin_key SET revoked_at_ms = $2 WHERE admin_key_id = $1")


class AdminKeys:
    """Tells the admin behind a token."""

    def __init__(self, database: Database, pepper: bytes) -> None:
        self._database = database
        self._pepper = pepper

    async def identify(self, token: str) -> Admin | None:
        """None for a token that opens nothing. Raises `Unavailable` when the store is down."""
        parts = parse_admin_key(token)
        if parts is None:
            return None
        admin_key_id, secret = parts

        def tx() -> Tx[list[Row]]:
            return list((yield Fetch(_PROOF, (admin_key_id,))))

        rows = await self._database.read(tx)
        # An unknown id takes as long as a wrong secret.
        stored = bytes(rows[0][8]) if rows else bytes(32)
        if not secrets.matches(self._pepper, secret, stored) or not rows:
            return None
        key = _key_of(rows[0])
        return key.admin if key.in_force(rows[0][9]) else None


def admin_keys(reach: Reach, filters: Mapping[str, Any], after: Any, limit: int) -> Tx[Page[AdminKey]]:
    page = yield from KEYS.page(reach, filters, after, limit)
    return Page([_key_of(row) for row in page.rows], page.after)


def admin_key(admin_key_id: str) -> Tx[AdminKey]:
    rows = yield Fetch(_KEY, (admin_key_id,))
    if not rows:
        raise NotFound(f"there is no admin key {admin_key_id}")
    return _key_of(rows[0])


def create_admin_key(
    actor: str,
    pepper: bytes,
    name: str,
    role: Role,
    reach: Reach,
    expires_at_ms: int | None,
    secret_bytes: bytes | None,
) -> Tx[tuple[AdminKey, str]]:
    """The key and its text. A team brings its tenant."""
    if reach.team_id:
        rows = yield Fetch(_TEAM, (reach.team_id,))
        if not rows or reach.tenant_id not in ("", rows[0][0]):
            raise InvalidRequest(f"there is no team {reach.team_id}", param="team_id")
        reach = Reach(rows[0][0], reach.team_id)
    elif reach.tenant_id and not (yield Fetch(_TENANT, (reach.tenant_id,))):
        raise InvalidRequest(f"there is no tenant {reach.tenant_id}", param="tenant_id")
    admin_key_id, secret = secrets.new_key(
        os.urandom(secrets.ID_RANDOM_BYTES), secret_bytes or os.urandom(secrets.SECRET_RANDOM_BYTES)
    )
    said = {"name": name, "role": role, "tenant_id": reach.tenant_id, "team_id": reach.team_id}
    _, now_ms = yield from audit.record(actor, "admin_key.create", f"admin_key:{admin_key_id}", said)
    made = AdminKey(admin_key_id, name, role, reach, now_ms, expires_at_ms)
    stored = secrets.hmac_of(pepper, secret)
    values = (name, role.value, reach.tenant_id, reach.team_id, now_ms, expires_at_ms)
    yield Fetch(_ADD, (admin_key_id, stored, *values))
    return made, admin_key_text(admin_key_id, secret)


def revoke_admin_key(actor: str, admin_key_id: str) -> Tx[AdminKey]:
    """Twice is once."""
    found = yield from admin_key(admin_key_id)
    if found.revoked_at_ms is not None:
        return found
    _, now_ms = yield from audit.record(actor, "admin_key.revoke", f"admin_key:{admin_key_id}", {})
    yield Fetch(_REVOKE, (admin_key_id, now_ms))
    return replace(found, revoked_at_ms=now_ms)


def _key_of(row: Row) -> AdminKey:
    """A row that begins with _COLUMNS."""
    admin_key_id, name, role, tenant_id, team_id, created_at_ms, expires_at_ms, revoked_at_ms = row[:8]
    reach = Reach(tenant_id, team_id)
    return AdminKey(admin_key_id, name, Role(role), reach, created_at_ms, expires_at_ms, revoked_at_ms)
