"""What `tollhouse calibrate` has measured, kept in `state_dir`; what the configuration says goes before it.

It counts only for the upstream model at which it was measured: a rate is of one model on one kind of GPU.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import msgspec

from gateway.core.calibration import Calibration
from gateway.core.catalog import Deployment

FILE = "calibration.json"
_FASTEST = 1e9


def kept(state_dir: Path) -> dict[str, Calibration]:
    """By deployment. A file that cannot be read is as good as none: it can be measured again."""
    try:
        rows = msgspec.json.decode((state_dir / FILE).read_bytes(), type=dict[str, Calibration])
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return {}
    return {name: row for name, row in rows.items() if 0 < row.prefill_tokens_per_s < _FASTEST}


def keep(state_dir: Path, deployment: str, found: Calibration) -> Path:
    """Beside what is known of others, in the place of what was known of this one. Returns the file."""
    known = kept(state_dir) | {deployment: found}
    state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    path, draft = state_dir / FILE, state_dir / f"{FILE}.{os.getpid()}"
    rows = {name: dataclasses.asdict(one) for name, one in sorted(known.items())}
    draft.write_text(json.dumps(rows, indent=2) + "\n", "utf-8")
    draft.replace(path)
    return path


def calibrated(deployment: Deployment, known: dict[str, Calibration]) -> Deployment:
    """With the measured rate of prefill, where the configuration says none."""
    source, found = deployment.replicas, known.get(deployment.name)
    if source is None or found is None or found.upstream_model != deployment.upstream_model:
        return deployment
    if source.prefill_tokens_per_s is not None:
        return deployment
    measured = dataclasses.replace(source, prefill_tokens_per_s=found.prefill_tokens_per_s)
    return dataclasses.replace(deployment, replicas=measured)
