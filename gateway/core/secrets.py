"""Virtual keys: `gw-<8 characters of id>-<43 characters of secret>`. Only the HMAC of the secret is stored.

A fast hash is enough, because the secret is 256 random bits; there is nothing to guess by dictionary.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re

ID_RANDOM_BYTES = 5
SECRET_RANDOM_BYTES = 32
_KEY = re.compile(r"gw-([a-z2-7]{8})-([A-Za-z0-9_-]{43})", re.ASCII)


def new_key(id_bytes: bytes, secret_bytes: bytes) -> tuple[str, str]:
    """(key id, secret) out of 5 and 32 random bytes."""
    if len(id_bytes) != ID_RANDOM_BYTES or len(secret_bytes) != SECRET_RANDOM_BYTES:
        raise ValueError(f"a key needs {ID_RANDOM_BYTES} and {SECRET_RANDOM_BYTES} random bytes")
    key_id = base64.b32encode(id_bytes).decode().lower()
    return key_id, secret_text(secret_bytes)


def secret_text(secret_bytes: bytes) -> str:
    """The secret of a key, as it stands in its text."""
    return base64.urlsafe_b64encode(secret_bytes).decode().rstrip("=")


def key_text(key_id: str, secret: str) -> str:
    """What the caller sends as its bearer token."""
    return f"gw-{key_id}-{secret}"


def parse_key(text: str) -> tuple[str, str] | None:
    """(key id, secret), or None if the text does not have the form of a key. Proves nothing."""
    match = _KEY.fullmatch(text)
    return (match[1], match[2]) if match else None


def hmac_of(pepper: bytes, secret: str) -> bytes:
    """HMAC-SHA-256 under the server's pepper: what is stored. Refuses an empty pepper."""
    if not pepper:
        raise ValueError("the pepper must not be empty")
    return hmac.digest(pepper, secret.encode(), hashlib.sha256)


def matches(pepper: bytes, secret: str, stored: bytes) -> bool:
    """True if `stored` is the HMAC of `secret`; takes the same time wherever they differ."""
    return hmac.compare_digest(hmac_of(pepper, secret), stored)
