"""Clauses of AMQP 1.0, parts 2.3 to 2.8, 3.5 and 4, that a client violates, and the answer of the gateway.

The table is the list of the clauses: a section, what the client sends, the frame that answers, its condition.
"""

from __future__ import annotations

import asyncio
import pathlib
import re
import socket
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

import pytest

from muster.message import destinations, protocol, settings
from tests.message import conftest

proton = pytest.importorskip("proton", reason="python-qpid-proton is not installed")

from muster.gateways.amqp.links import attach  # noqa: E402
from muster.gateways.amqp.protocol import frames  # noqa: E402
from muster.message.amqp_format import amqp_types  # noqa: E402
from tests.gateways.amqp import raw_client  # noqa: E402

if TYPE_CHECKING:
    from muster.gateways.amqp import gateway as amqp_gateway

U, NULL, TRUE, FALSE = amqp_types.uint, raw_client.NULL, b"\x41", b"\x42"
UNSETTLED, SETTLED = amqp_types.uint(0), amqp_types.uint(1)


def _byte(number: int) -> bytes:
    return bytes((0x50, number))


ONE, TWO = amqp_types.binary(b"1"), amqp_types.binary(b"2")
ORDERS = raw_client.described(0x29, [amqp_types.text("queue:orders")])
PAYLOAD = raw_client.described(0x77, [amqp_types.text("one")])[:3] + amqp_types.text("one")
CLOSE, END, DETACH = frames.CLOSE, frames.END, frames.DETACH
DECODE, INVALID, ALLOWED = "amqp:decode-error", "amqp:invalid-field", "amqp:not-allowed"
FRAMING, STATE = "amqp:connection:framing-error", "amqp:illegal-state"
UNATTACHED, IN_USE = "amqp:session:unattached-handle", "amqp:session:handle-in-use"
UNKNOWN, ROLLBACK = "amqp:transaction:unknown-id", "amqp:transaction:rollback"
IN_UNKNOWN = raw_client.described(0x34, [ONE])
DISCHARGE = raw_client.described(0x32, [ONE, FALSE])
ONLY_ACCEPTED = raw_client.described(0x28, [NULL] * 9 + [amqp_types.text("amqp:accepted:list", symbol=True)])
LIFETIME = raw_client.described(0x2B, [])

Client = raw_client.FrameClient


def _sends(raw: Client, mode: bytes = NULL, most: bytes = NULL) -> None:
    """Attach link 0, on which the client sends, and wait for credit."""
    fields = [amqp_types.text("out"), U(0), FALSE, mode, NULL, raw_client.described(0x28, []), ORDERS]
    raw.send(frames.ATTACH, [*fields, NULL, NULL, U(0), most])
    raw.until(frames.FLOW)


def _sends_while_attaching(raw: Client) -> None:
    raw.send(*raw.attach_sender(0, ORDERS), *raw.transfer(0, 0))


def _receives(raw: Client) -> None:
    raw.send(*raw.attach_receiver(0, [amqp_types.text("queue:orders")]))
    raw.until(frames.ATTACH)


def _frame(code: int, *items: bytes, channel: int = 0) -> Callable[[Client], None]:
    return lambda raw: raw.send(code, list(items), channel=channel)


def _bytes(data: bytes) -> Callable[[Client], None]:
    return lambda raw: raw.socket.sendall(data)


def _symbol(name: str) -> bytes:
    return amqp_types.text(name, symbol=True)


def _links(*, source: bytes = NULL, target: bytes = NULL, modes: tuple[bytes, bytes] = (NULL, NULL)) -> Any:
    """Attach a link on which the client receives from a source, or sends to a target."""
    role, first = (TRUE, NULL) if source != NULL else (FALSE, U(0))

    def act(raw: Client) -> None:
        raw.send(
            frames.ATTACH, [amqp_types.text("x"), U(0), role, *modes, source, target, NULL, NULL, first, NULL]
        )

    return act


def _source(*items: bytes) -> Any:
    return _links(source=raw_client.described(0x28, [amqp_types.text("queue:orders"), *items]))


def _node(properties: bytes) -> Any:
    """Attach a link to receive from a dynamic node."""
    return _links(source=raw_client.described(0x28, [NULL, NULL, NULL, NULL, TRUE, properties]))


def _properties(name: str, value: bytes) -> bytes:
    return amqp_types.mapping({name: value}, symbols=True)


def _target(*items: bytes, code: int = 0x29) -> Any:
    return _links(target=raw_client.described(code, list(items)))


def _coordinates(payload: bytes, settled: bytes = FALSE, source: bytes | None = None) -> Any:
    """Send a message to a coordinator."""

    def act(raw: Client) -> None:
        made = raw_client.described(0x28, []) if source is None else source
        fields = [amqp_types.text("coordinator"), U(1), FALSE, NULL, NULL, made]
        raw.send(frames.ATTACH, [*fields, raw_client.described(0x30, []), NULL, NULL, U(0)])
        raw.until(frames.FLOW)
        _send(raw, [U(1), U(0), ONE, U(0), settled], b"\x00\x53\x77" + payload)

    return act


def _sends_in_unknown_transaction(settled: bytes) -> Callable[[Client], None]:
    def act(raw: Client) -> None:
        _sends(raw)
        _send(raw, [U(0), U(0), ONE, U(0), settled, FALSE, NULL, IN_UNKNOWN], PAYLOAD)

    return act


def _transfers(*transfers: list[bytes], mode: bytes = NULL) -> Callable[[Client], None]:
    def act(raw: Client) -> None:
        _sends(raw, mode)
        for items in transfers:
            raw.send(frames.TRANSFER, items)

    return act


def _declares(raw: Client, handle: int = 1) -> bytes:
    """Attach a coordinator and declare a transaction; returns its name."""
    raw.send(*raw.attach_sender(handle, raw_client.described(0x30, []), f"coordinator {handle}"))
    raw.until(frames.FLOW)
    _send(raw, [U(handle), U(0), ONE, U(0)], b"\x00\x53\x77" + raw_client.described(0x31, []))
    name: bytes = frames.state_fields(raw.until(frames.DISPOSITION)[6])[0]
    return name


def _discharges_with_incomplete_message(raw: Client) -> None:
    name = _declares(raw)
    _sends(raw)
    state = raw_client.described(0x34, [name])
    _send(raw, [U(0), U(1), ONE, U(0), FALSE, TRUE, NULL, state], PAYLOAD[:4])
    _send(raw, [U(1), U(2), TWO, U(0)], b"\x00\x53\x77" + raw_client.described(0x32, [name, FALSE]))


def _changes_transaction(raw: Client) -> None:
    _sends(raw)
    states = [raw_client.described(0x34, [name]) for name in (ONE, TWO)]
    for state, more in zip(states, (TRUE, FALSE), strict=True):
        _send(raw, [U(0), U(1), ONE, U(0), FALSE, more, NULL, state], PAYLOAD[:4])


def _after(prepare: Callable[[Client], None], *items: bytes) -> Callable[[Client], None]:
    def act(raw: Client) -> None:
        prepare(raw)
        raw.send(frames.TRANSFER, list(items))

    return act


