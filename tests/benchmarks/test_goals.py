"""A goal cannot change or disappear unnoticed."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import goals, harness

LISTED = (
    goals.Goal("speed", 0.8, peer="nats-py"),
    goals.Goal("fleet, * machines: longest batch", 10),
    goals.Goal("fleet, * machines: reports", None),
    goals.Goal("memory at the end", 5, is_stored=False),
)


@pytest.fixture(autouse=True)
def listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(goals.GOALS, "example", LISTED)
    monkeypatch.setitem(goals.WITHDRAWN, "example", {"start *": "it says nothing"})


def row(metric: str, goal: float | None, peer_name: str | None = None) -> dict[str, Any]:
    return {"metric": metric, "goal": goal, "peer_name": peer_name}


WHOLE = [
    row("speed", 0.8, "nats-py"),
    row("speed", None, "another peer"),
    row("fleet, 5,000 machines: longest batch", 10.0),
    row("fleet, 9,000 machines: longest batch", 10.0),
    row("fleet, 5,000 machines: reports", 495.0),
    row("memory", None),
]


def test_rows_with_the_listed_goals_do_not_differ():
    assert goals.differences("example", WHOLE, are_stored=True) == []
    assert goals.differences("example", [*WHOLE, row("memory at the end", 5.0)]) == []
    assert goals.differences("without goals", [row("memory", None)]) == []


@pytest.mark.parametrize(
    ("changed", "difference"),
    [
        ([row("speed", 0.7, "nats-py"), *WHOLE[1:]], "speed: the goal 0.8 is 0.7 here"),
        ([row("speed", None, "nats-py"), *WHOLE[1:]], "speed: the goal 0.8 is None here"),
        (WHOLE[1:], "speed: no row has this goal (0.8)"),
        (
            [*WHOLE, row("fleet, 7 machines: reports", None)],
            "fleet, 7 machines: reports: the goal None is None here",
        ),
        ([*WHOLE, row("memory", 5.0)], "memory: the goal 5 is not listed"),
        ([*WHOLE, row("start of all", 5.0)], "start of all: the goal 5 is not listed"),
    ],
)
def test_a_goal_that_was_changed_removed_or_added_differs(changed: list[dict[str, Any]], difference: str):
    assert goals.differences("example", changed, are_stored=True) == [difference]


def test_a_full_run_has_the_goals_that_are_newer_than_the_stored_one():
    assert goals.differences("example", WHOLE) == ["memory at the end: no row has this goal (5)"]


def test_every_list_of_goals_is_of_a_benchmark():
    assert {*goals.GOALS, *goals.WITHDRAWN} - {"example"} <= set(harness.names())
