"""Lists of the registry."""

from __future__ import annotations

from typing import Any

from muster.manage import protocol
from muster.manage.registry import records, views
from tests.manage import assignment_cases


def test_an_agent_is_unknown_or_down_if_its_resources_are_silent():
    core = assignment_cases.having(
        assignment_cases.spec("web", agent="a"),
        assignment_cases.spec("db", agent="a"),
        assignment_cases.spec("x", agent="b"),
    )
    agents: dict[str, records.AgentRecord | None] = {name: records.AgentRecord() for name in "abc"}
    core.accept(records.RegistryChanges(agents=agents, epoch=core.epoch))
    assignment_cases.renew(core, "m")
    assignment_cases.own(core, {"web": "m", "db": "m", "x": "m"})

    presence = views.AgentPresence(0.0)

    def states() -> dict[str, str]:
        return {row.name: row.state for row in views.agents(core, presence, 1.0, "", 10)["items"]}

    assert states() == {"a": "unknown", "b": "unknown", "c": "unknown"}
    assignment_cases.report(core, "web", assignment_cases.State.UNKNOWN)
    assignment_cases.report(core, "db", assignment_cases.State.FAILED)
    assignment_cases.report(core, "x", assignment_cases.State.LATE)
    assert states() == {"a": "unknown", "b": "unknown", "c": "unknown"}, "a failure says nothing of its agent"
    silent = protocol.AGENT_SILENT
    assignment_cases.report(core, "web", assignment_cases.State.DOWN, reason=silent)
    assert states()["a"] == "down", "although a resource had failed before"
    assignment_cases.report(core, "db", assignment_cases.State.UP)
    assert states()["a"] == "up"
    assignment_cases.report(core, "web", assignment_cases.State.DOWN, reason="exit code 3")
    assignment_cases.report(core, "db", assignment_cases.State.DOWN, reason="exit code 1")
    assert states()["a"] == "unknown", "the resources ended: nothing is known of the agent"
    presence.announced("a", 0.5)
    assert states()["a"] == "up"
    assignment_cases.report(core, "db", assignment_cases.State.COMPLETED)
    assert {row.name: row.state for row in views.agents(core, presence, 80.0, "", 10)["items"]}["a"] == "down"


def test_an_agent_without_resources_is_up_while_it_announces_itself():
    core = assignment_cases.having()
    agents: dict[str, records.AgentRecord | None] = {name: records.AgentRecord() for name in "abc"}
    core.accept(records.RegistryChanges(agents=agents, epoch=core.epoch))
    presence = views.AgentPresence(1_000.0)

    def states(now: float) -> str:
        return " ".join(row.state for row in views.agents(core, presence, now, "", 10)["items"])

    presence.announced("a", 1_000.0)
    presence.announced("b", 1_000.0)
    assert states(1_030.0) == "up up unknown"
    presence.announced("b", 1_030.0)
    assert states(1_080.0) == "down up down"
    presence.since = 1_090.0  # the registry was cut off for a time and may have missed announcements
    assert states(1_100.0) == "up up unknown"
    presence.forget("a")
    assert states(1_100.0) == "unknown up unknown"
    assert states(1_200.0) == "down down down"


def test_the_summary_counts_what_is_down_as_desired():
    core = assignment_cases.having(
        assignment_cases.spec("web"),
        assignment_cases.spec("old", desired=protocol.DesiredState.DOWN),
        assignment_cases.spec("emptied", desired=protocol.DesiredState.DRAINED),
    )
    assignment_cases.renew(core, "m")
    assignment_cases.own(core, {"web": "m", "old": "m", "emptied": "m"})
    for name in ("web", "old", "emptied"):
        assignment_cases.report(core, name, assignment_cases.State.DOWN)
    summary = views.summary(core)
    assert (summary.states["down"], summary.down_as_desired) == (3, 2)
    assignment_cases.report(core, "old", assignment_cases.State.UP)
    assert views.summary(core).down_as_desired == 1


def test_agents_are_listed_by_a_thread_while_their_resources_change():
    core = assignment_cases.having(
        assignment_cases.spec("web", agent="a"), assignment_cases.spec("db", agent="a")
    )
    core.accept(records.RegistryChanges(agents={"a": records.AgentRecord()}, epoch=core.epoch))

    class Statuses(dict[str, Any]):
        """Another resource is applied while a status is read."""

        def get(self, name: str, default: Any = None) -> Any:
            core.accept(core.apply([assignment_cases.spec(f"new-{len(core.resources)}", agent="a")], "ann"))
            return super().get(name, default)

    snapshot = core.snapshot()
    snapshot.statuses = Statuses()
    (row,) = views.agents(snapshot, views.AgentPresence(0.0), 0.0, "", 10)["items"]
    assert (row.name, row.resources) == ("a", 2)
