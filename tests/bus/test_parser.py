"""The parser of the broker's protocol: the result does not depend on the division into blocks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import nats.errors
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.bus.client import counters
from muster.bus.client import parser as client_parser

SAID = (
    b"+OK\r\nPING\r\n"
    b"MSG a.b 7 5\r\nhello\r\n"
    b"MSG a.b 7 _INBOX.x 0\r\n\r\n"
    b"HMSG c 8 16 18\r\nNATS/1.0\r\nA: b\r\nhi\r\n"
    b"HMSG c 8 back 12 12\r\nNATS/1.0\r\n\r\n\r\n"
    b"INFO {\"a\": 1}\r\nPONG\r\n-ERR 'Some Trouble'\r\n"
    b"MSG a.b 7 8\r\nMSG 1\r\n2\r\n"
    b"MSG a\r7 8 2\r\nhi\r\nMSG \xff 7 x 0\r\n\r\nHMSG a\x0b9 7 12 12\r\nNATS/1.0\r\n\r\n\r\n"
    b"MSG \xc3\xa4 8 12 0\r\n\r\n"
    b"MSG s 9  5\r\nhello\r\n"
)
HEARD = [
    "ping",
    (7, b"a.b", b"", b"hello", None),
    (7, b"a.b", b"_INBOX.x", b"", None),
    (8, b"c", b"", b"hi", b"NATS/1.0\r\nA: b\r\n"),
    (8, b"c", b"back", b"", b"NATS/1.0\r\n\r\n"),
    {"a": 1},
    "pong",
    "'Some Trouble'",
    (7, b"a.b", b"", b"MSG 1\r\n2", None),
    ("malformed-subject", b"a\r7"),
    ("malformed-subject", b"\xff"),
    ("malformed-subject", b"a\x0b9"),
    (8, b"\xc3\xa4", b"12", b"", None),
    (9, b"s", b"", b"hello", None),
]


class Wire:
    def __init__(self) -> None:
        self.on_little: list[Callable[[], None]] = []
        self.heard: list[Any] = []

    def dispatch(self, *message: Any) -> None:
        self.heard.append(message)

    def answer_ping(self) -> None:
        self.heard.append("ping")

    def refuse(self, why: counters.ConnectionCounter, subject: bytes) -> None:
        self.heard.append((why.value[2], subject))

    async def _process_pong(self) -> None:
        self.heard.append("pong")

    async def _process_info(self, info: Any) -> None:
        self.heard.append(info)

    async def _process_err(self, text: str) -> None:
        self.heard.append(text)


def _parse(parser: client_parser.NatsParser, data: bytes) -> None:
    work = parser.parse(data)
    with pytest.raises(StopIteration):  # it never waits here
        work.send(None)


@given(st.lists(st.integers(0, len(SAID)), max_size=20), st.booleans())
def test_blocks_of_any_size(cuts: list[int], as_it_comes: bool):
    wire = Wire()
    parser = client_parser.NatsParser(wire)  # type: ignore[arg-type]
    edges = [0, *sorted(cuts), len(SAID)]
    for begin, end in itertools.pairwise(edges):
        block = SAID[begin:end]
        _parse(parser, parser.take(block) if as_it_comes else block)
    assert wire.heard == HEARD


@given(st.lists(st.integers(0, len(SAID)), max_size=20), st.booleans())
def test_a_bulk_reader_receives_the_messages_of_a_block_at_once(cuts: list[int], as_it_comes: bool):
    wire = Wire()
    parser = client_parser.NatsParser(wire)  # type: ignore[arg-type]
    calls: list[tuple[Any, Any]] = []
    parser.bulk[b"7"] = client_parser.BulkReader(lambda *call: calls.append(call))
    for begin, end in itertools.pairwise([0, *sorted(cuts), len(SAID)]):
        block = SAID[begin:end]
        _parse(parser, parser.take(block) if as_it_comes else block)
    messages = [message for subjects, data in calls for message in zip(subjects, data, strict=True)]
    assert messages == [(b"a.b", b"hello"), (b"a.b", b""), (b"a.b", b"MSG 1\r\n2")]
    assert wire.heard == [heard for heard in HEARD if not isinstance(heard, tuple) or heard[0] != 7]
    if not cuts:
        assert [len(data) for _, data in calls] == [2, 1]


def test_what_comes_amid_another_line_waits():
    class SlowReader(Wire):
        async def _process_pong(self) -> None:
            self.heard.append(parser.take(b"MSG b 2 0\r\n\r\n"))

    wire = SlowReader()
    parser = client_parser.NatsParser(wire)  # type: ignore[arg-type]
    _parse(parser, b"PONG\r\nMSG a 1 0\r\n\r\n")
    assert wire.heard == [b"MSG b 2 0\r\n\r\n", (1, b"a", b"", b"", None)]


def test_a_ping_is_replied_to_before_any_task_runs():
    wire = Wire()
    parser = client_parser.NatsParser(wire)  # type: ignore[arg-type]
    assert parser.take(b"PING\r\n") == b""
    assert wire.heard == ["ping"]
    assert parser.blocks == 1
    parser.take(b"MSG a 1 6\r\n")
    parser.take(b"PING\r\n")  # the payload of a message
    parser.take(b"\r\n")
    assert wire.heard == ["ping", (1, b"a", b"", b"PING\r\n", None)]


def test_what_an_old_connection_left_is_forgotten():
    wire = Wire()
    parser = client_parser.NatsParser(wire)  # type: ignore[arg-type]
    _parse(parser, SAID[:30])
    parser.reset()
    _parse(parser, b"PONG\r\n")
    assert wire.heard == ["ping", "pong"]


@pytest.mark.parametrize(
    "line",
    [
        b"HELLO\r\n",
        b"\r\n",
        b"MSG a\r\n",
        b"MSG a b c\r\n",
        b"MSG a 1 b 2 0\r\n\r\n",
        b"HMSG a 1 0\r\n\r\n",
        b"INFO {\r\n",
        b"x" * (2 << 20),
    ],
)
def test_malformed_input_is_rejected(line: bytes):
    parser = client_parser.NatsParser(Wire())  # type: ignore[arg-type]
    with pytest.raises(nats.errors.ProtocolError):
        parser.parse(line).send(None)
