"""A manager's side of orders: operations that users asked for, as the registry hands them on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

import msgspec

from muster.bus import api
from muster.bus.rpc import single_flight
from muster.core import errors, messages
from muster.core.telemetry import log
from muster.manage import operation_results, protocol
from muster.manage.manager import agent_calls

events = log.EventLog("manage")

# What should be is changed in the registry, never behind its back: users' orders only look, or execute.
_LOOKS = {verb.value: verb for verb in (protocol.Verb.GET, protocol.Verb.ENUMERATE)}


class OrderRunner:
    """``find`` a resource: its assignment, None where this manager has none; ``seen`` takes observations."""

    def __init__(
        self,
        name: str,
        operator: agent_calls.AgentCaller,
        find: Callable[[str], protocol.Assignment | None],
        seen: Callable[[str, protocol.ObservedState], None],
    ) -> None:
        self._name = name
        self._operator = operator
        self._find = find
        self._seen = seen
        self._under_way = single_flight.SingleFlight[list[protocol.OperationResult]]()

    async def obey(self, message: api.Message) -> None:
        try:
            said = messages.decode(message.data, protocol.OrderBatch)
        except errors.MusterError as error:
            events.warning("bad-order", error=error)
            return
        answers = await self._under_way.once(message.data, lambda: self._execute_all(said.orders))
        with contextlib.suppress(errors.MusterError):
            await message.respond(_results(answers))

    async def _execute_all(self, orders: Sequence[protocol.OperationOrder]) -> list[protocol.OperationResult]:
        return await asyncio.gather(*(self._execute(order) for order in orders))

    async def _execute(self, order: protocol.OperationOrder) -> protocol.OperationResult:
        assignment = self._find(order.resource)
        if assignment is None:
            return protocol.OperationResult(
                id=order.id,
                outcome=messages.DecisionOutcome.REFUSED,
                code=protocol.NOT_MANAGED,
                reason=f"{self._name} does not manage {order.resource}",
            )
        operation = protocol.Operation(
            id=order.id,
            verb=_LOOKS.get(order.operation, protocol.Verb.EXECUTE),
            resource=order.resource,
            epoch=assignment.epoch,
            manager=self._name,
            operation=order.operation,
            arguments=order.arguments,
            timeout_s=order.timeout_s,
        )
        answer = await self._operator.operate(assignment.spec.agent, operation)
        if answer.observed is not None:
            self._seen(order.resource, answer.observed)
        return answer


def _results(answers: list[protocol.OperationResult]) -> bytes:
    """Those of one message."""
    slim = [msgspec.structs.replace(answer, observed=None) for answer in answers]
    return messages.encode(protocol.OrderResults(results=tuple(operation_results.fitting(slim))), "msgpack")