VIOLATIONS = (
    ("2.3.1", "a frame of SASL", _bytes(b"\0\0\0\x0c\x02\x01\0\0\0\x53\x41\x45"), CLOSE, FRAMING),
    ("2.3.1", "an offset into the header", _bytes(b"\0\0\0\x09\x01\0\0\0\x40"), CLOSE, FRAMING),
    ("2.3.1", "a size below the header's", _bytes(b"\0\0\0\x07\x02\0\0\0"), CLOSE, FRAMING),
    ("2.7.1", "a frame above max-frame-size", _bytes(b"\x10\0\0\x09\x02\0\0\0\x40"), CLOSE, FRAMING),
    ("2.3.2", "a body that is no performative", _bytes(b"\0\0\0\x09\x02\0\0\0\x40"), CLOSE, DECODE),
    ("2.7", "an unknown performative", _frame(0x19), CLOSE, DECODE),
    ("2.4.1", "a second open", _frame(frames.OPEN, amqp_types.text("again")), CLOSE, STATE),
    ("2.5", "attach without begin", _frame(frames.ATTACH, channel=7), CLOSE, ALLOWED),
    ("2.5", "flow without begin", _frame(frames.FLOW, channel=7), CLOSE, ALLOWED),
    ("2.5", "transfer without begin", _frame(frames.TRANSFER, channel=7), CLOSE, ALLOWED),
    ("2.5", "disposition without begin", _frame(frames.DISPOSITION, channel=7), CLOSE, ALLOWED),
    ("2.5", "detach without begin", _frame(frames.DETACH, channel=7), CLOSE, ALLOWED),
    ("2.5", "end without begin", _frame(frames.END, channel=7), CLOSE, ALLOWED),
    ("2.5.1", "begin on a channel in use", _frame(frames.BEGIN, NULL, U(0), U(1), U(1)), CLOSE, DECODE),
    (
        "2.7.2",
        "an answer to no begin",
        _frame(frames.BEGIN, b"\x60\0\5", U(0), U(1), U(1), channel=3),
        CLOSE,
        INVALID,
    ),
    (
        *("2.7.1", "a channel above channel-max"),
        *(_frame(frames.BEGIN, NULL, U(0), U(1), U(1), channel=40_000), CLOSE, FRAMING),
    ),
    (
        *("2.7.3", "a handle that has a link"),
        *(lambda raw: raw.send(*raw.attach_sender(0, ORDERS) * 2), CLOSE, IN_USE),
    ),
    ("2.7.3", "attach without a name", _frame(frames.ATTACH, NULL, U(0), FALSE), CLOSE, DECODE),
    ("2.7.3", "attach without a handle", _frame(frames.ATTACH, ONE, NULL, FALSE), CLOSE, DECODE),
    ("2.7.3", "attach without a role", _frame(frames.ATTACH, amqp_types.text("out"), U(0)), CLOSE, DECODE),
    (
        *("2.7.3", "a sender without initial-delivery-count"),
        *(_frame(frames.ATTACH, amqp_types.text("out"), U(0), FALSE), CLOSE, DECODE),
    ),
    (
        *("2.7.2", "a handle above handle-max"),
        *(lambda raw: raw.send(*raw.attach_sender(0xFFFFFFFF, ORDERS)), CLOSE, FRAMING),
    ),
    (
        *("2.7.4", "fields of a link without its handle"),
        *(_frame(frames.FLOW, U(0), U(1), U(0), U(1), NULL, U(0), U(1)), END, INVALID),
    ),
    (
        *("2.7.4", "messages available of no link"),
        *(_frame(frames.FLOW, U(0), U(1), U(0), U(1), NULL, NULL, NULL, U(1)), END, INVALID),
    ),
    (
        *("2.7.3", "a receiver that resumes with an incomplete map"),
        *(_frame(frames.ATTACH, amqp_types.text("in"), U(0), TRUE, *[NULL] * 5, TRUE), DETACH),
        "amqp:not-implemented",
    ),
    (
        *("2.6.7", "a message before its link is attached"),
        *(_sends_while_attaching, DETACH, "amqp:link:transfer-limit-exceeded"),
    ),
    ("2.7.5", "transfer without fields", _transfers([]), CLOSE, DECODE),
    ("2.7.5", "transfer without a handle", _transfers([NULL, U(0), ONE, U(0)]), CLOSE, DECODE),
    ("2.7.5", "transfer without delivery-id", _transfers([U(0), NULL, ONE, U(0)]), DETACH, INVALID),
    ("2.7.5", "transfer without delivery-tag", _transfers([U(0), U(0), NULL, U(0)]), DETACH, INVALID),
    (
        *("2.8.7", "a delivery-tag of 33 bytes"),
        *(_transfers([U(0), U(0), amqp_types.binary(b"1" * 33), U(0)]), DETACH, INVALID),
    ),
    ("2.8.11", "an unknown message-format", _transfers([U(0), U(0), ONE, U(256)]), DETACH, INVALID),
    (
        *("2.7.5", "another delivery-id within a message"),
        *(_transfers([U(0), U(0), ONE, U(0), FALSE, TRUE], [U(0), U(1)]), DETACH, INVALID),
    ),
    (
        *("2.7.5", "another delivery-tag within a message"),
        *(_transfers([U(0), U(0), ONE, U(0), FALSE, TRUE], [U(0), U(0), TWO]), DETACH, INVALID),
    ),
    (
        *("2.7.5", "another message-format within a message"),
        *(_transfers([U(0), U(0), ONE, U(0), FALSE, TRUE], [U(0), U(0), ONE, U(1)]), DETACH, INVALID),
    ),
    (
        *("2.7.5", "settled on a link that settles nothing"),
        *(_transfers([U(0), U(0), ONE, U(0), TRUE], mode=UNSETTLED), DETACH, INVALID),
    ),
    (
        *("2.7.5", "unsettled on a link that settles everything"),
        *(_transfers([U(0), U(0), ONE, U(0), FALSE], mode=SETTLED), DETACH, INVALID),
    ),
    (
        *("2.7.5", "unsettled parts on a link that settles everything"),
        *(_transfers([U(0), U(0), ONE, U(0), NULL, TRUE], [U(0)], mode=SETTLED), DETACH, INVALID),
    ),
    ("2.6.2", "transfer by a receiver", _after(_receives, U(0), U(0), ONE, U(0)), DETACH, ALLOWED),
    ("2.7.6", "disposition without fields", _frame(frames.DISPOSITION), CLOSE, DECODE),
    ("2.7.6", "disposition without a role", _frame(frames.DISPOSITION, NULL, U(0)), CLOSE, DECODE),
    ("2.7.6", "disposition without first", _frame(frames.DISPOSITION, TRUE), CLOSE, DECODE),
    ("2.7.6", "a sender's disposition without first", _frame(frames.DISPOSITION, FALSE), CLOSE, DECODE),
    ("2.7.7", "detach without a handle", _frame(frames.DETACH), CLOSE, DECODE),
    (
        "2.7.2",
        "an answer to a session",
        _frame(frames.BEGIN, U(0), U(0), U(1), U(1), channel=3),
        CLOSE,
        INVALID,
    ),
    ("2.8.2", "an unknown snd-settle-mode", _links(target=ORDERS, modes=(_byte(3), NULL)), DETACH, INVALID),
    ("2.8.3", "an unknown rcv-settle-mode", _links(target=ORDERS, modes=(NULL, _byte(2))), DETACH, INVALID),
    (
        *("2.7.5", "rcv-settle-mode second on a link for first"),
        *(_transfers([U(0), U(0), ONE, U(0), FALSE, FALSE, _byte(1)]), DETACH, INVALID),
    ),
    (
        *("2.7.5", "an unknown rcv-settle-mode of a message"),
        *(_transfers([U(0), U(0), ONE, U(0), FALSE, FALSE, _byte(2)]), CLOSE, DECODE),
    ),
    ("3.5.3", "a target as source", _links(source=ORDERS), DETACH, INVALID),
    ("3.5.4", "a source as target", _target(amqp_types.text("queue:orders"), code=0x28), DETACH, INVALID),
    ("3.5.4", "an address that is a number", _target(U(5)), DETACH, INVALID),
    ("3.5.5", "an unknown durability", _source(U(3)), DETACH, INVALID),
    ("3.5.6", "an unknown expiry-policy", _source(NULL, _symbol("some-day")), DETACH, INVALID),
    ("3.5.3", "a dynamic source with an address", _source(NULL, NULL, NULL, TRUE), DETACH, INVALID),
    (
        *("3.5.4", "a dynamic target with an address"),
        *(_target(amqp_types.text("queue:orders"), NULL, NULL, NULL, TRUE), DETACH, INVALID),
    ),
    ("3.5.9", "node properties that are no map", _node(amqp_types.text("lifetime-policy")), DETACH, INVALID),
    ("3.5.9", "a lifetime-policy that is none", _node(_properties("lifetime-policy", U(1))), DETACH, INVALID),
    (
        "3.5.9",
        "a lifetime-policy described by a list",
        _node(_properties("lifetime-policy", b"\0\x45\x45")),
        DETACH,
        INVALID,
    ),
    (
        *("3.5.9", "distribution modes that are none"),
        *(_node(_properties("supported-dist-modes", U(0))), DETACH, INVALID),
    ),
    ("3.5.8", "a filter that is no map", _source(*[NULL] * 6, amqp_types.text("x")), DETACH, INVALID),
    ("3.5.7", "an unknown distribution-mode", _source(*[NULL] * 5, _symbol("share")), DETACH, INVALID),
    ("3.5.3", "a default-outcome that is none", _source(*[NULL] * 7, IN_UNKNOWN), DETACH, INVALID),
    (
        *("3.5.3", "a default-outcome that is not among the outcomes"),
        *(_source(*[NULL] * 7, frames.RELEASED_STATE, _symbol("amqp:accepted:list")), DETACH, INVALID),
    ),
    (
        *("4.5.1", "a coordinator as target of the gateway"),
        *(
            _links(
                source=raw_client.described(0x28, [amqp_types.text("queue:orders")]),
                target=raw_client.described(0x30, []),
            ),
            DETACH,
            INVALID,
        ),
    ),
    ("4.2", "a settled declare", _coordinates(raw_client.described(0x31, []), TRUE), DETACH, INVALID),
    ("4.3", "a settled discharge", _coordinates(DISCHARGE, TRUE), DETACH, INVALID),
    (
        "4.3",
        "a discharge that cannot be rejected",
        _coordinates(DISCHARGE, source=ONLY_ACCEPTED),
        DETACH,
        UNKNOWN,
    ),
    ("4.4.1", "a discharge within a message", _discharges_with_incomplete_message, DETACH, ROLLBACK),
    ("4.4.1", "another transaction within a message", _changes_transaction, DETACH, INVALID),
    ("4.4.1", "a settled message in no transaction", _sends_in_unknown_transaction(TRUE), DETACH, UNKNOWN),
    (
        "4.4.1",
        "an unsettled message in no transaction",
        _sends_in_unknown_transaction(FALSE),
        DETACH,
        UNKNOWN,
    ),
    ("2.8.17", "detach of an unknown handle", _frame(frames.DETACH, U(9), TRUE), END, UNATTACHED),
)


