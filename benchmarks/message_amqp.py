"""A light AMQP client for bench-message, in a process of its own: ``python -m benchmarks.message_amqp URL``.

It writes and reads transfers by hand, many in one write, so that it costs less than what it measures.
``[messages, bytes, persistent]``: it sends so many to a topic (or, persistent, to a queue), receives them
over a second connection, accepts each, and says how long that took.
"""

from __future__ import annotations

import json
import select
import socket
import struct
import sys
import time
from typing import Any

from cproton_ffi import ffi, lib

from muster.message.amqp import codec, engine, sasl, sections

WINDOW = 1000
TOPIC, QUEUE = "topic:bench/amqp", "queue:bench-amqp"


class Client:
    """One connection with one link; the engine is proton's, on the client's side."""

    def __init__(self, host: str, port: int, name: str) -> None:
        import proton

        self._socket = socket.create_connection((host, port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._log_in()
        self._connection = proton.Connection()
        self._connection.container = name
        self._collector = proton.Collector()
        self._connection.collect(self._collector)
        self._transport = proton.Transport()
        self._transport.max_frame_size = 64 << 10
        self._transport.bind(self._connection)
        self._raw = self._transport._impl
        self._out = ffi.new(f"char[{1 << 18}]")
        self.session = self._connection.session()
        self.session.incoming_capacity = 64 << 20
        self._connection.open()
        self.session.open()
        self.received = self.settled = 0
        self.link: Any = None

    def _log_in(self) -> None:
        init = b"\x00\x53\x41\xc0\x0c\x01\xa3\x09ANONYMOUS"
        self._socket.sendall(sasl.HEADER + struct.pack(">IBBH", len(init) + 8, 2, 1, 0) + init)
        got = b""
        while b"\x00\x53\x44" not in got:
            got += self._socket.recv(4096)

    def flush(self) -> None:
        parts = []
        while (size := lib.pn_transport_pending(self._raw)) > 0:
            size = lib.pn_transport_peek(self._raw, self._out, min(size, 1 << 18))
            parts.append(ffi.buffer(self._out, size)[:])
            lib.pn_transport_pop(self._raw, size)
        if parts:
            self._socket.sendall(b"".join(parts))

    def readable(self, timeout_s: float) -> bool:
        return bool(select.select([self._socket], [], [], timeout_s)[0])

    def read(self) -> None:
        data = self._socket.recv(1 << 18)
        if not data:
            raise SystemExit("the gateway closed the connection")
        view, at = ffi.from_buffer(data), 0
        while at < len(data):
            at += lib.pn_transport_push(
                self._raw, view + at, min(len(data) - at, lib.pn_transport_capacity(self._raw))
            )
            self._events()

    def _events(self) -> None:
        collector = self._collector._impl
        event = lib.pn_collector_peek(collector)
        while event != ffi.NULL:
            if lib.pn_event_type(event) == lib.PN_DELIVERY:
                delivery = lib.pn_event_delivery(event)
                link = lib.pn_delivery_link(delivery)
                if lib.pn_link_is_receiver(link):
                    if engine.receive(link, delivery) is not None:
                        engine.accept(delivery)
                        self.received += 1
                        if self.received % (WINDOW // 2) == 0:
                            lib.pn_link_flow(link, WINDOW // 2)
                elif lib.pn_delivery_updated(delivery):
                    assert lib.pn_delivery_remote_state(delivery) == engine.ACCEPTED, "it was not accepted"
                    lib.pn_delivery_settle(delivery)
                    self.settled += 1
            lib.pn_collector_pop(collector)
            event = lib.pn_collector_peek(collector)

    def wait(self, ready: Any) -> None:
        deadline = time.monotonic() + 20
        while not ready():
            self.flush()
            if time.monotonic() > deadline:
                raise SystemExit("the gateway does not answer")
            if self.readable(0.1):
                self.read()

    def attach_sender(self, address: str) -> None:
        self.link = self.session.sender(f"to {address}")
        self.link.target.address = address
        self.link.open()
        self.wait(lambda: self.link.credit > 0)

    def attach_receiver(self, address: str) -> None:
        self.link = self.session.receiver(f"from {address}")
        self.link.source.address = address
        self.link.open()
        self.link.flow(WINDOW)
        import proton

        self.wait(lambda: self.link.state & proton.Endpoint.REMOTE_ACTIVE)


def run(sender: Client, receiver: Client, count: int, data: bytes) -> float:
    began = time.perf_counter()
    wanted, settled = receiver.received + count, sender.settled + count
    link, sent = sender.link._impl, 0
    sockets = [sender._socket, receiver._socket]
    while receiver.received < wanted or sender.settled < settled:
        for _ in range(min(lib.pn_link_credit(link), count - sent, 200)):
            tag = struct.pack(">I", sent)
            lib.pn_delivery(link, (4, ffi.from_buffer(tag)))
            lib.pn_link_send(link, data, len(data))
            lib.pn_link_advance(link)
            sent += 1
        sender.flush()
        ready = select.select(sockets, [], [], 20)[0]
        if not ready:
            raise SystemExit(f"only {receiver.received} of {wanted} came")
        for one in (sender, receiver):
            if one._socket in ready:
                one.read()
                one.flush()
    return time.perf_counter() - began


def message(size: int, persistent: bool) -> bytes:
    """As a JMS client would make it."""
    header = codec._header(persistent, 4, 0)
    annotations = {"x-opt-jms-msg-type": b"\x51\x03", "x-opt-jms-dest": b"\x51\x01"}
    properties = [sections.text("ID:bench-1"), b"\x40", sections.text("bench/amqp"), *[b"\x40"] * 6]
    properties.append(sections.timestamp(time.time_ns() // 1_000_000))
    return (
        header
        + sections.section(sections.ANNOTATIONS, sections.mapping(annotations, symbols=True))
        + sections.section(sections.PROPERTIES, sections.sequence(properties))
        + codec._body_section("b", b"x" * size)
    )


def main(host: str, port: str) -> None:
    pairs: dict[bool, tuple[Client, Client]] = {}
    print(json.dumps({}), flush=True)
    for line in sys.stdin:
        count, size, persistent = json.loads(line)
        if persistent not in pairs:
            receiver = Client(host, int(port), f"bench-receiver-{persistent}")
            receiver.attach_receiver(QUEUE if persistent else TOPIC)
            sender = Client(host, int(port), f"bench-sender-{persistent}")
            sender.attach_sender(QUEUE if persistent else TOPIC)
            pairs[persistent] = (sender, receiver)
        cpu = time.process_time()
        took_s = run(*pairs[persistent], count, message(size, persistent))
        print(json.dumps({"took_s": took_s, "cpu_s": time.process_time() - cpu}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
