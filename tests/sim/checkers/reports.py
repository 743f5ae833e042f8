"""Reports: each aggregate counts all live machines of its group, or is marked as incomplete; none is counted
twice.

A machine's value is a power of a base, so the sum of a window shows how often each machine was counted.
"""

from __future__ import annotations

import collections

from tests.sim import history


def check(story: history.History) -> list[str]:
    values = {fact.key: fact.facts["value"] for fact in story.of("machine")}
    group_of = {fact.key: fact.facts["group"] for fact in story.of("machine")}
    base = sorted({*values.values(), 0})[2] if len(set(values.values())) > 1 else 2
    known_s: dict[str, float] = {}
    for fact in story.of("stored"):
        known_s.setdefault(fact.key, fact.facts["at_s"])
    made: dict[tuple[str, int], int] = collections.Counter()
    violations: list[str] = []
    aggregates = list(story.of("aggregate"))
    window_ms = aggregates[0].facts["window_ms"] if aggregates else 1
    for report in story.of("report"):
        made[report.key, report.facts["at_ms"] // window_ms * window_ms] += 1
    for aggregate in aggregates:
        facts = aggregate.facts
        marked = facts["partial"] or facts["dropped"] or facts["stale"] or facts["machines"] < facts["known"]
        for machine, value in values.items():
            if group_of[machine] != aggregate.key:
                continue
            counted = int(facts["sum"]) // value % base
            reports = made[machine, facts["from_ms"]]
            if counted > reports:
                violations.append(
                    f"reports: {machine} made {reports} reports, and counts {counted}: {aggregate}"
                )
            is_known = known_s.get(machine, aggregate.start_s) < aggregate.start_s
            if is_known and reports and not counted and not marked:
                violations.append(f"reports: {machine} is missing from {aggregate}, which is not marked")
    return violations
