"""Answers that a real vLLM gave are recorded beside the project, not in it; where they are not, that is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.untested import untested

GOLDEN = Path(__file__).parents[3] / "shared" / "upstream" / "golden"

collect_ignore = [] if GOLDEN.is_dir() else ["test_golden.py"]
if collect_ignore:
    untested(
        "tests/vllm/test_golden.py: ../shared/upstream/golden, the answers of a real vLLM that the fake one is held "
        "against, is not beside this directory."
    )


@pytest.fixture
def golden() -> Path:
    return GOLDEN
