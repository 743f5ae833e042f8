"""Operations requested by users, sent through the manager of each resource.

An order keeps its id whichever manager executes it. If a manager is lost, its orders go to the next manager
of the resource. The agent remembers ids and outcomes, so an operation is never executed twice; it is in doubt
only if the outcome cannot be determined.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from muster.bus import api
from muster.bus.rpc import client, server
from muster.core import errors, messages
from muster.manage import operation_results, protocol, rows
from muster.manage.registry import records

if TYPE_CHECKING:
    from muster.manage.registry import endpoint

ORDERS_MAX, ORDERS_BYTES_MAX = 500, 700_000  # in one message to a manager
MANAGER_WAIT_S = 20.0  # how long an order waits if its resource has no manager
RESEND_S = 2.0  # a request without a reply for so long is sent again: a broker may have lost it
LOG_S = 8.0  # for the end of a log
LOOK_S, LOOK_S_MAX = 0.1, 1.0  # the poll interval grows, because thousands may wait

ResultsById = dict[str, protocol.OperationResult]


async def submit_operation(
    registry: endpoint.RegistryEndpoint, orders: list[protocol.OperationOrder], by: str
) -> list[protocol.OperationResult]:
    """A result for each order. Raises `errors.Unavailable` only when this registry is not active any more.
    The next one continues, because a request without a reply is repeated under the same ids.
    """
    loop = asyncio.get_running_loop()
    until = loop.time() + MANAGER_WAIT_S
    maybe_started: set[str] = set()  # ids sent to a manager that was lost: the operation may have started
    results: ResultsById = {}
    left, look_s = orders, LOOK_S
    while left:
        try:
            results |= await _send_once(registry, left, by, maybe_started)
        except errors.Unavailable as error:  # nothing was sent this time
            if not registry.acting.is_set():
                raise
            # Disconnected: the lease may outlast that.
            results |= {
                order.id: _result(order, messages.DecisionOutcome.FAILED, protocol.NOT_MANAGED, error.message)
                for order in left
            }
        left = [order for order in left if results[order.id].code == protocol.NOT_MANAGED]
        if not left or loop.time() > until:
            break
        await asyncio.sleep(look_s)
        look_s = min(LOOK_S_MAX, look_s * 1.5)
    for order in left:
        if order.id in maybe_started:
            reason = "its manager was lost, and no other manager has replied"
            results[order.id] = _result(
                order, messages.DecisionOutcome.IN_DOUBT, protocol.NOT_MANAGED, reason
            )
    return [results[order.id] for order in orders]


async def log_end(
    registry: endpoint.RegistryEndpoint,
    resource: str,
    id: str,
    lines: int,
    bytes_max: int,
    *,
    since_s: float | None = None,
) -> str | None:
    """The last lines of the log of a resource, or of what was written within ``since_s``; None if they cannot
    be read soon."""
    order = protocol.OperationOrder(
        id=id,
        resource=resource,
        operation=protocol.LOG_PAGE,
        arguments={"lines": lines, "bytes_max": bytes_max, "since_s": since_s},
        timeout_s=LOG_S,
    )
    try:
        async with asyncio.timeout(LOG_S):
            (answer,) = await submit_operation(registry, [order], "")
    except TimeoutError:
        return None
    return rows.LogRow.of(resource, answer).text[-bytes_max:] or None


async def _send_once(
    registry: endpoint.RegistryEndpoint,
    orders: list[protocol.OperationOrder],
    by: str,
    maybe_started: set[str],
) -> ResultsById:
    state = registry.state
    by_manager: dict[str, list[protocol.OperationOrder]] = {}
    for order in orders:
        owner = state.owners.get(order.resource)
        by_manager.setdefault(owner.manager if owner else "", []).append(order)
    pages = [(manager, page) for manager, all_of in by_manager.items() for page in _pages(all_of)]
    replies = await asyncio.gather(
        *(
            _send_page(registry, manager, state.managers.get(manager), page, by, maybe_started)
            for manager, page in pages
        )
    )
    results = {answer.id: answer for page in replies for answer in page}
    for order in orders:
        if order.id not in results:
            reason = "its manager did not report the outcome"
            results[order.id] = _result(
                order, messages.DecisionOutcome.IN_DOUBT, errors.TimedOut.code, reason
            )
    return results


def _pages(orders: list[protocol.OperationOrder]) -> Iterator[list[protocol.OperationOrder]]:
    """Batches that fit into a message."""
    page: list[protocol.OperationOrder] = []
    size = 0
    for order in orders:
        size += len(msgspec.json.encode(order))
        if page and (len(page) == ORDERS_MAX or size > ORDERS_BYTES_MAX):
            yield page
            page, size = [], len(msgspec.json.encode(order))
        page.append(order)
    if page:
        yield page


async def _send_page(
    registry: endpoint.RegistryEndpoint,
    manager: str,
    member: records.ManagerRecord | None,
    page: list[protocol.OperationOrder],
    by: str,
    maybe_started: set[str],
) -> list[protocol.OperationResult]:
    def all_of(outcome: messages.DecisionOutcome, code: str, reason: str) -> list[protocol.OperationResult]:
        return [_result(order, outcome, code, reason) for order in page]

    if member is None:
        return all_of(messages.DecisionOutcome.FAILED, protocol.NOT_MANAGED, "the resource has no manager")
    try:
        data = messages.encode(protocol.OrderBatch(orders=tuple(page), by=by), "msgpack")
    except messages.MessageTooLarge as error:
        return all_of(messages.DecisionOutcome.REFUSED, error.code, error.message)
    within_s = max(order.timeout_s for order in page) + 5
    subject, repeat = protocol.to_manager(manager, "execute"), api.Repetition(RESEND_S)  # executed once
    request = asyncio.ensure_future(
        client.exchange_repeated(registry.bus, subject, data, timeout_s=within_s, repeat=repeat)
    )
    try:
        while not request.done():
            await asyncio.wait([request], timeout=LOOK_S)
            now = registry.state.managers.get(manager)
            if now is None or now.boot != member.boot:
                break
        if not request.done():
            maybe_started.update(order.id for order in page)
            return all_of(messages.DecisionOutcome.FAILED, protocol.NOT_MANAGED, f"{manager} was lost")
        message = request.result()
        return list(messages.decode(message.data, protocol.OrderResults, max_bytes=64 << 20).results)
    except errors.TimedOut as error:
        return all_of(messages.DecisionOutcome.IN_DOUBT, error.code, f"{manager} did not reply")
    except errors.Unavailable:
        # The manager has no subscription, or this process is cut off: it expires, or the request is repeated.
        maybe_started.update(order.id for order in page)
        return all_of(messages.DecisionOutcome.FAILED, protocol.NOT_MANAGED, f"{manager} cannot be reached")
    except errors.MusterError as error:
        return all_of(messages.DecisionOutcome.FAILED, error.code, error.message)
    finally:
        request.cancel()
        with contextlib.suppress(asyncio.CancelledError, errors.MusterError):
            await request


def _result(
    order: protocol.OperationOrder, outcome: messages.DecisionOutcome, code: str, reason: str
) -> protocol.OperationResult:
    return protocol.OperationResult(id=order.id, outcome=outcome, code=code, reason=reason)


# Commands that users run inside resources

BEGIN_TIMEOUT_S = 15.0
EXCHANGE_TIMEOUT_S = 5.0
COMMAND_SHOWN = 500  # characters of it in the audit

SessionName = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16,64}$(?!\n)")]


class ShellHandlers:
    """The name of a session begins with the identity of its user, whom the broker proves, so no other user
    reaches it. Begin and end are audited, with the command and its exit code; the end only if it is seen.
    """

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
        (answer,) = await submit_operation(self._registry, [order], call.actor)
        if answer.outcome is not messages.DecisionOutcome.DONE:
            raise operation_results.to_error(name, protocol.SHELL, answer.outcome, answer.code, answer.reason)
        return answer.result


def _target(arguments: Mapping[str, Any]) -> str:
    return str(arguments.get("name", ""))[:256]
