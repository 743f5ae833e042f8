from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.core import errors, health, messages

name = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
text = st.text(st.characters(codec="utf-8"), max_size=20)
count = st.integers(0, (1 << 63) - 1)
at_ms = st.integers(0, (1 << 53) - 1)
finite = st.floats(allow_nan=False, allow_infinity=False)
metrics = st.dictionaries(name, finite, max_size=5)
period = st.floats(0.001, 86400)

services = st.builds(
    messages.ServiceReport, name=name, state=st.sampled_from(health.HealthState), metrics=metrics
)
node_reports = st.builds(
    messages.NodeReport,
    machine=name,
    group=name,
    zone=name,
    boot=count,
    sequence=count,
    at_ms=at_ms,
    period_s=period,
    metrics=metrics,
    services=st.lists(services, max_size=3).map(tuple),
)
alerts = st.builds(
    messages.Alert,
    rule=name,
    about=name,
    severity=st.sampled_from(messages.Severity),
    state=st.sampled_from(messages.AlertState),
    since_ms=at_ms,
    at_ms=at_ms,
    value=st.none() | finite,
    reason=text,
    labels=st.dictionaries(name, text, max_size=3),
)
decisions = st.builds(
    messages.Decision,
    id=name,
    who=name,
    what=name,
    target=name,
    why=text,
    at_ms=at_ms,
    outcome=st.sampled_from(messages.DecisionOutcome),
)
every = st.one_of(node_reports, alerts, decisions)
KINDS: list[type[messages.WireMessage]] = [
    messages.NodeReport,
    messages.Alert,
    messages.Decision,
]
REPORT = messages.NodeReport(machine="web-7", sequence=1, at_ms=1, period_s=10, metrics={"cpu": 0.5})


@given(every, st.sampled_from(["json", "msgpack"]))
def test_messages_read_back_in_both_forms(message: messages.WireMessage, form: Any) -> None:
    assert messages.decode(messages.encode(message, form), type(message)) == message


def test_the_wire_is_plain_json_with_its_kind() -> None:
    assert json.loads(messages.encode(REPORT)) == {
        "kind": "node-report/1",
        "machine": "web-7",
        "sequence": 1,
        "at_ms": 1,
        "period_s": 10,
        "metrics": {"cpu": 0.5},
    }


def test_a_field_added_later_is_ignored() -> None:
    wire = json.loads(messages.encode(REPORT)) | {"colour": "blue"}
    assert messages.decode(json.dumps(wire).encode(), messages.NodeReport) == REPORT


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"kind": "node-report/2"}, messages.UnknownMessageKind),
        ({"kind": "alert/1"}, messages.UnknownMessageKind),
        ({"kind": "nothing/0"}, messages.UnknownMessageKind),
        ({"kind": None}, messages.UnknownMessageKind),
        ({"kind": "x" * 100_000}, messages.UnknownMessageKind),
        ({"sequence": -1}, messages.MalformedMessage),
        ({"sequence": 1 << 63}, messages.MalformedMessage),
        ({"sequence": "1"}, messages.MalformedMessage),
        ({"machine": ""}, messages.MalformedMessage),
        ({"machine": "x" * 257}, messages.MalformedMessage),
        ({"period_s": 0}, messages.MalformedMessage),
        ({"metrics": {"cpu": None}}, messages.MalformedMessage),
        ({"metrics": {f"m{n}": 1 for n in range(1025)}}, messages.MalformedMessage),
        ({"services": [{"name": "s", "state": "asleep"}]}, messages.MalformedMessage),
    ],
)
def test_what_is_wrong_is_refused_with_a_short_reason(
    change: dict[str, Any], fault: type[errors.MusterError]
) -> None:
    wire = json.loads(messages.encode(REPORT)) | change
    for data in (json.dumps(wire).encode(), msgspec.msgpack.encode(wire)):
        with pytest.raises(fault) as caught:
            messages.decode(data, messages.NodeReport)
        assert len(caught.value.message) < 500
        assert caught.value.code in ("malformed", "unknown-kind")


def test_a_message_without_a_kind_is_refused() -> None:
    wire = json.loads(messages.encode(REPORT))
    del wire["kind"]
    with pytest.raises(messages.UnknownMessageKind, match="missing required field `kind`"):
        messages.decode(json.dumps(wire).encode(), messages.NodeReport)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_none_is_refused_at_both_ends(value: float) -> None:
    with pytest.raises(messages.MalformedMessage, match="'cpu' is not a finite"):
        messages.NodeReport(machine="m", sequence=1, at_ms=1, period_s=1, metrics={"cpu": value})
    with pytest.raises(messages.MalformedMessage):
        messages.ServiceReport(name="s", metrics={"cpu": value})
    wire = msgspec.to_builtins(REPORT) | {"metrics": {"cpu": value}}
    with pytest.raises(messages.MalformedMessage, match="'cpu' is not a finite"):
        messages.decode(msgspec.msgpack.encode(wire), messages.NodeReport)


def test_size_is_bounded_at_both_ends() -> None:
    with pytest.raises(messages.MessageTooLarge):
        messages.decode(b"{" * 10_000_000, messages.NodeReport)
    with pytest.raises(messages.MessageTooLarge):
        messages.decode(messages.encode(REPORT), messages.NodeReport, max_bytes=10)
    big = messages.Decision(id="i", who="w", what="w", target="t", why="x" * (1 << 20), at_ms=1)
    with pytest.raises(messages.MessageTooLarge):
        messages.encode(big)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b" ",
        b"{",
        b"null",
        b"[]",
        b"[" * 90_000,
        b'{"x":' * 90_000,
        b"\x81\xa1x" * 90_000,
        b"\xdf" + b"\xff" * 4,
    ],
)
def test_hostile_bytes_are_malformed(data: bytes) -> None:
    for kind in KINDS:
        with pytest.raises(errors.InvalidInput):
            messages.decode(data, kind)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_a_clear_error(data: bytes) -> None:
    for kind in KINDS:
        with pytest.raises(errors.InvalidInput):
            messages.decode(data, kind)


@given(every, st.data())
def test_a_truncated_or_damaged_message_is_a_message_or_a_clear_error(
    message: messages.WireMessage, data: Any
) -> None:
    complete = bytearray(messages.encode(message, data.draw(st.sampled_from(["json", "msgpack"]))))
    complete[data.draw(st.integers(0, len(complete) - 1))] = data.draw(st.integers(0, 255))
    del complete[data.draw(st.integers(1, len(complete))) :]
    try:
        read = messages.decode(bytes(complete), type(message))
    except errors.InvalidInput:
        return
    assert isinstance(read, type(message))
