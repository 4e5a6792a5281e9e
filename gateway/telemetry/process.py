"""What the operating system says about this process, for the `process_*` metrics (Linux /proc)."""

from __future__ import annotations

import os
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def _stat_fields() -> list[str]:
    # The second field is the command in parentheses and may hold spaces: count from the last ")".
    return Path("/proc/self/stat").read_text().rpartition(")")[2].split()


def cpu_seconds() -> float:
    """User and system time of all threads."""
    times = os.times()
    return times.user + times.system


def resident_bytes() -> float:
    return float(int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES)


def virtual_bytes() -> float:
    return float(int(Path("/proc/self/statm").read_text().split()[0]) * _PAGE_BYTES)


def open_fds() -> float:
    return float(len(os.listdir("/proc/self/fd")))


def max_fds() -> float:
    for line in Path("/proc/self/limits").read_text().splitlines():
        if line.startswith("Max open files"):
            soft = line.split()[3]
            return float("inf") if soft == "unlimited" else float(soft)
    return float("inf")


def start_time_seconds() -> float:
    """Seconds since 1970 UTC at which this process started."""
    boot = next(
        int(line.split()[1])
        for line in Path("/proc/stat").read_text().splitlines()
        if line.startswith("btime ")
    )
    return boot + int(_stat_fields()[19]) / _TICKS_PER_S
