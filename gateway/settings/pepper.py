"""The server's pepper: the secret under which virtual keys are stored as HMACs.

Losing it makes every issued key useless; with SQLite it lies beside the database and shares its fate.
"""

from __future__ import annotations

import os
import secrets
import stat

from gateway.settings.model import ConfigError, Problem, Settings

_BYTES = 32


def ensure_pepper(settings: Settings) -> bytes:
    """The configured pepper, else the one in `state_dir/pepper`, made there (mode 0600) the first time.

    Raises ConfigError if the directory cannot be written or the file can be read by others.
    """
    if settings.pepper is not None:
        return settings.pepper.reveal().encode()
    path = settings.state_dir / "pepper"
    try:
        settings.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            _make(path.with_name(f"pepper.{os.getpid()}"), path)
        mode = path.stat().st_mode
        text = path.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        hint = "make the directory writable, or set TOLLHOUSE_PEPPER"
        raise ConfigError([Problem(str(path), 0, "", f"cannot be used: {_why(error)}", hint)]) from error
    if stat.S_IMODE(mode) & 0o077:
        raise ConfigError([Problem(str(path), 0, "", "can be read by other users", f"chmod 600 {path}")])
    if len(text) < _BYTES:
        raise ConfigError(
            [Problem(str(path), 1, "", "is too short to be a pepper", "restore it from a backup")]
        )
    return text.encode()


def _make(draft: os.PathLike[str], path: os.PathLike[str]) -> None:
    """Written aside and linked into place: of two workers that start at once, one wins and both read the same."""
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.write(descriptor, secrets.token_hex(_BYTES).encode() + b"\n")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    try:
        os.link(draft, path)
    except FileExistsError:
        pass
    finally:
        os.unlink(draft)


def _why(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else "it is not text"
