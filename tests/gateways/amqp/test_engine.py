"""The gateway's engine with proton's client, in memory; and with invalid input."""

from __future__ import annotations

import sys
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies

proton = pytest.importorskip("proton", reason="python-qpid-proton is not installed")

from muster.gateways.amqp import connection, memory_budget  # noqa: E402
from muster.gateways.amqp.links import producers  # noqa: E402
from muster.gateways.amqp.protocol import endpoints, engine, frames  # noqa: E402

SIZES = (0, 1, 100, 256, 471, 479, 480, 512, 5_000, 70_000, 300_000)


class EnginePair:
    """A client of proton's and our engine, whose owner opens everything that the client opens."""

    def __init__(
        self, *, frame_bytes: int = 16 << 10, window_bytes: int = 1 << 20, session_bytes: int = 64 << 20
    ) -> None:
        self.heard = b""  # by the client
        self._session_bytes = session_bytes
        self.outcomes: list[tuple[Any, int]] = []
        self.taken: list[tuple[int, bytes, bool]] = []
        self.links: list[endpoints.AmqpLink] = []
        self.server = engine.AmqpEngine(
            30, lambda token, code, _: self.outcomes.append((token[2], code)), self.event
        )
        self.server.transport.max_frame_size = frame_bytes
        self.client = proton.Connection()
        self.client.container = "client"
        self.collector = proton.Collector()
        self.client.collect(self.collector)
        self.transport = proton.Transport()
        self.transport.max_frame_size = frame_bytes
        self.transport.bind(self.client)
        self.session = self.client.session()
        self.session.incoming_capacity = window_bytes
        self.client.open()
        self.session.open()
        self.broken = False
        self.run()

    def event(self, event: Any) -> None:
        match event.type:
            case proton.Event.CONNECTION_REMOTE_OPEN:
                event.connection.container = "server"
                event.connection.open()
            case proton.Event.SESSION_REMOTE_OPEN:
                event.session.incoming_capacity = self._session_bytes
                event.session.open()
            case proton.Event.LINK_REMOTE_OPEN:
                event.link.source.copy(event.link.remote_source)
                event.link.target.copy(event.link.remote_target)
                event.link.open()
                link = self.server.link_of(event.link)
                link.on_message = lambda number, data, settled, _: self.taken.append((number, data, settled))
                self.links.append(link)

    def run(self) -> None:
        """Until neither has anything to say."""
        while True:
            quiet = True
            while (size := self.transport.pending()) > 0:
                data = bytes(self.transport.peek(size))
                self.transport.pop(size)
                self.broken |= not self.server.push(data)
                quiet = False
            data, _ = self.server.pull()
            if data:
                quiet = False
                self.hear(data)
            if quiet:
                return

    def hear(self, data: bytes) -> None:
        self.heard += data
        at = 0
        while at < len(data) and (room := self.transport.capacity()) > 0:
            self.transport.push(data[at : at + room])
            at += room
            self.read()

    def read(self) -> None:
        """What came in whole is read at once, so that the client's window opens again."""

    def sender(self) -> Any:
        made = self.session.sender("out")
        made.target.address = "somewhere"
        made.open()
        self.run()
        return made

    def receiver(self) -> Any:
        made = self.session.receiver("in")
        made.source.address = "somewhere"
        made.open()
        self.run()
        return made


def _token(number: int, key: str = "backlog") -> endpoints.Token:
    return None, key, number, b""


def _deliver(link: Any, tag: str, data: bytes) -> Any:
    made = link.delivery(tag)
    link.send(data)
    link.advance()
    return made


