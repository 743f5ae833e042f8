"""What agents report to host, compared with the desired state. Pure.

A resource that an agent hosts and that does not belong there is an orphan: it was deleted or moved, or its
machine was forgotten, while the agent could not be reached. The registry tells the agent to delete it, with
the highest epoch assigned so far: nothing that is assigned later is deleted.

An orphan that this registry may not know is listed only, and left to an operator: its epoch was assigned
after the backup from which the registry was restored.
"""

from __future__ import annotations

from collections.abc import Iterable

from muster.manage import protocol, rows
from muster.manage.registry import assignments

ORPHANS_MAX = 1_000  # listed for one agent
RESTORED = "it was created after the backup from which the registry was restored"


def find_orphans(
    state: assignments.AssignmentProcessor, agent: str, hosted: Iterable[protocol.ReportedResource]
) -> list[rows.OrphanRow]:
    orphans = []
    for item in hosted:
        expected_on = state.agent_of(item.name)
        if expected_on == agent:
            continue
        reason = f"it belongs to {expected_on}" if expected_on else "it was deleted"
        is_lost = any(first < item.epoch <= last for first, last in state.lost_epochs)
        is_known = item.epoch <= state.epoch and not is_lost
        orphans.append(
            rows.OrphanRow(
                name=item.name,
                agent=agent,
                state=item.state.value,
                pid=item.pid or None,
                epoch=item.epoch,
                generation=item.generation,
                reason=reason if is_known or expected_on else RESTORED,
                is_deleted=is_known or expected_on is not None,
            )
        )
    return orphans


class AgentInventories:
    """The orphans of each agent by its last announcements. Not stored: agents announce themselves again."""

    def __init__(self) -> None:
        self._orphans: dict[str, dict[str, rows.OrphanRow]] = {}
        self._empty: set[str] = set()  # agents that reported to host nothing

    def record(
        self, agent: str, hello: protocol.AgentHello, orphans: Iterable[rows.OrphanRow]
    ) -> list[rows.OrphanRow]:
        """Record a page. Returns the orphans that were not known before."""
        if hello.hosted is None:
            return []
        is_empty = not (hello.hosted or hello.after or hello.until)
        (self._empty.add if is_empty else self._empty.discard)(agent)
        known = self._orphans.pop(agent, {})
        kept = {
            name: orphan
            for name, orphan in known.items()
            if name <= hello.after or (hello.until and name > hello.until)
        }
        new = []
        for orphan in orphans:
            if len(kept) < ORPHANS_MAX:
                kept[orphan.name] = orphan
                if orphan.name not in known:
                    new.append(orphan)
        if kept:
            self._orphans[agent] = kept
        return new

    def count(self, agent: str) -> int:
        return len(self._orphans.get(agent, ()))

    def is_empty(self, agent: str) -> bool:
        """Whether the agent has reported that it hosts nothing."""
        return agent in self._empty

    def expect_report(self, agent: str) -> None:
        """What the agent reported before is no longer relevant."""
        self._empty.discard(agent)

    def forget(self, agent: str) -> None:
        self._empty.discard(agent)
        self._orphans.pop(agent, None)

    def rows(self) -> list[rows.OrphanRow]:
        return [orphan for agent in sorted(self._orphans) for orphan in self._orphans[agent].values()]
