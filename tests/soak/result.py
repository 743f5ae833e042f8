"""The verdict of a run: as text, as JSON, as a plot, and as tables of the documentation."""

from __future__ import annotations

import json
import pathlib
from typing import Any

from muster.core.formats import line_plot
from tests.soak import sizes, trends

ROOT = pathlib.Path(__file__).parents[2]
FILE = pathlib.Path(__file__).parent / "result.json"
PLOT = ROOT / "docs" / "pictures" / "soak.svg"
MEGABYTE = 1e6
UNITS = {"memory": ("MB", MEGABYTE), "bytes": ("MB", MEGABYTE)}


def quantity(size: str, value: float) -> str:
    unit, scale = UNITS.get(size, ("", 1.0))
    return f"{value / scale:,.1f} {unit}" if unit else f"{value:,.0f}"


def text(result: dict[str, Any]) -> str:
    """The whole result for the terminal."""
    lines = [_summary(result), ""]
    lines += [
        f"{row['name']:24} {row['accepted']:>7,} acknowledged, {row['in_doubt']:>4} in doubt, "
        f"{row['marked']:>4} repeated with a mark, longest delivery {row['delay_max_s']:.1f} s"
        for row in result["deliveries"]
    ]
    lines += [
        f"{row['name']:24} {row['writes']:>7,} acknowledged, {row['reads']:>7,} read"
        for row in result["writes"]
    ]
    lines.append(f"commands                 {result['commands']:>7,} acknowledged")
    lines += ["", f"{'':34} {'size':12} {'median':>12} {'last':>12} {'per hour':>12}"]
    for row in result["trends"]:
        slope = "–" if row["per_hour"] is None else quantity(row["size"], row["per_hour"])
        lines.append(
            f"{row['subject']:34} {row['size']:12} {quantity(row['size'], row['median']):>12} "
            f"{quantity(row['size'], row['last']):>12} {slope:>12}  {'level' if row['is_level'] else 'GROWS'}"
        )
    lines += ["", *(f"VIOLATION: {problem}" for problem in result["violations"])]
    return "\n".join(lines)


def _summary(result: dict[str, Any]) -> str:
    faults = result["faults"]
    replaced = [fault["replaced_s"] for fault in faults if fault["replaced_s"] is not None]
    growing = sum(not row["is_level"] for row in result["trends"])
    return (
        f"{result['minutes']:g} minutes with {result['fleet']:,} machines "
        f"({'with' if result['spark'] else 'without'} Spark), seed {result['seed']}, "
        f"{result['cpu_share']:.0%} of {result['cores']} cores used; "
        f"{len(faults)} faults, {len(faults) - len(replaced)} processes not replaced in time, "
        f"the slowest in {max(replaced, default=0):.0f} s; "
        f"{len(result['violations'])} violations, {growing} of {len(result['trends'])} sizes grow"
    )


def markdown(result: dict[str, Any]) -> str:
    """Tables of acknowledged work, and every size that grows or is largest of its kind."""
    lines = [
        f"{_summary(result)} ({result['date']}).",
        "",
        "| work | acknowledged | in doubt | repeated with a mark | longest delivery |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['name']} | {row['accepted']:,} | {row['in_doubt']} | {row['marked']} "
        f"| {row['delay_max_s']:.1f} s |"
        for row in result["deliveries"]
    ]
    lines += [
        f"| {row['name']} writes ({row['reads']:,} reads) | {row['writes']:,} | – | – | – |"
        for row in result["writes"]
    ]
    lines += [
        f"| commands to the fleet | {result['commands']:,} | – | – | – |",
        "",
        "| process, stream or file | size | median | change in an hour | verdict |",
        "|---|---|---|---|---|",
    ]
    for row in result["trends"]:
        if row["size"] in ("memory", "bytes") or not row["is_level"]:
            slope = "too short" if row["per_hour"] is None else quantity(row["size"], row["per_hour"])
            verdict = "not judged" if row["per_hour"] is None else "level" if row["is_level"] else "**grows**"
            lines.append(
                f"| {row['subject']} | {row['size']} | {quantity(row['size'], row['median'])} "
                f"| {slope} | {verdict} |"
            )
    lines += ["", "Descriptors, threads and tasks that are not listed do not grow.", ""]
    lines += [f"- violation: {problem}" for problem in result["violations"]]
    return "\n".join(lines) + ("\n" if result["violations"] else "")


def write(result: dict[str, Any], series: sizes.Series) -> None:
    FILE.write_text(json.dumps(result, indent=1) + "\n")
    PLOT.write_text(plot(series))


def plot(series: sizes.Series) -> str:
    """Memory of the processes, as a share of the median of each."""
    lines = {}
    for (subject, size), samples in series.items():
        if size == "memory" and "(" not in subject:
            median = trends.trend(subject, size, samples).median
            lines[subject] = [(sample.at_s / 60, sample.value / median) for sample in samples]
    longest = max((points[-1][0] for points in lines.values()), default=1.0)
    highest = max((value for points in lines.values() for _, value in points), default=2.0)
    return line_plot.svg(
        lines,
        line_plot.PlotAxis(
            0.0, longest, [(minute, f"{minute} min") for minute in range(0, int(longest), 10)]
        ),
        line_plot.PlotAxis(0.0, highest, [(0.5, "0.5"), (1.0, "1"), (1.5, "1.5")]),
        label="memory of each process, as a share of its median",
        height=320,
    )