@pytest.fixture
async def frame_client(gateway: amqp_gateway.AmqpGateway) -> AsyncIterator[Client]:
    made = await asyncio.to_thread(raw_client.FrameClient, gateway.port, "frames")
    yield made
    made.socket.close()


@pytest.mark.parametrize(
    ("act", "code", "condition"),
    [pytest.param(*answer, id=f"{section} {what}") for section, what, *answer in VIOLATIONS],
)
async def test_a_violation_is_answered_with_its_condition(
    frame_client: Client, act: Callable[[Client], None], code: int, condition: str
):
    def work() -> tuple[int, Any]:
        act(frame_client)
        answer = frame_client.until(CLOSE, END, DETACH, frames.DISPOSITION)
        error = answer[4] if answer[0] == DETACH else answer[2]
        return answer[0], frames.state_fields(error)[0]

    assert await asyncio.to_thread(work) == (code, condition)


async def test_a_link_that_misused_a_transfer_stores_nothing(frame_client: Client, dial: conftest.Dial):
    connection = await dial()

    def work() -> None:
        _transfers([U(0), U(0), NULL, U(0)])(frame_client)
        frame_client.until(DETACH)

    await asyncio.to_thread(work)
    assert not any(row.depth for row in (await connection.request(protocol.ListQueues())).queues)


async def test_3_2_1_a_priority_that_is_too_large_is_the_highest(frame_client: Client):
    """It is a ubyte; some number of another type is accepted, and must not keep the message."""

    def work() -> int:
        raw = frame_client
        _sends(raw)
        _send(raw, [U(0), U(0), ONE, U(0)], raw_client.described(0x70, [FALSE, U(300)]) + PAYLOAD)
        raw.send(*raw.attach_receiver(1, [amqp_types.text("queue:orders")]))
        raw.until(frames.ATTACH)
        raw.send(*raw.flow(1, 1))
        message = proton.Message()
        message.decode(raw.until(frames.TRANSFER)[1])
        return int(message.priority)

    assert await asyncio.to_thread(work) == 255


async def test_3_2_a_message_without_sections_is_rejected(frame_client: Client):
    def work() -> tuple[int, Any]:
        _transfers([U(0), U(0), ONE, U(0)])(frame_client)
        state = frame_client.until(frames.DISPOSITION)[6]
        return frames.code_of(state), frames.state_fields(frames.state_fields(state)[0])[0]

    assert await asyncio.to_thread(work) == (frames.REJECTED, DECODE)


async def test_2_7_3_an_oversize_message_ends_its_link_before_it_is_complete(
    gateway: amqp_gateway.AmqpGateway, frame_client: Client
):
    gateway.max_message_bytes = 1000

    def work() -> str:
        _sends(frame_client)
        part = raw_client.described(frames.TRANSFER, [U(0), U(0), ONE, U(0), FALSE, TRUE]) + bytes(600)
        frame = (len(part) + 8).to_bytes(4, "big") + b"\x02\0\0\0" + part
        frame_client.socket.sendall(frame + frame)
        return raw_client.condition(frame_client.until(DETACH, CLOSE))

    assert await asyncio.to_thread(work) == "amqp:link:message-size-exceeded"


async def test_3_5_3_the_source_of_the_gateway_is_complete(frame_client: Client):
    def work() -> list[Any]:
        frame_client.send(*frame_client.attach_receiver(0, [amqp_types.text("queue:orders")]))
        source: list[Any] = frames.state_fields(frame_client.until(frames.ATTACH)[7])
        return source

    source = await asyncio.to_thread(work)
    assert (source[0], source[6]) == ("queue:orders", "move")
    assert [name in source[9] for name in (b"amqp:accepted:list", b"amqp:modified:list")] == [True, True]


