"""The parser of the broker's protocol: the result does not depend on the division into blocks."""

from __future__ import annotations

import asyncio
import functools
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.bus.client import broker_errors, counters
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
    "Some Trouble",
    (7, b"a.b", b"", b"MSG 1\r\n2", None),
    ("malformed-subject", b"a\r7"),
    ("malformed-subject", b"\xff"),
    ("malformed-subject", b"a\x0b9"),
    (8, b"\xc3\xa4", b"12", b"", None),
    (9, b"s", b"", b"hello", None),
]


class Wire:
    """Subscriptions 7 to 9, and what the parser passes on."""

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self.subscriptions = client_parser.WireSubscriptions(counters.ConnectionCounters(None))
        self.subscriptions.refuse = self.refuse  # type: ignore[method-assign]
        self.subscriptions.reader_failed = self.reader_failed  # type: ignore[method-assign]
        self.listen(7)
        self.listen(8)
        self.listen(9)

    def listen(self, number: int, subject: str = ">", read_all: Any = None) -> None:
        read = None if read_all else functools.partial(self.read, number)
        made = client_parser.WireSubscription(number, subject, "", read, read_all)
        self.subscriptions.by_number[b"%d" % number] = made

    def parser(self) -> client_parser.BrokerParser:
        made = client_parser.BrokerParser(self, self.subscriptions)  # type: ignore[arg-type]
        made.reads_messages = True
        return made

    def read(self, *message: Any) -> None:
        self.heard.append(message)

    def on_ping(self) -> None:
        self.heard.append("ping")

    def on_pong(self) -> None:
        self.heard.append("pong")

    def on_info(self, info: dict[str, Any]) -> None:
        self.heard.append(info)

    def on_error(self, text: str) -> None:
        self.heard.append(text)

    def refuse(self, why: counters.ConnectionCounter, subject: bytes) -> None:
        self.heard.append((why.value[2], subject))

    def reader_failed(self, subject: bytes, error: BaseException) -> None:
        self.heard.append((subject, type(error)))


@given(st.lists(st.integers(0, len(SAID)), max_size=20))
def test_blocks_of_any_size(cuts: list[int]):
    wire = Wire()
    parser = wire.parser()
    for begin, end in itertools.pairwise([0, *sorted(cuts), len(SAID)]):
        parser.feed(SAID[begin:end])
    assert wire.heard == HEARD


@given(st.lists(st.integers(0, len(SAID)), max_size=20))
def test_a_bulk_reader_receives_the_messages_of_a_block_at_once(cuts: list[int]):
    wire = Wire()
    calls: list[tuple[Any, Any]] = []
    wire.listen(7, read_all=lambda *call: calls.append(call))
    parser = wire.parser()
    for begin, end in itertools.pairwise([0, *sorted(cuts), len(SAID)]):
        parser.feed(SAID[begin:end])
    messages = [message for subjects, data in calls for message in zip(subjects, data, strict=True)]
    assert messages == [(b"a.b", b"hello"), (b"a.b", b""), (b"a.b", b"MSG 1\r\n2")]
    assert wire.heard == [heard for heard in HEARD if not isinstance(heard, tuple) or heard[0] != 7]
    if not cuts:
        assert [len(data) for _, data in calls] == [3]


def test_a_subscription_reads_only_its_subjects():
    wire = Wire()
    wire.listen(1, "a.*")
    wire.listen(2, "a.b.>", read_all=lambda subjects, _: wire.heard.append(subjects))
    wire.parser().feed(
        b"".join(b"MSG %b 0\r\n\r\n" % each for each in (b"a.b 1", b"a.b.c 1", b"a.b 2", b"a.b.c 2"))
    )
    assert wire.heard == [
        (1, b"a.b", b"", b"", None),
        ("other-subject", b"a.b.c"),
        ("other-subject", b"a.b"),
        [b"a.b.c"],
    ]


def test_an_own_subject_receives_no_reply_of_the_broker():
    """A client can have it sent to any subject."""
    wire = Wire()
    wire.listen(1, "muster.manage.to.a.*")
    wire.listen(2, "topic.a")
    wire.listen(3, "muster.>", read_all=lambda subjects, _: wire.heard.append(subjects))
    own = b"NATS/1.0\r\nNats-Expected-Stream: s\r\nX-Nats-Stream: s\r\n\r\n"
    copy = b"NATS/1.0\r\na: b\r\nNats-Stream: reports\r\nNats-Sequence: 1\r\n\r\n"
    status = b"NATS/1.0 404 Message Not Found\r\n\r\n"
    for headers in (own, copy, status):
        for subject, number in ((b"muster.manage.to.a.b", 1), (b"topic.a", 2), (b"muster.x", 3)):
            size = len(headers)
            wire.parser().feed(b"HMSG %b %d %d %d\r\n%b\r\n" % (subject, number, size, size, headers))
    assert wire.heard == [
        (1, b"muster.manage.to.a.b", b"", b"", own),
        (2, b"topic.a", b"", b"", own),
        [b"muster.x"],
        ("reply-of-broker", b"muster.manage.to.a.b"),
        (2, b"topic.a", b"", b"", copy),
        ("reply-of-broker", b"muster.x"),
        ("reply-of-broker", b"muster.manage.to.a.b"),
        (2, b"topic.a", b"", b"", status),
        ("reply-of-broker", b"muster.x"),
    ]


@pytest.mark.parametrize("error", [ValueError, asyncio.CancelledError])
def test_an_error_of_a_reader_is_its_own(error: type[BaseException]):
    def fail(*_: Any) -> None:
        raise error

    wire = Wire()
    wire.subscriptions.by_number[b"1"] = client_parser.WireSubscription(1, "a", "", fail)
    wire.listen(2, "a", read_all=fail)
    wire.parser().feed(b"MSG a 1 0\r\n\r\nMSG a 2 0\r\n\r\nMSG a 7 0\r\n\r\n")
    assert wire.heard == [(b"a", error), (7, b"a", b"", b"", None), (b"a", error)]


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
    with pytest.raises(broker_errors.BrokerError):
        Wire().parser().feed(line)
