"""Judge a stored history: violations, and how long each service was unavailable.

python -m tests.faults check FOLDER     # every history of a folder, again
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from tests.faults import history
from tests.faults.workloads import contexts, events, messages, reports, resources, topics, workload
from tests.sim import history as sim_history
from tests.sim.checkers import contexts as context_checker
from tests.sim.checkers import events as event_checker
from tests.sim.checkers import messages as message_checker
from tests.sim.checkers import reports as report_checker
from tests.sim.checkers import resources as resource_checker

WORKLOADS: dict[str, type[workload.Workload]] = {
    kind.name: kind
    for kind in (
        contexts.ContextWorkload,
        messages.MessageWorkload,
        events.EventWorkload,
        resources.ResourceWorkload,
        reports.ReportWorkload,
        topics.TopicWorkload,
    )
}


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A workload in a run."""

    fault: str
    workload: str
    operations: int
    violations: tuple[str, ...]
    unavailable_s: float  # the longest time without a success of a client that works otherwise
    restored_s: float | None = None  # the same, from the end of the fault on
    date: str = ""
    load: float = 0.0  # of the machine, when the run began


def _check_instances(story: sim_history.History) -> list[str]:
    """At most one instance of a process runs at a time."""
    return resource_checker.check(story) + [
        f"resources: {instance} started while the former instance ran"
        for instance in story.of("instance")
        if instance.facts["state"] != "alone"
    ]


CHECKERS: dict[str, Callable[[sim_history.History], list[str]]] = {
    "contexts": context_checker.check,
    "queues": message_checker.check,
    "events": event_checker.check,
    "resources": _check_instances,
    "reports": report_checker.check,
    "topics": lambda _: [],
}


def longest_gap_s(
    story: sim_history.History, actions: tuple[str, ...], since_s: float, until_s: float, agent: str = ""
) -> float:
    """The longest time between two successes of the same client and action. Without the restoration of
    processes of ``agent``."""
    successes: dict[tuple[str, str], list[float]] = {}
    for operation in story.of(*actions):
        if operation.actor == workload.UNMEASURED or (
            agent and operation.action == "restore" and operation.actor.endswith(f"-{agent}")
        ):
            continue
        times = successes.setdefault((operation.actor, operation.action), [])
        if operation.outcome in ("ok", "not-found"):  # a deleted context was looked up
            times.append(operation.end_s)
    gaps = [0.0]
    for times in successes.values():
        if not any(at_s <= since_s for at_s in times):  # it had not worked before the fault either
            continue
        marks = [since_s, *sorted(at_s for at_s in times if since_s <= at_s <= until_s), until_s]
        gaps += [after - before for before, after in itertools.pairwise(marks)]
    return max(gaps)


def _victim_agent(story: sim_history.History) -> str:
    """The agent of the machine that does not work during the fault."""
    victim = next(story.of("victim"), None)
    return "" if victim is None else str(victim.facts.get("agent", ""))


#: The operations that are counted, where they are not the measured ones.
COUNTED = {"queues": ("send", "received", "acknowledge"), "reports": ("report",)}


def operations(story: sim_history.History, name: str) -> int:
    return sum(1 for _ in story.of(*COUNTED.get(name, WORKLOADS[name].measured)))


def check(file: Path) -> Iterator[Result]:
    story = history.LoadedHistory(file)
    run: dict[str, Any] = story.run
    fault = next(story.of("fault"), None)
    ended = next(story.of("load-ended"), None)
    for name in run["workloads"]:
        violations = CHECKERS[name](story)
        violations += [
            f"{name}: {failure.facts['error']}" for failure in story.of("failure") if failure.actor == name
        ]
        violations += [
            f"{name}: not restored: {late.facts['text']}"
            for late in story.of("not-restored")
            if late.actor == name
        ]
        if name == run["workloads"][0]:
            violations += [f"status: {lie.facts['text']}" for lie in story.of("untrue")]
        if fault is None or ended is None:
            violations.append(f"{name}: the run was interrupted")
        gap_s = restored_s = 0.0
        if fault is not None and ended is not None:
            measured, agent = WORKLOADS[name].measured, _victim_agent(story)
            gap_s = longest_gap_s(story, measured, fault.start_s, ended.start_s, agent)
            restored_s = longest_gap_s(story, measured, fault.end_s, ended.start_s)
        yield Result(
            fault=run["fault"],
            workload=name,
            operations=operations(story, name),
            violations=tuple(violations),
            unavailable_s=round(gap_s, 1),
            restored_s=round(restored_s, 1),
            date=run["date"],
            load=run["load"],
        )