async def test_3_5_10_a_dynamic_node_ends_with_the_session_of_its_link(frame_client: Client):
    def work() -> str:
        raw = frame_client
        raw.send(*raw.attach_receiver(0, [NULL, NULL, NULL, NULL, TRUE]))
        address = amqp_types.text(frames.state_fields(raw.until(frames.ATTACH)[7])[0])
        raw.send(frames.END, [])
        raw.until(END)
        for _ in range(100):  # the end is answered before the node is deleted
            raw.send(frames.BEGIN, [NULL, U(0), U(100), U(100)])
            raw.until(frames.BEGIN)
            raw.send(*raw.attach_receiver(0, [address]))
            raw.until(frames.ATTACH)
            raw.send(frames.FLOW, [U(0), U(100), U(0), U(100), NULL, NULL, NULL, NULL, NULL, TRUE])
            answer = raw.until(DETACH, frames.FLOW)
            if answer[0] == DETACH:
                return raw_client.condition(answer)
            raw.send(frames.END, [])
            raw.until(END)
        return "the node exists"

    assert await asyncio.to_thread(work) == "amqp:not-found"


@pytest.mark.parametrize("split", [1, 2])
def test_2_4_5_a_read_that_ends_just_after_a_heartbeat(split: int):
    """The rest of the frame after it comes with the next read."""
    from tests.gateways.amqp import test_engine

    world = test_engine.EnginePair()
    world.sender()
    detach = b"\0\0\0\x0e\x02\0\0\0\0\x53\x16\xc0\x01\x00"
    assert world.server.push(frames.EMPTY + detach[:split])
    assert not world.server.push(detach[split:])
    assert "a detach without handle" in str(world.server.connection.condition)


@pytest.mark.parametrize("header", [b"AMQP\0\0\x09\x01", b"AMQP\x03\x01\0\0", b"hello wo"])
async def test_2_2_another_protocol_is_answered_with_the_supported_one(
    gateway: amqp_gateway.AmqpGateway, header: bytes
):
    def work() -> bytes:
        with socket.create_connection(("127.0.0.1", gateway.port), timeout=10) as raw:
            raw.sendall(raw_client.LOGIN + header)
            got = b""
            while data := raw.recv(4096):
                got += data
            return got

    got = await asyncio.to_thread(work)
    assert got[got.index(b"\x00\x53\x44") :].partition(b"AMQP")[1:] == (b"AMQP", b"\0\x01\0\0")


@pytest.mark.parametrize("destination", ["queue:orders", "topic:news"])
async def test_4_4_2_an_outcome_in_an_unknown_transaction_ends_its_link(
    frame_client: Client, dial: conftest.Dial, destination: str
):
    producer = (await dial()).session().producer(destinations.Destination.parse(destination))
    loop = asyncio.get_running_loop()
    state = raw_client.described(0x34, [amqp_types.binary(b"nothing"), frames.ACCEPTED_STATE])

    def work() -> str:
        raw = frame_client
        raw.send(*raw.attach_receiver(0, [amqp_types.text(destination)]))
        raw.until(frames.ATTACH)
        raw.send(*raw.flow(0, 1))
        raw.send(*raw.flow(0, 1, NULL, FALSE, TRUE))
        raw.until(frames.FLOW)
        asyncio.run_coroutine_threadsafe(producer.send("one"), loop).result()
        number = raw.until(frames.TRANSFER)[3]
        raw.send(frames.DISPOSITION, [TRUE, U(number), U(number), TRUE, state])
        return raw_client.condition(raw.until(DETACH))

    assert await asyncio.to_thread(work) == "amqp:transaction:unknown-id"


async def test_4_4_1_a_link_sends_in_a_transaction_and_beside_it(frame_client: Client, dial: conftest.Dial):
    """What is sent beside the transaction is stored at once, and survives its rollback."""
    connection = await dial()

    def work() -> list[int]:
        raw = frame_client
        name = _declares(raw)
        _sends(raw)
        body = b"\x00\x53\x77" + amqp_types.text("one")
        codes = []
        for number, state in ((1, raw_client.described(0x34, [name])), (2, NULL)):
            tag = amqp_types.binary(b"%d" % number)
            _send(raw, [U(0), U(number), tag, U(0), FALSE, FALSE, NULL, state], body)
            codes.append(frames.code_of(raw.until(frames.DISPOSITION)[6]))
        discharge = b"\x00\x53\x77" + raw_client.described(0x32, [name, TRUE])
        _send(raw, [U(1), U(3), TWO, U(0)], discharge)
        raw.until(frames.DISPOSITION)
        return codes

    assert await asyncio.to_thread(work) == [frames.TRANSACTIONAL, frames.ACCEPTED]
    assert [row.depth for row in (await connection.request(protocol.ListQueues())).queues if row.depth] == [1]


async def test_2_3_1_an_extended_header_is_ignored(frame_client: Client):
    def work() -> int:
        body = raw_client.described(*frame_client.attach_receiver(0, [amqp_types.text("queue:orders")]))
        frame = b"\x04\0\0\0" + b"extended" + body
        frame_client.socket.sendall((len(frame) + 4).to_bytes(4, "big") + frame)
        return int(frame_client.until(frames.ATTACH, CLOSE)[0])

    assert await asyncio.to_thread(work) == frames.ATTACH


async def test_2_4_1_an_open_is_sent_on_channel_0(gateway: amqp_gateway.AmqpGateway):
    def work() -> str:
        with socket.create_connection(("127.0.0.1", gateway.port), timeout=10) as raw:
            body = raw_client.described(frames.OPEN, [amqp_types.text("late")])
            frame = (len(body) + 8).to_bytes(4, "big") + b"\x02\0\0\1" + body
            raw.sendall(raw_client.LOGIN + frames.HEADER + frame)
            return _rest(raw).decode(errors="replace")

    answer = await asyncio.to_thread(work)
    assert FRAMING in answer
    assert "an open belongs on channel 0" in answer


@pytest.mark.parametrize("error", [False, True])
async def test_2_4_3_a_close_is_the_last_frame(frame_client: Client, error: bool):
    """Also if it is due to an error; then what follows is discarded."""

    def work() -> tuple[list[Any], bytes]:
        raw = frame_client
        if error:
            raw.send(0x19, [], *raw.attach_receiver(0, [amqp_types.text("queue:orders")]))
        else:
            raw.send(CLOSE, [])
        closed = raw.until(CLOSE, frames.ATTACH)
        return closed, raw._rest + _rest(raw.socket)

    closed, after = await asyncio.to_thread(work)
    assert (closed[0], closed[2:] not in ([], [None]), after) == (CLOSE, error, b"")


async def test_2_4_5_heartbeats_keep_to_the_idle_time_out_of_the_client(gateway: amqp_gateway.AmqpGateway):
    def work() -> tuple[int, int]:
        client = raw_client.FrameClient(
            gateway.port, None, [amqp_types.text("idle"), NULL, NULL, NULL, U(600)]
        )
        with client.socket:
            client.until(frames.OPEN)
            client.socket.settimeout(0.6 * 2)  # at a loaded machine: a quarter of idle_s is 7.5 s
            return len(client.socket.recv(8)), len(client.socket.recv(8))

    assert await asyncio.to_thread(work) == (8, 8)


async def test_2_4_5_an_idle_time_out_that_is_too_short_is_refused(gateway: amqp_gateway.AmqpGateway):
    def work() -> list[Any]:
        client = raw_client.FrameClient(
            gateway.port, None, [amqp_types.text("idle"), NULL, NULL, NULL, U(20)]
        )
        with client.socket:
            return frames.state_fields(client.until(CLOSE)[2])

    error = await asyncio.to_thread(work)
    assert error[:2] == [INVALID, "an idle-time-out of 0.02 s: at least 0.2 s is supported"]


