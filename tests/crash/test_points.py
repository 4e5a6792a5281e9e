"""Nobody dies without an order, and nothing of this is there without the setting. `make crash` counts the deaths."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from gateway import settings as config
from gateway.crash import Crash, Point


def test_only_the_point_that_is_ordered_kills_and_only_once(tmp_path: Path) -> None:
    order = tmp_path / "crash"
    deaths: list[str] = []
    crash = Crash(order, die=lambda: deaths.append("died"))
    for point in Point:
        crash.reached(point)
    assert deaths == []
    order.write_text(Point.BEFORE_SEND)
    crash.reached(Point.AFTER_HEADERS)
    assert (deaths, order.exists()) == ([], True)
    crash.reached(Point.BEFORE_SEND)
    crash.reached(Point.BEFORE_SEND)
    assert (deaths, order.exists()) == (["died"], False)


def test_it_is_off_unless_the_environment_says_otherwise(tmp_path: Path) -> None:
    shipped = config.shipped("config/gateway.yaml")
    assert config.load(shipped, {}).crash_file is None
    named = config.load(shipped, {"TOLLHOUSE_CRASH_FILE": str(tmp_path / "crash")})
    assert named.crash_file == tmp_path / "crash"


def test_a_gateway_that_is_not_to_crash_does_not_load_it() -> None:
    loads = "import sys, gateway.app, gateway.start; sys.exit('gateway.crash' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", loads], check=False).returncode == 0
