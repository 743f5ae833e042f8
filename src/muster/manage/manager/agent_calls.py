"""A manager has an operation carried out: it asks the agent, and asks again, by the same id, when an answer
was lost.  The agent does it once.  Some hundred are under way at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from muster.bus import api
from muster.core import errors, messages
from muster.manage import protocol

AT_ONCE = 500  # operations under way
RETRY_S = 0.25
AGAIN_S = 2.0  # without an answer for so long it is asked again, then after twice as long


class AgentCaller:
    """``may_act`` says whether its manager's renewal holds; without it nothing is sent."""

    def __init__(self, bus: api.Bus, may_act: Callable[[], bool]) -> None:
        self._gate = asyncio.Semaphore(AT_ONCE)
        self._bus = bus
        self._may_act = may_act

    async def operate(self, agent: str, operation: protocol.Operation) -> protocol.OperationResult:
        subject = protocol.operation(agent, operation.resource)
        data = messages.encode(operation, "msgpack")
        loop = asyncio.get_running_loop()
        async with self._gate:
            deadline = loop.time() + operation.timeout_s
            sent, again_s = False, AGAIN_S
            while True:
                if not self._may_act():
                    return _none(operation, sent, errors.Unavailable.code, "this manager may not act now")
                try:
                    left_s = max(0.1, deadline - loop.time() + 1)
                    message = await self._bus.request(subject, data, timeout_s=min(left_s, again_s))
                    return messages.decode(message.data, protocol.OperationResult)
                except errors.TimedOut as error:
                    sent, again_s = True, again_s * 2
                    if loop.time() > deadline:
                        return _none(operation, sent, error.code, f"{agent} did not answer")
                except errors.Unavailable as error:
                    if not sent:
                        return _none(operation, sent, error.code, f"{agent} cannot be reached")
                    if loop.time() > deadline:
                        return _none(operation, sent, error.code, f"{agent} is gone since")
                    await asyncio.sleep(RETRY_S)
                except errors.MusterError as error:
                    return _none(operation, True, error.code, error.message)


def _none(operation: protocol.Operation, sent: bool, code: str, reason: str) -> protocol.OperationResult:
    """No answer: what was sent may have been done."""
    outcome = messages.DecisionOutcome.IN_DOUBT if sent else messages.DecisionOutcome.FAILED
    return protocol.OperationResult(id=operation.id, outcome=outcome, code=code, reason=reason)
