"""One end of a direct connection.

Messages of one turn of the event loop are written together. A peer that is silent is detected as a broker is
(`muster.bus.silence`): then, and when a reply is late, the link is not used until something arrives on
it. A peer that does not read is disconnected: what waits for it is bounded.

A listener reads from a link only while the identity of the peer has a budget of the event loop
(`muster.bus.rpc.admission`): a flood stays in the sockets, and costs the peer's own messages time.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import ssl
import weakref
from collections.abc import Callable
from typing import TypeVar, cast

from muster.bus import message_format, silence
from muster.bus.client import received, request_timers, requests
from muster.bus.direct import frames
from muster.bus.rpc import admission
from muster.core import errors, subjects
from muster.core.telemetry import log

events = log.EventLog("direct")

T = TypeVar("T")

UNSENT_BYTES_MAX = 8 << 20
WRITABLE_BYTES = 1 << 20  # with more unsent, senders wait
WATCHED_BYTES = 64 << 10  # with more in memory, the owner of several links limits their sum
PENDING_MAX = 10_000  # requests without a reply
CLOSE_S = 1.0  # for the last words of a link
NO_HANDLER = b"NATS/1.0 503\r\n\r\n"
FORBIDDEN = b"NATS/1.0 403\r\n\r\n"


class NoReplyYet(errors.TimedOut):
    """The request was sent, and may have been executed: the link ended, or the reply is late."""


_open: weakref.WeakSet[DirectLink] = weakref.WeakSet()


def number_open() -> int:
    """The links of this process."""
    return len(_open)


Deliver = Callable[["DirectLink", frames.DirectFrame], None]


class DirectLink(asyncio.Protocol):
    """``deliver`` is called with each message that is not a reply; `received.ReplyConnection` for replies.

    ``payload_bytes_max``: as the brokers limit messages. With ``on_connected``, which a listener has, nothing
    is read before `start_tls`.
    """

    def __init__(
        self,
        deliver: Deliver,
        *,
        payload_bytes_max: int,
        on_connected: Callable[[DirectLink], None] | None = None,
    ) -> None:
        self.identity = ""  # of the peer, once it is proven
        self.address = ""  # of the peer
        self.may_send: Callable[[str], bool] = lambda _: False  # which subjects the peer may publish on
        self.is_open = False
        self.is_responsive = True
        self.budgets: admission.Admission | None = None  # with that of the peer
        self.on_held: Callable[[], None] = lambda: None  # called while `held_bytes` exceeds `WATCHED_BYTES`
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[str] = loop.create_future()  # the reason
        self.welcomed: asyncio.Future[None] = loop.create_future()
        self._deliver = deliver
        self._payload_bytes_max = payload_bytes_max
        self._on_connected = on_connected
        self._transport: asyncio.Transport | None = None
        self._reader = frames.FrameReader()
        self._greeting: asyncio.Future[bytes] = loop.create_future()  # the next message of the handshake
        self._blocks = 0
        self._held: list[bytes] = []  # read, while the peer has no budget
        self._unsent: list[bytes] = []
        self._in_burst = False
        self._is_writable = asyncio.Event()
        self._is_writable.set()
        self._requester = ""
        self._numbers = itertools.count(1)
        self._pending: dict[str, asyncio.Future[received.ReceivedMessage]] = {}
        self._timers: request_timers.RequestTimers[asyncio.Future[received.ReceivedMessage]] = (
            request_timers.RequestTimers(_late)
        )
        self._silence = silence.SilenceWatch()
        self._watch_timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<direct link with {self.identity or self.address} {'open' if self.is_open else 'closed'}>"

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=WRITABLE_BYTES)
        peer = transport.get_extra_info("peername")
        self.address = str(peer[0]) if peer else ""
        if self._on_connected is not None:
            self._transport.pause_reading()  # the first bytes may be those of TLS
            self._on_connected(self)

    def data_received(self, data: bytes) -> None:
        self._blocks += 1
        self.is_responsive = True
        wait_s = self._wait_s()
        if not wait_s and not self._held:
            self._read(data)
            return
        if not self._held and self._transport is not None:
            self._transport.pause_reading()
            asyncio.get_running_loop().call_later(wait_s, self._continue_reading)
        self._held.append(data)

    def _wait_s(self) -> float:
        """The time until the peer has a budget again; 0: it has one."""
        if self.budgets is None:
            return 0.0
        return self.budgets.wait_s(self.identity, asyncio.get_running_loop().time())

    def _continue_reading(self) -> None:
        if self.ended.done() or self._transport is None:
            return
        if wait_s := self._wait_s():  # another link of the identity was first
            asyncio.get_running_loop().call_later(wait_s, self._continue_reading)
            return
        held, self._held = b"".join(self._held), []
        self._transport.resume_reading()
        self._read(held)

    def _read(self, data: bytes) -> None:
        has_frame = False
        try:
            for content in self._reader.feed(data):
                has_frame = True
                if self.ended.done():
                    return
                if self.is_open:
                    self._receive(frames.decode(content, frames.DirectFrame))
                elif self._greeting.done():
                    raise errors.InvalidInput("a message before the handshake has ended")
                else:
                    self._greeting.set_result(bytes(content))
        except errors.InvalidInput as error:
            self.close(f"malformed: {error}")
        if not has_frame:  # a peer may send each byte alone
            self._charge()
        if self._reader.kept_bytes > WATCHED_BYTES:
            self.on_held()

    def pause_writing(self) -> None:
        self._is_writable.clear()

    def resume_writing(self) -> None:
        self._is_writable.set()

    def connection_lost(self, error: BaseException | None) -> None:
        self.close(str(error) if error else "the peer closed the connection")

    # The handshake.

    async def start_tls(self, context: ssl.SSLContext | None) -> None:
        """Let the client's first bytes be read, as those of TLS if there is a context."""
        assert self._transport is not None
        if context is None:
            self._transport.resume_reading()
            return
        loop = asyncio.get_running_loop()
        transport = await loop.start_tls(
            self._transport, self, context, server_side=True, ssl_handshake_timeout=frames.HANDSHAKE_S
        )
        if transport is None:
            raise ConnectionError("the connection was closed during the TLS handshake")
        transport.set_write_buffer_limits(high=WRITABLE_BYTES)
        self._transport = transport

    async def greeting(self, kind: type[T]) -> T:
        """The next message of the handshake."""
        await asyncio.wait((self._greeting, self.ended), return_when=asyncio.FIRST_COMPLETED)
        if not self._greeting.done():
            raise ConnectionError(self.ended.result())
        content, self._greeting = self._greeting.result(), asyncio.get_running_loop().create_future()
        return frames.decode(content, kind)

    def greet(self, value: frames.DirectHello | frames.DirectChallenge | frames.DirectProof) -> None:
        if self._transport is not None and not self.ended.done():
            self._transport.write(frames.encode(value))

    def open(self, identity: str, own_identity: str) -> None:
        """The peer has proven who it is: from now on messages are exchanged."""
        self.identity = identity
        self._requester = f"{own_identity}.{secrets.token_hex(8)}"
        self._reader.bytes_max = self._payload_bytes_max + frames.OVERHEAD_BYTES_MAX
        self.is_open = not self.ended.done()
        if self.is_open:
            _open.add(self)
            self._watch()

    def refuse(self, reason: str) -> None:
        """Tell the peer why the connection ends."""
        if self._transport is not None and not self.ended.done():
            self._transport.write(frames.encode(frames.DirectFrame("", reason.encode(), frames.REFUSED)))
            self.close(reason, at_once=False)

    def close(self, reason: str = "closed", *, at_once: bool = True) -> None:
        """End the connection. ``at_once``: what is unsent is lost."""
        if self.ended.done():
            return
        if self.is_open:
            events.info("link-ended", peer=self.identity, reason=reason)
        self.is_open = False
        _open.discard(self)
        self.ended.set_result(reason)
        if not self.welcomed.done():
            self.welcomed.set_exception(
                errors.NotConnected(f"{self.address} closed the connection: {reason}")
            )
            self.welcomed.exception()  # retrieved, if nothing waits for it
        if self._watch_timer is not None:
            self._watch_timer.cancel()
        if self._transport is not None:
            if at_once:
                self._transport.abort()
            else:
                self._transport.close()
                asyncio.get_running_loop().call_later(CLOSE_S, self._transport.abort)
        self._is_writable.set()
        for answer in list(self._pending.values()):
            if not answer.done():
                answer.set_exception(NoReplyYet(f"the connection to {self.identity} has ended: {reason}"))

    # Receiving.

    def _receive(self, frame: frames.DirectFrame) -> None:
        if not frame.subject:
            self._charge()
            self._control(frame)
        elif (answer := self._pending.get(frame.subject)) is not None:
            if not answer.done():
                self._settle(answer, frame)
        elif frame.subject.startswith(subjects.REPLY_PREFIX):  # that of a request that was given up
            self._charge()
        else:
            message_format.check_subject(frame.subject)
            if frame.reply:
                message_format.check_subject(frame.reply)
            self._deliver(self, frame)

    def _charge(self) -> None:
        """For what reaches no handler, which would charge it."""
        if self.budgets is not None:
            self.budgets.charge(self.identity, admission.RECEIVED, asyncio.get_running_loop().time())

    def _settle(self, answer: asyncio.Future[received.ReceivedMessage], frame: frames.DirectFrame) -> None:
        if frame.headers is not None and not frame.data:
            if frame.headers.startswith(NO_HANDLER[:12]):
                answer.set_exception(requests.NoResponders(f"{self.identity} has no handler for the request"))
                return
            if frame.headers.startswith(FORBIDDEN[:12]):
                answer.set_exception(errors.Forbidden("this identity may not publish to the subject"))
                return
        answer.set_result(received.ReceivedMessage(frame.subject, None, frame.data, frame.headers, self))

    def _control(self, frame: frames.DirectFrame) -> None:
        match frame.reply:
            case frames.PING:
                self.control(frames.PONG)
            case frames.WELCOME if not self.welcomed.done():
                self.welcomed.set_result(None)
            case frames.REFUSED:
                reason = bytes(frame.data[:500]).decode("utf-8", "replace")
                if not self.welcomed.done():
                    self.welcomed.set_exception(errors.Unauthorized(f"{self.identity} refuses: {reason}"))
                    self.welcomed.exception()
                self.close(f"refused: {reason}")

    # Sending.

    @property
    def has_room(self) -> bool:
        return self.is_open and self._is_writable.is_set()

    def send(self, subject: str, data: bytes, reply: str = "", raw_headers: bytes | None = None) -> bool:
        """Queue a message. True when so much is queued that the caller should `ease`."""
        size = len(data) + (len(raw_headers) if raw_headers is not None else 0)
        if size > self._payload_bytes_max:
            raise errors.LimitExceeded(
                f"a message of {size} bytes: the maximum of the brokers is {self._payload_bytes_max}"
            )
        self._write(frames.encode(frames.DirectFrame(subject, data, reply, raw_headers)))
        return not self._is_writable.is_set()

    def control(self, kind: str, data: bytes = b"") -> None:
        self._write(frames.encode(frames.DirectFrame("", data, kind)))

    def _write(self, data: bytes) -> None:
        if not self.is_open or self._transport is None:
            raise errors.NotConnected(f"the connection to {self.identity} has ended")
        if self._in_burst:
            self._unsent.append(data)
            return
        # The first message of a turn of the loop is written at once, the others at its end.
        self._in_burst = True
        asyncio.get_running_loop().call_soon(self._end_burst)
        self._transport.write(data)

    def _end_burst(self) -> None:
        self._in_burst = False
        unsent, self._unsent = self._unsent, []
        if unsent and self.is_open and self._transport is not None:
            self._transport.write(b"".join(unsent))
        if not self.is_open:
            return
        unsent_bytes = self.unsent_bytes()
        if unsent_bytes > UNSENT_BYTES_MAX:
            self.close("the peer does not read its messages")
        elif unsent_bytes > WATCHED_BYTES:
            self.on_held()

    def unsent_bytes(self) -> int:
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def held_bytes(self) -> int:
        """What is unsent, and the beginning of a frame whose end has not arrived."""
        return self.unsent_bytes() + self._reader.kept_bytes

    async def ease(self) -> None:
        await self._is_writable.wait()

    def count_bad_trace(self, _: str) -> None:
        events.debug("malformed-trace", peer=self.identity)

    def ask(
        self, subject: str, data: bytes, raw_headers: bytes | None, wait_s: float
    ) -> tuple[str, asyncio.Future[received.ReceivedMessage]]:
        """Send a request: its reply subject, and the reply, which is `NoReplyYet` after ``wait_s``; end with
        `forget`. `errors.Unavailable`: nothing was sent."""
        if len(self._pending) >= PENDING_MAX:
            raise errors.Overloaded(f"{PENDING_MAX} requests to {self.identity} have no reply yet")
        reply = subjects.reply_subject(
            subjects.responder(subject), self._requester, f"{next(self._numbers):x}"
        )
        self.send(subject, data, reply, raw_headers)
        answer = self._pending[reply] = asyncio.get_running_loop().create_future()
        self._timers.start(answer, wait_s)
        return reply, answer

    def suspect(self) -> None:
        """Do not use the link until something arrives on it: a peer that is only slow replies at once."""
        self.is_responsive = False
        if self.is_open:
            self.control(frames.PING)

    def ask_on(self, reply: str) -> asyncio.Future[received.ReceivedMessage]:
        """The reply to a request whose reply is late."""
        answer = self._pending[reply] = asyncio.get_running_loop().create_future()
        if not self.is_open:
            answer.set_exception(NoReplyYet(f"the connection to {self.identity} has ended"))
        return answer

    def forget(self, reply: str, answer: asyncio.Future[received.ReceivedMessage], wait_s: float) -> None:
        answer.cancel()
        self._timers.stop(answer, wait_s)
        answer = self._pending.pop(reply)
        if answer.done() and not answer.cancelled():
            answer.exception()  # it was retrieved, or is not needed

    def _watch(self) -> None:
        """As a session with a broker."""
        self._watch_timer = asyncio.get_running_loop().call_later(silence.INTERVAL_S, self._watch)
        self._silence.observe(self._blocks, self.unsent_bytes())
        if self._silence.is_lost:
            self.close("the peer is silent")
        elif self._silence.intervals:
            self.is_responsive &= self._silence.intervals == 1  # an idle link is pinged once
            self.control(frames.PING)


def _late(answer: asyncio.Future[received.ReceivedMessage]) -> None:
    if not answer.done():
        answer.set_exception(NoReplyYet("no reply in time"))
