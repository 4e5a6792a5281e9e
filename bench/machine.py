"""What a process and its group use, by the kernel's count; and what machine this is."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def _group_stats(pgid: int) -> Iterator[list[str]]:
    """The fields of /proc/<pid>/stat from the state on, for every process of the group."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it ended while we looked
            continue
        if int(fields[2]) == pgid:
            yield fields


def group_rss_mb(pgid: int) -> float:
    """Resident memory of a process group in MB (1e6 bytes)."""
    return sum(int(fields[21]) for fields in _group_stats(pgid)) * _PAGE_BYTES / 1e6


def cpu_s(pid: int) -> float:
    """CPU time that a process and its living descendants have used, user and system.

    By parents, not by group: each backend of Postgres leads a group of its own.
    """
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it ended while we looked
            continue
        child = int(stat.parent.name)
        parents[child], ticks[child] = int(fields[1]), int(fields[11]) + int(fields[12])
    return sum(used for child, used in ticks.items() if _descends(child, pid, parents)) / _TICKS_PER_S


def _descends(child: int, pid: int, parents: dict[int, int]) -> bool:
    while child != pid and child in parents:
        child = parents[child]
    return child == pid


def busy_s() -> float:
    """CPU time that everything on this machine has used since its start."""
    first = Path("/proc/stat").read_text().partition("\n")[0]
    user, nice, system, _idle, _wait, irq, softirq, *_ = map(int, first.split()[1:])
    return (user + nice + system + irq + softirq) / _TICKS_PER_S


def description() -> str:
    """One line for the head of a table."""
    cpu = next(
        (
            x.partition(":")[2].strip()
            for x in Path("/proc/cpuinfo").read_text().splitlines()
            if x.startswith("model name")
        ),
        platform.machine(),
    )
    return f"{os.cpu_count()} cores ({cpu}), Linux {platform.release().split('-')[0]}, Python {platform.python_version()}"
