"""Node packages for tests: installed once per lock file below var/, or not at all, and then said aloud."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import tempfile
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent / "npm"
_CACHE = Path(__file__).resolve().parents[2] / "var" / "node-clients"
INSTALL_TIMEOUT_S = 45


class NodeMissing(Exception):
    """The Node libraries cannot be had here; the message says why."""


def installed() -> Path:
    """The directory that holds node_modules. Raises `NodeMissing` without node or npm, or without a registry."""
    lock = (PACKAGE / "package-lock.json").read_bytes()
    ready = _CACHE / hashlib.sha256(lock).hexdigest()[:16]
    if not shutil.which("node"):
        raise NodeMissing("node is not installed")
    if ready.exists():
        return ready
    npm = shutil.which("npm")
    if npm is None:
        raise NodeMissing("npm is not installed")
    _CACHE.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=_CACHE))
    try:
        for name in ("package.json", "package-lock.json"):
            shutil.copy(PACKAGE / name, made)
        command = [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--fetch-retries=0"]
        result = subprocess.run(
            command, cwd=made, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False
        )
        if result.returncode:
            raise NodeMissing(f"npm ci failed: {' '.join(result.stderr.split())[:300]}")
        if not ready.exists():  # else another run was faster
            made.rename(ready)
        return ready
    except subprocess.TimeoutExpired as late:
        raise NodeMissing(f"npm ci did not end within {INSTALL_TIMEOUT_S} s") from late
    finally:
        shutil.rmtree(made, ignore_errors=True)
