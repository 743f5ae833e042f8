"""The AMQP protocol without a socket: bytes in, events out, bytes out.

The work is divided. Proton handles the rare frames (connections, sessions, links, closing, heartbeats). The
frames that transfer messages (transfer, disposition, flow) never reach proton: they are read and written
here, many messages in one write and their outcomes in ranges, at a fraction of the cost of proton events.

Proton assigns the channel and handle numbers, which are read from its frames. Its flow frames do not contain
the windows of this module and are dropped. Frames are sent in the order in which they were decided: those of
this module are queued in `_out`, and `sync` adds those of proton, after a link was opened and in `pull`.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import proton

from muster.gateways.amqp import memory_budget
from muster.gateways.amqp.protocol import attach_rules, endpoints, frames
from muster.gateways.amqp.protocol import proton as protocol_proton
from muster.message.amqp_format import amqp_types

# The time that proton's clients need for a large message is proportional to its size and to the number of
# its frames. A message of a single frame fits into a message of the bus.
FRAME_BYTES_MAX: Final = 512 << 10
OUT_BYTES_MAX: Final = 1 << 20  # output for a socket at one time before links stop
_FIRST_FRAME_BYTES_MAX: Final = 512  # until the peer has stated its maximum frame size
_MASK: Final = endpoints.MASK
_OVERDRAWN: Final = _MASK - (1 << 24)  # a credit above this is negative
_STOLEN: Final = "amqp:link:stolen"
RETAINED_MAX: Final = 10_000  # outcomes that the peer has not settled; the oldest are forgotten


class AmqpEngine:
    """``on_outcome`` is called with the outcome of a message (its token, the code of the state, the state),
    ``on_event`` with proton's events. ``on_unsettled_outcome`` is called after outcomes that the peer did not
    settle, with a function to call when they are stored; ``on_retired`` for such outcomes in a transaction,
    with a function to call after the commit. ``on_ended`` is called with a link that ends on
    this side: the peer attached another one with its name in the same session, or misused one that sends.
    """

    def __init__(
        self,
        idle_s: float,
        on_outcome: Callable[[endpoints.Token, int, bytes | None], None],
        on_event: Callable[[Any], None],
        budget: memory_budget.ConnectionBudget | None = None,
        on_unsettled_outcome: Callable[[Callable[[], None]], None] = lambda confirm: confirm(),
        on_retired: Callable[[endpoints.Token, bytes, Callable[[], None]], None] = endpoints.ignore,
        on_ended: Callable[[endpoints.AmqpLink], None] = endpoints.ignore,
    ) -> None:
        self.budget = budget or memory_budget.ConnectionBudget(memory_budget.CONNECTION)
        self.budget.on_room = self.resume_links
        self._sessions: dict[int, endpoints.AmqpSession] = {}  # by the peer's channel
        self._payload_max = _FIRST_FRAME_BYTES_MAX - frames.TRANSFER_BYTES
        self._out: list[bytes] = []
        self._out_bytes = 0
        self.stopped = False
        self._accepting: list[endpoints.AmqpSession] = []
        self._close_sent = False
        self._held = False
        self._library = protocol_proton.ProtonTransport(idle_s, FRAME_BYTES_MAX, self._on_proton_event)
        self.connection = self._library.connection
        self.transport = self._library.transport
        self._on_outcome = on_outcome
        self._on_event = on_event
        self._on_unsettled_outcome = on_unsettled_outcome
        self._on_retired = on_retired
        self._on_ended = on_ended
        self._greeted = False
        self._rest = b""
        self._received = False
        self.accepted = 0  # number of messages accepted, if the last `push` contained nothing else
        self._links: dict[Any, endpoints.AmqpLink] = {}
        self._names: dict[endpoints.LinkKey, endpoints.AmqpLink] = {}  # the latest link with each name
        # Outcomes that the peer has not settled, by link and tag; they outlive the attachment of the link
        self._retained: dict[tuple[endpoints.LinkKey, bytes], bytes] = {}
        # Those that proton has, also after the peer has detached them
        self._of_sessions: dict[tuple[endpoints.AmqpSession, endpoints.LinkKey], endpoints.AmqpLink] = {}
        self._arriving: endpoints.AmqpSession | endpoints.AmqpLink | None = None
        self._arriving_number = 0  # the peer's channel of the session, or handle of the link
        self._output_pending = True  # proton may have output

    @property
    def closed(self) -> bool:
        return bool(self.transport.closed)

    def link_of(self, wrapper: Any) -> endpoints.AmqpLink:
        return self._links[wrapper]

    # Input.

    def push(self, data: bytes) -> bool:
        """Process bytes from the peer. False: it violated the protocol, and the error has been queued."""
        if self._rest:
            data = self._rest + data
        at, size = 0, len(data)
        if not self._greeted:
            if size < 8:
                self._rest = data
                return True
            self._greeted = True
            at = 8
            if data[:8] != frames.HEADER:
                self._put(frames.HEADER)  # the only version; a peer that cannot use it is disconnected
                self._close_sent = True
                return False
            if not self._control(data[:8]):
                return False
        sessions = self._sessions
        read_head = frames.read_head
        others = False
        self.accepted = 0
        try:
            while size - at >= frames.HEAD_BYTES:
                if data.startswith(frames.SETTLED, at) and (taken := self._accepted(data, at)):
                    at += taken
                    continue
                others = True
                length, offset, kind, channel, described, code = read_head(data, at)
                end = at + length
                if not 8 <= length <= FRAME_BYTES_MAX:
                    return self._control(data[at:])  # proton reports the error
                if end > size:
                    break
                if length <= frames.HEAD_BYTES:
                    code, start = 0, end
                elif described == 0x53 and offset == 2 and kind == 0:
                    start = at + frames.HEAD_BYTES
                else:
                    code, start = frames.frame_type(data, at, end)
                if frames.FLOW <= code <= frames.DISPOSITION:
                    self._received = True
                    session = sessions.get(channel)
                    if session is None:
                        self.fail("amqp:not-allowed", f"no such channel: {channel}")
                        return False
                    if code == frames.TRANSFER:
                        self._transfer(session, data, start, end)
                    elif code == frames.DISPOSITION:
                        self._disposition(session, data, start)
                    else:
                        self._flow(session, data, start)
                elif not self._control_frame(code, channel, data[at:end], start - at):
                    return False
                at = end
            if size - at >= 8:
                length = int.from_bytes(data[at : at + 4], "big")
                if not 8 <= length <= FRAME_BYTES_MAX:
                    return self._control(data[at:])  # proton reports the error
                if length <= size - at:  # a heartbeat, or too short for a performative
                    others = True
                    if not self._control_frame(0, 0, data[at : at + length], 0):
                        return False
                    at += length
        except amqp_types.MALFORMED as error:
            self.fail("amqp:decode-error", f"a malformed frame: {error}")
            return False
        self._rest = data[at:]
        if others:
            self.accepted = 0
        return True

    def fail(self, condition: str, why: str) -> None:
        """Close the connection with an error condition."""
        self._rest = b""
        self._output_pending = True
        if self.connection.state & proton.Endpoint.LOCAL_UNINIT:
            self.connection.open()  # a close follows an open
        if self.connection.state & proton.Endpoint.REMOTE_UNINIT:  # proton would wait for that
            self.sync()
            self._put(frames.close(condition, why))
            self._close_sent = True
            return
        self.connection.condition = proton.Condition(condition, why)
        self.connection.close()

    def _control(self, data: bytes) -> bool:
        self._output_pending = True
        return self._library.push(data)

    def _control_frame(self, code: int, channel: int, frame: bytes, at: int) -> bool:
        """Pass a frame to proton, and note what concerns this module."""
        if (wrong := self._misplaced(code, channel, frame)) is not None:
            self.fail(*wrong)
            return False
        session = self._sessions.get(channel)
        container = None
        if code == frames.OPEN:
            fields, _ = frames.fields(frame, at, 3)
            container = fields[0] if fields else None
            limit = fields[2] if len(fields) > 2 else None
            frame_bytes = limit if type(limit) is int else _MASK
            self._payload_max = min(max(frame_bytes, 512), 1 << 20) - frames.TRANSFER_BYTES
        elif code == frames.BEGIN:
            answered, first, window, peer_window = frames.numbers(frame, at, 4)
            if answered is not None:
                self.fail("amqp:invalid-field", "a begin that answers none: the client begins the sessions")
                return False
            frames.require(
                "a begin", next_outgoing_id=first, incoming_window=window, outgoing_window=peer_window
            )
            if channel in self._sessions:
                raise ValueError(f"channel {channel} already has a session")
            self._arriving, self._arriving_number = (
                endpoints.AmqpSession(first or 0, window or 0, self.budget),
                channel,
            )
        elif code == frames.ATTACH and session is not None:
            fields, _ = frames.fields(frame, at, 10)
            name, handle, receives, send_mode, receive_mode = (*fields, *[None] * 5)[:5]
            frames.require("an attach", name=name, handle=handle, role=receives)
            if not isinstance(name, str) or type(handle) is not int or type(receives) is not bool:
                raise ValueError("an attach whose name, handle or role has the wrong type")
            if handle in session.links:
                self.fail("amqp:session:handle-in-use", f"handle {handle} already has a link")
                return False
            first = fields[9] if len(fields) > 9 else None
            if not receives:
                frames.require("an attach of a sender", initial_delivery_count=first)
            if not self.budget.add_link():
                self.fail("amqp:resource-limit-exceeded", "this connection, or its login, has too many links")
                return False
            attached = endpoints.AmqpLink(session, (name, not receives))
            attached.problem = attach_rules.problem(fields)
            attached.can_reject = attach_rules.can_reject(fields[5] if len(fields) > 5 else None)
            if receives:
                attached.default_outcome = frames.default_outcome(fields[5] if len(fields) > 5 else None)
            else:  # a sender begins to count at any number
                attached.send_mode = send_mode if send_mode in (0, 1) else None
                attached.settles_second = receive_mode == 1
                attached.delivered = first if type(first) is int else 0
                if len(fields) < 8 or fields[7] is None:
                    self._forget_retained(attached)  # the peer has settled them
            self._free_name(session, attached.key)
            self._arriving, self._arriving_number = attached, handle
        elif code == frames.DETACH and session is not None:
            (handle,) = frames.numbers(frame, at, 1)
            frames.require("a detach", handle=handle)
            if handle not in session.links:
                self._end(session, "amqp:session:unattached-handle", f"handle {handle} has no link")
                return True
        arriving = self._arriving
        valid = self._control(frame)
        if code == frames.OPEN:  # after proton has it, which sends no close before an open
            frames.require("an open", container_id=container)
        self._arriving = None
        if arriving is not None and arriving.wrapper is None:  # proton did not accept it
            if isinstance(arriving, endpoints.AmqpLink):
                self.budget.remove_links(1)
            raise ValueError("a begin or an attach with fields of the wrong type")
        if session is not None and code == frames.DETACH:
            handle, closed = (*frames.fields(frame, at, 2)[0], None)[:2]
            link = session.links.pop(handle or 0, None)
            if link is not None:
                if closed:
                    self._forget_retained(link)
                link.peer_detached = bool(closed)
                self.budget.remove_links(1)
                self._release_link(link)
        elif session is not None and code == frames.END:
            for link in [link for link in self._links.values() if link.session is session]:
                self._release_link(link)
                self.free(link.wrapper)
            session.shut()
            session.forget()
            self.budget.remove_links(len(session.links))
            del self._sessions[channel]
        return valid

    def _misplaced(self, code: int, channel: int, frame: bytes) -> tuple[str, str] | None:
        """The condition and the reason why a frame may not come now, or is none that this layer knows."""
        is_open = not self.connection.state & proton.Endpoint.REMOTE_UNINIT
        if frames.OPEN <= code <= frames.CLOSE:
            if is_open == (code == frames.OPEN):
                return "amqp:illegal-state", "a connection begins with one open"
            if code == frames.OPEN and channel:
                return "amqp:connection:framing-error", "an open belongs on channel 0"
        elif frame[4] >= 2 and frame[5] != 0:
            return "amqp:connection:framing-error", f"frames of type {frame[5]} are not allowed here"
        elif 2 <= frame[4] < len(frame) / 4:
            return "amqp:decode-error", "the body of a frame is none of the performatives"
        return None

    def has_link(self, wrapper: Any) -> bool:
        return wrapper in self._links

    def free(self, wrapper: Any) -> None:
        """Free a link that both sides have closed; proton would keep it as long as its session."""
        self.sync()  # its pending frames go first
        link = self._links.pop(wrapper)
        del self._of_sessions[link.session, link.key]
        wrapper.free()

    def steal(self, link: endpoints.AmqpLink) -> None:
        """End a link because the peer has attached another one with its name."""
        if link.wrapper.state & proton.Endpoint.LOCAL_UNINIT:
            link.wrapper.open()
        self.close(link, _STOLEN, f"another link with the name {link.key[0]!r} was attached")

    def _free_name(self, session: endpoints.AmqpSession, key: endpoints.LinkKey) -> None:
        """Proton has one link of a name in a session. The peer still knows the handle of the old one, or
        attaches it again before its detach is answered.
        """
        old = self._of_sessions.get((session, key))
        if old is None:
            return
        if old.peer_detached is None:
            self._on_ended(old)
            self.steal(old)
            for handle, link in session.links.items():
                if link is old:
                    session.links[handle] = endpoints.AmqpLink(session, key)
        else:
            self.answer_detach(old.wrapper, closed=old.peer_detached)
        self.free(old.wrapper)
        self._release_link(old)

    def answer_detach(self, wrapper: Any, *, closed: bool) -> None:
        if wrapper.state & proton.Endpoint.LOCAL_UNINIT:
            wrapper.open()  # it was still being attached
        (wrapper.close if closed else wrapper.detach)()

    def _release_link(self, link: endpoints.AmqpLink) -> None:
        link.detach()
        link.namesake = None
        if self._names.get(link.key) is link:
            del self._names[link.key]
        session = link.session
        session.draining.discard(link)
        if session.blocked:
            session.blocked = deque(entry for entry in session.blocked if entry[0] is not link)

    def _on_proton_event(self, event: proton.Event) -> None:
        arriving, kinds = self._arriving, proton.Event
        if event.type == kinds.SESSION_REMOTE_OPEN and isinstance(arriving, endpoints.AmqpSession):
            arriving.wrapper = event.session
            self._sessions[self._arriving_number] = arriving
        elif event.type == kinds.LINK_REMOTE_OPEN and isinstance(arriving, endpoints.AmqpLink):
            arriving.wrapper = event.link
            arriving.namesake = self._names.get(arriving.key)
            self._names[arriving.key] = arriving
            arriving.session.links[self._arriving_number] = self._links[event.link] = arriving
            self._of_sessions[arriving.session, arriving.key] = arriving
        self._on_event(event)

    def _transfer(self, session: endpoints.AmqpSession, data: bytes, at: int, end: int) -> None:
        handle, number, tag, rest, start = frames.transfer(data, at)
        settled, more, state, aborted, form, second, resumed = rest
        if start > end:
            raise ValueError("a transfer extends beyond its frame")
        session.incoming = (session.incoming + 1) & _MASK
        session.incoming_window -= 1
        if session.incoming_window < -endpoints.WINDOW:  # the peer ignores the window
            self._end(session, "amqp:session:window-violation", "there was no room for this frame")
            return
        if session.incoming_window <= endpoints.WINDOW // 2 and not self._held:
            self._session_flow(session)
        link = session.links.get(handle)
        if link is None:
            self._end(session, "amqp:session:unattached-handle", f"handle {handle} has no link")
            return
        if link.handle is None:  # closed on this side, and the peer does not know yet; or not open yet
            link.overdrawn = True
            return
        if not link.key[1]:
            self._on_ended(link)
            self.close(link, "amqp:not-allowed", "a transfer on a link that receives")
            return
        if (wrong := link.misuse(number, tag, form, settled)) is not None:
            self.close(link, "amqp:invalid-field", wrong)
            return
        if second and not link.settles_second:
            self.close(link, "amqp:invalid-field", "a message for rcv-settle-mode second on a link for first")
            return
        if (
            link.partial is not None
            and state not in (None, link.partial[2])
            and (frames.code_of(state) == frames.TRANSACTIONAL)
        ):
            self.close(link, "amqp:invalid-field", "the transaction has changed within a message")
            return
        if link.send_mode is not None and not more and not aborted:
            is_settled = settled or (link.partial is not None and link.partial[1])
            if is_settled != bool(link.send_mode):
                mode = "settled" if link.send_mode else "unsettled"
                self.close(link, "amqp:invalid-field", f"the link sends {mode} messages only")
                return
        if link.partial is None:
            if link.credit <= 0:
                self._close_overdrawn(link)
                return
            if link.incomplete and not resumed:
                why = "a new message, although the unsettled ones in the attach were not all"
                self.close(link, "amqp:illegal-state", why)
                return
            assert number is not None
            link.credit -= 1
            link.delivered += 1
            link.identity = tag, form
            if link.settles_second and tag is not None and not settled:
                if len(session.received) >= RETAINED_MAX:
                    del session.received[next(iter(session.received))]
                session.received[number] = link.key, tag
            if resumed:
                complete = functools.partial(self._resumed, link, number, tag or b"")
                link.large = endpoints.ResumedDelivery(complete)
            elif not more:
                if aborted:
                    link.on_aborted()
                elif end - start > link.bytes_max:
                    link.on_oversize(state)
                else:
                    link.on_message(number, data[start:end], settled, state)
                return
            link.partial = number, settled, state
        link.add(data[start:end], settled, state, more=more, aborted=aborted)

    def _resumed(self, link: endpoints.AmqpLink, number: int, tag: bytes, settled: bool) -> None:
        """The peer sent a message of an earlier attachment again: tell it the outcome, if there is one."""
        if settled:
            self._retained.pop((link.key, tag), None)
        elif (state := self._retained.get((link.key, tag))) is not None:
            self.settle(link, number, state)
        link.on_aborted()

    def _forget_retained(self, link: endpoints.AmqpLink) -> None:
        if link.settles_second:
            for entry in [entry for entry in self._retained if entry[0] == link.key]:
                del self._retained[entry]

    def _close_overdrawn(self, link: endpoints.AmqpLink) -> None:
        self.close(link, "amqp:link:transfer-limit-exceeded", "there was no credit for this message")

    def _end(self, session: endpoints.AmqpSession, condition: str, why: str) -> None:
        if session.wrapper.state & proton.Endpoint.LOCAL_CLOSED:
            return
        session.wrapper.condition = proton.Condition(condition, why)
        session.wrapper.close()
        session.shut()
        self._output_pending = True

    def close(self, link: endpoints.AmqpLink, condition: str, why: str, tag: bytes | None = None) -> None:
        """``tag``: of the delivery that is the reason, encoded."""
        link.shut()
        link.abort()
        if condition != _STOLEN:  # else the link goes on, with its unsettled messages
            self._forget_retained(link)
        info = None if tag is None else {proton.symbol(frames.DELIVERY_TAG): frames.binary_of(tag)}
        link.wrapper.condition = proton.Condition(condition, why, info)
        link.wrapper.close()
        self._output_pending = True

    def _accepted(self, data: bytes, at: int) -> int:
        """Process a run of accepting dispositions, the most frequent frames; returns its size in bytes."""
        sessions, on_outcome = self._sessions, self._on_outcome
        count = 0
        for channel, number in frames.accepted(data, at):
            session = sessions.get(channel)
            if session is None:
                break
            count += 1
            token = session.settle(number)
            if token is not None and token[1]:
                on_outcome(token, frames.ACCEPTED, frames.ACCEPTED_STATE)
            if session.over_unsettled_limit:
                self.check_unsettled(session)
        self._received |= count > 0
        self.accepted += count
        return count * frames.SETTLED_BYTES

    def _disposition(self, session: endpoints.AmqpSession, data: bytes, at: int) -> None:
        fields, _ = frames.fields(data, at, 5)
        role, first, last, settled, state = fields + [None] * (5 - len(fields))
        frames.require("a disposition", role=role, first=first)
        if type(role) is not bool or type(first) is not int or type(last) not in (int, type(None)):
            raise ValueError("a disposition whose role or deliveries have the wrong type")
        last = first if last is None else last
        if not role:  # of the peer's messages
            for number in endpoints.numbers_from(session.received, first, last) if settled else ():
                self._retained.pop(session.received.pop(number), None)
            return
        if not isinstance(state, bytes):
            state = None
        code = frames.ACCEPTED if state == frames.ACCEPTED_STATE else frames.code_of(state)
        if not settled and not frames.is_outcome(code, state):
            return  # no outcome yet
        if not settled and code == frames.TRANSACTIONAL and state is not None:
            for number in endpoints.numbers_from(session.unsettled, first, last):
                settle = functools.partial(self._retire, session, number, state)
                self._on_retired(session.unsettled[number], state, settle)
            return
        for number in endpoints.numbers_from(session.unsettled, first, last):
            token = session.settle(number)
            if token is not None and (token[1] or code != frames.ACCEPTED):
                self._on_outcome(token, code, state)
        if session.over_unsettled_limit:
            self.check_unsettled(session)
        if not settled:
            # The receiver settles after this side (rcv-settle-mode second): when the outcome is stored.
            self._on_unsettled_outcome(functools.partial(self._confirm, session, first, last, state))

    def _retire(self, session: endpoints.AmqpSession, number: int, state: bytes) -> None:
        """The transaction of an outcome was committed."""
        if session.settle(number) is not None:
            self._confirm(session, number, number, frames.outcome_of(state))
        if session.over_unsettled_limit:
            self.check_unsettled(session)

    def _confirm(self, session: endpoints.AmqpSession, first: int, last: int, state: bytes | None) -> None:
        if session.channel is not None:
            self._put(frames.disposition(session.channel, first, last, state or b"\x40", receiver=False))

    def _flow(self, session: endpoints.AmqpSession, data: bytes, at: int) -> None:
        incoming, incoming_window, outgoing, peer_window, handle, *of_link = frames.numbers(data, at, 8)
        delivered, credit, _ = of_link
        if incoming_window is None or outgoing is None or peer_window is None:
            frames.require(
                "a flow",
                incoming_window=incoming_window,
                next_outgoing_id=outgoing,
                outgoing_window=peer_window,
            )
        drain, echo, properties = (*frames.fields(data, at, 11)[0][8:], None, None, None)[:3]
        window = ((incoming or 0) + (incoming_window or 0) - session.outgoing) & _MASK
        session.window = 0 if window > _OVERDRAWN else window
        self._report_room(session)
        if session.blocked:
            self._unblock(session)
            if not session.blocked:
                self._notify_credit(list(session.links.values()))
        if handle is None:
            if drain or of_link != [None] * 3:
                self._end(
                    session, "amqp:invalid-field", "a flow with fields of a link, but without its handle"
                )
                return
            if echo:
                self._session_flow(session)
            self._notify_credit(list(session.links.values()))
            return
        link_or_none = session.links.get(handle)
        if link_or_none is None:
            self._end(session, "amqp:session:unattached-handle", f"handle {handle} has no link")
            return
        link = link_or_none
        if isinstance(properties, bytes) and frames.names_transaction(properties):
            self._on_ended(link)
            self.close(
                link,
                "amqp:not-implemented",
                "messages are not acquired in transactions; settle them in the transaction instead",
            )
            return
        if not link.key[1]:
            left = ((delivered or 0) + (credit or 0) - link.delivered) & _MASK
            link.credit = 0 if left > _OVERDRAWN else left
            link.drain = bool(drain)
            link.on_credit()
        if echo and link.handle is not None:
            self._link_flow(link)

    def check_unsettled(self, session: endpoints.AmqpSession) -> None:
        """Resume deliveries of a session if it has settled enough."""
        if session.unsettled_bytes <= endpoints.UNSETTLED_BYTES_MAX // 2:
            session.over_unsettled_limit = False
            self._notify_credit(list(session.links.values()))

    # Messages, their outcomes and windows.

    def links(self) -> Iterator[endpoints.AmqpLink]:
        for session in self._sessions.values():
            yield from list(session.links.values())

    def _notify_credit(self, links: Iterable[endpoints.AmqpLink]) -> None:
        for link in links:
            if link.credit > 0 and not link.key[1]:
                link.on_credit()

    def stop(self) -> None:
        """The socket accepts no more: messages that are not encoded yet wait at their link, where they can
        expire.
        """
        self.stopped = True

    def resume(self) -> None:
        self.stopped = False
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
            and not (self.stopped or session.blocked or session.over_unsettled_limit)
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
            self.stopped = True

    def has_room(self, link: endpoints.AmqpLink) -> bool:
        """Whether the next part of a message can be sent. Otherwise `AmqpSession.on_room` reports it."""
        return not self.stopped and not link.session.blocked

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
                self.stopped = True
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
        elif accepted[0] is link and number == accepted[2] + 1:
            session.accepted = (link, accepted[1], number)
            return
        else:
            self._flush_accepted(session)
        session.accepted = (link, number, number)

    def _flush_accepted(self, session: endpoints.AmqpSession) -> None:
        if session.accepted is not None and session.channel is not None:
            _, first, last = session.accepted
            self._put(frames.disposition(session.channel, first, last, frames.ACCEPTED_STATE))
        session.accepted = None

    def settle(self, link: endpoints.AmqpLink, number: int, state: bytes) -> None:
        """Send an outcome, and settle unless the peer settles first."""
        session = link.session
        self._flush_accepted(session)  # outcomes keep their order
        if link.settles_second and (entry := session.received.get(number)) is not None:
            if len(self._retained) >= RETAINED_MAX:
                del self._retained[next(iter(self._retained))]
            self._retained[entry] = state
        if session.channel is not None:
            settled = not link.settles_second
            self._put(frames.disposition(session.channel, number, number, state, settled=settled))

    # Output.

    def sync(self) -> None:
        """Queue the output of proton."""
        for frame in self._library.pull():
            self._send_control(frame)

    def _send_control(self, frame: bytes) -> None:
        """A frame of proton: note the numbers it assigns, and queue it unless it is a flow."""
        if frame.startswith(b"AMQP"):
            self._put(frame)
            return
        code, at = frames.frame_type(frame, 0, len(frame))
        channel = int.from_bytes(frame[6:8], "big")
        if code == frames.FLOW:
            return
        if code == frames.ATTACH:
            frame = self._opened(frame, at, channel)
        self._put(frame)
        if code == frames.BEGIN:
            fields, _ = frames.fields(frame, at, 3)
            if (session := self._sessions.get(fields[0])) is not None:
                session.channel = channel
                session.outgoing = fields[1]
                session.incoming_window = fields[2]
        elif code == frames.DETACH:
            fields, _ = frames.fields(frame, at, 1)
            for link in self.links():
                if link.session.channel == channel and link.handle == fields[0]:
                    link.shut()
        elif code == frames.END:
            for session in self._sessions.values():
                if session.channel == channel:
                    session.shut()
        elif code == frames.CLOSE:
            self._close_sent = True

    def _opened(self, frame: bytes, at: int, channel: int) -> bytes:
        """An attach of proton: the link has its handle. Proton writes neither the default outcome of its
        source, which is in effect, nor unsettled deliveries.
        """
        fields, _ = frames.fields(frame, at, 3)
        for link in self.links():
            is_new = link.wrapper is not None
            if is_new and link.session.channel == channel and link.key == (fields[0], bool(fields[2])):
                link.opened(channel, fields[1])
                if link.default_outcome is not None and len(link.default_outcome) < 256:
                    frame = frames.with_default_outcome(frame, at, link.default_outcome)
                unsettled = [entry for entry in self._retained.items() if entry[0][0] == link.key]
                if unsettled:
                    parts = [part for (_, tag), state in unsettled for part in (tag, state)]
                    most = self._payload_max + frames.TRANSFER_BYTES
                    frame, complete = frames.with_unsettled(frame, at, parts, most)
                    link.incomplete = not complete
                if link.overdrawn and not link.wrapper.state & proton.Endpoint.LOCAL_CLOSED:
                    self._close_overdrawn(link)
        return frame

    @property
    def has_output(self) -> bool:
        """Whether there is output after a `push`."""
        return self._output_pending or bool(self._out) or bool(self._accepting)

    def pull(self) -> tuple[bytes, bool]:
        """The bytes to send, and whether more may follow (False: the connection has ended)."""
        self._output_pending = False
        if self._accepting:
            for session in self._accepting:
                self._flush_accepted(session)
            self._accepting.clear()
        self.sync()
        data = b"".join(self._out)
        self._out.clear()
        self._out_bytes = 0
        return data, not self._library.ended

    def tick(self, now_s: float) -> None:
        if self._received:
            self._received = False
            self._control(frames.EMPTY)
        self.transport.tick(now_s)
        self._library.process()
