"""An AMQP client that reads and writes when it wants to."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Callable
from typing import Any

import proton


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
