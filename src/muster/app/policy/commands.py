"""Executes commands that a resource's policy accepted, as requests to the resource's manager.

The receiver represents the resource and runs with its agent, but the agent does not act on the resource
directly: the manager has the desired state and the epoch.
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
    """Request the operation that each accepted event names, as long as the receiver exists.

    A durable event is acknowledged when its request has a reply: done, failed, refused, or in doubt because
    even the agent cannot determine the outcome. While no manager replies, or the agent's reply is lost, the
    request is repeated under the same id and executed once. Later events wait, so commands run in order.
    Events that are not durable are requested once.
    """
    async for event in receiver:
        operation = event.content.get(OPERATION)
        if not isinstance(operation, str):
            continue  # not a command
        wait_s = RETRY_S
        while not await _request_operation(event, operation, resource, manager) and event.sequence:
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, RETRY_S_MAX)


async def _request_operation(
    event: notify.ReceivedEvent, operation: str, resource: str, manager: manage.ManageClient
) -> bool:
    """Whether the request got a reply."""
    try:
        answers = await manager.exec(operation, resource, id=f"{event.sender['_id']}:{event.id}")
    except errors.MusterError as error:
        events.warning("command-failed", resource=resource, operation=operation, error=str(error))
        return not isinstance(error, errors.Unavailable)
    for answer in answers:
        events.info("command", resource=resource, operation=operation, outcome=answer.outcome)
    return all(
        answer.outcome != messages.DecisionOutcome.IN_DOUBT.value or answer.code == operation_log.IN_DOUBT
        for answer in answers
    )
