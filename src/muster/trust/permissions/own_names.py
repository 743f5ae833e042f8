"""Names of the domain's own parts, which no machine, program or person may have.

An identity has one role. If a machine were called ``web``, the dashboard could not connect; if it were called
``sensor``, its reports and those of the domain's own machine would be reports of one machine.
"""

from __future__ import annotations

from muster.core import errors
from muster.trust.permissions import roles

SENSOR = "sensor"

ROLES = {
    "bootstrap": roles.Role.BOOTSTRAP,
    "channel": roles.Role.CHANNEL,
    "link": roles.Role.LINK,
    "message": roles.Role.GATEWAY,
    "notifier": roles.Role.NOTIFIER,
    "pipeline": roles.Role.PIPELINE,
    "responder": roles.Role.RESPONDER,
    SENSOR: roles.Role.AGENT,
    "uddi": roles.Role.VIEWER,  # inquiries without a login
    "web": roles.Role.WEB,
}


def check(name: str, role: roles.Role, *, of_machine: bool = False) -> None:
    """`errors.Conflict` if ``name`` belongs to a part of the domain with another role.

    ``of_machine``: the credentials are those of another machine, so the name of the domain's sensor, which
    has the role of machines too, is refused.
    """
    own = ROLES.get(name)
    if own is not None and (own is not role or (of_machine and name == SENSOR)):
        raise errors.Conflict(
            f"{name!r} is the name of a part of the domain itself", hint="choose another name"
        )