async def test_2_5_1_the_answer_to_a_begin_names_the_channel_of_the_client(frame_client: Client):
    def work() -> list[Any]:
        frame_client.send(frames.BEGIN, [NULL, U(7), U(100), U(100)], channel=300)
        return frame_client.until(frames.BEGIN)[2:6]

    answered, first, window, peer_window = await asyncio.to_thread(work)
    assert answered == 300
    assert None not in (first, window, peer_window)


async def test_2_5_5_what_follows_an_error_of_a_session_is_discarded_until_its_end(frame_client: Client):
    def work() -> tuple[str, list[int]]:
        raw = frame_client
        raw.send(*raw.flow(9, 1))
        condition = frames.state_fields(raw.until(END)[2])[0]
        sender, receiver = raw.attach_sender(0, ORDERS), raw.attach_receiver(1, [amqp_types.text("queue:q")])
        raw.send(*sender, *receiver, *raw.transfer(0, 0), *raw.flow(1, 5), *raw.flow(9, 1))
        raw.send(frames.DISPOSITION, [TRUE, U(0)])
        raw.send(END, [], frames.BEGIN, [NULL, U(0), U(100), U(100)], *sender)
        return condition, [raw.until(*range(frames.OPEN, CLOSE + 1))[0] for _ in range(3)]

    condition, codes = await asyncio.to_thread(work)
    assert (condition, codes) == (UNATTACHED, [frames.BEGIN, frames.ATTACH, frames.FLOW])


async def test_2_5_6_a_flow_before_the_begin_counts_from_the_first_transfer(
    frame_client: Client, dial: conftest.Dial
):
    """It has no next-incoming-id. Credit without a delivery-count counts from the first delivery."""
    producer = (await dial()).session().producer(destinations.queue("orders"))
    for number in range(3):
        await producer.send(f"{number}")

    def work() -> list[Any]:
        raw = frame_client
        _receives(raw)
        raw.send(frames.FLOW, [NULL, U(1), U(0), U(100), U(0), NULL, U(2)])
        first = raw.until(frames.TRANSFER)
        raw.send(frames.FLOW, [NULL, U(2), U(0), U(100), U(0), NULL, U(2), NULL, FALSE, TRUE])
        second, state = raw.until(frames.TRANSFER), raw.until(frames.FLOW)
        return [first[3], second[3], *state[6:9]]

    assert await asyncio.to_thread(work) == [0, 1, 0, 2, 0]


async def test_2_6_3_a_link_that_is_refused_is_attached_to_nothing_and_closed(frame_client: Client):
    def work() -> list[Any]:
        raw = frame_client
        raw.send(*raw.attach_sender(4, raw_client.described(0x29, [amqp_types.text("topic:secret/plans")])))
        attach, detach = raw.until(frames.ATTACH, DETACH), raw.until(DETACH)
        return [attach[0], attach[8], detach[2] == attach[3], detach[3], raw_client.condition(detach)]

    assert await asyncio.to_thread(work) == [frames.ATTACH, None, True, True, "amqp:unauthorized-access"]


@pytest.mark.parametrize("closed", [False, True])
async def test_2_6_6_a_detach_is_answered_in_kind_and_frees_its_handle(frame_client: Client, closed: bool):
    def work() -> tuple[bool, int]:
        raw = frame_client
        _receives(raw)
        raw.send(DETACH, [U(0), TRUE if closed else FALSE])
        answer = raw.until(DETACH)
        raw.send(*raw.attach_receiver(0, [amqp_types.text("queue:orders")], "another"))
        return bool(answer[3]) if len(answer) > 3 else False, raw.until(frames.ATTACH, CLOSE, END)[0]

    assert await asyncio.to_thread(work) == (closed, frames.ATTACH)


async def test_2_6_5_frames_in_flight_to_a_link_that_ended_with_an_error_are_ignored(frame_client: Client):
    """The standard ends the session (errant-link), though the client cannot know of the error yet."""

    def work() -> tuple[str, int]:
        raw = frame_client
        _transfers([U(0), U(0), NULL, U(0)], [U(0), U(1), ONE, U(0)])(raw)
        raw.send(*raw.flow(0, 1))
        condition = raw_client.condition(raw.until(DETACH))
        raw.send(DETACH, [U(0), TRUE], *raw.attach_sender(0, ORDERS, "another"))
        return condition, raw.until(frames.ATTACH, CLOSE, END)[0]

    assert await asyncio.to_thread(work) == (INVALID, frames.ATTACH)


@pytest.mark.parametrize(("mode", "settled"), [(NULL, False), (_byte(0), False), (_byte(1), True)])
async def test_2_6_12_a_delivery_has_an_id_a_tag_a_format_and_the_settlement_of_its_link(
    frame_client: Client, dial: conftest.Dial, mode: bytes, settled: bool
):
    producer = (await dial()).session().producer(destinations.queue("orders"))
    for number in range(2):
        await producer.send(f"{number}")

    def work() -> list[list[Any]]:
        raw = frame_client
        code, fields = raw.attach_receiver(0, [amqp_types.text("queue:orders")])
        raw.send(code, [*fields[:3], mode, *fields[4:]])
        raw.until(frames.ATTACH)
        raw.send(*raw.flow(0, 2))
        return [raw.until(frames.TRANSFER)[2:7] for _ in range(2)]

    (_, first_id, first_tag, *first), (_, second_id, second_tag, *second) = await asyncio.to_thread(work)
    assert (second_id - first_id, first_tag != second_tag) == (1, True)
    assert [bool(each) for each in (*first, *second)] == [False, settled] * 2


async def test_2_7_5_a_message_that_was_settled_in_one_transfer_stays_so(
    frame_client: Client, dial: conftest.Dial
):
    connection = await dial()

    def work() -> list[Any]:
        raw = frame_client
        _sends(raw)
        _send(raw, [U(0), U(0), ONE, U(0), TRUE, TRUE], PAYLOAD[:4])
        _send(raw, [U(0), NULL, NULL, NULL, NULL, FALSE], PAYLOAD[4:])
        _send(raw, [U(0), U(1), TWO, U(0)], PAYLOAD)
        return raw.until(frames.DISPOSITION)[3:5]

    assert await asyncio.to_thread(work) == [1, 1]
    assert [row.depth for row in (await connection.request(protocol.ListQueues())).queues if row.depth] == [2]


async def test_3_4_released_does_not_count_and_modified_may(frame_client: Client, dial: conftest.Dial):
    await (await dial()).session().producer(destinations.queue("orders")).send("one")

    def work() -> list[int]:
        raw = frame_client
        _receives(raw)
        counts = []
        for place, state in enumerate(
            (
                frames.RELEASED_STATE,
                raw_client.described(0x27, [FALSE]),
                raw_client.described(0x27, [TRUE]),
                NULL,
            )
        ):
            raw.send(frames.FLOW, [U(place), U(100), U(0), U(100), U(0), U(place), U(1)])
            transfer = raw.until(frames.TRANSFER)
            message = proton.Message()
            message.decode(transfer[1])
            counts.append(message.delivery_count)
            raw.send(frames.DISPOSITION, [TRUE, U(transfer[3]), NULL, TRUE, state])
        return counts

    assert await asyncio.to_thread(work) == [0, 0, 0, 1]


