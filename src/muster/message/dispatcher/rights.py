"""What an identity may do with queues, topics and subscriptions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from muster.core import errors
from muster.message import destinations, settings

#: Whether an identity may publish on (``"pub"``) or subscribe to (``"sub"``) a users' subject, use a queue
#: (``"send"``, ``"receive"``, ``"browse"``, ``"admin"``), or manage durable subscriptions of other identities
#: (``"subscriptions"``: ``"list"``, ``"end"``).
May = Callable[[str, str, str], bool]
_VERBS: Final = {"send": "send to", "receive": "receive from", "admin": "administer"}


def allow_all(identity: str, action: str, subject: str) -> bool:
    return True


class MessageRights:
    def __init__(self, may: May, message_settings: settings.MessageSettings) -> None:
        self.may = may
        self._settings = message_settings

    def check_may_send(self, identity: str, destination: destinations.Destination) -> None:
        if destination.is_queue:
            self.check_queue(identity, "send", destination.name)
        elif not self.may(identity, "pub", destination.subject):
            raise errors.Forbidden(f"{identity} may not publish on {destination.name!r}")

    def may_subscribe(self, identity: str, topic: str) -> bool:
        return all(self.may(identity, "sub", subject) for subject in destinations.topic(topic).patterns)

    def check_may_subscribe(self, identity: str, topic: str) -> None:
        if not self.may_subscribe(identity, topic):
            raise errors.Forbidden(f"{identity} may not subscribe to {topic!r}")

    def check_queue(self, identity: str, right: str, queue: str) -> None:
        if not self.may(identity, right, queue):
            raise errors.Forbidden(
                f"{identity} may not {_VERBS.get(right, right)} the queue {queue!r}",
                hint=f"`muster creds show {identity}` lists its rights; `creds issue --queue` grants them",
            )
        if right != "admin":
            self._settings.check_exists(queue)

    def may_browse(self, identity: str, queue: str) -> bool:
        """Every identity may browse its own temporary queues."""
        if queue.startswith(destinations.TEMPORARY):
            owner, _, _ = destinations.queue(queue).owner.rpartition("-")
            if owner == identity:
                return True
        return self.may(identity, "browse", queue)
