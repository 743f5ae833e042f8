"""Operations that a manager sends to agents.

A request without a reply is sent again under the same id; the agent executes it once. The number of
operations in progress is bounded, and one agent may have half of them: operations on others do not wait for
an agent that does not reply.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable

from muster.bus import api
from muster.bus.rpc import client
from muster.core import errors, messages
from muster.manage import protocol
from muster.manage.manager import concurrency_limit

AT_ONCE = 500  # operations in progress
RETRY_S = 0.25
RESEND_S = 2.0  # the first wait for a reply; it doubles with each resend


class AgentCaller:
    """``may_act``: whether the manager's renewal is valid; nothing is sent without it."""

    def __init__(self, bus: api.Bus, may_act: Callable[[], bool]) -> None:
        self._limit = concurrency_limit.ConcurrencyLimit(AT_ONCE)
        self._limits = collections.defaultdict[str, concurrency_limit.ConcurrencyLimit](  # by agent
            lambda: concurrency_limit.ConcurrencyLimit(AT_ONCE // 2)
        )
        self._bus = bus
        self._may_act = may_act

    async def call(self, agent: str, operation: protocol.Operation) -> protocol.OperationResult:
        subject = protocol.operation(agent, operation.resource)
        try:
            data = messages.encode(operation, "msgpack")
        except errors.MusterError as error:
            return _no_reply(operation, False, error.code, error.message)
        loop = asyncio.get_running_loop()
        async with self._limits[agent], self._limit:
            deadline = loop.time() + operation.timeout_s
            sent, resend_s = False, RESEND_S
            while True:
                if not self._may_act():
                    return _no_reply(
                        operation, sent, errors.Unavailable.code, "this manager has no valid renewal"
                    )
                try:
                    left_s = max(0.1, deadline - loop.time() + 1)
                    message = await client.exchange_once(
                        self._bus, subject, data, timeout_s=min(left_s, resend_s)
                    )
                    return messages.decode(message.data, protocol.OperationResult)
                except errors.TimedOut as error:
                    sent, resend_s = True, resend_s * 2
                    if loop.time() > deadline:
                        return _no_reply(operation, sent, error.code, f"{agent} did not reply")
                except errors.Unavailable as error:
                    if not sent:
                        return _no_reply(operation, sent, error.code, f"{agent} cannot be reached")
                    if loop.time() > deadline:
                        return _no_reply(
                            operation, sent, error.code, f"{agent} disconnected after the request was sent"
                        )
                    await asyncio.sleep(RETRY_S)
                except errors.MusterError as error:
                    return _no_reply(operation, True, error.code, error.message)


def _no_reply(operation: protocol.Operation, sent: bool, code: str, reason: str) -> protocol.OperationResult:
    """The result without a reply: what was sent may have been executed."""
    outcome = messages.DecisionOutcome.IN_DOUBT if sent else messages.DecisionOutcome.FAILED
    return protocol.OperationResult(id=operation.id, outcome=outcome, code=code, reason=reason)
