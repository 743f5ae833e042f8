"""One picture a benchmark: a panel for each unit, bars for us, the peer and the paper, marks for goals."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from benchmarks import markers

if TYPE_CHECKING:
    from benchmarks import harness

COLOURS = {"ours": "#1b6ca8", "peer": "#9fb4c0", "paper": "#d9a441"}
GOAL_COLOUR = "#c0392b"
BAR_INCHES = 0.22
DOTS_PER_INCH = 100
LOGARITHMIC_FROM = 30  # times the smallest figure
ROWS_MAX = 30  # of more, only those with something to be held against are drawn; the table has them all


def draw(name: str, rows: Sequence[harness.Row], path: pathlib.Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import artist, lines, patches, pyplot

    if len(rows) > ROWS_MAX:
        rows = [row for row in rows if row.goal is not None or row.paper is not None]
    panels: dict[str, list[harness.Row]] = {}
    for row in rows:
        panels.setdefault(row.unit, []).append(row)
    heights = [sum(len(_bars(row)) + 1 for row in panel) + 2 for panel in panels.values()]
    figure, axes = pyplot.subplots(
        len(panels),
        figsize=(8, BAR_INCHES * sum(heights) + 0.6),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
    )
    for axis, (unit, panel) in zip(axes[:, 0], panels.items(), strict=True):
        _panel(axis, unit, panel)
    peers = sorted({row.peer_name for row in rows if row.peer_name})
    labels = {"ours": "Muster", "peer": " / ".join(peers) or "peer", "paper": "paper"}
    used = [kind for kind in COLOURS if any(kind in _bars(row) for row in rows)]
    handles: list[artist.Artist] = [
        patches.Rectangle((0, 0), 1, 1, color=COLOURS[kind], label=labels[kind]) for kind in used
    ]
    if any(row.goal is not None for row in rows):
        handles.append(lines.Line2D([], [], color=GOAL_COLOUR, linewidth=2, label="goal"))
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False)
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=DOTS_PER_INCH, metadata={"Title": f"bench-{name}"})
    pyplot.close(figure)


def _panel(axis: Any, unit: str, rows: Sequence[harness.Row]) -> None:
    place, ticks = 0.0, []
    values = []
    for row in rows:
        bars = _bars(row)
        ticks.append((place + (len(bars) - 1) / 2, row.metric))
        for offset, (kind, value) in enumerate(bars.items()):
            axis.barh(place + offset, value, height=0.85, color=COLOURS[kind])
            axis.annotate(
                markers.figure(value),
                (value, place + offset),
                xytext=(3, 0),
                textcoords="offset points",
                va="center",
                fontsize=7,
                zorder=3,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5},
            )
            values.append(value)
        if (goal := _goal(row)) is not None:
            axis.plot([goal, goal], [place - 0.5, place + len(bars) - 0.5], color=GOAL_COLOUR, linewidth=2)
            values.append(goal)
        place += len(bars) + 1
    axis.set_yticks([at for at, _ in ticks], [metric for _, metric in ticks], fontsize=8)
    axis.invert_yaxis()
    lower = all(row.better == "lower" for row in rows)
    axis.set_xlabel(f"{unit} ({'less' if lower else 'more'} is better)", fontsize=8)
    axis.tick_params(axis="x", labelsize=7)
    axis.margins(x=0.12)
    positive = [value for value in values if value > 0]
    if positive and max(positive) > LOGARITHMIC_FROM * min(positive):
        axis.set_xscale("log")
    axis.xaxis.set_major_formatter(lambda value, _: markers.figure(value))
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _bars(row: harness.Row) -> dict[str, float]:
    values = {"ours": row.ours, "peer": row.peer, "paper": row.paper}
    return {kind: value for kind, value in values.items() if value is not None}


def _goal(row: harness.Row) -> float | None:
    if row.goal is None or row.goal_is == "ours":
        return row.goal
    if row.peer is None:
        return None
    return row.peer * row.goal if row.better == "higher" else row.peer / row.goal
