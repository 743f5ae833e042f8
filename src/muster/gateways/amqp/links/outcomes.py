"""Messages that the client of a connection has received, and the outcomes it reports for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from muster.gateways.amqp.links import consumers
from muster.gateways.amqp.protocol import endpoints, frames
from muster.message import protocol

if TYPE_CHECKING:
    from muster.gateways.amqp import connection


class Outcomes:
    def __init__(self, owner: connection.AmqpConnection) -> None:
        self._connection = owner
        self._unsettled: set[tuple[str, int]] = set()  # messages without an outcome, by backlog and number
        self._acks: dict[str, list[int]] = {}

    def __bool__(self) -> bool:
        """Whether there are acknowledgements to send to the dispatcher."""
        return bool(self._acks)

    def forget(self, key: str, number: int) -> None:
        """The message has an outcome, or its link is closed, so that it will have none."""
        self._unsettled.discard((key, number))

    def transmit(self, outgoing: consumers.OutgoingLink, data: bytes, key: str = "", number: int = 0) -> None:
        """Send a message to the client. With a ``key``, it belongs to a backlog."""
        settled = outgoing.presettled
        self._connection.running.send(outgoing.link, data, (outgoing, key, number, data), settled=settled)
        if key:
            if settled:
                self._acks.setdefault(key, []).append(number)
                self.acknowledge()
            else:
                self._unsettled.add((key, number))
        self._connection.flush_soon()

    def begin_transmit(self, outgoing: consumers.OutgoingLink, data: bytes, key: str, number: int) -> int:
        """Begin to send a message in parts; returns its number in the session."""
        settled = outgoing.presettled
        if key and not settled:
            self._unsettled.add((key, number))
        return self._connection.running.begin(outgoing.link, (outgoing, key, number, data), settled=settled)

    def end_transmit(self, outgoing: consumers.OutgoingLink, key: str, number: int) -> None:
        """The last part was sent."""
        if key and outgoing.presettled:
            self._acks.setdefault(key, []).append(number)
            self.acknowledge()

    def has_unsettled(self, key: str, number: int) -> bool:
        """Whether the client has this message and its outcome is not stored yet."""
        return (key, number) in self._unsettled or self._connection.jms.outbox.is_acknowledging(key, number)

    def is_unsettled(self, message: tuple[str, int]) -> bool:
        return message in self._unsettled

    def discharged(self, acks: dict[str, list[int]]) -> None:
        """Forget messages that a transaction acknowledged or released."""
        self._unsettled.difference_update((key, number) for key in acks for number in acks[key])

    def unsettled_by_backlog(self) -> dict[str, list[int]]:
        held: dict[str, list[int]] = {}
        for key, number in self._unsettled:
            held.setdefault(key, []).append(number)
        return held

    def settled(self, token: endpoints.Token, code: int, state: bytes | None) -> None:
        """The client reports the outcome of a message."""
        outgoing, key, number, data = token
        default = outgoing.link.default_outcome
        if code != frames.TRANSACTIONAL and not frames.is_outcome(code, state):
            state = default
            code = frames.code_of(state)
        self._connection.transactions.forget_live(outgoing, key, number)
        if not key:
            outgoing.returned(number, data, code, state)
            return
        transactions = self._connection.transactions
        if code == frames.TRANSACTIONAL and transactions.acknowledge(outgoing, state, default, key, number):
            return
        self._unsettled.discard((key, number))
        self.apply(code, state, key, number)
        if outgoing.closed:
            self._connection.link_factory.end_settled()

    def apply(self, code: int, state: bytes | None, key: str, number: int) -> None:
        """Give a message its outcome; `acknowledge` follows."""
        if code == frames.ACCEPTED:
            self._acks.setdefault(key, []).append(number)
        else:
            self.release(code, state, key, number)

    def release(self, code: int, state: bytes | None, key: str, number: int) -> None:
        counted, elsewhere, reason = False, False, None
        if code == frames.REJECTED:
            reason = "rejected by its consumer"
        elif code == frames.TRANSACTIONAL:
            counted = True  # its transaction has ended, so the client's processing is void
        elif code == frames.MODIFIED:
            counted, elsewhere = frames.modified(state)
        release = protocol.ReleaseMessages(
            self._connection.jms.name, {key: [number]}, counted=counted, reason=reason, elsewhere=elsewhere
        )
        self._connection.spawn(self._connection.jms.notify(release))

    def return_message(self, outcome: bytes, key: str, number: int) -> None:
        """A message has an outcome other than accepted. It may return to this client."""
        self.forget(key, number)
        self.release(frames.code_of(outcome), outcome, key, number)

    def acknowledge(self) -> asyncio.Future[None] | None:
        """Acknowledgements of one read are sent to the dispatcher together."""
        if not self._acks or self._connection.ended:
            return None
        acks, self._acks = self._acks, {}
        return self._connection.jms.submit([], acks)

    def confirm_when_stored(self, confirm: Callable[[], None]) -> None:
        """Call ``confirm`` when the acknowledgements until now are stored."""
        future = self.acknowledge()
        if future is None:
            confirm()
            return

        def stored(done: asyncio.Future[None]) -> None:
            if not (self._connection.ended or done.cancelled() or done.exception()):
                confirm()
                self._connection.flush_soon()

        future.add_done_callback(stored)
