"""Operations that users asked for, on their way from the registry through each resource's manager.

An order keeps its id whichever manager carries it.  When a manager is lost while it has one, the order goes
to the resource's next manager, and the agent, which remembers ids, tells what became of it: it is never
carried out twice, and only what nobody can tell is in doubt.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from muster.bus import api
from muster.core import errors, messages
from muster.manage import protocol

if TYPE_CHECKING:
    from muster.manage.registry import endpoint

ORDERS_MAX, ORDERS_BYTES_MAX = 500, 700_000  # in one message to a manager
PATIENCE_S = 20.0  # how long an order waits for a manager, where its resource has none just now
AGAIN_S = 2.0  # a manager that did not answer for so long is asked again: a broker may have lost it
LOOK_S, LOOK_S_MAX = 0.1, 1.0  # looked for rarely after a while: many thousands may wait

Answers = dict[str, protocol.OperationResult]


async def submit_operation(
    registry: endpoint.RegistryEndpoint, orders: list[protocol.OperationOrder], by: str
) -> list[protocol.OperationResult]:
    """An answer for each order, whatever happens."""
    loop = asyncio.get_running_loop()
    until = loop.time() + PATIENCE_S
    handed: set[str] = set()  # to a manager that was lost since: may have been begun
    found: Answers = {}
    left, look_s = orders, LOOK_S
    while left:
        found |= await _send_once(registry, left, by, handed)
        left = [order for order in left if found[order.id].code == protocol.NOT_MANAGED]
        if not left or loop.time() > until:
            break
        await asyncio.sleep(look_s)
        look_s = min(LOOK_S_MAX, look_s * 1.5)
    for order in left:
        if order.id in handed:
            reason = "the manager that had it was lost, and no other has the resource"
            found[order.id] = _answer(order, messages.DecisionOutcome.IN_DOUBT, protocol.NOT_MANAGED, reason)
    return [found[order.id] for order in orders]


async def _send_once(
    registry: endpoint.RegistryEndpoint, orders: list[protocol.OperationOrder], by: str, handed: set[str]
) -> Answers:
    state = registry.state
    by_manager: dict[str, list[protocol.OperationOrder]] = {}
    for order in orders:
        owner = state.owners.get(order.resource)
        by_manager.setdefault(owner.manager if owner else "", []).append(order)
    pages = [(manager, page) for manager, all_of in by_manager.items() for page in _pages(all_of)]
    told = await asyncio.gather(
        *(_to_manager(registry, manager, page, by, handed) for manager, page in pages)
    )
    found = {answer.id: answer for page in told for answer in page}
    for order in orders:
        if order.id not in found:
            reason = "its manager did not tell what became of it"
            found[order.id] = _answer(order, messages.DecisionOutcome.IN_DOUBT, errors.TimedOut.code, reason)
    return found


def _pages(orders: list[protocol.OperationOrder]) -> Iterator[list[protocol.OperationOrder]]:
    """As many in each as fit into a message."""
    page: list[protocol.OperationOrder] = []
    size = 0
    for order in orders:
        size += len(msgspec.msgpack.encode(order))
        if page and (len(page) == ORDERS_MAX or size > ORDERS_BYTES_MAX):
            yield page
            page, size = [], len(msgspec.msgpack.encode(order))
        page.append(order)
    if page:
        yield page


async def _to_manager(
    registry: endpoint.RegistryEndpoint,
    manager: str,
    page: list[protocol.OperationOrder],
    by: str,
    handed: set[str],
) -> list[protocol.OperationResult]:
    def all_of(outcome: messages.DecisionOutcome, code: str, reason: str) -> list[protocol.OperationResult]:
        return [_answer(one, outcome, code, reason) for one in page]

    member = registry.state.managers.get(manager)
    if member is None:
        return all_of(messages.DecisionOutcome.FAILED, protocol.NOT_MANAGED, "no manager has it now")
    try:
        data = messages.encode(protocol.OrderBatch(orders=tuple(page), by=by), "msgpack")
    except messages.MessageTooLarge as error:
        return all_of(messages.DecisionOutcome.REFUSED, error.code, error.message)
    within_s = max(one.timeout_s for one in page) + 5
    request = asyncio.ensure_future(
        _ask(registry.bus, protocol.to_manager(manager, "execute"), data, within_s=within_s)
    )
    try:
        while not request.done():
            await asyncio.wait([request], timeout=LOOK_S)
            now = registry.state.managers.get(manager)
            if now is None or now.boot != member.boot:
                break
        if not request.done():
            handed.update(one.id for one in page)
            return all_of(messages.DecisionOutcome.FAILED, protocol.NOT_MANAGED, f"{manager} was lost")
        message = request.result()
        return list(messages.decode(message.data, protocol.OrderResults, max_bytes=64 << 20).results)
    except errors.TimedOut as error:
        return all_of(messages.DecisionOutcome.IN_DOUBT, error.code, f"{manager} did not answer")
    except errors.Unavailable:
        # Nobody listens there, or we are cut off: it will expire, or be asked again.
        handed.update(one.id for one in page)
        return all_of(messages.DecisionOutcome.FAILED, protocol.NOT_MANAGED, f"{manager} cannot be reached")
    except errors.MusterError as error:
        return all_of(messages.DecisionOutcome.FAILED, error.code, error.message)
    finally:
        request.cancel()
        with contextlib.suppress(asyncio.CancelledError, errors.MusterError):
            await request


async def _ask(bus: api.Bus, subject: str, data: bytes, *, within_s: float) -> api.Message:
    """The answer to the same question, asked again and again: it is carried out once."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within_s
    while True:
        left_s = max(0.1, deadline - loop.time())
        try:
            return await bus.request(subject, data, timeout_s=min(left_s, AGAIN_S))
        except errors.TimedOut:
            if loop.time() >= deadline:
                raise


def _answer(
    order: protocol.OperationOrder, outcome: messages.DecisionOutcome, code: str, reason: str
) -> protocol.OperationResult:
    return protocol.OperationResult(id=order.id, outcome=outcome, code=code, reason=reason)
