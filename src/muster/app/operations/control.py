"""Changes of a running domain: the domain's process executes the requests of `bus.brokers.control`.

The identity in the subject is that of the sender, enforced by the broker; its role is in the keyring.  A
request that is repeated under the same id gets the same reply and is not executed again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from muster.app.components import component
from muster.app.components import context as context_
from muster.bus.brokers import control
from muster.bus.rpc import server
from muster.core import errors
from muster.trust import identity_roles
from muster.trust.permissions import roles

READ_VERBS = ("list", "links", "topics", "alerts", "components")  # verbs that only read

Verb = server.Handler


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
                f"{control.KIND}.{name}",
                verb,
                audited=name not in READ_VERBS,
                what=f"broker-{name}",
                target=_target,
            )
            for name, verb in self._verbs.items()
        ]
        self._server = server.RpcServer(
            context.bus, control.PART, operations, authorize=self._authorize, at_once=1
        )
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.close()

    def health(self) -> component.ComponentHealth:
        return component.ComponentHealth()

    async def _authorize(
        self, call: server.RpcCall, operation: server.RpcOperation, arguments: Mapping[str, Any]
    ) -> None:
        role = await asyncio.to_thread(identity_roles.IdentityRoles(self._context.trust), call.identity)
        reads = role == roles.Role.WEB and not operation.is_audited
        if role != roles.Role.OPERATOR and not reads:
            raise errors.Forbidden(
                f"{call.identity} has the role {role}; only an operator may change brokers"
            )


def _target(arguments: Mapping[str, Any]) -> str:
    if "near" in arguments:
        return f"{arguments['near']}>{arguments['far']}"
    return server.target_of(arguments)
