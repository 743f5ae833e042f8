"""Message groups (``JMSXGroupID``): the messages of a group go to one consumer as long as it is attached."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from muster.message.dispatcher.index import lines

# Above this, the least used groups without held messages are forgotten.
GROUPS_MAX = 10_000


class GroupOwners:
    def __init__(self) -> None:
        self._owners: dict[str, lines.BacklogConsumer] = {}  # the least recently used first

    def __iter__(self) -> Iterator[str]:
        return iter(self._owners)

    def get(self, group: str) -> lines.BacklogConsumer | None:
        return self._owners.get(group)

    def use(self, group: str) -> None:
        self._owners[group] = self._owners.pop(group)

    def join(
        self, group: str, consumer: lines.BacklogConsumer, consumers: Iterable[lines.BacklogConsumer]
    ) -> None:
        """``consumers``: all of the backlog."""
        self._owners[group] = consumer
        if len(self._owners) > GROUPS_MAX:
            used: set[str | None] = set()
            for other in consumers:
                used.update(held.group for held in other.held.values())
                used.update(other.reserved_groups)
            for unused in [name for name in list(self._owners)[: GROUPS_MAX // 2] if name not in used]:
                del self._owners[unused]

    def leave(self, consumer: lines.BacklogConsumer) -> None:
        self._owners = {group: owner for group, owner in self._owners.items() if owner is not consumer}
