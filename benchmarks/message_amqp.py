"""A light AMQP client for bench-message, in a process of its own: ``python -m benchmarks.message_amqp HOST
PORT``.

It writes and reads frames by hand, many in one write, so that it costs less than what it measures.
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
from collections.abc import Callable

from muster.gateways.amqp.protocol import frames, sasl
from muster.message.amqp_format import amqp_types, fast_path, message_codec

CREDIT = 1000
TOPIC, QUEUE = "topic:bench/amqp", "queue:bench-amqp"
TIMEOUT_S = 20.0
LEAD = frames.transfer_lead(0, 0)


def frame(code: int, *fields: bytes) -> bytes:
    body = amqp_types.section(code, amqp_types.sequence(list(fields)))
    return struct.pack(">IBBH", 8 + len(body), 2, 0, 0) + body


class Client:
    """One connection with one session and one link, all of them number 0."""

    def __init__(self, host: str, port: int, name: str, address: str, *, receives: bool) -> None:
        self.socket = socket.create_connection((host, port), timeout=TIMEOUT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._log_in()
        self._rest = b""
        self._attached = False
        self.sent = self.settled = self.received = self.credit = self.window = 0
        self._told = self._granted = 0
        terminus = amqp_types.section(
            0x28 if receives else 0x29, amqp_types.sequence([amqp_types.text(address)])
        )
        ends = [terminus, b"\x40"] if receives else [b"\x40", terminus]
        role = b"\x41" if receives else b"\x42"
        self.socket.sendall(
            b"AMQP\x00\x01\x00\x00"
            + frame(frames.OPEN, amqp_types.text(name))
            + frame(frames.BEGIN, b"\x40", b"\x43", *[amqp_types.uint(frames.WINDOW_MAX)] * 2)
            + frame(
                frames.ATTACH, amqp_types.text(address), b"\x43", role, b"\x40", b"\x40", *ends,
                b"\x40", b"\x40", b"\x43",
            )
        )  # fmt: skip
        self.wait(lambda: self._attached and (receives or self.credit > 0))
        if receives:
            self.grant()

    def _log_in(self) -> None:
        init = b"\x00\x53\x41\xc0\x0c\x01\xa3\x09ANONYMOUS"
        self.socket.sendall(sasl.HEADER + struct.pack(">IBBH", len(init) + 8, 2, 1, 0) + init)
        got = b""
        while b"\x00\x53\x44" not in got:
            got += self.socket.recv(4096)

    def wait(self, ready: Callable[[], bool]) -> None:
        while not ready():
            self.read()

    def read(self) -> None:
        chunk = self.socket.recv(1 << 18)
        if not chunk:
            raise SystemExit("the gateway closed the connection")
        data = self._rest + chunk
        at, size = 0, len(data)
        while size - at >= 8:
            if data[at : at + 4] == b"AMQP":
                at += 8
                continue
            end = at + int.from_bytes(data[at : at + 4], "big")
            if end > size:
                break
            code = data[at + 10] if end - at > 10 else 0
            if code == frames.TRANSFER:
                self.received += 1
            elif code == frames.DISPOSITION:
                (_, first, last, _, state), _ = frames.fields(data, at + 11)
                assert state == frames.ACCEPTED_STATE, "it was not accepted"
                self.settled += last - first + 1
            elif code == frames.FLOW:
                incoming, room, _, _, _, delivered, credit = frames.numbers(data, at + 11, 7)
                self.window = (incoming or 0) + (room or 0) - self.sent
                if credit is not None:
                    self.credit = (delivered or 0) + credit - self.sent
            elif code == frames.ATTACH:
                self._attached = True
            elif code in (frames.DETACH, frames.END, frames.CLOSE):
                raise SystemExit(f"the gateway refuses: {data[at:end]!r}")
            at = end
        self._rest = data[at:]
        if self.received > self._told:
            disposition = frames.disposition(0, self._told, self.received - 1, frames.ACCEPTED_STATE)
            self._told = self.received
            self.socket.sendall(disposition)
            if self._granted - self.received <= CREDIT // 2:
                self.grant()

    def grant(self) -> None:
        self._granted = self.received + CREDIT
        window = (self.received, frames.WINDOW_MAX, 0)
        self.socket.sendall(frames.flow(0, window, (0, self.received, CREDIT)))

    def send(self, data: bytes, most: int) -> None:
        count = min(self.credit, self.window, most, 200)
        parts = []
        for number in range(self.sent, self.sent + count):
            parts.append(frames.transfer_head(LEAD, number, len(data), False, False))
            parts.append(data)
        self.sent += count
        self.credit -= count
        self.window -= count
        if parts:
            self.socket.sendall(b"".join(parts))


def run(sender: Client, receiver: Client, count: int, data: bytes) -> float:
    began = time.perf_counter()
    expected, settled, last = receiver.received + count, sender.settled + count, sender.sent + count
    sockets = [sender.socket, receiver.socket]
    while receiver.received < expected or sender.settled < settled:
        sender.send(data, last - sender.sent)
        ready = select.select(sockets, [], [], TIMEOUT_S)[0]
        if not ready:
            raise SystemExit(f"{expected - receiver.received} of {count} did not come")
        for client in (sender, receiver):
            if client.socket in ready:
                client.read()
    return time.perf_counter() - began


def message(size: int, persistent: bool) -> bytes:
    """As a JMS client would make it."""
    header = message_codec._header(persistent, 4, 0)
    annotations = {"x-opt-jms-msg-type": b"\x51\x03", "x-opt-jms-dest": b"\x51\x01"}
    properties = [amqp_types.text("ID:bench-1"), b"\x40", amqp_types.text("bench/amqp"), *[b"\x40"] * 6]
    properties.append(amqp_types.timestamp(time.time_ns() // 1_000_000))
    return (
        header
        + amqp_types.section(amqp_types.ANNOTATIONS, amqp_types.mapping(annotations, symbols=True))
        + amqp_types.section(amqp_types.PROPERTIES, amqp_types.sequence(properties))
        + fast_path.body_section("b", b"x" * size)
    )


def main(host: str, port: str) -> None:
    pairs: dict[bool, tuple[Client, Client]] = {}
    print(json.dumps({}), flush=True)
    for line in sys.stdin:
        count, size, persistent = json.loads(line)
        if persistent not in pairs:
            where = QUEUE if persistent else TOPIC
            receiver = Client(host, int(port), f"bench-receiver-{persistent}", where, receives=True)
            sender = Client(host, int(port), f"bench-sender-{persistent}", where, receives=False)
            pairs[persistent] = (sender, receiver)
        cpu = time.process_time()
        took_s = run(*pairs[persistent], count, message(size, persistent))
        print(json.dumps({"took_s": took_s, "cpu_s": time.process_time() - cpu}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
