"""Schemathesis over the admin API's document, its links followed: the judgement of somebody else on the same promises.

    python -m tests.admin.stateful --examples 30 --seed 0        (make fuzz-admin)

It runs in a process of its own against a listener of this one, whose faults must be none as well.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.storage.schema import migrate
from tests.admin.fuzz import DOCUMENT
from tests.admin.office import ADMIN_KEY, Office, office

#: What a schema cannot say (one limit of four, a price that there is); what is read kindly (numbers as text); wrong keys,
#: many of which have an answer of their own (test_listener); and `Allow`, where "bulk" could be the id of a key as well.
BEYOND = "positive_data_acceptance,negative_data_rejection,missing_required_header,ignored_auth,allow_header_conformance"
_CASES = re.compile(r"([\d,]+) generated")


@dataclass(frozen=True, slots=True)
class Verdict:
    status: int  # of Schemathesis: 0 if nothing was found
    said: str
    faults: tuple[tuple[str, str], ...]  # that the server caught

    @property
    def cases(self) -> int:
        found = _CASES.search(self.said)
        return int(found[1].replace(",", "")) if found else 0


async def judged(
    it: Office,
    folder: Path,
    *,
    examples: int,
    seed: int = 0,
    phases: str = "examples,coverage,fuzzing,stateful",
    paths: str = "",
    promised: dict[str, Any] = DOCUMENT,
) -> Verdict:
    """`examples`: how many requests an operation gets at most, or chains of them there are; `paths`: a pattern of those meant."""
    document = folder / "openapi.json"
    document.write_text(json.dumps(promised))
    options = ("--max-examples", examples, "--seed", seed, "--phases", phases, "--max-failures", 5)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "schemathesis.cli", "run", str(document), "--origin", it.url, "--no-color"),
        *(
            "-H",
            f"Authorization: Bearer {ADMIN_KEY}",
            "--suppress-health-check",
            "all",
            "--exclude-checks",
            BEYOND,
        ),
        *map(str, options),
        *(("--include-path-regex", paths) if paths else ()),
        cwd=folder,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        said, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return Verdict(process.returncode or 0, said.decode(), tuple(it.faults))


async def _main(examples: int, seed: int) -> int:
    with tempfile.TemporaryDirectory(prefix="tollhouse-schemathesis-") as name:
        url = f"sqlite:///{Path(name) / 'fuzz.db'}"
        await migrate(url)
        async with office(url) as it:
            verdict = await judged(it, Path(name), examples=examples, seed=seed)
    print(verdict.said)
    for fault in verdict.faults:
        print(f"the server caught: {fault}", file=sys.stderr)
    return 1 if verdict.status or verdict.faults else 0


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--examples", type=int, default=30)
    options.add_argument("--seed", type=int, default=0)
    given = options.parse_args()
    sys.exit(asyncio.run(_main(given.examples, given.seed)))
