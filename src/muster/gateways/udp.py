"""JMS over UDP: non-persistent topic messages in datagrams. LOSSY: a lost datagram is not repeated.

    async with udp.UdpSession(connection) as session:
        publisher = await session.publisher(topic)
        subscriber = await session.subscriber(pattern, "grams < 5")
        publisher.send("light as a feather")
        async for message in subscriber: ...

Keys are exchanged over the ordinary connection. On a control topic (``udp/…``), a sender announces itself,
and a receiver offers its address. Every sender replies with its key and sends a first datagram with a token,
which the receiver has to return over the bus. Therefore only clients with permission for the topic get a key,
and no client can direct datagrams to another host. Announcements are repeated; an offer is valid for a
limited time and is renewed. A receiver of a pattern offers to each sender that it hears of.

Each datagram is authenticated and encrypted (AES-GCM; the nonce consists of the sender's id and the
datagram's number) and is accepted once. Loss and reordering are counted, not repaired. All receivers of a
sender have its key, so an authentic datagram may come from any of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import math
import secrets
import struct
import time
from typing import Annotated, Any, Final, Self

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import aead

from muster.bus import api
from muster.core import duplicates, errors, subjects, topics
from muster.message import codec, destinations, messages, selectors
from muster.message.client import api as client_api
from muster.message.client import producers
from muster.supervision import tasks

DATAGRAM_BYTES_MAX: Final = 60_000
RENEW_S: Final = 5.0
HOLD_S: Final = 20.0
WAITING_MAX: Final = 10_000
SENDERS_MAX: Final = 1_000  # of one topic
_KEY_BYTES: Final = 32
_HEAD: Final = struct.Struct(">IQB")  # sender, number, kind
_PROBE, _DATA = 0, 1
_WINDOW: Final = 1024  # how late a datagram may arrive and still be accepted


class _Offer(msgspec.Struct, frozen=True):
    """``host`` is an address: to resolve a name would block the sender."""

    host: str
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    tokens: list[str] = []  # tokens from probes, one for each sender

    def __post_init__(self) -> None:
        ipaddress.IPv4Address(self.host)


class _Key(msgspec.Struct, frozen=True):
    sender: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
    key: Annotated[bytes, msgspec.Meta(min_length=_KEY_BYTES, max_length=_KEY_BYTES)]
    first: Annotated[int, msgspec.Meta(ge=0)]


class _SenderStarted(msgspec.Struct, frozen=True):
    sender: int


_PREFIX: Final = f"{subjects.TOPIC_PREFIX}."
_CONTROL: Final = f"{_PREFIX}udp."


def _control(subject: str) -> str:
    """The subject on which senders and receivers of a topic's subject meet."""
    return _CONTROL + subject.removeprefix(_PREFIX)


class UdpSession(contextlib.AsyncExitStack):
    """Publishers and subscribers over datagrams, beside those of a connection; they are closed with it.
    ``host``: the address of this machine at which subscribers receive.
    """

    def __init__(self, connection: client_api.Connection, *, host: str = "127.0.0.1") -> None:
        super().__init__()
        self._connection = connection
        self._host = host

    async def publisher(self, topic: destinations.Destination) -> UdpSender:
        return await self.enter_async_context(UdpSender(self._connection, topic))

    async def subscriber(self, topic: destinations.Destination, selector: str | None = None) -> UdpReceiver:
        """``topic`` may have wildcards."""
        return await self.enter_async_context(UdpReceiver(self._connection, topic, selector, host=self._host))


