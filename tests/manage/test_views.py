"""What the registry lists."""

from __future__ import annotations

from muster.manage.registry import records, views
from tests.manage import assignment_cases


def test_an_agent_whose_resources_are_all_silent_is_unknown():
    core = assignment_cases.having(
        assignment_cases.spec("web", agent="a"),
        assignment_cases.spec("db", agent="a"),
        assignment_cases.spec("x", agent="b"),
    )
    agents: dict[str, records.AgentRecord | None] = {name: records.AgentRecord() for name in "abc"}
    core.accept(records.RegistryChanges(agents=agents, epoch=core.epoch))
    assignment_cases.renew(core, "m")
    assignment_cases.own(core, {"web": "m", "db": "m", "x": "m"})

    def states() -> dict[str, str]:
        return {row.name: row.state for row in views.agents(core, "", 10)["items"]}

    assert states() == {"a": "", "b": "", "c": ""}
    assignment_cases.report(core, "web", assignment_cases.State.UNKNOWN)
    assignment_cases.report(core, "db", assignment_cases.State.FAILED)
    assignment_cases.report(core, "x", assignment_cases.State.LATE)
    assert states() == {"a": "up", "b": "unknown", "c": ""}
