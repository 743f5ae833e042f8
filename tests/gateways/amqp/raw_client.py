"""An AMQP client whose reads and writes the test controls."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from typing import Any

import proton

from muster.gateways.amqp.protocol import frames
from muster.message.amqp_format import amqp_types


def _login(fields: bytes, count: int) -> bytes:
    frame = b"\x00\x53\x41\xc0" + bytes((len(fields) + 1, count)) + fields
    return b"AMQP\x03\x01\x00\x00" + (len(frame) + 8).to_bytes(4, "big") + b"\x02\x01\x00\x00" + frame


def plain(name: str, password: str) -> bytes:
    """Logs in with a password."""
    encoded = f"\0{name}\0{password}".encode()
    return _login(b"\xa3\x05PLAIN\xa0" + bytes((len(encoded),)) + encoded, 2)


LOGIN = _login(b"\xa3\x09ANONYMOUS", 1)
OPEN = b"\x00\x53\x10\xc0\x0b\x01\xa1\x08half-way"


class Raw:
    def __init__(self, port: int, name: str, tls: ssl.SSLContext | None = None, login: bytes = LOGIN) -> None:
        self.connection = proton.Connection()
        self.connection.container = name
        self.session = self.connection.session()
        self.session.incoming_capacity = 1 << 30
        self.transport = proton.Transport()
        self.transport.bind(self.connection)
        self.connection.open()
        self.session.open()
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=30)
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_hostname="127.0.0.1")
        self.socket.sendall(login)
        got = b""
        while b"\x00\x53\x44" not in got:
            got += self.socket.recv(4096)

    def write(self) -> None:
        while (size := self.transport.pending()) > 0:
            self.socket.sendall(self.transport.peek(size))
            self.transport.pop(size)

    def read(self) -> None:
        data = self.socket.recv(1 << 16)
        assert data, "the gateway closed the connection"
        at = 0
        while at < len(data):
            room = self.transport.capacity()
            self.transport.push(data[at : at + room])
            at += room

    def until(self, ready: Callable[[], object]) -> None:
        self.write()
        while not ready():
            self.read()
            self.write()


def receive(raw: Raw, receiver: Any) -> tuple[proton.Message, proton.Delivery]:
    raw.until(lambda: receiver.current is not None and receiver.current.readable)
    delivery, got = receiver.current, proton.Message()
    got.decode(receiver.recv(delivery.pending))
    receiver.advance()
    return got, delivery


def receiver(raw: Raw, address: str, credit: int = 10) -> Any:
    made = raw.session.receiver("in")
    made.source.address = address
    made.open()
    made.flow(credit)
    return made


class FrameClient:
    """Writes frames that proton does not write. Fields are encoded values, in the order of AMQP.
    Without a name it opens no session; ``opening``: the fields of its open then."""

    def __init__(self, port: int, name: str | None, opening: list[bytes] | None = None) -> None:
        self._rest = b""
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=30)
        self.socket.sendall(LOGIN)
        while b"\x00\x53\x44" not in self._rest:
            self._rest += self.socket.recv(4096)
        self.socket.sendall(b"AMQP\x00\x01\x00\x00")
        self.send(frames.OPEN, opening or [NULL if name is None else amqp_types.text(name)])
        if name is not None:
            self.send(frames.BEGIN, [NULL, *(amqp_types.uint(number) for number in (0, 100, 100))])
        self._rest = self._rest[self._rest.index(b"\x00\x53\x44") + 3 :]
        while b"AMQP\x00\x01\x00\x00" not in self._rest:
            self._rest += self.socket.recv(4096)
        self._rest = self._rest[self._rest.index(b"AMQP\x00\x01\x00\x00") + 8 :]
        if name is not None:
            self.until(frames.BEGIN)

    def send(self, *codes_and_fields: Any, channel: int = 0) -> None:
        """Frames in one write: a code, its fields, the next code and so on."""
        written = b""
        for code, items in zip(codes_and_fields[::2], codes_and_fields[1::2], strict=True):
            body = described(code, items)
            written += (len(body) + 8).to_bytes(4, "big") + b"\x02\x00" + channel.to_bytes(2, "big") + body
        self.socket.sendall(written)

    def until(self, *codes: int) -> list[Any]:
        """The fields of the next frame with one of these codes, after the code itself and its payload."""
        while True:
            while len(self._rest) >= 4 and len(self._rest) >= int.from_bytes(self._rest[:4], "big"):
                size = int.from_bytes(self._rest[:4], "big")
                frame, self._rest = self._rest[:size], self._rest[size:]
                code, at = frames.frame_type(frame, 0, size)
                if code in codes:
                    fields, end = frames.fields(frame, at)
                    return [code, frame[end:], *fields]
            data = self.socket.recv(1 << 16)
            assert data, f"the gateway closed the connection {self._rest!r}"
            self._rest += data

    def attach_receiver(self, handle: int, source: list[bytes], name: str = "in") -> list[Any]:
        """The frame that attaches a link to receive."""
        fields = [amqp_types.text(name), amqp_types.uint(handle), b"\x41", NULL, NULL]
        return [frames.ATTACH, [*fields, described(0x28, source), described(0x29, [])]]

    def attach_sender(self, handle: int, target: bytes, name: str = "out") -> list[Any]:
        """The frame that attaches a link to send."""
        fields = [amqp_types.text(name), amqp_types.uint(handle), b"\x42", NULL, NULL, described(0x28, [])]
        return [frames.ATTACH, [*fields, target, NULL, NULL, amqp_types.uint(0)]]

    def transfer(self, handle: int, number: int, *, more: bool = False, aborted: bool = False) -> list[Any]:
        """A transfer without a payload."""
        numbers = [amqp_types.uint(handle), amqp_types.uint(number), amqp_types.binary(b"%d" % number)]
        flags = [NULL, b"\x42", _bool(more), NULL, NULL, NULL, _bool(aborted)]
        return [frames.TRANSFER, [*numbers, *flags]]

    def flow(self, handle: int, credit: int, *rest: bytes) -> list[Any]:
        numbers = (amqp_types.uint(number) for number in (0, 100, 0, 100, handle, 0, credit))
        return [frames.FLOW, [*numbers, *rest]]


NULL = b"\x40"


def _bool(value: bool) -> bytes:
    return b"\x41" if value else b"\x42"


def described(code: int, items: list[bytes]) -> bytes:
    return b"\x00\x53" + bytes((code,)) + amqp_types.sequence(items)


def condition(fields: list[Any]) -> str:
    """The condition in the error of a detach."""
    return str(frames.state_fields(fields[4])[0])
