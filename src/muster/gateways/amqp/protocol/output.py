"""The output of an engine: transfers, flows and dispositions, and the state that limits them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from muster.gateways.amqp import memory_budget
from muster.gateways.amqp.protocol import endpoints, frames

OUT_BYTES_MAX: Final = 1 << 20  # output for a socket at one time before links stop
_MASK: Final = endpoints.MASK
_FIRST_FRAME_BYTES_MAX: Final = 512  # until the peer has stated its maximum frame size


class EngineOutput:
    """The part of an engine that sends messages and their outcomes."""

    def __init__(self, budget: memory_budget.ConnectionBudget | None) -> None:
        self.budget = budget or memory_budget.ConnectionBudget(memory_budget.CONNECTION)
        self.budget.on_room = self.resume_links
        self._sessions: dict[int, endpoints.AmqpSession] = {}  # by the peer's channel
        self._payload_max = _FIRST_FRAME_BYTES_MAX - frames.TRANSFER_BYTES
        self._out: list[bytes] = []
        self._out_bytes = 0
        self._stopped = False
        self._accepting: list[endpoints.AmqpSession] = []
        self._close_sent = False
        self._held = False

    def links(self) -> Iterator[endpoints.AmqpLink]:
        for session in self._sessions.values():
            yield from list(session.links.values())

    def _notify_credit(self, links: Iterable[endpoints.AmqpLink]) -> None:
        for link in links:
            if link.credit > 0 and not link.key[1]:
                link.on_credit()

    @property
    def stopped(self) -> bool:
        return self._stopped

    def stop(self) -> None:
        """The socket accepts no more: messages that are not encoded yet wait at their link, where they can
        expire.
        """
        self._stopped = True

    def resume(self) -> None:
        self._stopped = False
        self.resume_links()
        for session in self._sessions.values():
            self._report_room(session)

    def _report_room(self, session: endpoints.AmqpSession) -> None:
        if session.on_room:
            waiting, session.on_room = session.on_room, []
            for report in waiting:
                report()

    def resume_links(self) -> None:
        self._notify_credit(list(self.links()))

    def _put(self, *parts: bytes) -> None:
        if not self._close_sent:
            self._out += parts

    def _session_flow(self, session: endpoints.AmqpSession) -> None:
        if session.channel is not None:
            self._put(frames.flow(session.channel, session.window_state(held=self._held)))

    def hold(self, held: bool) -> None:
        """While ``held``, the windows of sessions are not extended."""
        if self._held and not held:
            self._held = False
            for session in self._sessions.values():
                if session.incoming_window <= endpoints.WINDOW // 2:
                    self._session_flow(session)
        self._held = held

    def _link_flow(self, link: endpoints.AmqpLink, *, drain: bool = False) -> None:
        session = link.session
        if session.channel is not None and link.handle is not None:
            state = (link.handle, link.delivered & _MASK, link.credit)
            window = session.window_state(held=self._held)
            self._put(frames.flow(session.channel, window, state, drain=drain))

    def grant(self, link: endpoints.AmqpLink, credit: int) -> None:
        """Allow the peer to send this many more messages."""
        link.credit += credit
        self._link_flow(link)

    def drained(self, link: endpoints.AmqpLink) -> None:
        """Nothing more is to be sent for the remaining credit."""
        session = link.session
        if any(blocked[0] is link for blocked in session.blocked):
            session.draining.add(link)
        elif link.drain:
            link.delivered += link.credit
            link.credit = 0
            link.drain = False
            self._link_flow(link, drain=True)

    def may_send(self, link: endpoints.AmqpLink) -> bool:
        session = link.session
        return (
            link.credit > 0
            and not (self._stopped or session.blocked or session.over_unsettled_limit)
            and self.budget.may_deliver
        )

    def begin(self, link: endpoints.AmqpLink, token: endpoints.Token, *, settled: bool) -> int:
        """Begin a message whose parts follow; returns its number. ``token`` identifies it in its outcome."""
        session = link.session
        number = session.next_number & _MASK
        session.next_number += 1
        link.credit -= 1
        link.delivered += 1
        if not settled:
            session.sent(number, token)
        return number

    def send_part(
        self, link: endpoints.AmqpLink, number: int, data: bytes, *, settled: bool, more: bool
    ) -> None:
        session, size, most = link.session, len(data), self._payload_max
        for at in range(0, max(size, 1), most):
            session.blocked.append((link, number, data[at : at + most], settled, more or at + most < size))
        self._unblock(session)
        self._out_bytes += size
        if self._out_bytes > OUT_BYTES_MAX:
            self._stopped = True

    def has_room(self, link: endpoints.AmqpLink) -> bool:
        """Whether the next part of a message can be sent. Otherwise `AmqpSession.on_room` reports it."""
        return not self._stopped and not link.session.blocked

    def send(self, link: endpoints.AmqpLink, data: bytes, token: endpoints.Token, *, settled: bool) -> None:
        """``token`` identifies the message in its outcome."""
        session = link.session
        number = self.begin(link, token, settled=settled)
        size = len(data)
        if link.lead and size <= self._payload_max and session.window > 0 and not session.blocked:
            session.window -= 1
            session.outgoing += 1
            if not self._close_sent:
                self._out += (frames.transfer_head(link.lead, number, size, settled, False), data)
            self._out_bytes += size
            if self._out_bytes > OUT_BYTES_MAX:
                self._stopped = True
        else:
            self.send_part(link, number, data, settled=settled, more=False)

    def _unblock(self, session: endpoints.AmqpSession) -> None:
        while session.blocked and session.window > 0:
            link, number, data, settled, more = session.blocked.popleft()
            if not link.lead:
                continue
            session.window -= 1
            session.outgoing += 1
            self._put(frames.transfer_head(link.lead, number, len(data), settled, more), data)
        if session.draining and not session.blocked:
            draining, session.draining = session.draining, set()
            for link in draining:
                self.drained(link)

    def accept(self, link: endpoints.AmqpLink, number: int) -> None:
        """Sent together with adjacent deliveries in the next `pull`."""
        if link.settles_second:
            self.settle(link, number, frames.ACCEPTED_STATE)
            return
        session = link.session
        accepted = session.accepted
        if accepted is None:
            self._accepting.append(session)
        elif number == accepted[1] + 1:
            session.accepted = (accepted[0], number)
            return
        else:
            self._flush_accepted(session)
        session.accepted = (number, number)

    def _flush_accepted(self, session: endpoints.AmqpSession) -> None:
        if session.accepted is not None and session.channel is not None:
            first, last = session.accepted
            self._put(frames.disposition(session.channel, first, last, frames.ACCEPTED_STATE))
        session.accepted = None

    def settle(self, link: endpoints.AmqpLink, number: int, state: bytes) -> None:
        """Send an outcome, and settle unless the peer settles first."""
        if link.session.channel is not None:
            settled = not link.settles_second
            self._put(frames.disposition(link.session.channel, number, number, state, settled=settled))
