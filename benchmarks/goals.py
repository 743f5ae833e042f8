"""The goals of all benchmarks in one list, so that none leaves with its row or changes unseen.

A full run is compared with this list, and a test compares the stored results (`differences`).  A goal is
added, changed or moved to `WITHDRAWN` in a commit of its own that says why.  In a metric ``*`` stands for any
text.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Goal:
    """``value`` None: it depends on the size. ``peer``: of a metric with several peers, the one it is for.
    Not ``is_stored``: its row is newer than the stored run."""

    metric: str
    value: float | None
    peer: str | None = None
    is_stored: bool = True

    def concerns(self, row: Mapping[str, Any]) -> bool:
        is_peer = self.peer is None or row["peer_name"] == self.peer
        return is_peer and fnmatch.fnmatchcase(row["metric"], self.metric)

    def is_stated(self, row: Mapping[str, Any]) -> bool:
        return row["goal"] is not None and self.value in (None, row["goal"])


def differences(name: str, rows: Iterable[Mapping[str, Any]], *, are_stored: bool = False) -> list[str]:
    """What differs between the goals in these rows of a benchmark and those listed here."""
    rows, listed = list(rows), GOALS.get(name, ())
    result = [
        f"{row['metric']}: the goal {row['goal']:g} is not listed"
        for row in rows
        if row["goal"] is not None and not any(goal.concerns(row) for goal in listed)
    ]
    for goal in listed:
        concerned = [row for row in rows if goal.concerns(row)]
        result += [
            f"{row['metric']}: the goal {goal.value} is {row['goal']} here"
            for row in concerned
            if not goal.is_stated(row)
        ]
        if not concerned and (goal.is_stored or not are_stored):
            result.append(f"{goal.metric}: no row has this goal ({goal.value})")
    return result


def _matches(of: str, goal: float, cpu_p99: float | None) -> Iterable[Goal]:
    for accepting in ("", ", ??% accepting"):
        for address in ("", ", new address"):
            what = f"match, {of} addressed, 100,000 policies{accepting}{address}"
            yield Goal(f"{what}: p50", goal)
            if cpu_p99 is not None:
                yield Goal(f"{what}: CPU p99", cpu_p99)


def _alone(what: str, value: float | None) -> Goal:
    return Goal(f"pipeline alone, * machines: {what}", value)


def _fleet(profile: str) -> tuple[Goal, ...]:
    """Of a fleet that held, with channels."""
    name = f"{profile} fleet, * machines"
    return (
        Goal(f"{name}: longest batch", 10),
        Goal(f"{name}: growth of the lag", 5),
        Goal(f"{name}: behind at the end", 25),
        Goal(f"{name}: system report after its window, longest", 24),
    )


_PIPELINE_ALONE = (
    _alone("reports", None),
    _alone("behind at the end", 25),
    _alone("growth of the lag", 5),
    _alone("longest batch", 10),
    _alone("system report after its window, longest", 24),
    _alone("CPU, all", 90),
)
_NONE_LOST = Goal("reports lost or doubled, to Parquet", 0)

_STORED = ("16 senders, 1 queue", "16 senders, 16 queues", "64 senders, 1 queue", "64 senders, 16 queues")

GOALS: dict[str, tuple[Goal, ...]] = {
    "admission": (Goal("p99 of a client's reads during *", 3.0),),
    "bus": (
        *(Goal(f"1 to {receivers}, {size} bytes", 0.8) for receivers in (1, 10) for size in ("512", "1,024")),
        Goal("request p50", 0.8),
        Goal("request p99", 0.8),
        Goal("idle connections held", 10_000),
        Goal("start of a 3-broker domain", 3),
        Goal("muster --help", 300),
    ),
    "predicates": (Goal("the paper's policy on one message: *", 300),),
    "monitor": (
        Goal("one channel, single reports, a core", 50_000),
        Goal("batches of 1,000: Arrow beside XML", 20),
        Goal("two levels: model beside measured", 20),
        Goal("whole way: model beside measured", 20),
        Goal("whole way: p99, beside holding times, trigger and 5 s", 11.8),
    ),
    "pipeline": (
        Goal("pipeline alone, * machines: caught up after kill -9 of the driver", 60),
        _NONE_LOST,
        Goal("plain fleet, * machines: CPU for a million samples", 1),
        Goal("plain fleet, * machines: memory for a million samples a period", 1),
    ),
    "pipeline_alone": (*_PIPELINE_ALONE, _NONE_LOST),
    "pipeline_plain": (
        Goal("plain fleet: largest that held for 600 s", 2_000_000),
        *_fleet("plain"),
        _NONE_LOST,
    ),
    "pipeline_realistic": (
        Goal("realistic fleet: largest that held for 600 s", 500_000),
        *_fleet("realistic"),
        _NONE_LOST,
    ),
    "manage": (
        Goal("a command to 10000 agents and all answers back", 3),
        Goal("ring of 8 brokers deployed", 5),
        Goal("cluster of 8 brokers deployed", 5),
        Goal("10000 resources on one manager, 500 events/s: response, mean", 20),
        Goal("10000 resources on one manager, 500 events/s: response, p99", 200),
        Goal("100000 resources applied and up, 2 manager(s)", 40),
        Goal("kill -9 of the active registry, 10000 resources: a write is answered", 2),
        Goal("SIGSTOP of the active registry, 10000 resources: a write is answered", 8),
        Goal("kill -9 of a machine, 1000 resources: all up on others", 15),
        Goal("kill -9 of a manager, 10000 resources: all reassigned and answered", 10),
    ),
    "inform": (
        Goal("remote access, one broker", 1),
        Goal("remote access, two brokers", 1.5),
        Goal("update at a remote primary, synced, one broker", 1.5),
        Goal("local read", 10),
        Goal("local reads", 100_000),
        Goal("1 replica created, one broker", 1.5),
        Goal("2 replicas created, one broker", 2),
        Goal("3 replicas created, one broker", 2.5),
        Goal("remote read by a client, any age, p50", 2),
        Goal("remote read by a client, any age, p99", 1),
        Goal("remote reads by clients, any age, 64 at once", 3),
        Goal("remote read by a client, linearizable, p50", 0.55),
        Goal("remote read by a client, linearizable, p99", 1),
        Goal("remote reads by clients, linearizable, 64 at once", 1.5),
        Goal("remote read by a client, linearizable by lease (depends on clocks), p50", 2),
        Goal("remote reads by clients, linearizable by lease (depends on clocks), 64 at once", 3),
        Goal("durable write by a client, p50", 0.7),
        Goal("durable write by a client, p99", 0.667),
        Goal("durable writes by clients, 64 at once", 0.6),
        Goal("durable writes by clients, 64 at once, a request each", 1.2),
        Goal("1,000,000 contexts on one node: start with its view", 15),
        Goal("1,000,000 contexts on one node: memory for them, of 1024 MiB configured", 1024),
    ),
    "notify": (
        *_matches("0.01%", 120, 300),
        *_matches("1%", 120, 300),
        *_matches("50%", 250, None),
        Goal("sustained for 60 s: events, with updates at once", 5_000),
        Goal("sustained: state updates meanwhile", 50_000),
        Goal("events matched, 1,000 policies", 10_000),
        Goal("memory for each of 1,000,000 receivers, 1,000 policies: the notifier's process", 200),
        Goal("memory for each of 1,000,000 receivers, 100,000 policies: the notifier's process", 200),
        Goal("end to end, 100,000 receivers, 100 matches an event: p50", 5),
        Goal("end to end, 100,000 receivers, 100 matches an event, new address: p50", 5),
    ),
    "message": (
        Goal("non-persistent end to end, Python", 60_000),
        Goal("CPU to send and receive one, Python", 15),
        Goal("persistent, synced, acknowledged, 50 senders, Python", 10_000),
        Goal("gateway, 512 B, acked, batching client", 40_000),
        Goal("gateway's CPU a message, in and out", 15),
        Goal("512 B through one connection, JMS", 1, peer="Artemis, AMQP"),
        *(
            Goal(f"transit p50, {of}, JMS", 1, peer="Artemis, AMQP")
            for of in (
                *(f"{size} B at 25/s to 100 subscribers" for size in (100, 2000, 6000)),
                "100 B at 100/s to 100 subscribers",
                "100 B at 1000/s to 100 subscribers (limited by the client's CPU)",
            )
        ),
        *(
            Goal(f"512 B persistent, sent and received, {of}, JMS", value, peer, of == _STORED[0])
            for of in _STORED
            for peer, value in (("Artemis, AMQP", 0.7), ("ActiveMQ, OpenWire", 1.0))
        ),
        Goal("two dispatchers / one", 1.5),
    ),
}

#: By benchmark and metric: goals that are held against nothing any more, and why.
WITHDRAWN: dict[str, dict[str, str]] = {
    "message": {
        "transit p50, * B at 5/s to 101 subscribers, JMS": "a p50 of 1,000 messages would take 200 s "
        "for each provider and size; 25 messages a second of the same sizes have the same goal",
    },
    "pipeline": {
        "pipeline alone, * machines: fleet behind its own clock": "it is of the generator; a fleet whose "
        "generator falls behind does not hold",
    },
}
