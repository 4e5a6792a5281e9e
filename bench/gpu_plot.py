"""Hit rate against first-token time as SVG, a panel per workload and load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from math import log10
from typing import Any

_COLOURS = ("#8c8c8c", "#b07aa1", "#f28e2b", "#edc948", "#9c755f", "#4e79a7", "#59a14f", "#e15759", "#000000")
_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 250, 190, 50, 60, 58


def plot(rows: Sequence[Mapping[str, Any]], titles: Mapping[str, str]) -> str:
    """`rows` as of gpu_routing.Row. Right and down is better; the dashed line is the best possible hit rate."""
    workloads = list(dict.fromkeys(r["workload"] for r in rows))
    loads = list(dict.fromkeys(r["load"] for r in rows))
    colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(titles)}
    width = _LEFT + len(loads) * (_WIDTH + _GAP)
    legend_top = _TOP + len(workloads) * (_HEIGHT + _GAP) + 10
    used = [name for name in titles if any(r["policy"] == name for r in rows)]
    height = legend_top + 18 * len(used) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        'font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{_LEFT}" y="22" font-size="15">Hit rate (right is better) and first token p90 in seconds, '
        "logarithmic (down is better)</text>",
    ]
    for row, workload in enumerate(workloads):
        for column, load in enumerate(loads):
            here = [r for r in rows if r["workload"] == workload and r["load"] == load]
            left, top = _LEFT + column * (_WIDTH + _GAP), _TOP + row * (_HEIGHT + _GAP)
            parts += _panel(here, f"{workload}, {load}", left, top, colours)
    for i, name in enumerate(used):
        y = legend_top + 18 * i
        parts.append(f'<circle cx="{_LEFT + 6}" cy="{y}" r="5" fill="{colours[name]}"/>')
        parts.append(f'<text x="{_LEFT + 18}" y="{y + 4}">{escape(titles[name])}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _panel(
    rows: Sequence[Mapping[str, Any]], title: str, left: int, top: int, colours: Mapping[str, str]
) -> list[str]:
    best = max((r["best_hit_rate"] for r in rows), default=1.0)
    times = [max(0.01, r["first_token_p90_s"]) for r in rows] or [1.0]
    least, most = log10(min(times)) - 0.1, log10(max(times)) + 0.1

    def across(hit: float) -> float:
        return left + _WIDTH * hit / (best * 1.05)

    def down(seconds: float) -> float:
        return top + _HEIGHT * (1 - (log10(max(0.01, seconds)) - least) / (most - least))

    parts = [
        f'<text x="{left}" y="{top - 6}" font-weight="bold">{escape(title)}</text>',
        f'<rect x="{left}" y="{top}" width="{_WIDTH}" height="{_HEIGHT}" fill="none" stroke="#cccccc"/>',
        f'<line x1="{across(best):.1f}" x2="{across(best):.1f}" y1="{top}" y2="{top + _HEIGHT}" stroke="#888888" '
        'stroke-dasharray="4 3"/>',
    ]
    for part in (0.0, 0.25, 0.5, 0.75, 1.0):
        at = across(best * part)
        parts.append(
            f'<text x="{at:.1f}" y="{top + _HEIGHT + 14}" text-anchor="middle">{best * part:.0%}</text>'
        )
    for tick in (t for e in range(-2, 4) for t in (10.0**e, 3 * 10.0**e)):
        if least <= log10(tick) <= most:
            y = down(tick)
            parts.append(f'<text x="{left - 5}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
            parts.append(
                f'<line x1="{left}" x2="{left + _WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#eeeeee"/>'
            )
    # Ours last, so that no other point hides it.
    for r in sorted(rows, key=lambda r: r["policy"] == "ours"):
        size = 6 if r["policy"] == "ours" else 4.5
        parts.append(
            f'<circle cx="{across(r["hit_rate"]):.1f}" cy="{down(r["first_token_p90_s"]):.1f}" r="{size}" '
            f'fill="{colours[r["policy"]]}" fill-opacity="0.85"/>'
        )
    return parts
