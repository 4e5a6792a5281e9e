"""Schemathesis finds nothing on what keys, teams, budgets and tasks do, its links followed. `make fuzz-admin` plays it all."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

from tests.admin.fuzz import DOCUMENT
from tests.admin.office import Office
from tests.admin.stateful import judged


async def test_somebody_else_finds_nothing_either(it: Office, tmp_path: Path) -> None:
    paths = "^/admin/v1/(keys|teams|budgets|tasks)"
    verdict = await judged(it, tmp_path, examples=2, phases="fuzzing,stateful", paths=paths)
    assert (verdict.status, verdict.faults) == (0, ()), verdict.said
    assert verdict.cases > 60
    assert "inferred)" in verdict.said  # links of the document and those that it found itself


async def test_an_answer_that_is_not_as_promised_is_found(it: Office, tmp_path: Path) -> None:
    promised = deepcopy(DOCUMENT)
    answers = promised["paths"]["/admin/v1/me"]["get"]["responses"]
    answers["200"]["content"]["application/json"]["schema"] = {"type": "integer"}
    verdict = await judged(
        it, tmp_path, examples=1, phases="fuzzing", paths="^/admin/v1/me$", promised=promised
    )
    assert (verdict.status, verdict.faults) == (1, ()), verdict.said
    assert "violates schema" in verdict.said