@pytest.mark.parametrize("frame_bytes", [512, 4096, 64 << 10])
def test_what_a_client_sends_arrives_whole_and_is_accepted_in_ranges(frame_bytes: int):
    world = EnginePair(frame_bytes=frame_bytes)
    sender = world.sender()
    world.server.grant(world.links[0], 100)
    world.run()
    assert sender.credit == 100
    sent = [bytes([place]) * size for place, size in enumerate(SIZES)]
    deliveries = [_deliver(sender, f"tag-{place}", data) for place, data in enumerate(sent)]
    world.run()
    assert [data for _, data, _ in world.taken] == sent
    for number, _, settled in world.taken:
        assert not settled
        world.server.accept(world.links[0], number)
    world.run()
    assert all(
        delivery.remote_state == proton.Delivery.ACCEPTED and delivery.settled for delivery in deliveries
    )
    assert world.links[0].credit == 100 - len(SIZES)


def test_a_settled_transfer_is_marked_and_a_refused_one_has_a_reason():
    world = EnginePair()
    sender = world.sender()
    world.server.grant(world.links[0], 10)
    world.run()
    _deliver(sender, "", b"one").settle()
    refused = _deliver(sender, "two", b"two")
    world.run()
    assert [settled for _, _, settled in world.taken] == [True, False]
    world.server.settle(world.links[0], world.taken[1][0], frames.rejected("amqp:not-allowed", "no" * 300))
    world.run()
    assert refused.remote_state == proton.Delivery.REJECTED
    assert (refused.remote.condition.name, refused.remote.condition.description) == (
        "amqp:not-allowed",
        "no" * 300,
    )


@pytest.mark.parametrize(("frame_bytes", "window_bytes"), [(512, 2048), (4096, 8192), (64 << 10, 1 << 20)])
def test_what_we_send_arrives_whole_within_the_clients_window(frame_bytes: int, window_bytes: int):
    got: list[bytes] = []

    class Reading(EnginePair):
        def read(self) -> None:
            receiver = self.session.connection.link_head(0)
            while receiver is not None and (current := receiver.current) is not None:
                if not current.readable:
                    return
                if current.partial:
                    parts.append(receiver.recv(current.pending) or b"")
                    return
                got.append(b"".join(parts) + (receiver.recv(current.pending) or b""))
                parts.clear()
                receiver.advance()
                current.update(proton.Delivery.ACCEPTED)
                current.settle()

    parts: list[bytes] = []
    world = Reading(frame_bytes=frame_bytes, window_bytes=window_bytes)
    receiver = world.receiver()
    receiver.flow(100)
    world.run()
    link = world.links[0]
    assert link.credit == 100
    sent = [bytes([place]) * size for place, size in enumerate(SIZES)]
    for place, data in enumerate(sent):
        world.server.send(link, data, _token(place), settled=False)
    world.run()
    assert got == sent
    assert world.outcomes == [(place, frames.ACCEPTED) for place in range(len(SIZES))]
    assert not link.session.unsettled
    assert link.credit == 100 - len(SIZES)


@pytest.mark.parametrize("first", [0, 5000, 0xFFFFFFFB])
def test_credit_counts_from_the_number_at_which_a_sender_begins(first: int):
    """Otherwise a sender that begins above the credit never sends."""
    world = EnginePair()
    null, is_sender = b"\x40", b"\x42"
    count = b"\x70" + first.to_bytes(4, "big")
    fields = b"\xa1\x03raw" + b"\x52\x07" + is_sender + 6 * null + count
    attach = b"\x00\x53\x12\xc0" + bytes((len(fields) + 1, 10)) + fields
    world.server.push((len(attach) + 8).to_bytes(4, "big") + b"\x02\x00\x00\x00" + attach)
    world.server.pull()
    (link,) = world.links
    world.server.grant(link, 10)
    flow, _ = world.server.pull()
    assert frames.numbers(flow, frames.frame_type(flow, 0, len(flow))[1], 7)[5:] == [first, 10]


