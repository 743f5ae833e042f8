"""Operations requested by users: the registry forwards them to the manager of each resource."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Sequence

import msgspec

from muster.bus import api
from muster.bus.rpc import single_flight
from muster.core import errors, messages
from muster.core.telemetry import log
from muster.manage import operation_results, protocol
from muster.manage.manager import agent_calls

events = log.EventLog("manage")

FLUSH_TRIES, FLUSH_RETRY_S = 16, 0.25  # in less time than the registry waits beyond that of an operation
# Desired state changes only through the registry: these orders read or execute.
_READS = {verb.value: verb for verb in (protocol.Verb.GET, protocol.Verb.ENUMERATE)}
_KEEPING = {*_READS, "logs", protocol.LOG_PAGE}  # they begin no run; programs may repeat them often


class OrderRunner:
    """``find`` returns the assignment of a resource, None if this manager has none; ``on_executed`` receives
    the observation after an operation, and whether that may have begun a run; ``flush`` stores the states of
    resources.
    """

    def __init__(
        self,
        name: str,
        agents: agent_calls.AgentCaller,
        find: Callable[[str], protocol.Assignment | None],
        on_executed: Callable[[str, protocol.ObservedState | None, bool], None],
        flush: Callable[[Collection[str]], Awaitable[None]],
    ) -> None:
        self._name = name
        self._agents = agents
        self._find = find
        self._on_executed = on_executed
        self._flush = flush
        self._under_way = single_flight.SingleFlight[list[protocol.OperationResult]]()

    async def execute(self, message: api.Message) -> None:
        try:
            batch = messages.decode(message.data, protocol.OrderBatch)
        except errors.MusterError as error:
            events.warning("bad-order", error=error)
            return
        answers = await self._under_way.once(message.data, lambda: self._execute_all(batch.orders))
        with contextlib.suppress(errors.MusterError):
            await message.respond(_results(answers))

    async def _execute_all(self, orders: Sequence[protocol.OperationOrder]) -> list[protocol.OperationResult]:
        results = await asyncio.gather(*(self._execute(order) for order in orders))
        # The registry knows the state after an operation before it knows the outcome: a rollout relies on it.
        is_stored = False
        for _ in range(FLUSH_TRIES):  # another registry may be taking over
            with contextlib.suppress(errors.MusterError):
                await self._flush([order.resource for order in orders])
                is_stored = True
                break
            await asyncio.sleep(FLUSH_RETRY_S)
        return [
            answer  # not superseded: otherwise the registry has refused the state
            if is_stored and self._find(order.resource)
            else msgspec.structs.replace(answer, code=answer.code or protocol.NOT_CHECKPOINTED)
            for order, answer in zip(orders, results, strict=True)
        ]

    async def _execute(self, order: protocol.OperationOrder) -> protocol.OperationResult:
        not_managed = protocol.OperationResult(
            id=order.id,
            outcome=messages.DecisionOutcome.REFUSED,
            code=protocol.NOT_MANAGED,
            reason=f"{self._name} does not manage {order.resource}",
        )
        if (assignment := self._find(order.resource)) is None:
            return not_managed
        operation = protocol.Operation(
            id=order.id,
            verb=protocol.Verb.SHELL
            if order.is_shell
            else _READS.get(order.operation, protocol.Verb.EXECUTE),
            resource=order.resource,
            epoch=assignment.epoch,
            manager=self._name,
            operation=order.operation,
            arguments=order.arguments,
            timeout_s=order.timeout_s,
        )
        answer = await self._agents.call(assignment.spec.agent, operation)
        if answer.code == errors.StaleEpoch.code:  # nothing was done
            return not_managed
        begins_run = not order.is_shell and order.operation not in _KEEPING
        self._on_executed(order.resource, answer.observed, begins_run)
        return answer


def _results(answers: list[protocol.OperationResult]) -> bytes:
    """The results of one message, without observations."""
    slim = [msgspec.structs.replace(answer, observed=None) for answer in answers]
    return messages.encode(
        protocol.OrderResults(results=tuple(operation_results.fit_message(slim))), "msgpack"
    )
