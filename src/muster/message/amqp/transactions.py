"""Transactions of a connection: what a client sends and acknowledges in one is kept until its discharge."""

from __future__ import annotations

import contextlib
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import proton

from muster.core import errors
from muster.message import faults, protocol, values
from muster.message.amqp import engine, sections

if TYPE_CHECKING:
    from muster.message.amqp import bridge

_DECLARE, _DISCHARGE, _DECLARED = 0x31, 0x32, 0x33
_ACCEPTED: Final = proton.Described(proton.ulong(engine.ACCEPTED), [])


@dataclass(slots=True)
class Transaction:
    sends: list[protocol.Send] = field(default_factory=list)
    acks: dict[str, list[int]] = field(default_factory=dict)
    error: errors.MusterError | None = None  # why it can only be rolled back


class Transactions:
    def __init__(self, owner: bridge.Bridge) -> None:
        self._bridge = owner
        self._open: dict[bytes, Transaction] = {}

    def _named(self, delivery: Any) -> tuple[bytes, Transaction]:
        name = bytes(delivery.remote.data[0])
        found = self._open.get(name)
        if found is None:
            raise errors.InvalidInput("there is no such transaction")
        return name, found

    def send(self, pointer: engine.Pointer, send: protocol.Send) -> None:
        delivery = engine.wrapped(pointer)
        name, transaction = self._named(delivery)
        if len(transaction.sends) >= protocol.SENDS_MAX:
            raise errors.LimitExceeded(f"a transaction holds at most {protocol.SENDS_MAX} messages")
        transaction.sends.append(send)
        if not delivery.settled:
            delivery.local.data = [name, _ACCEPTED]
            delivery.update(engine.TRANSACTIONAL)
        delivery.settle()

    def spoil(self, pointer: engine.Pointer, error: errors.MusterError) -> None:
        """A message of it was refused: its commit fails, since the client may not have waited to hear."""
        with contextlib.suppress(errors.InvalidInput):
            _, transaction = self._named(engine.wrapped(pointer))
            transaction.error = error

    def acknowledge(self, pointer: engine.Pointer, key: str, number: int) -> None:
        with contextlib.suppress(errors.InvalidInput):  # it is over: the message comes again
            _, transaction = self._named(engine.wrapped(pointer))
            transaction.acks.setdefault(key, []).append(number)

    def coordinate(self, pointer: engine.Pointer, data: bytes) -> None:
        """A message to the coordinator: declare, or discharge."""
        delivery = engine.wrapped(pointer)
        said = _described(data)
        code = said.descriptor if said is not None else None
        if said is not None and code == _DECLARE:
            made = secrets.token_bytes(8)
            self._open[made] = Transaction()
            delivery.local.data = [made]
            delivery.update(_DECLARED)
            delivery.settle()
        elif said is not None and code == _DISCHARGE:
            name, failed = (*(item.value for item in said.value), False)[:2]
            transaction = self._open.pop(name, None)
            if transaction is None:
                raise errors.InvalidInput("there is no such transaction")
            self._bridge.spawn(self._discharge(delivery, transaction, commit=not failed))
        else:
            raise errors.InvalidInput("a coordinator takes declare and discharge")

    async def _discharge(self, delivery: Any, transaction: Transaction, *, commit: bool) -> None:
        jms = self._bridge.jms
        error = transaction.error if commit else None
        if commit and error is None and (transaction.sends or transaction.acks):
            try:
                await jms.submit(transaction.sends, transaction.acks, alone=True)
            except errors.MusterError as found:
                error = found
        if (error is not None or not commit) and transaction.acks:
            with contextlib.suppress(errors.Unavailable):
                await jms.ask(protocol.Release(jms.name, transaction.acks, counted=True))
        if error is not None:
            # Any condition but amqp:transaction:rollback tells the Java client that it was rolled back.
            delivery.local.condition = proton.Condition("amqp:internal-error", error.message)
            delivery.update(proton.Delivery.REJECTED)
        else:
            delivery.update(proton.Delivery.ACCEPTED)
        delivery.settle()


def _described(data: bytes) -> sections.Described | None:
    """The one described list in a message's value."""
    try:
        for code, _, value, _ in sections.split(data):
            if code == sections.VALUE:
                found, _ = sections.read(data, value)
                if (
                    isinstance(found, sections.Described)
                    and isinstance(found.value, list)
                    and all(isinstance(item, values.Typed) for item in found.value)
                ):
                    return found
    except sections.MALFORMED as error:
        raise faults.FormatError(f"no AMQP message: {error}") from error
    return None