class UdpSender(asyncio.DatagramProtocol):
    """``sent`` counts datagrams, one for each message and receiver."""

    def __init__(self, connection: client_api.Connection, topic: destinations.Destination) -> None:
        self._connection = connection
        self._destination = topic
        self._subject = _control(topics.Topic.parse(topic.name).subject)
        self._tasks = tasks.TaskSupervisor(f"UDP publisher of {topic.name}")
        self._found = asyncio.Event()  # a receiver has been there
        self._number = 0
        self._id = secrets.randbits(32)
        self._key = aead.AESGCM.generate_key(8 * _KEY_BYTES)
        self._cipher = aead.AESGCM(self._key)
        self._peers: dict[tuple[str, int], float] = {}  # valid until
        self._probed: dict[tuple[str, int], tuple[str, float]] = {}  # token, valid until
        self.sent = 0

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._socket, _ = await loop.create_datagram_endpoint(lambda: self, local_addr=("0.0.0.0", 0))
        self._subscription = await self._connection.bus.subscribe(self._subject, handler=self._on_offer)
        self._tasks.loop("announce", self._announce)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._tasks.close()
        await self._subscription.close()
        self._socket.close()

    async def wait_for_receiver(self, timeout_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._found.wait()
        return self.receivers > 0

    async def _announce(self) -> None:
        announcement = msgspec.json.encode(_SenderStarted(self._id))
        while True:
            with contextlib.suppress(errors.Unavailable):
                await self._connection.bus.publish(self._subject, announcement)
            await asyncio.sleep(RENEW_S)

    @property
    def receivers(self) -> int:
        now = time.monotonic()
        return sum(until > now for until in self._peers.values())

    async def _on_offer(self, message: api.Message) -> None:
        try:
            offer = msgspec.json.decode(message.data, type=_Offer)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return  # not an offer: another sender has started
        peer, now = (offer.host, offer.port), time.monotonic()
        if len(self._probed) >= WAITING_MAX:
            self._probed = {address: held for address, held in self._probed.items() if held[1] > now}
        token, _ = self._probed.get(peer, ("", 0.0))
        if token and any(secrets.compare_digest(token.encode(), each.encode()) for each in offer.tokens):
            self._peers[peer] = now + HOLD_S
            self._found.set()
            self._probed[peer] = (token, now + HOLD_S)
        elif token or len(self._probed) < WAITING_MAX:
            token = token or secrets.token_hex(8)
            self._probed[peer] = (token, now + HOLD_S)
            self._transmit(peer, _PROBE, token.encode())
        await message.respond(msgspec.json.encode(_Key(self._id, self._key, self._number)))

    def send(self, body: producers.Body) -> None:
        message = producers.to_message(body)
        message.destination, message.persistent = self._destination, False
        message.message_id = self._connection.next_message_id()
        message.timestamp_ms = messages.now_ms()
        message.origin = self._connection.origin
        meta, data = message.meta()
        raw = messages.encode_meta(meta)
        packed = struct.pack(">I", len(raw)) + raw + data
        if len(packed) > DATAGRAM_BYTES_MAX:
            raise errors.LimitExceeded(
                f"{len(packed)} bytes do not fit into a datagram: the maximum is {DATAGRAM_BYTES_MAX}"
            )
        now = time.monotonic()
        for peer, until in list(self._peers.items()):
            if until > now:
                self._transmit(peer, _DATA, packed)
                self.sent += 1
            else:
                del self._peers[peer]
                self._probed.pop(peer, None)
        self._number += 1

    def _transmit(self, peer: tuple[str, int], kind: int, data: bytes) -> None:
        # A probe has a random number: a nonce must never be used twice.
        number = self._number if kind == _DATA else secrets.randbits(63) | 1 << 63
        head = _HEAD.pack(self._id, number, kind)
        sealed = self._cipher.encrypt(head[:12], data, head)
        self._socket.sendto(head + sealed, peer)


class _SenderState:
    """The state of one sender."""

    def __init__(self, key: _Key, topic: topics.Topic) -> None:
        self.cipher = aead.AESGCM(key.key)
        self.topic = topic
        self.first: int | None = None  # the number of the first datagram that arrived
        self.highest = key.first - 1
        self.seen = 0  # see `duplicates.observe`
        self.token = ""
        self.last_seen = 0.0  # last reply over the bus


class UdpReceiver(asyncio.DatagramProtocol):
    """Iterate over it. ``lost`` counts datagrams that did not arrive, or arrived too late, ``rejected`` those
    that the selector does not accept, and ``dropped`` those that found too many waiting.
    """

    def __init__(
        self,
        connection: client_api.Connection,
        topic: destinations.Destination,
        selector: str | None = None,
        *,
        host: str = "127.0.0.1",
    ) -> None:
        self._connection = connection
        self._pattern = topics.TopicPattern.parse(topic.name)
        self._matches = selectors.compiled(selector) if selector else None
        self._topics: dict[topics.Topic, float] = {}  # of senders, and when the last one was heard
        with contextlib.suppress(errors.InvalidInput):  # without wildcards
            self._topics[topics.Topic.parse(topic.name)] = math.inf
        self._host = host
        self._senders: dict[int, _SenderState] = {}
        self._waiting: asyncio.Queue[messages.JmsMessage] = asyncio.Queue(WAITING_MAX)
        self._wake = asyncio.Event()
        self._tasks = tasks.TaskSupervisor(f"UDP subscription of {topic.name}")
        self._subscriptions: list[api.Subscription] = []
        self.received = self.lost = self.reordered = self.refused = self.dropped = self.rejected = 0

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._socket, _ = await loop.create_datagram_endpoint(lambda: self, local_addr=(self._host, 0))
        self._host, self._port = self._socket.get_extra_info("sockname")[:2]
        try:
            for subject in map(_control, self._pattern.subjects):
                self._subscriptions.append(
                    await self._connection.bus.subscribe(subject, handler=self._on_sender_started)
                )
        except BaseException:
            await self.__aexit__()
            raise
        self._tasks.loop("offer", self._offer)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._tasks.close()
        for subscription in self._subscriptions:
            await subscription.close()
        self._socket.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> messages.JmsMessage:
        return await self._waiting.get()

    def _on_sender_started(self, message: api.Message) -> None:
        """A sender has started, or is still there."""
        try:
            started = msgspec.json.decode(message.data, type=_SenderStarted)
            topic = topics.Topic.from_subject(_PREFIX + message.subject.removeprefix(_CONTROL))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, errors.InvalidInput):
            return
        if not self._pattern.matches(topic):
            return
        if topic in self._topics or len(self._topics) < SENDERS_MAX:
            self._topics[topic] = max(self._topics.get(topic, 0.0), time.monotonic())
            if started.sender not in self._senders:
                self._wake.set()

    async def _offer(self) -> None:
        while True:
            offer = _Offer(
                self._host, self._port, [sender.token for sender in self._senders.values() if sender.token]
            )
            data = msgspec.json.encode(offer)
            gone = time.monotonic() - HOLD_S
            self._topics = {topic: heard for topic, heard in self._topics.items() if heard > gone}
            await asyncio.gather(*(self._offer_to(topic, data) for topic in self._topics))
            gone = time.monotonic() - HOLD_S
            self._senders = {
                name: sender for name, sender in self._senders.items() if sender.last_seen > gone
            }
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RENEW_S):
                    await self._wake.wait()
            self._wake.clear()

    async def _offer_to(self, topic: topics.Topic, data: bytes) -> None:
        with contextlib.suppress(errors.Unavailable):  # retry with the next offer
            subject = _control(topic.subject)
            for reply in await self._connection.bus.gather(subject, data, timeout_s=0.5):
                self._on_key(reply, topic)

    def _on_key(self, reply: api.Message, topic: topics.Topic) -> None:
        try:
            key = msgspec.json.decode(reply.data, type=_Key)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return
        known = self._senders.get(key.sender)
        if known is None:
            if len(self._senders) >= SENDERS_MAX:
                return
            known = self._senders[key.sender] = _SenderState(key, topic)
            self._wake.set()  # its probe arrived before its key: request another
        known.last_seen = time.monotonic()

    def datagram_received(self, data: bytes, addr: Any) -> None:
        if len(data) < _HEAD.size:
            self.refused += 1
            return
        head = data[: _HEAD.size]
        sender, number, kind = _HEAD.unpack(head)
        known = self._senders.get(sender)
        if known is None:
            return
        try:
            text = known.cipher.decrypt(head[:12], data[_HEAD.size :], head)
        except InvalidTag:
            self.refused += 1
            return
        if kind == _PROBE:
            token = text.decode("ascii", "replace")
            if known.token != token:
                known.token = token
                self._wake.set()
            return
        if not self._accept_number(known, number):
            self.refused += 1
            return
        try:
            (size,) = struct.unpack_from(">I", text)
            meta = messages.decode_meta(text[4 : 4 + size])
            message = codec.message_from_meta(meta, text[4 + size :])
            if message.destination is None or topics.Topic.parse(message.destination.name) != known.topic:
                self.refused += 1  # another holder of the key for a topic that is not the key's
            elif self._matches is not None and not self._matches(meta.lookup()):
                self.rejected += 1
            else:
                self._waiting.put_nowait(message)
                self.received += 1
        except (errors.MusterError, struct.error, asyncio.QueueFull):
            self.dropped += 1

    def _accept_number(self, known: _SenderState, number: int) -> bool:
        """Whether the number is new; updates the counts of loss and reordering."""
        verdict, highest, seen = duplicates.observe(known.highest, known.seen, number, _WINDOW)
        if verdict is not duplicates.DuplicateVerdict.NEW:
            return False
        if known.first is None:
            known.first = number
        elif number > known.highest:
            self.lost += number - known.highest - 1
        else:
            self.reordered += 1
            self.lost -= number > known.first  # an earlier one was not counted as lost
        known.highest, known.seen = highest, seen
        return True
