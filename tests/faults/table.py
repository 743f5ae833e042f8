"""The table of stored results: killed and frozen side by side."""

from __future__ import annotations

import collections
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from tests.faults import checker, nemesis

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).parent / "results.json"


def load() -> list[checker.Result]:
    return msgspec.json.decode(RESULTS.read_bytes(), type=list[checker.Result]) if RESULTS.exists() else []


def save(results: Iterable[checker.Result]) -> None:
    """Replace the stored results of the same faults."""
    new = list(results)
    replaced = {(result.fault, result.workload) for result in new}
    kept = [result for result in load() if (result.fault, result.workload) not in replaced]
    order = list(nemesis.FAULTS)
    stored = sorted(kept + new, key=lambda result: order.index(result.fault))
    RESULTS.write_bytes(msgspec.json.format(msgspec.json.encode(stored), indent=1) + b"\n")


def text(results: Iterable[checker.Result]) -> str:
    """``killed / frozen`` where a fault is one of the two."""
    rows: dict[tuple[str, str], dict[str, list[checker.Result]]] = {}
    for result in results:
        fault = nemesis.FAULTS[result.fault]
        verb = result.fault.split("-")[0] if result.fault.startswith(("kill-", "freeze-")) else ""
        place = "domain on three machines" if fault.kind == "machines" else "domain on one machine"
        by_verb = rows.setdefault(
            (f"{fault.words} ({place})", result.workload), collections.defaultdict(list)
        )
        by_verb[verb].append(result)
    lines = [
        "| guarantee | fault | workload | runs | operations | violations | longest unavailability |",
        "|---|---|---|---|---|---|---|",
    ]
    for (fault_words, workload), by_verb in rows.items():
        every = [result for group in by_verb.values() for result in group]
        longest = {verb: _longest(group) for verb, group in by_verb.items()}
        if "" in longest:
            shown = longest[""]
        else:
            words = {"kill": "killed", "freeze": "frozen"}
            shown = ", ".join(f"{words[verb]} {longest[verb]}" for verb in words if verb in longest)
        lines.append(
            f"| {checker.WORKLOADS[workload].guarantee} | {fault_words} | {workload} | {_runs(by_verb)} | "
            f"{sum(result.operations for result in every):,} | "
            f"{sum(len(result.violations) for result in every)} | {shown} |"
        )
    return "\n".join(lines) + "\n"


def _longest(group: list[checker.Result]) -> str:
    """For what cannot work before the end of a fault, also the time after it."""
    text = f"{max(result.unavailable_s for result in group):.1f} s"
    restored_s = [result.restored_s for result in group if result.restored_s is not None]
    if restored_s and nemesis.FAULTS[group[0].fault].lasting:
        text += f" ({max(restored_s):.1f} s after the fault)"
    return text


def _runs(by_verb: dict[str, list[checker.Result]]) -> str:
    return " + ".join(str(len(group)) for group in by_verb.values())


def markdown(stored: Any) -> str:
    """The table of the documentation."""
    results = msgspec.convert(stored, list[checker.Result])
    dates = sorted({result.date for result in results})
    loads = [result.load for result in results]
    return (
        f"Measured {' to '.join(dict.fromkeys((dates[0], dates[-1])))}; load of the machine (two cores) when "
        f"the runs began: {min(loads):.1f} to {max(loads):.1f}.\n\n{text(results)}"
    )