def test_outcomes_keep_their_kind():
    world = EnginePair()
    receiver = world.receiver()
    receiver.flow(10)
    world.run()
    for place in range(4):
        world.server.send(world.links[0], b"x", _token(place), settled=False)
    world.run()
    for outcome in (proton.Delivery.ACCEPTED, proton.Delivery.RELEASED, proton.Delivery.MODIFIED):
        current = receiver.current
        receiver.advance()
        current.local.failed = outcome == proton.Delivery.MODIFIED
        current.update(outcome)
        current.settle()
    world.run()
    assert sorted(world.outcomes) == [(0, frames.ACCEPTED), (1, frames.RELEASED), (2, frames.MODIFIED)]
    assert [token[2] for token in world.links[0].session.unsettled.values()] == [3]


def test_acceptances_are_read_together_and_counted_if_there_are_no_other_outcomes():
    world = EnginePair()
    receiver = world.receiver()
    receiver.flow(1000)
    world.run()
    for place in range(400):
        world.server.send(
            world.links[0], b"x", _token(place, key="" if place > 390 else "backlog"), settled=False
        )
    world.run()
    output = [frames.disposition(0, number, number, frames.ACCEPTED_STATE) for number in range(300, 400)]
    pushed = world.server.push
    assert pushed(b"".join(output[:50]) + output[50][:7])
    assert (len(world.outcomes), world.server.accepted) == (50, 50)
    assert pushed(output[50][7:] + output[51])
    assert (len(world.outcomes), world.server.accepted) == (52, 2)
    other = frames.disposition(0, 0, 9, frames.ACCEPTED_STATE)
    assert pushed(b"".join(output[52:60]) + other + b"".join(output[60:]))
    assert (len(world.outcomes), world.server.accepted) == (101, 0), "other outcomes were sent too"
    assert sorted(world.links[0].session.unsettled) == list(range(10, 300))
    assert max(world.outcomes)[0] == 390, "without a backlog, only rejections are reported"


def test_a_drained_link_has_no_credit_left():
    world = EnginePair()
    receiver = world.receiver()
    receiver.drain(7)
    world.run()
    link = world.links[0]
    assert link.drain
    world.server.send(link, b"x", _token(0), settled=True)
    world.server.drained(link)
    world.run()
    assert (link.credit, receiver.credit - receiver.queued, receiver.draining()) == (0, 0, False)


def test_a_link_is_drained_after_what_the_sessions_window_held_back():
    world = EnginePair(window_bytes=16 << 10)
    receiver = world.session.receiver("in")
    receiver.open()
    receiver.drain(10)
    world.session.incoming_capacity = 16 << 10
    world.run()
    (link,) = world.links
    link.session.window = 1
    data = b"x" * 40_000
    world.server.send(link, data, (None, "", 1, data), settled=True)
    assert link.session.blocked
    world.server.drained(link)
    assert link.credit == 9  # not yet
    link.session.window = 100
    world.server._unblock(link.session)
    assert (link.credit, link.drain) == (0, False)


def test_unfinished_and_unsettled_bytes_are_bounded_over_all_links_and_sessions():
    login = memory_budget.ConnectionBudget(
        memory_budget.GatewayLimits(links=3, unfinished_bytes=1000, unsettled_bytes=3000)
    )
    ample = memory_budget.GatewayLimits(links=100, unfinished_bytes=10_000, unsettled_bytes=2000)
    first, other = (memory_budget.ConnectionBudget(ample, login) for _ in range(2))
    eased: list[str] = []
    first.on_room = lambda: eased.append("one")
    login.on_room = lambda: eased.append("login")
    assert [part.add_link() for part in (first, other, first, other)] == [True, True, True, False]
    assert first.add_unfinished(600)
    assert not other.add_unfinished(600)
    other.remove_unfinished(600)
    assert other.add_unfinished(400)
    first.add_unsettled(2001)
    assert (first.may_deliver, other.may_deliver) == (False, True)
    other.add_unsettled(1000)
    assert (first.may_deliver, other.may_deliver) == (False, False)
    first.remove_unsettled(1400)
    assert (eased, first.may_deliver) == (["one"], False)  # for the login's sake
    other.close()
    assert (eased, first.may_deliver) == (["one", "login"], True)
    first.close()
    assert (login.links, login.unfinished_bytes, login.unsettled_bytes) == (0, 0, 0)


