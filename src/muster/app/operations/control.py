"""Changes of a running domain: requests to its process over the bus, from operators.

    muster.bus.from.<identity>.brokers.<verb>      verbs: list, start, stop, link, unlink, alerts

The identity in the subject is that of the sender, enforced by the broker; its role is in the keyring.  Only
the role ``operator`` may change brokers.  Requests and replies are those of `muster.bus.rpc`.

A change may make the broker reload its configuration, which can lose a reply.  A request is therefore
repeated under the same id; it gets the same reply and is not executed again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from muster.app.components import component
from muster.app.components import context as context_
from muster.bus import api
from muster.bus.rpc import client, server
from muster.core import errors, subjects
from muster.trust.permissions import roles

PART = "bus"
KIND = "brokers"
READ_VERBS = ("list", "links", "alerts")  # verbs that only read
TIMEOUT_S = 60.0  # a broker with storage may have to drain first
RETRY_S = 3.0

Verb = server.Handler


async def request_control(bus: api.Bus, verb: str, **arguments: Any) -> Any:
    """The reply of the domain; raises the error of a rejected request."""
    subject = subjects.from_identity(PART, bus.identity, KIND, verb)
    absent = errors.Unavailable(
        "no domain process listens on this bus", hint="were these brokers started by `muster up`?"
    )
    return await client.call(
        bus, subject, arguments, timeout_s=TIMEOUT_S, try_s=RETRY_S, waits=False, absent=absent
    )


class ControlServer:
    """The component that executes these requests."""

    name = "control"
    depends_on: Sequence[str] = ()
    vital = False

    def __init__(self, verbs: dict[str, Verb]) -> None:
        self._verbs = verbs
        self._context: context_.ComponentContext
        self._server: server.RpcServer | None = None

    async def start(self, context: context_.ComponentContext) -> None:
        self._context = context
        operations = [
            server.RpcOperation.plain(
                f"{KIND}.{name}",
                verb,
                audited=name not in READ_VERBS,
                what=f"broker-{name}",
                target=_target,
            )
            for name, verb in self._verbs.items()
        ]
        self._server = server.RpcServer(context.bus, PART, operations, authorize=self._authorize, at_once=1)
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.close()

    def health(self) -> component.ComponentHealth:
        return component.ComponentHealth()

    async def _authorize(
        self, call: server.RpcCall, operation: server.RpcOperation, arguments: Mapping[str, Any]
    ) -> None:
        record = await asyncio.to_thread(self._context.trust.show, call.identity)
        reads = record.role == roles.Role.WEB and not operation.is_audited
        if record.role != roles.Role.OPERATOR and not reads:
            raise errors.Forbidden(
                f"{call.identity} has the role {record.role}; only an operator may change brokers"
            )


def _target(arguments: Mapping[str, Any]) -> str:
    if "near" in arguments:
        return f"{arguments['near']}>{arguments['far']}"
    return server.target_of(arguments)
