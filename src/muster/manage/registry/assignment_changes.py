"""Changes for each manager, in an order that allows sending them in pages. Pure.

Each change has its own revision. A manager states the revision up to which it knows its assignments and
receives the changes after it. A page may end anywhere; a change that arrives between two pages is on a later
page.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator


class AssignmentChanges:
    def __init__(self) -> None:
        self.revision = 1
        self.released: dict[
            str, dict[str, int]
        ] = {}  # by manager: the released resources and the revision of each
        self._assigned: dict[
            str, tuple[str, int]
        ] = {}  # by resource: its manager and the revision of the last change
        # By manager: (revision, resource), oldest first; a later change of a resource adds another entry.
        self._logs: dict[str, list[tuple[int, str]]] = {}
        self._live: dict[str, int] = {}  # by manager: the number of valid entries in its log

    def assign(self, manager: str, resource: str) -> None:
        """The resource belongs to this manager, and something about it changed."""
        before = self._assigned.get(resource)
        if before is None or before[0] != manager:
            self._live[manager] = self._live.get(manager, 0) + 1
        self.released.get(manager, {}).pop(resource, None)
        self._assigned[resource] = (manager, self.revision + 1)
        self._append(manager, resource)

    def release(self, manager: str, resource: str, *, notify: bool) -> None:
        """The resource no longer belongs to this manager; ``notify``: the manager has to be informed."""
        if self._assigned.pop(resource, ("", 0))[0] == manager:
            self._live[manager] -= 1
        if notify:
            self.released.setdefault(manager, {})[resource] = self.revision + 1
            self._append(manager, resource)

    def confirm(self, manager: str, revision: int) -> None:
        """The manager has received all changes up to this revision."""
        released = self.released.get(manager, {})
        for resource in [name for name, at in released.items() if at <= revision]:
            del released[resource]

    def forget(self, manager: str) -> None:
        """The manager will receive all its assignments again."""
        self.released.pop(manager, None)
        self._compact(manager)

    def since(self, manager: str, revision: int) -> Iterator[tuple[int, str, bool]]:
        """Later changes, oldest first: revision, resource, and whether it was released."""
        log, released = self._logs.get(manager, []), self.released.get(manager, {})
        for index in range(bisect.bisect_right(log, revision, key=lambda entry: entry[0]), len(log)):
            at, resource = log[index]
            if self._assigned.get(resource) == (manager, at):
                yield at, resource, False
            elif released.get(resource) == at:
                yield at, resource, True

    def _append(self, manager: str, resource: str) -> None:
        self.revision += 1
        log = self._logs.setdefault(manager, [])
        log.append((self.revision, resource))
        if len(log) > 2 * (self._live.get(manager, 0) + len(self.released.get(manager, ()))) + 1_000:
            self._compact(manager)

    def _compact(self, manager: str) -> None:
        self._logs[manager] = [(at, resource) for at, resource, _ in self.since(manager, 0)]
