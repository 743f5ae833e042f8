"""Pure parts under hostile and random input: subjects, headers, keys, patterns, groups."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.bus import message_format
from muster.bus.streams import commit_groups, jetstream, key_value
from muster.core import errors, subjects

TEXT = st.text(st.characters(categories=None), max_size=40)
TOKENS = st.lists(st.sampled_from(["a", "b", "*", ">", "é"]), min_size=1, max_size=5)


@given(TEXT)
def test_a_subject_is_refused_or_harmless(text: str):
    with contextlib.suppress(errors.InvalidInput):
        message_format.check_subject(text, wildcards=True)
        line = f"PUB {text} 0\r\n".encode()
        assert line.count(b"\r\n") == 1
        assert len(line.split()) == 3, "it cannot smuggle a second word into the protocol"
        assert all(text.split("."))


@given(st.dictionaries(TEXT, TEXT, max_size=4))
def test_headers_are_refused_or_come_back(headers: dict[str, str]):
    with contextlib.suppress(errors.InvalidInput):
        raw = message_format.encode_headers(headers)
        assert message_format.decode_headers(raw) == headers
        assert raw.count(b"\r\n\r\n") == 1
        assert raw.endswith(b"\r\n\r\n")


def test_headers_are_limited_in_number_and_garbled_ones_in_size():
    """A client may send a megabyte of them, which are decoded before its budget is known to be used up."""
    many = {f"Name-{number}": "x" for number in range(message_format.HEADERS_MAX)}
    assert message_format.decode_headers(message_format.encode_headers(many)) == many
    with pytest.raises(errors.LimitExceeded, match="1001 headers"):
        message_format.encode_headers(many | {"One": "more"})
    foreign = b"NATS/1.0\r\n" + b"".join(b"A%d: b\r\n" % number for number in range(5000)) + b"\r\n"
    assert len(message_format.decode_headers(foreign)) == message_format.HEADERS_MAX
    garbled = b"NATS/1.0\r\nA: b\r\nB: " + b"\xff" * (1 << 20) + b"\r\n\r\n"
    decoded = message_format.decode_headers(garbled)
    assert decoded["A"] == "b"
    assert len(decoded["B"]) < message_format.GARBLED_BYTES_MAX


@given(st.binary(max_size=80))
def test_any_bytes_as_headers_are_survived(raw: bytes):
    assert all(isinstance(value, str) for value in message_format.decode_headers(raw).values())
    assert message_format.status_of(raw) >= 0


@pytest.mark.parametrize(
    ("raw", "status"),
    [(b"NATS/1.0 503\r\n\r\n", 503), (b"NATS/1.0\r\nA: b\r\n\r\n", 0), (None, 0), (b"NATS/1.0 x\r\n\r\n", 0)],
)
def test_status_lines(raw: bytes | None, status: int):
    assert message_format.status_of(raw) == status


@given(st.text(st.characters(), max_size=60))
def test_any_key_comes_back_and_is_a_subject(key: str):
    encoded = key_value.encode_key(key)
    assert key_value.decode_key(encoded) == key
    message_format.check_subject(f"$KV.b.{encoded}")


@given(TEXT, TEXT)
def test_different_keys_stay_different(first_key: str, other: str):
    assert (key_value.encode_key(first_key) == key_value.encode_key(other)) == (first_key == other)


def matches_by_definition(pattern: list[str], subject: list[str]) -> bool:
    if not pattern or not subject:
        return not pattern and not subject
    if pattern == [">"]:
        return True
    fits = pattern[0] == subject[0] or (pattern[0] == "*" and subject[0] != ">")
    return fits and matches_by_definition(pattern[1:], subject[1:])


@given(TOKENS, TOKENS)
def test_patterns_match_as_defined(pattern: list[str], subject: list[str]):
    if ">" in (*pattern[:-1], *subject[:-1]):
        return
    expected = matches_by_definition(pattern, subject)
    assert subjects.matches(".".join(pattern), ".".join(subject)) == expected
    assert subjects.SubjectPatternSet([".".join(pattern)]).match(".".join(subject)) == expected


@pytest.mark.parametrize(
    ("text", "at_ns"),
    [
        ("2026-11-15T19:33:52.098413693Z", 1794771232098413693),
        ("2026-11-15T19:33:52Z", 1794771232000000000),
        ("2026-11-15T19:33:52.1Z", 1794771232100000000),
    ],
)
def test_times(text: str, at_ns: int):
    assert jetstream.nanoseconds(text) == at_ns


@dataclass
class Waiting:
    subject: str
    size: int
    alone: bool
    guarded: bool
    message_id: str | None


WAITING = st.builds(
    Waiting,
    subject=st.sampled_from("abcdef"),
    size=st.sampled_from([100] * 10 + [100 << 10] * 3 + [1 << 20]),
    alone=st.sampled_from([False] * 20 + [True]),
    guarded=st.sampled_from([False] * 5 + [True]),
    message_id=st.sampled_from([None] * 10 + ["1", "2", "3"]),
)


@given(st.lists(WAITING, min_size=1, max_size=60))
def test_rounds_make_progress_and_batches_are_such_as_the_broker_takes(waiting: list[Waiting]):
    left, costs = list(waiting), commit_groups.CommitCosts()
    while left:
        count, together = commit_groups.next_group(left, costs)
        costs.observe(count, together, 0.001)
        assert 1 <= count <= len(left)
        batch, left = left[:count], left[count:]
        if together:
            assert commit_groups.MIN_BATCH <= len(batch) <= commit_groups.MAX_BATCH
            assert sum(item.size for item in batch) <= commit_groups.MAX_BATCH_BYTES
            assert not any(item.alone or item.size > commit_groups.LARGE_BYTES for item in batch)
            ids = [item.message_id for item in batch if item.message_id]
            assert len(ids) == len(set(ids))
            for place, message in enumerate(batch):
                assert not (
                    message.guarded and message.subject in {earlier.subject for earlier in batch[:place]}
                )


def test_many_waiting_go_together_and_few_do_not():
    many = [Waiting(f"s{n}", 100, False, True, str(n)) for n in range(2000)]
    costs = commit_groups.CommitCosts()
    assert commit_groups.next_group(many, costs) == (commit_groups.MAX_BATCH, True)
    assert commit_groups.next_group(many[: commit_groups.MIN_BATCH - 1], costs) == (
        commit_groups.MIN_BATCH - 1,
        False,
    )


def test_large_messages_go_one_by_one_and_do_not_keep_others_from_going_together():
    """The broker writes the messages of a batch twice."""
    small, large = (
        [Waiting(f"s{n}", size, False, False, None) for n in range(50)] for size in (128 << 10, 129 << 10)
    )
    costs = commit_groups.CommitCosts()
    costs.single_s = 1.0
    assert commit_groups.next_group(large, costs) == (50, False)
    assert commit_groups.next_group([*large[:3], *small], costs) == (3, False)
    assert commit_groups.next_group([*small[:20], *large], costs) == (20, True)


@pytest.mark.parametrize(
    ("single_s", "batch_s", "together"),
    [(0.000_3, 0.003, True), (0.000_03, 0.002, False), (0.003, 0.03, True)],
    ids=["synced", "sync off", "busy disk"],
)
@pytest.mark.parametrize("start", [0.000_001, 0.01])
def test_costs_are_learned_from_the_rounds(single_s: float, batch_s: float, together: bool, start: float):
    """50 senders in a closed loop, whatever its first estimate was."""
    costs = commit_groups.CommitCosts()
    costs.single_s = start
    many = [Waiting(f"s{n}", 100, False, False, None) for n in range(50)]
    chosen = []
    for _ in range(50 * commit_groups.EXPLORE_EVERY):
        count, as_one = commit_groups.next_group(many, costs)
        chosen.append(as_one)
        costs.observe(count, as_one, batch_s + count * 0.000_02 if as_one else 0.000_2 + count * single_s)
    late = chosen[-10 * commit_groups.EXPLORE_EVERY :]
    assert late.count(together) >= len(late) * 0.95


class DeafBrokers:
    """Brokers that lose every request, as during an election."""

    def __init__(self) -> None:
        self.requests = self
        self.waited_s: list[float] = []

    async def exchange(self, _: str, __: bytes, *, timeout_s: float) -> None:
        self.waited_s.append(round(timeout_s, 3))
        await asyncio.sleep(timeout_s)
        raise errors.TimedOut("no reply")


@pytest.mark.virtual_time
@pytest.mark.parametrize(
    ("try_s", "waited_s"), [(None, [0.75, 1.5, 3.0, 3.0, 1.75]), (4.0, [4.0, 4.0, 2.0]), (10.0, [10.0])]
)
async def test_a_lost_request_is_repeated_soon_and_then_less_often(try_s, waited_s):
    brokers: Any = DeafBrokers()
    with pytest.raises(errors.TimedOut, match="within 10 s"):
        await jetstream.JetStreamApi(brokers).call("INFO", timeout_s=10.0, try_s=try_s)
    assert brokers.waited_s == waited_s