@pytest.mark.parametrize(
    "sent_bytes",
    [
        pytest.param((frames.TRANSFER, b"\xc0\x40\x05\x43\x43\xa0\x01a\x43" + bytes(56)), id="nested zeros"),
        pytest.param(
            (frames.DISPOSITION, b"\xd0\x00\x00\x10\x00\x00\x00\x00\x05\x41\x43\x43\x41" + bytes(5000)),
            id="deep",
        ),
        pytest.param((frames.BEGIN, b"\xc0\x04\x03\x40\x41\x41"), id="begin of booleans"),
        pytest.param((frames.BEGIN, b"\xc0\x06\x03\xa1\x01x\x43\x43"), id="begin with a text"),
        pytest.param((frames.ATTACH, b"\xc0\x04\x03\x40\x43\x41"), id="attach without a name"),
        pytest.param((frames.ATTACH, b"\x45"), id="empty attach"),
    ],
)
def test_a_malformed_frame_of_a_client_that_logged_in_ends_with_an_error_close(sent_bytes: tuple[int, bytes]):
    world = EnginePair()
    code, body = sent_bytes
    performative = b"\x00\x53" + bytes((code,)) + body
    channel = 7 if code == frames.BEGIN else 0
    frame = (
        (len(performative) + 8).to_bytes(4, "big") + b"\x02\x00" + channel.to_bytes(2, "big") + performative
    )
    transfer = b"\x00\x53\x14\xc0\x03\x02\x43\x43"
    after = (len(transfer) + 8).to_bytes(4, "big") + b"\x02\x00" + channel.to_bytes(2, "big") + transfer
    assert (
        not world.server.push(frame + after) or world.server.connection.state & proton.Endpoint.LOCAL_CLOSED
    )
    answer, _ = world.server.pull()
    assert b"amqp:" in answer


def test_a_message_without_credit_closes_its_link():
    world = EnginePair()
    sender = world.sender()
    output = frames.transfer_head(frames.transfer_lead(0, 0), 0, 1, settled=False, more=False) + b"x"
    world.server.push(output)
    world.run()
    assert world.taken == []
    assert sender.remote_condition.name == "amqp:link:transfer-limit-exceeded"


def test_the_window_of_a_session_is_never_what_stops_a_producer():
    """Qpid JMS would then keep messages until the next heartbeat, although it has credit and a new window."""
    assert endpoints.WINDOW >= 16 * producers.CREDIT


def test_a_new_session_has_an_open_window():
    """Proton computes it in 32 bits, from the number of bytes."""
    world = EnginePair(frame_bytes=engine.FRAME_BYTES_MAX, session_bytes=connection.SESSION_BYTES_MAX)
    begin = world.heard.index(bytes((0, 0x53, frames.BEGIN)))
    (_, _, window, *_), _ = frames.fields(world.heard, begin + 3)
    assert producers.CREDIT < window <= endpoints.WINDOW


def test_empty_parts_of_a_message_take_no_memory():
    world = EnginePair()
    world.sender()
    (link,) = world.server.links()
    world.server.grant(link, 1)
    lead = frames.transfer_lead(0, 0)
    world.server.push(frames.transfer_head(lead, 0, 1, settled=True, more=True) + b"x")
    for _ in range(10_000):
        world.server.push(frames.transfer_head(lead, 0, 0, settled=True, more=True))
    assert sys.getsizeof(link.parts) < 1000
    world.server.push(frames.transfer_head(lead, 0, 1, settled=True, more=False) + b"y")
    assert world.taken == [(0, b"xy", True)]


