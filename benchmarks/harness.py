"""Run benchmarks: ``python -m benchmarks.harness [NAME …]``; all of them without a name.

Each prints its table, draws ``results/NAME.png``, writes ``results/NAME.json`` and brings the figures in the
texts up to date (`benchmarks.markers`).  A missed goal is shown as missed and is not a failure; the exit code
is 1 only when a benchmark itself failed.  ``QUICK=1`` measures the same things for less time; its results go
to ``quick/`` and change no text.  The goals of a full run are compared with `benchmarks.goals`.

A row states the load it was measured under, and a p50 or p99 the number of its samples.  A percentile of
fewer than `markers.SAMPLES_MIN` samples is shown with the word "few".
"""

from __future__ import annotations

import asyncio
import datetime
import importlib
import json
import os
import pathlib
import pkgutil
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import benchmarks
from benchmarks import goals, markers, plots
from muster.bus.brokers import binary
from muster.core import errors

RESULTS = pathlib.Path(__file__).parent / "results"
QUICK_RESULTS = pathlib.Path(__file__).parent / "quick"  # not kept: they fill no text
RUN_S_MAX = 900
QUICK_S_MAX = 300  # a minute of an idle machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure. ``goal`` is the issue's; ``goal_is`` says whether our figure or the ratio has to reach it.

    ``ratio`` compares with the peer so that more is better, whichever way the metric goes: 2 means twice as
    good.  ``samples`` counts the independent measurements of a percentile; ``peer_samples`` is given where
    the peer has another number.  ``load`` names the parameters that the metric's name does not.
    """

    metric: str
    ours: float
    unit: str
    better: Literal["lower", "higher"]
    paper: float | None = None
    peer: float | None = None
    peer_name: str | None = None
    goal: float | None = None
    goal_is: Literal["ours", "ratio"] = "ours"
    samples: int | None = None
    peer_samples: int | None = None
    load: str = ""

    @property
    def ratio(self) -> float | None:
        if not self.peer or not self.ours:
            return None
        return self.ours / self.peer if self.better == "higher" else self.peer / self.ours

    @property
    def met(self) -> bool | None:
        if self.goal is None:
            return None
        if self.goal_is == "ratio":
            return self.ratio is not None and self.ratio >= self.goal
        return self.ours >= self.goal if self.better == "higher" else self.ours <= self.goal

    def as_json(self) -> dict[str, Any]:
        return {
            "metric": self.metric,
            "ours": _rounded(self.ours),
            "unit": self.unit,
            "better": self.better,
            "paper": self.paper,
            "peer": _rounded(self.peer),
            "peer_name": self.peer_name,
            "ratio": _rounded(self.ratio),
            "goal": self.goal,
            "met": self.met,
            "samples": self.samples,
            "peer_samples": self.peer_samples,
            "load": self.load,
        }

    def goal_text(self) -> str:
        if self.goal is None:
            return "–"
        if self.goal_is == "ratio":
            return f"≥ {self.goal:g} × peer"
        return f"{'≥' if self.better == 'higher' else '≤'} {markers.figure(self.goal)}"


def under(load: str, rows: Iterable[Row]) -> list[Row]:
    """These rows, measured under this load; a row that states its own load keeps it."""
    return [replace(row, load=row.load or load) for row in rows]


def names() -> list[str]:
    """The modules here that have a ``run``."""
    modules = (module.name for module in pkgutil.iter_modules(benchmarks.__path__))
    return sorted(name for name in modules if hasattr(importlib.import_module(f"benchmarks.{name}"), "run"))


def table(rows: list[Row]) -> str:
    head = ("metric", "ours", "unit", "paper", "peer", "ratio", "goal", "met", "samples", "load")
    labels = markers.load_labels(row.load for row in rows)
    body = [
        (
            row.metric,
            markers.figure(row.ours),
            row.unit,
            markers.figure(row.paper),
            f"{markers.figure(row.peer)} {row.peer_name or ''}".strip(),
            markers.figure(row.ratio),
            row.goal_text(),
            {True: "yes", False: "MISSED", None: "–"}[row.met],
            markers.samples(row.metric, row.samples, row.peer_samples),
            labels.get(row.load, "–"),
        )
        for row in rows
    ]
    widths = [max(len(line[column]) for line in (head, *body)) for column in range(len(head))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in (head, tuple("-" * width for width in widths), *body)
    ]
    return "\n".join([*lines, *(f"{label}: {load}" for load, label in labels.items())])


def machine(quick: bool) -> dict[str, Any]:
    """What the figures depend on, and nothing by which the machine could be recognised."""
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "python": platform.python_version(),
        "nats_server": _nats_server(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "run": "quick" if quick else "full",
    }


def write(name: str, rows: list[Row], quick: bool, results: pathlib.Path = RESULTS) -> pathlib.Path:
    results.mkdir(exist_ok=True)
    content = {"name": name, "machine": machine(quick), "rows": [row.as_json() for row in rows]}
    path = results / f"{name}.json"
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    return path


def run_one(name: str, quick: bool) -> bool:
    """Whether it has measured all that the texts show. Otherwise their figures and the stored result stay."""
    module = importlib.import_module(f"benchmarks.{name}")
    print(
        f"bench-{name}{' (quick)' if quick else ''}: {(module.__doc__ or name).splitlines()[0]}\n", flush=True
    )
    limit_s = (
        getattr(module, "QUICK_S_MAX", QUICK_S_MAX) if quick else getattr(module, "RUN_S_MAX", RUN_S_MAX)
    )

    def give_up(*_: object) -> None:
        raise errors.TimedOut(f"bench-{name} did not end in {limit_s} s")

    signal.signal(signal.SIGALRM, give_up)
    signal.alarm(limit_s)
    start = time.monotonic()
    rows: list[Row] = module.run(quick)
    signal.alarm(0)
    print(table(rows))
    missing = [] if quick else markers.missing(name, [row.metric for row in rows])
    is_stored = not quick and not missing
    path = write(name, rows, quick, RESULTS if is_stored else QUICK_RESULTS)
    plots.draw(name, rows, path.with_suffix(".png"))
    changed = markers.fill_all() if is_stored else []
    for metric in missing:
        print(f"not stored: the texts show {metric!r}, which this run has not measured")
    if not quick:
        for difference in goals.differences(name, [row.as_json() for row in rows]):
            print(f"differs from benchmarks/goals.py: {difference}")
    missed = sum(row.met is False for row in rows)
    print(
        f"\n{missed} of {sum(row.goal is not None for row in rows)} goals missed; "
        f"{time.monotonic() - start:.0f} s; written: {', '.join(_short(file) for file in (path, *changed))}\n"
    )
    return not missing


def main(arguments: list[str]) -> int:
    quick = os.environ.get("QUICK", "") not in ("", "0")
    if len(arguments) == 1:
        known = names()
        if arguments[0] not in known:
            print(f"no benchmark is called {arguments[0]!r}; there are: {', '.join(known)}", file=sys.stderr)
            return 2
        return 0 if run_one(arguments[0], quick) else 1
    failed = [
        # In a process of its own, so that none inherits another's memory, threads or limits.
        name
        for name in arguments or names()
        if subprocess.run([sys.executable, "-m", "benchmarks.harness", name], check=False).returncode
    ]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def _short(path: pathlib.Path) -> str:
    return str(path.relative_to(RESULTS.parents[1]))


def _cpu() -> str:
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    models = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return models[0] if models else platform.machine()


def _nats_server() -> str:
    return binary.show(asyncio.run(binary.find()).version)


if __name__ == "__main__":
    from benchmarks import harness  # under its own name, as the benchmarks know it

    sys.exit(harness.main(sys.argv[1:]))
