"""What becomes of a command that a resource's policy accepted: a request to the resource's manager.

The party stands for the resource and lives with its agent, but the agent does not act on the resource behind
the manager's back: the manager knows the desired state and holds the epoch.
"""

from __future__ import annotations

from muster.core import errors, log
from muster.manage import client as manage
from muster.notify import client as notify

events = log.Events("app")

OPERATION = "operation"


async def obey(party: notify.Party, resource: str, manager: manage.Client) -> None:
    """Ask for the operation that each accepted event names, for as long as the party lives.

    A durable event is acknowledged when its request has been answered; asked again after a crash, the
    request has the same id, and is carried out once.
    """
    async for event in party:
        operation = event.content.get(OPERATION)
        if not isinstance(operation, str):
            continue  # news, not a command
        try:
            answers = await manager.exec(operation, resource, id=f"{event.sender['party']}:{event.id}")
        except errors.MusterError as error:
            events.warning(
                "command-not-carried-out", resource=resource, operation=operation, error=str(error)
            )
        else:
            for answer in answers:
                events.info("command", resource=resource, operation=operation, outcome=answer["outcome"])