def test_a_client_that_ignores_the_session_window_is_disconnected():
    world = EnginePair()
    sender = world.sender()
    (link,) = world.server.links()
    world.server.grant(link, 4 * endpoints.WINDOW)
    world.server.hold(True)
    lead = frames.transfer_lead(0, 0)
    for number in range(3 * endpoints.WINDOW):
        world.server.push(frames.transfer_head(lead, number, 1, settled=True, more=False) + b"x")
    world.run()
    assert sender.session.remote_condition.name == "amqp:session:window-violation"
    assert len(world.taken) <= 2 * endpoints.WINDOW


@pytest.mark.parametrize(
    "sent_bytes",
    [
        frames.transfer_head(frames.transfer_lead(0, 9), 0, 1, settled=False, more=False) + b"x",
        frames.flow(0, (0, 1, 0), (9, 0, 1)),
    ],
)
def test_an_unknown_handle_ends_its_session(sent_bytes: bytes):
    world = EnginePair()
    world.server.push(sent_bytes)
    world.run()
    assert world.session.remote_condition.name == "amqp:session:unattached-handle"


@pytest.mark.parametrize(
    "sent_bytes",
    [
        b"\x00\x00\x00\x10\x02\x00\x00\x00\x00\x53\x14\xff\xff\xff\xff\xff",
        b"\x00\x00\x00\x0d\x02\x00\x00\x00\x00\x53\x14\x45\x00",
        frames.disposition(0, 0, 5, b"\x00\x53")[:-1] + b"\xd0",
        frames.disposition(0, 5, 2, frames.ACCEPTED_STATE),
    ],
)
def test_a_malformed_frame_closes_the_connection_with_an_error(sent_bytes: bytes):
    world = EnginePair()
    assert not world.server.push(sent_bytes)
    data, _ = world.server.pull()
    world.hear(data)
    assert world.client.remote_condition.name == "amqp:decode-error"


@hypothesis.given(
    strategies.lists(
        strategies.tuples(
            strategies.sampled_from([0x10, 0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17, 0x18, 0x99]),
            strategies.binary(max_size=40),
        ),
        max_size=6,
    ),
    strategies.integers(min_value=1, max_value=64),
)
@hypothesis.settings(max_examples=150, deadline=None)
def test_no_bytes_trip_the_engine(sent_bytes: list[tuple[int, bytes]], step: int):
    world = EnginePair()
    world.sender()
    data = b"".join(
        (11 + len(body)).to_bytes(4, "big") + b"\x02\x00\x00\x00\x00\x53" + bytes([code]) + body
        for code, body in sent_bytes
    )
    for at in range(0, len(data), step):
        if not world.server.push(data[at : at + step]):
            break
        world.server.pull()
    world.server.pull()


def test_links_stop_after_a_megabyte_until_the_socket_has_taken_it():
    """What is made for a socket can no longer expire, and takes memory."""
    world, size = EnginePair(window_bytes=1 << 30), 10_000
    receiver = world.receiver()
    receiver.flow(1_000)
    world.run()
    (link,) = world.links
    sent = 0
    while world.server.may_send(link) and sent < 500:
        world.server.send(link, b"x" * size, _token(sent), settled=True)
        sent += 1
    assert 1 << 20 < sent * size <= (1 << 20) + size
    assert world.server.stopped
    data, _ = world.server.pull()
    assert len(data) > sent * size
    world.server.resume()
    assert world.server.may_send(link)


def test_parts_of_a_large_message_stop_after_a_megabyte_as_well():
    world, size = EnginePair(window_bytes=1 << 30), 10_000
    receiver = world.receiver()
    receiver.flow(1)
    world.run()
    (link,) = world.links
    number = world.server.begin(link, _token(0), settled=True)
    sent = 0
    while world.server.has_room(link) and sent < 500:
        world.server.send_part(link, number, b"x" * size, settled=True, more=True)
        sent += 1
    assert 1 << 20 < sent * size <= (1 << 20) + size
    assert world.server.stopped
    world.server.pull()
    world.server.resume()
    assert world.server.has_room(link)
