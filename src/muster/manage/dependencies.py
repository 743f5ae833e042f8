"""What depends on what. Pure."""

from __future__ import annotations

import graphlib
from collections.abc import Iterable, Mapping


def find_cycle(needs: Mapping[str, Iterable[str]]) -> list[str] | None:
    """Names that depend on each other in a circle, first and last the same; None where there is none."""
    try:
        graphlib.TopologicalSorter(needs).prepare()
    except graphlib.CycleError as error:
        found: list[str] = list(reversed(error.args[1]))
        return found
    return None


def dependency_waves(needs: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """Names in the order in which they may be acted upon: those of one wave at the same time."""
    known = {name: [other for other in others if other in needs] for name, others in needs.items()}
    sorter = graphlib.TopologicalSorter(known)
    sorter.prepare()
    found = []
    while sorter.is_active():
        ready = sorted(sorter.get_ready())
        found.append(ready)
        sorter.done(*ready)
    return found
