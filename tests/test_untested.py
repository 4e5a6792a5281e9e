"""What could not be tried is said once at the end, in one process as in several."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CONFTEST = """
from tests.support.untested import Untested

def pytest_configure(config):
    config.pluginmanager.register(Untested())
"""
TESTS = """
import pytest
from tests.support.untested import untested

@pytest.mark.parametrize("n", range(4))
def test_it(n):
    untested("The dark side of the moon was not reached.")
"""


@pytest.mark.parametrize("processes", [0, 2])
def test_it_is_said_once_whoever_met_it(tmp_path: Path, processes: int) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TESTS)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-n",
            str(processes),
            "-p",
            "no:cacheprovider",
            "-p",
            "no:asyncio",
            "-p",
            "no:schemathesis",
        ],
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    said = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    assert said[-1].startswith("4 passed")
    assert said.count("The dark side of the moon was not reached.") == 1
    assert sum("NOT TESTED" in line for line in said) == 1
