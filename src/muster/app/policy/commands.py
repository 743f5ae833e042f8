"""What becomes of a command that a resource's policy accepted: a request to the resource's manager.

The receiver represents the resource and runs with its agent.  The agent does not act on the resource itself:
the manager has the desired state and the epoch.
"""

from __future__ import annotations

import asyncio

from muster.core import errors, messages
from muster.core.telemetry import log
from muster.manage import client as manage
from muster.manage.agent import operation_log
from muster.notify import client as notify

events = log.EventLog("app")

OPERATION = "operation"
RETRY_S, RETRY_S_MAX = 0.5, 30.0


async def execute_command(
    receiver: notify.ReceiverHandle, resource: str, manager: manage.ManageClient
) -> None:
    """Ask for the operation that each accepted event names, for as long as the receiver lives.

    A durable event is acknowledged when its request has been answered: done, failed, refused, or in doubt for
    good, as its agent cannot know the outcome itself.  While no manager answers, or the agent's answer is
    lost, the request is repeated under the same id, and is carried out once.  The events behind it wait, so
    commands are carried out in their order.  What is not durable is asked for once.
    """
    async for event in receiver:
        operation = event.content.get(OPERATION)
        if not isinstance(operation, str):
            continue  # news, not a command
        wait_s = RETRY_S
        while not await _carry_out(event, operation, resource, manager) and event.sequence:
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, RETRY_S_MAX)


async def _carry_out(
    event: notify.ReceivedEvent, operation: str, resource: str, manager: manage.ManageClient
) -> bool:
    """Whether the request was answered."""
    try:
        answers = await manager.exec(operation, resource, id=f"{event.sender['_id']}:{event.id}")
    except errors.MusterError as error:
        events.warning("command-not-carried-out", resource=resource, operation=operation, error=str(error))
        return not isinstance(error, errors.Unavailable)
    for answer in answers:
        events.info("command", resource=resource, operation=operation, outcome=answer["outcome"])
    return all(
        answer["outcome"] != messages.DecisionOutcome.IN_DOUBT.value
        or answer["code"] == operation_log.IN_DOUBT
        for answer in answers
    )
