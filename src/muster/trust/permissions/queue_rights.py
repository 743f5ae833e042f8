"""Rights on queues: send, receive, browse and administer.

A grant is a pattern of queue names and the rights on them, written ``orders:send,receive``. In a pattern
``*`` matches any text. An identity has the grants in its credentials, or those of its role (`of_role`).
Dead letters are granted only by their name, and temporary queues by patterns that begin with their prefix.

    send      put messages in
    receive   take messages out, and acknowledge them
    browse    look at messages and leave them there
    admin     purge the queue, and move its messages elsewhere (which also needs ``send`` there)

Only identities that received the name of a temporary queue from its owner know it: every identity with a
right on any queue may send there, its own connection receives, and its owner browses.

Pure. The dispatcher enforces it, for AMQP clients as well, since each uses its own identity.
"""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass

from muster.core import errors, queue_names
from muster.trust.permissions import roles


class QueueRight(enum.StrEnum):
    SEND = "send"
    RECEIVE = "receive"
    BROWSE = "browse"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class QueueGrant:
    pattern: str
    rights: frozenset[QueueRight]

    @classmethod
    def parse(cls, text: str) -> QueueGrant:
        pattern, _, listed = text.rpartition(":")
        named = [right.strip() for right in listed.split(",")]
        if not pattern or not set(named) <= set(QueueRight):
            raise errors.InvalidInput(
                f"{text[:140]!r} grants nothing: expected QUEUE:RIGHTS, "
                f"the rights among {', '.join(QueueRight)}",
                hint="for example 'orders:send,receive' or 'orders-*:browse'",
            )
        return cls(pattern, frozenset(QueueRight(right) for right in named))

    def __str__(self) -> str:
        return f"{self.pattern}:{','.join(right for right in QueueRight if right in self.rights)}"


Grants = tuple[QueueGrant, ...]

_ALL = frozenset(QueueRight)
_USE = frozenset((QueueRight.SEND, QueueRight.RECEIVE, QueueRight.BROWSE))
_EVERYTHING = tuple(
    QueueGrant(name, _ALL) for name in ("*", queue_names.DEAD_LETTERS, f"{queue_names.TEMPORARY}*")
)

_OF_ROLES: dict[roles.Role, Grants] = {
    roles.Role.USER: (QueueGrant("*", _USE),),
    roles.Role.VIEWER: tuple(
        QueueGrant(name, frozenset((QueueRight.BROWSE,))) for name in ("*", queue_names.DEAD_LETTERS)
    ),
    roles.Role.OPERATOR: _EVERYTHING,
    roles.Role.WEB: _EVERYTHING,
    roles.Role.GATEWAY: _EVERYTHING,
}


def of_role(role: roles.Role, *, narrowed: bool = False) -> Grants:
    """The grants of a role. ``narrowed``: its topics are limited, and so it has none."""
    return () if narrowed else _OF_ROLES.get(role, ())


def allows(grants: Iterable[QueueGrant], queue: str, right: str) -> bool:
    """Whether one of the grants permits it."""
    temporary = queue.startswith(queue_names.TEMPORARY)
    if temporary and right == QueueRight.SEND:
        return any(grant.rights for grant in grants)
    return any(right in grant.rights and _matches(grant.pattern, queue) for grant in grants)


@functools.lru_cache(4096)
def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(".*".join(map(re.escape, text.split("*"))), re.DOTALL)


def _matches(pattern: str, queue: str) -> bool:
    if queue == queue_names.DEAD_LETTERS:
        return pattern == queue
    if queue.startswith(queue_names.TEMPORARY) and not pattern.startswith(queue_names.TEMPORARY):
        return False
    return _pattern(pattern).fullmatch(queue) is not None
