"""Dependency graphs: cycles and the order of execution. Pure."""

from __future__ import annotations

import graphlib
from collections.abc import Iterable, Mapping


def find_cycle(needs: Mapping[str, Iterable[str]]) -> list[str] | None:
    """Names that depend on each other in a cycle, first and last the same; None if there is no cycle."""
    try:
        graphlib.TopologicalSorter(needs).prepare()
    except graphlib.CycleError as error:
        cycle: list[str] = list(reversed(error.args[1]))
        return cycle
    return None


def dependency_waves(needs: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Names in execution order; the names of one wave can be processed at the same time."""
    known = {name: [other for other in others if other in needs] for name, others in needs.items()}
    sorter = graphlib.TopologicalSorter(known)
    sorter.prepare()
    waves = []
    while sorter.is_active():
        ready = sorted(sorter.get_ready())
        waves.append(ready)
        sorter.done(*ready)
    return waves