async def test_4_4_4_a_rollback_gives_settled_deliveries_their_default_outcome(
    frame_client: Client, dial: conftest.Dial
):
    await (await dial()).session().producer(destinations.queue("orders")).send("one")

    def work() -> list[int]:
        raw = frame_client
        name = _declares(raw)
        source = [amqp_types.text("queue:orders"), *[NULL] * 7, frames.RELEASED_STATE]
        raw.send(*raw.attach_receiver(0, source))
        raw.until(frames.ATTACH)
        counts = []
        for place in range(2):
            raw.send(frames.FLOW, [U(place), U(100), U(0), U(100), U(0), U(place), U(1)])
            transfer = raw.until(frames.TRANSFER)
            message = proton.Message()
            message.decode(transfer[1])
            counts.append(message.delivery_count)
            state = raw_client.described(0x34, [name, frames.ACCEPTED_STATE])
            raw.send(frames.DISPOSITION, [TRUE, U(transfer[3]), NULL, TRUE, state])
            if not place:
                _send(
                    raw, [U(1), U(1), TWO, U(0)], b"\x00\x53\x77" + raw_client.described(0x32, [name, TRUE])
                )
                raw.until(frames.DISPOSITION)
        return counts

    assert await asyncio.to_thread(work) == [0, 0]


async def test_3_5_3_properties_of_a_node_that_is_not_dynamic_are_ignored(frame_client: Client):
    """Clients repeat those of a dynamic node when they attach to it again."""

    def work() -> int:
        _source(NULL, NULL, NULL, FALSE, _properties("lifetime-policy", LIFETIME))(frame_client)
        return int(frame_client.until(frames.ATTACH)[7] is None)

    assert await asyncio.to_thread(work) == 0


def _in_orders(raw: Client, credit: int) -> list[Any]:
    """The next message of the queue."""
    raw.send(*raw.flow(0, credit))
    return raw.until(frames.TRANSFER)


async def test_2_7_6_an_outcome_applies_while_its_link_is_detached(frame_client: Client, dial: conftest.Dial):
    """Other consumers receive the message when the link is attached again without an outcome."""
    connection = await dial()
    await connection.session().producer(destinations.queue("orders")).send("one")

    def work() -> None:
        raw = frame_client
        _receives(raw)
        number = _in_orders(raw, 5)[3]
        raw.send(DETACH, [U(0)])
        raw.until(DETACH)
        raw.send(frames.DISPOSITION, [TRUE, U(number), NULL, TRUE, frames.ACCEPTED_STATE])
        raw.send(END, [])
        raw.until(END)

    await asyncio.to_thread(work)
    async with await connection.session().consumer(destinations.queue("orders")) as consumer:
        await connection.session().producer(destinations.queue("orders")).send("two")
        assert await conftest.take(consumer, 1) == ["two"]


async def test_2_7_6_a_transaction_retires_messages_of_a_detached_link(
    frame_client: Client, dial: conftest.Dial
):
    connection = await dial()
    await connection.session().producer(destinations.queue("orders")).send("one")

    def work() -> int:
        raw = frame_client
        name = _declares(raw)
        _receives(raw)
        number = _in_orders(raw, 1)[3]
        raw.send(DETACH, [U(0)])
        raw.until(DETACH)
        state = raw_client.described(0x34, [name, frames.ACCEPTED_STATE])
        raw.send(frames.DISPOSITION, [TRUE, U(number), NULL, TRUE, state])
        _send(raw, [U(1), U(1), TWO, U(0)], b"\x00\x53\x77" + raw_client.described(0x32, [name, FALSE]))
        return frames.code_of(raw.until(frames.DISPOSITION)[6])

    assert await asyncio.to_thread(work) == frames.ACCEPTED
    assert not any(row.depth for row in (await connection.request(protocol.ListQueues())).queues)


@pytest.mark.parametrize("end", ["attach", "session"])
async def test_2_6_13_what_a_detached_link_did_not_settle_is_delivered_again(
    frame_client: Client, dial: conftest.Dial, end: str
):
    await (await dial()).session().producer(destinations.queue("orders")).send("one")

    def work() -> tuple[bytes, bytes]:
        raw = frame_client
        _receives(raw)
        first = _in_orders(raw, 1)
        raw.send(DETACH, [U(0)])
        raw.until(DETACH)
        if end == "session":
            raw.send(END, [], frames.BEGIN, [NULL, U(0), U(100), U(100)])
            raw.until(frames.BEGIN)
        _receives(raw)
        raw.send(frames.FLOW, [NULL, U(100), U(0), U(100), U(0), NULL, U(1)])
        return first[1], raw.until(frames.TRANSFER)[1]

    first, second = await asyncio.to_thread(work)
    assert b"one" in first
    assert b"one" in second


async def test_2_6_13_a_sender_that_settles_last_resumes_its_messages(
    frame_client: Client, dial: conftest.Dial
):
    """The attach names what it has not settled; what it sends again is not stored again."""
    connection = await dial()

    def attach(handle: int, unsettled: bytes) -> Any:
        fields = [amqp_types.text("out"), U(handle), FALSE, NULL, _byte(1), raw_client.described(0x28, [])]
        frame_client.send(frames.ATTACH, [*fields, ORDERS, unsettled, NULL, U(0)])
        attached = frame_client.until(frames.ATTACH)
        frame_client.until(frames.FLOW)
        return attached[9]

    def resumed(handle: int, number: int, tag: bytes, settled: bytes) -> None:
        _send(frame_client, [U(handle), U(number), tag, U(0), settled, *[NULL] * 3, TRUE], PAYLOAD)

    def work() -> list[Any]:
        raw = frame_client
        attach(0, NULL)
        _send(raw, [U(0), U(0), ONE, U(0)], PAYLOAD)
        answers = [raw.until(frames.DISPOSITION)[3:7]]
        raw.send(DETACH, [U(0)])
        raw.until(DETACH)
        answers.append(attach(1, amqp_types.encoded_map([ONE, NULL])))
        resumed(1, 1, TWO, FALSE)  # the gateway does not have it, and ignores it
        resumed(1, 2, ONE, FALSE)
        answers.append(raw.until(frames.DISPOSITION)[3:7])
        raw.send(frames.DISPOSITION, [FALSE, U(2), NULL, TRUE])
        raw.send(DETACH, [U(1)])
        raw.until(DETACH)
        return [*answers, attach(2, amqp_types.encoded_map([ONE, NULL]))]

    accepted = frames.ACCEPTED_STATE
    first, unsettled, again, rest = await asyncio.to_thread(work)
    assert (first, again) == ([0, 0, False, accepted], [2, 2, False, accepted])
    assert (unsettled, rest) == (amqp_types.encoded_map([ONE, accepted]), None)
    assert [row.depth for row in (await connection.request(protocol.ListQueues())).queues if row.depth] == [1]


