"""Bars for `replay`: in the terminal, and as an SVG file."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from gateway.commands.output import dollars

_WIDTH = 60
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_COLOURS = ("#9aa0a6", "#d98c5f", "#7aa6c2", "#3d7ea6", "#2f5d7c", "#5b8c5a")

#: (what it is called, nano-dollars)
Amounts = Sequence[tuple[str, int]]


def bars(amounts: Amounts) -> list[str]:
    """A line per amount, the largest as long as the plot is wide."""
    most = max((amount for _, amount in amounts), default=0) or 1
    label = max((len(name) for name, _ in amounts), default=0)
    lines = []
    for name, amount in amounts:
        whole, rest = divmod(amount * _WIDTH * 8 // most, 8)
        bar = "█" * whole + (_EIGHTHS[rest] if rest else "")
        lines.append(f"{name:<{label}}  {bar:<{_WIDTH}}  {dollars(round(amount, -3))}")
    return lines


def svg(title: str, runs: Sequence[tuple[str, Amounts]]) -> str:
    """One group of bars per run."""
    row, gap, left, width = 14, 12, 220, 560
    most = max((amount for _, amounts in runs for _, amount in amounts), default=0) or 1
    y = 40
    parts = []
    for run, amounts in runs:
        parts.append(f'<text x="8" y="{y + row}" font-weight="bold">{escape(run)}</text>')
        for i, (name, amount) in enumerate(amounts):
            length = round(amount * width / most, 1)
            colour = _COLOURS[i % len(_COLOURS)]
            parts.append(
                f'<text x="{left - 8}" y="{y + 11}" text-anchor="end">{escape(name)}</text>'
                f'<rect x="{left}" y="{y + 1}" width="{length}" height="{row - 2}" fill="{colour}"/>'
                f'<text x="{left + length + 6}" y="{y + 11}">{dollars(round(amount, -3))}</text>'
            )
            y += row
        y += gap
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 140}" height="{y + 8}" '
        'font-family="sans-serif" font-size="11">'
        f'<rect width="100%" height="100%" fill="white"/><text x="8" y="22" font-size="14">{escape(title)}</text>'
    )
    return head + "".join(parts) + "</svg>\n"
