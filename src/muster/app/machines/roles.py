"""The roles of machines."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from muster.core import errors


class MachineRole(enum.StrEnum):
    """What a machine runs."""

    BROKER = "broker"
    REGISTRY = "registry"  # with a dispatcher of messages and a notifier
    MANAGER = "manager"
    INFORMATION_NODE = "information-node"
    CHANNEL = "channel"
    GATEWAY = "gateway"  # AMQP, for JMS clients
    AGENT = "agent"


ALL = tuple(role.value for role in MachineRole)
USUAL = tuple(role for role in ALL if role != MachineRole.GATEWAY)  # which needs a package of its own


def check(names: Sequence[str]) -> tuple[str, ...]:
    unknown = [name for name in names if name not in ALL]
    if unknown or not names:
        raise errors.InvalidInput(
            f"{unknown[0]!r} is not a role of a machine" if unknown else "a machine needs a role",
            hint=f"one of {', '.join(ALL)}",
        )
    return tuple(name for name in ALL if name in names)