async def test_2_6_13_an_attach_that_cannot_name_all_messages_says_so(gateway: amqp_gateway.AmqpGateway):
    """Then the sender may only resume messages."""
    tags = [amqp_types.binary(b"%032d" % number) for number in range(30)]

    def work() -> tuple[Any, str]:
        raw = raw_client.FrameClient(gateway.port, None, [amqp_types.text("small"), NULL, U(512)])
        with raw.socket:
            raw.until(frames.OPEN)
            raw.send(frames.BEGIN, [NULL, U(0), U(100), U(100)])
            fields = [U(0), FALSE, NULL, _byte(1), raw_client.described(0x28, []), ORDERS]
            raw.send(frames.ATTACH, [amqp_types.text("out"), *fields, NULL, NULL, U(0)])
            raw.until(frames.FLOW)
            for number, tag in enumerate(tags):
                _send(raw, [U(0), U(number), tag, U(0)], PAYLOAD)
                raw.until(frames.DISPOSITION)
            raw.send(DETACH, [U(0)])
            raw.until(DETACH)
            unsettled = amqp_types.encoded_map([part for tag in tags for part in (tag, NULL)])
            raw.send(frames.ATTACH, [amqp_types.text("out"), *fields, unsettled, NULL, U(0)])
            attached = raw.until(frames.ATTACH)
            raw.until(frames.FLOW)
            _send(raw, [U(0), U(30), ONE, U(0)], PAYLOAD)
            return attached[9:11], raw_client.condition(raw.until(DETACH))

    (unsettled, is_incomplete), condition = await asyncio.to_thread(work)
    assert 0 < len(amqp_types.elements(unsettled, 0)) < 2 * len(tags)
    assert (is_incomplete, condition) == (True, STATE)


@pytest.mark.parametrize("sends", [False, True])
async def test_3_5_10_a_dynamic_node_outlives_the_detachment_of_its_link(frame_client: Client, sends: bool):
    """The link that is attached again has the same node, and deletes it when it is closed."""

    def attach() -> str:
        raw = frame_client
        node = [NULL, NULL, NULL, NULL, TRUE]
        raw.send(
            *(
                raw.attach_sender(0, raw_client.described(0x29, node))
                if sends
                else raw.attach_receiver(0, node)
            )
        )
        return str(frames.state_fields(raw.until(frames.ATTACH)[8 if sends else 7])[0])

    def work() -> tuple[list[str], str]:
        raw = frame_client
        addresses = [attach()]
        for closed in (FALSE, TRUE):
            raw.send(DETACH, [U(0), closed])
            raw.until(DETACH)
            if closed == FALSE:
                addresses.append(attach())
        raw.send(*raw.attach_receiver(0, [amqp_types.text(addresses[0])], "another"))
        return addresses, raw_client.condition(raw.until(DETACH))

    addresses, condition = await asyncio.to_thread(work)
    assert (len(set(addresses)), condition) == (1, "amqp:not-found")


@pytest.mark.parametrize("kind", ["", "temporary-queue", "temporary-topic"])
async def test_a_temporary_destination_of_jms_is_locked_for_other_connections(
    gateway: amqp_gateway.AmqpGateway, frame_client: Client, kind: str
):
    """Any other dynamic node is for all, and known to all when it is deleted."""
    capability = _symbol(kind) if kind else NULL

    def work() -> list[str]:
        raw = frame_client
        raw.send(*raw.attach_receiver(0, [*[NULL] * 4, TRUE, *[NULL] * 5, capability]))
        source = [frames.state_fields(raw.until(frames.ATTACH)[7])[0]]
        source = [amqp_types.text(source[0]), *[NULL] * 9, capability]
        other = raw_client.FrameClient(gateway.port, "other")
        conditions = []
        with other.socket:
            for name in ("first", "second"):
                other.send(*other.attach_receiver(0, source, name))
                is_attached = other.until(frames.ATTACH)[7] is not None
                other.send(DETACH, [U(0), TRUE])
                answer = other.until(DETACH)
                conditions.append("attached" if is_attached else raw_client.condition(answer))
                if name == "first":
                    raw.send(DETACH, [U(0), TRUE])
                    raw.until(DETACH)
        return conditions

    locked = ["amqp:resource-locked"] * 2
    assert await asyncio.to_thread(work) == (locked if kind else ["attached", "amqp:not-found"])


async def test_2_6_12_outcomes_keep_the_order_of_their_messages(frame_client: Client):
    """Of messages in a transaction and beside it, too."""

    def work() -> list[int]:
        raw = frame_client
        name = _declares(raw)
        _sends(raw)
        state = raw_client.described(0x34, [name])
        for number in range(1, 6):
            in_transaction = state if number in (2, 4) else NULL
            tag = amqp_types.binary(b"%d" % number)
            _send(raw, [U(0), U(number), tag, U(0), FALSE, FALSE, NULL, in_transaction], PAYLOAD)
        _send(raw, [U(1), U(6), TWO, U(0)], b"\x00\x53\x77" + raw_client.described(0x32, [name, FALSE]))
        numbers: list[int] = []
        while 6 not in numbers:
            first, last = raw.until(frames.DISPOSITION)[3:5]
            numbers += range(first, last + 1)
        return numbers

    assert await asyncio.to_thread(work) == [1, 2, 3, 4, 5, 6]


TO_NOWHERE = raw_client.described(0x73, [NULL, NULL, amqp_types.text("queue:nowhere")]) + PAYLOAD


@pytest.mark.parametrize("source", [raw_client.described(0x28, []), ONLY_ACCEPTED])
@pytest.mark.parametrize("settled", [FALSE, TRUE])
@pytest.mark.parametrize("in_transaction", [False, True])
async def test_a_message_to_nowhere_is_refused_with_its_tag(
    gateway: amqp_gateway.AmqpGateway,
    frame_client: Client,
    source: bytes,
    settled: bytes,
    in_transaction: bool,
):
    """As "Using the Anonymous Terminus for Message Routing", 2.2.2, demands. A settled message of a
    transaction lets its commit fail."""
    gateway.check_exists = settings.MessageSettings(create_queues=False).check_exists

    def work() -> tuple[int, list[Any], Any]:
        raw = frame_client
        name = _declares(raw) if in_transaction else b""
        fields = [amqp_types.text("out"), U(0), FALSE, NULL, NULL, source]
        raw.send(frames.ATTACH, [*fields, raw_client.described(0x29, []), NULL, NULL, U(0)])
        raw.until(frames.FLOW)
        state = raw_client.described(0x34, [name]) if in_transaction else NULL
        _send(raw, [U(0), U(1), ONE, U(0), settled, FALSE, NULL, state], TO_NOWHERE)
        answer: list[Any] = [0]
        if not (in_transaction and settled == TRUE):
            answer = raw.until(DETACH, frames.DISPOSITION)
        commit = None
        if in_transaction:
            _send(raw, [U(1), U(2), TWO, U(0)], b"\x00\x53\x77" + raw_client.described(0x32, [name, FALSE]))
            commit = frames.state_fields(frames.state_fields(raw.until(frames.DISPOSITION)[6])[0])[0]
        error = answer[4] if answer[0] == DETACH else b""
        if answer[0] == frames.DISPOSITION:
            outcome = frames.outcome_of(answer[6]) if in_transaction else answer[6]
            error = frames.state_fields(outcome)[0]
        return answer[0], frames.state_fields(error), commit

    code, error, commit = await asyncio.to_thread(work)
    assert commit == (ROLLBACK if in_transaction else None)
    if in_transaction and settled == TRUE:
        assert not code
        return
    assert code == (DETACH if settled == TRUE or source == ONLY_ACCEPTED else frames.DISPOSITION)
    assert error[0] == "amqp:not-found"
    assert amqp_types.entries(error[2], 0)["delivery-tag"].value == b"1"


