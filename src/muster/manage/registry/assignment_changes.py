"""What has changed for each manager, in an order in which it can be sent in pages. Pure.

Every change takes the next revision.  A manager says up to which revision it knows its assignments and gets
the next ones: a page may end anywhere, and a change that comes between two pages is on a later one.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator


class AssignmentChanges:
    def __init__(self) -> None:
        self.revision = 1
        self.released: dict[str, dict[str, int]] = {}  # of a manager: what it lost, and when
        self._assigned: dict[str, tuple[str, int]] = {}  # of a resource: whose, and when it changed
        # Of a manager: (revision, resource), oldest first; what has changed again since is in it once more.
        self._logs: dict[str, list[tuple[int, str]]] = {}
        self._live: dict[str, int] = {}  # of a manager: how many entries of its log hold

    def assign(self, manager: str, resource: str) -> None:
        """The resource is this manager's, and something about it changed."""
        before = self._assigned.get(resource)
        if before is None or before[0] != manager:
            self._live[manager] = self._live.get(manager, 0) + 1
        self.released.get(manager, {}).pop(resource, None)
        self._assigned[resource] = (manager, self.revision + 1)
        self._append(manager, resource)

    def release(self, manager: str, resource: str, *, tell: bool) -> None:
        """The resource is not this manager's any more; ``tell``: the manager has to be told."""
        if self._assigned.pop(resource, ("", 0))[0] == manager:
            self._live[manager] -= 1
        if tell:
            self.released.setdefault(manager, {})[resource] = self.revision + 1
            self._append(manager, resource)

    def confirm(self, manager: str, revision: int) -> None:
        """The manager knows everything up to this revision."""
        released = self.released.get(manager, {})
        for resource in [one for one, at in released.items() if at <= revision]:
            del released[resource]

    def forget(self, manager: str) -> None:
        """The manager will be told everything anew."""
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
