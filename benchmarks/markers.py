"""Figures in the texts stand between markers, and come from ``results/`` only.

    <!-- bench:bus:request p50 -->0.21 ms<!-- /bench -->            our figure with its unit
    <!-- bench:bus:request p50:peer -->0.25 ms<!-- /bench -->       or: peer, paper, goal, ratio
    <!-- bench-date:bus -->2026-11-16<!-- /bench-date -->                when

A ``*`` in a metric stands for any text, such as the size of a fleet that differs from run to run.

``make bench`` fills them after every run; a test compares them with the files.  A figure without a result is
an error.  Whole tables (`markdown`) are in the documentation site only.
"""

from __future__ import annotations

import fnmatch
import json
import pathlib
import re
from collections.abc import Iterable, Sequence
from typing import Any

from muster.core import errors

ROOT = pathlib.Path(__file__).parents[1]
FIELDS = ("ours", "peer", "paper", "goal", "ratio")
SAMPLES_MIN = 1000  # of a p50 or p99 that is worth quoting

_FIGURE = re.compile(r"(<!-- bench:([\w-]+):([^>]+?) -->)(.*?)(<!-- /bench -->)", re.DOTALL)
_DATE = re.compile(r"(<!-- bench-date:([\w-]+) -->)(.*?)(<!-- /bench-date -->)", re.DOTALL)
_PERCENTILE = re.compile(r"\bp\d{2}\b")


def figure(value: float | None) -> str:
    """Three digits are as many as a measurement here is worth."""
    if value is None:
        return "–"
    if value == 0:
        return "0"
    rounded = float(f"{value:.3g}")
    return f"{rounded:,.0f}" if abs(rounded) >= 100 else f"{rounded:g}"


def samples(metric: str, count: int | None, of_peer: int | None = None) -> str:
    """How many samples a figure has; a percentile says so where they are few or were not counted."""
    percentile = _PERCENTILE.search(metric) is not None
    if count is None:
        return "not counted" if percentile else "–"
    text = f"{count:,}" if of_peer in (None, count) else f"{count:,}; peer {of_peer:,}"
    few = percentile and min(count, count if of_peer is None else of_peer) < SAMPLES_MIN
    return f"{text} (few)" if few else text


def load_labels(loads: Iterable[str]) -> dict[str, str]:
    """A short label for each load, in the order of the rows."""
    different = dict.fromkeys(load for load in loads if load)
    return {load: f"L{number}" for number, load in enumerate(different, 1)}


def figure_names(text: str) -> set[str]:
    """The benchmarks of the single figures in a text."""
    return {match[2] for match in _FIGURE.finditer(text)}


def date_names(text: str) -> set[str]:
    return {match[2] for match in _DATE.finditer(text)}


def texts(root: pathlib.Path = ROOT) -> list[pathlib.Path]:
    return [path for path in (root / "README.md", *sorted((root / "docs").rglob("*.md"))) if path.exists()]


def fill(text: str, results: pathlib.Path) -> str:
    """The text with the figures of these results."""

    def replace_figure(match: re.Match[str]) -> str:
        metric, field = _metric(match)
        row = _row(results, match[2], metric)
        unit = "" if field == "ratio" else f" {row['unit']}"
        return f"{match[1]}{figure(row[field])}{unit}{match[5]}"

    def replace_date(match: re.Match[str]) -> str:
        return f"{match[1]}{_load(results, match[2])['machine']['date']}{match[4]}"

    return _DATE.sub(replace_date, _FIGURE.sub(replace_figure, text))


def missing(name: str, metrics: Sequence[str], root: pathlib.Path = ROOT) -> list[str]:
    """The metrics of a benchmark that the texts show and that are not among these."""
    shown = {
        _metric(match)[0]
        for text in texts(root)
        for match in _FIGURE.finditer(text.read_text())
        if match[2] == name
    }
    return sorted(metric for metric in shown if not fnmatch.filter(metrics, metric))


def fill_all(root: pathlib.Path = ROOT) -> list[pathlib.Path]:
    """The texts that changed."""
    changed = []
    for path in texts(root):
        before = path.read_text()
        after = fill(before, root / "benchmarks" / "results")
        if after != before:
            path.write_text(after)
            changed.append(path)
    return changed


def _metric(match: re.Match[str]) -> tuple[str, str]:
    """The metric of a marker, and the field that it shows."""
    metric, _, field = match[3].rpartition(":")
    return (metric, field) if field in FIELDS and metric else (match[3], "ours")


def markdown(result: dict[str, Any]) -> str:
    head = ("metric", "ours", "paper", "peer", "ratio", "goal", "met", "samples", "load")
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    labels = load_labels(row["load"] for row in result["rows"])
    for row in result["rows"]:
        peer = f"{figure(row['peer'])} ({row['peer_name']})" if row["peer"] is not None else "–"
        met = {True: "yes", False: "**missed**", None: "–"}[row["met"]]
        cells = (
            f"{row['metric']}, {row['unit']}",
            figure(row["ours"]),
            figure(row["paper"]),
            peer,
            figure(row["ratio"]),
            figure(row["goal"]),
            met,
            samples(row["metric"], row["samples"], row["peer_samples"]),
            labels.get(row["load"], "–"),
        )
        lines.append(f"| {' | '.join(cells)} |")
    if labels:
        lines += ["", *(f"- {label}: {load}" for load, label in labels.items())]
    about = result["machine"]
    lines.append(
        f"\n{about['cpu']}, {about['cores']} cores, {about['memory_gib']} GiB, Python {about['python']}, "
        f"nats-server {about['nats_server']}, {about['date']} ({about['run']} run)."
    )
    return "\n".join(lines) + "\n"


def _load(results: pathlib.Path, name: str) -> dict[str, Any]:
    path = results / f"{name}.json"
    if not path.exists():
        raise errors.NotFound(
            f"a text shows figures of bench-{name}, but it has no results", hint=f"run make bench-{name}"
        )
    result: dict[str, Any] = json.loads(path.read_text())
    return result


def _row(results: pathlib.Path, name: str, metric: str) -> dict[str, Any]:
    rows: list[dict[str, Any]] = _load(results, name)["rows"]
    for row in rows:
        if fnmatch.fnmatchcase(row["metric"], metric):
            return row
    known = ", ".join(row["metric"] for row in rows)
    raise errors.NotFound(f"bench-{name} measures no {metric!r}", hint=f"it measures: {known}")