async def test_an_error_of_the_gateway_ends_the_connection_that_waits_for_an_answer(
    frame_client: Client, monkeypatch: pytest.MonkeyPatch
):
    async def fail(*_: object) -> None:
        raise KeyError("a mistake of ours")

    monkeypatch.setattr(attach.LinkFactory, "_attach_outgoing", fail)

    def act() -> str:
        frame_client.send(*frame_client.attach_receiver(0, [amqp_types.text("queue:orders")]))
        return str(frames.state_fields(frame_client.until(frames.CLOSE)[2])[0])

    assert await asyncio.to_thread(act) == "amqp:internal-error"


@pytest.mark.parametrize(("product", "condition"), [("x", ROLLBACK), ("QpidJMS", "amqp:internal-error")])
async def test_4_3_a_commit_that_fails_says_rollback(
    gateway: amqp_gateway.AmqpGateway, product: str, condition: str
):
    """Qpid JMS takes that for an unknown outcome, and every other error for a rollback."""
    about = amqp_types.mapping({"product": amqp_types.text(product)}, symbols=True)

    def work() -> str:
        raw = raw_client.FrameClient(gateway.port, None, [amqp_types.text("c"), *[NULL] * 8, about])
        with raw.socket:
            raw.until(frames.OPEN)
            raw.send(frames.BEGIN, [NULL, U(0), U(100), U(100)])
            raw.until(frames.BEGIN)
            name = _declares(raw)
            _sends(raw)
            state = raw_client.described(0x34, [name])
            _send(raw, [U(0), U(1), ONE, U(0), FALSE, FALSE, NULL, state], b"malformed")
            raw.until(frames.DISPOSITION)
            _send(raw, [U(1), U(2), TWO, U(0)], b"\x00\x53\x77" + raw_client.described(0x32, [name, FALSE]))
            return str(frames.state_fields(frames.state_fields(raw.until(frames.DISPOSITION)[6])[0])[0])

    assert await asyncio.to_thread(work) == condition


def _discharge(raw: Client, name: bytes, number: int, failed: bytes) -> list[Any]:
    """The outcome of a discharge: the next disposition."""
    tag = amqp_types.binary(b"discharge %d" % number)
    _send(raw, [U(1), U(number), tag, U(0)], b"\x00\x53\x77" + raw_client.described(0x32, [name, failed]))
    return raw.until(frames.DISPOSITION)


async def test_4_4_2_what_is_not_settled_in_a_transaction_is_settled_after_its_commit(
    frame_client: Client, dial: conftest.Dial
):
    connection = await dial()
    await connection.session().producer(destinations.queue("orders")).send("one")

    def work() -> list[Any]:
        raw = frame_client
        name = _declares(raw)
        _receives(raw)
        number = _in_orders(raw, 1)[3]
        state = raw_client.described(0x34, [name, frames.ACCEPTED_STATE])
        raw.send(frames.DISPOSITION, [TRUE, U(number), NULL, FALSE, state])
        outcome = _discharge(raw, name, 1, FALSE)
        return [outcome[2], outcome[3], outcome[6], *raw.until(frames.DISPOSITION)[2:7]]

    accepted = frames.ACCEPTED_STATE
    assert await asyncio.to_thread(work) == [True, 1, accepted, False, 0, 0, True, accepted]
    assert not any(row.depth for row in (await connection.request(protocol.ListQueues())).queues)


async def test_4_4_2_what_is_not_settled_in_a_transaction_stays_with_its_client_after_a_rollback(
    frame_client: Client, dial: conftest.Dial
):
    """It may get another outcome."""
    connection = await dial()
    await connection.session().producer(destinations.queue("orders")).send("one")

    def work() -> int:
        raw = frame_client
        name = _declares(raw)
        _receives(raw)
        number = _in_orders(raw, 5)[3]
        state = raw_client.described(0x34, [name, frames.ACCEPTED_STATE])
        raw.send(frames.DISPOSITION, [TRUE, U(number), NULL, FALSE, state])
        _discharge(raw, name, 1, TRUE)
        raw.send(frames.DISPOSITION, [TRUE, U(number), NULL, TRUE, frames.ACCEPTED_STATE])
        raw.send(frames.FLOW, [U(1), U(100), U(0), U(100), U(0), U(0), U(2), NULL, TRUE])
        return int(raw.until(frames.FLOW, frames.TRANSFER)[0])

    assert await asyncio.to_thread(work) == frames.FLOW
    assert not any(row.depth for row in (await connection.request(protocol.ListQueues())).queues)


async def test_4_4_2_outcomes_of_a_message_in_two_transactions_end_the_second(
    frame_client: Client, dial: conftest.Dial
):
    await (await dial()).session().producer(destinations.queue("orders")).send("one")

    def work() -> str:
        raw = frame_client
        names = [_declares(raw, handle) for handle in (1, 2)]
        _receives(raw)
        number = _in_orders(raw, 1)[3]
        for name in names:
            state = raw_client.described(0x34, [name, frames.ACCEPTED_STATE])
            raw.send(frames.DISPOSITION, [TRUE, U(number), NULL, FALSE, state])
        return raw_client.condition(raw.until(DETACH))

    assert await asyncio.to_thread(work) == ROLLBACK


@pytest.mark.parametrize("misuse", ["acquires in a transaction", "transfers"])
async def test_a_link_that_was_ended_holds_no_messages_back(
    frame_client: Client, dial: conftest.Dial, misuse: str
):
    """Even if its client does not answer the detach."""
    session = (await dial()).session()

    def work() -> None:
        raw = frame_client
        _receives(raw)
        raw.send(*raw.flow(0, 5))
        if misuse == "transfers":
            raw.send(*raw.transfer(0, 0))
        else:
            raw.send(*raw.flow(0, 5, *[NULL] * 3, amqp_types.mapping({"txn-id": ONE}, symbols=True)))
        raw.until(DETACH)

    await asyncio.to_thread(work)
    await session.producer(destinations.queue("orders")).send("one")
    async with await session.consumer(destinations.queue("orders")) as consumer:
        assert await conftest.take(consumer, 1) == ["one"]


async def test_4_5_1_a_coordinator_states_what_it_can_do(frame_client: Client):
    def work() -> str:
        raw = frame_client
        raw.send(*raw.attach_sender(1, raw_client.described(0x30, []), "coordinator"))
        target = raw.until(frames.ATTACH)[8]
        return f"{frames.code_of(target):#x} {frames.state_fields(target)}"

    stated = await asyncio.to_thread(work)
    assert stated.startswith("0x30")
    assert "amqp:local-transactions" in stated


def test_the_tests_that_the_reference_names_exist():
    page = pathlib.Path("docs/reference/amqp.md").read_text().partition("## Rules and their tests")[2]
    named = set(re.findall(r"`(test_\w+|\d[^`]+)`", page.partition("| section |")[2]))
    files = pathlib.Path("tests").glob("*/**/*.py")
    tests = {name for path in files for name in re.findall(r"def (test_\w+)", path.read_text())}
    violations = {f"{section} {what}" for section, what, *_ in VIOLATIONS}
    assert named <= tests | violations, named - tests - violations
    assert violations <= named, violations - named


def _rest(raw: socket.socket) -> bytes:
    got = b""
    while data := raw.recv(4096):
        got += data
    return got


def _send(raw: Client, items: list[bytes], payload: bytes) -> None:
    body = raw_client.described(frames.TRANSFER, items) + payload
    raw.socket.sendall((len(body) + 8).to_bytes(4, "big") + b"\x02\0\0\0" + body)
