"""Commands that users run inside resources: begun, exchanged and ended through the manager of the resource.

The name of a session begins with the identity of its user, whom the broker proves: no other user reaches it.
Begin and end are audited, with the command and its exit code; a user that disappears leaves no end.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from muster.bus.rpc import server
from muster.core import errors, messages
from muster.manage import operation_results, protocol
from muster.manage.registry import operations, records

if TYPE_CHECKING:
    from muster.manage.registry import endpoint

BEGIN_TIMEOUT_S = 15.0
EXCHANGE_TIMEOUT_S = 5.0
COMMAND_SHOWN = 500  # characters of it in the audit

SessionName = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16,64}$(?!\n)")]


class ShellHandlers:
    def __init__(self, registry: endpoint.RegistryEndpoint) -> None:
        self._registry = registry

    def operations(self) -> list[server.RpcOperation]:
        def operation(verb: str, handler: server.Handler, **options: Any) -> server.RpcOperation:
            return server.RpcOperation(f"request.{verb}", handler, what="shell", target=_target, **options)

        return [
            operation(protocol.SHELL, self._begin),
            operation(protocol.SHELL_EXCHANGE, self._exchange, audited=False, once=False),
            operation(protocol.SHELL_END, self._end),
        ]

    async def _begin(self, call: server.RpcCall, name: str, command: protocol.ShellCommand) -> str:
        """The name of the session."""
        words = " ".join(command.command)
        call.why = f"{call.actor} runs {words[:100]}"
        call.details = {"command": words[:COMMAND_SHOWN], "terminal": command.terminal}
        id = records.derived_id(call.request_id and f"{call.identity}/{call.request_id}", 32)
        await self._submit(call, name, id, command, BEGIN_TIMEOUT_S)
        return id

    async def _exchange(
        self, call: server.RpcCall, name: str, id: SessionName, exchange: protocol.ShellExchange
    ) -> protocol.ShellOutput:
        exchange = msgspec.structs.replace(exchange, closes=False)
        result = await self._submit(call, name, id, exchange, EXCHANGE_TIMEOUT_S)
        return msgspec.convert(result, protocol.ShellOutput)

    async def _end(
        self, call: server.RpcCall, name: str, id: SessionName, exit_code: int | None = None
    ) -> None:
        """``exit_code``: None if the user ends it before."""
        call.why = "ended by its user" if exit_code is None else f"exit code {exit_code}"
        await self._submit(call, name, id, protocol.ShellExchange(closes=True), EXCHANGE_TIMEOUT_S)

    async def _submit(
        self,
        call: server.RpcCall,
        name: str,
        id: str,
        request: protocol.ShellCommand | protocol.ShellExchange,
        timeout_s: float,
    ) -> Any:
        if name not in self._registry.state.resources:
            raise errors.NotFound(f"no resource {name!r}")
        order = protocol.OperationOrder(
            id=records.order_id(secrets.token_hex(8), name),
            resource=name,
            operation=f"{call.identity}/{id}",
            arguments=msgspec.to_builtins(request),
            timeout_s=timeout_s,
            is_shell=True,
        )
        (answer,) = await operations.submit_operation(self._registry, [order], call.actor)
        if answer.outcome is not messages.DecisionOutcome.DONE:
            raise operation_results.to_error(name, protocol.SHELL, answer.outcome, answer.code, answer.reason)
        return answer.result


def _target(arguments: Mapping[str, Any]) -> str:
    return str(arguments.get("name", ""))[:256]
