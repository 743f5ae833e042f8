"""What a message or a consumer costs does not depend on how many others there are: counted, not timed."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest

from muster.message import codec, destinations, messages, protocol, settings, values
from muster.message.amqp_format import amqp_types, message_codec, repeated_sections
from muster.message.dispatcher import backlog, dispatcher
from muster.message.dispatcher.log import journal, ledger, message_cache, message_log, pages

JOBS = destinations.queue("jobs")


def copy_to(destination: destinations.Destination) -> journal.JournalMessage:
    return journal.JournalMessage(destination, messages.MessageMeta(), "{}", b"", "subject")


class CountingPosition(int):
    """A number that counts how often it is compared."""

    comparisons = 0

    def __lt__(self, other: int) -> bool:
        CountingPosition.comparisons += 1
        return int(self) < other


@pytest.mark.parametrize("newer", [0, 1, 7, 1000])
def test_a_consumer_that_is_up_to_date_visits_no_cached_message(newer: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(CountingPosition, "comparisons", 0)
    cache = message_cache.MessageCache(1 << 20)
    for number in range(10, 20_010, 10):
        cache.add_stored(number, copy_to(JOBS))
    last = 20_000
    assert [number for number, _ in cache.after(CountingPosition(last - 10 * newer))] == list(
        range(last - 10 * newer + 10, last + 10, 10)
    )
    assert CountingPosition.comparisons <= newer + 1


class Unvisited(dict[str, Any]):
    """Entries that may be looked up, but not enumerated."""

    def _refuse(self) -> NoReturn:
        raise AssertionError("all entries were visited")

    def __iter__(self) -> Iterator[str]:
        self._refuse()

    def keys(self) -> Any:
        self._refuse()

    def values(self) -> Any:
        self._refuse()

    def items(self) -> Any:
        self._refuse()


async def test_a_batch_visits_only_the_backlogs_that_it_concerns():
    unused: Any = None
    shared = message_log.MessageLog(unused, 1, settings.MessageSettings())
    shared.ledger.backlogs = Unvisited({"q:other": backlog.Backlog("q:other")})
    stored: list[int] = []
    shared.on_stored = lambda placed: stored.extend(number for _, number in placed)
    for sequence in (7, 8):
        record = ledger.LogRecord(stored={"q:jobs": 1}, last_works={"ann-1": sequence})
        number = pages.number(sequence, 0)
        shared.journal._on_batch(record, sequence, [(copy_to(JOBS), number)])
        assert stored.pop() == number
    jobs = shared.ledger.backlogs["q:jobs"]
    assert jobs.live, "the log contains nothing of a queue before its first message"
    assert shared.ledger.depths == {"q:jobs": 2}


async def test_a_closed_bus_connection_concerns_only_the_connections_that_use_it(
    monkeypatch: pytest.MonkeyPatch,
):
    """Ten thousand may close at once."""
    unused: Any = None
    made = dispatcher.Dispatcher(unused, unused, 1, settings.MessageSettings())
    for name, number in (("ann-1", 7), ("ann-2", 7), ("ann-3", 7), ("ann-3", 8), ("ann-4", 9)):
        made._hello("ann", protocol.ClientHello(connection=name, broker="b", number=number))
    monkeypatch.setattr(made._clients, "connections", Unvisited(made._clients.connections))
    for id in ("b", "b", ["b"]):  # a report may be repeated
        report: Any = types.SimpleNamespace(
            data=json.dumps({"server": {"id": id}, "client": {"id": 7}}).encode()
        )
        made._connection_closed(report)
    assert [name for name in ("ann-1", "ann-2", "ann-3", "ann-4") if name in made._clients.connections] == [
        "ann-3",
        "ann-4",
    ]


def amqp_message(text: str, header: bytes = b"", annotation: str = "x-opt-jms-msg-type") -> bytes:
    properties = [amqp_types.text(f"ID:{text}"), b"\x40", amqp_types.text("jobs")]
    header = header or amqp_types.sequence([b"\x41", b"\x50\x07", amqp_types.uint(60_000)])
    return (
        amqp_types.section(amqp_types.HEADER, header)
        + amqp_types.section(
            amqp_types.ANNOTATIONS, amqp_types.mapping({annotation: b"\x51\x05"}, symbols=True)
        )
        + amqp_types.section(amqp_types.PROPERTIES, amqp_types.sequence(properties))
        + amqp_types.section(amqp_types.VALUE, amqp_types.text(text))
    )


def test_the_sections_that_amqp_messages_have_in_common_are_decoded_once(monkeypatch: pytest.MonkeyPatch):
    decoded = 0
    read = amqp_types.read

    def counted(data: bytes, at: int, depth: int = 0) -> tuple[Any, int]:
        nonlocal decoded
        decoded += not depth
        return read(data, at, depth)

    message_codec.decode(amqp_message("first"), JOBS, 0)
    monkeypatch.setattr(amqp_types, "read", counted)
    meta, payload, _ = message_codec.decode(amqp_message("second"), JOBS, 1000)
    assert decoded == 1, "its body"
    assert (meta.message_id, meta.priority, meta.expiration_ms, payload) == (
        "ID:second",
        7,
        61_000,
        b"second",
    )
    decoded = 0
    encoded = message_codec.encode(meta, payload, 0, 1000)
    assert decoded == 0
    again, _, _ = message_codec.decode(encoded, JOBS, 1000)
    assert (again.priority, again.expiration_ms) == (7, 61_000)


def test_a_client_cannot_fill_the_memory_with_sections():
    cached = (repeated_sections._cached_header, repeated_sections._cached_annotations)
    before = [cache.cache_info().currsize for cache in cached]
    large = amqp_types.sequence([b"\x41", b"\x50\x03", b"\x40", b"\x40", amqp_types.binary(b"x" * 200)])
    meta, _, _ = message_codec.decode(amqp_message("large", large, "x-opt-" + "y" * 200), JOBS, 0)
    assert (meta.persistent, meta.priority) == (True, 3)
    assert [cache.cache_info().currsize for cache in cached] == before
    assert all(cache.cache_info().maxsize == 1024 for cache in cached)


def test_the_properties_of_a_received_message_are_made_once(monkeypatch: pytest.MonkeyPatch):
    made: list[values.Properties] = []
    received = values.Properties.received

    def counted(typed: dict[str, values.TypedValue]) -> values.Properties:
        made.append(received(typed))
        return made[-1]

    monkeypatch.setattr(values.Properties, "received", counted)
    meta = messages.MessageMeta(kind="t", properties={"region": "north"})
    message = codec.message_from_meta(meta, b"text", JOBS)
    assert made == [message.properties]
    assert dict(message.properties) == {"region": "north"}
