from __future__ import annotations

import io
import json
import logging
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.core.telemetry import log, trace


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def lines(stream: io.StringIO) -> list[str]:
    return stream.getvalue().split("\n")[:-1]


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    stream = io.StringIO()
    undo = log.configure(stream)
    yield stream
    undo()


def test_an_event_is_one_json_object_for_programs(stream: io.StringIO) -> None:
    log.EventLog("bus", domain="d").bind(broker="b1").info(
        "lease-lost", lease="manager-1", epoch=7, event="x"
    )
    [line] = lines(stream)
    event = json.loads(line)
    assert event.pop("time").endswith("Z")
    assert event == {
        "level": "info",
        "part": "bus",
        "event": "lease-lost",
        "domain": "d",
        "broker": "b1",
        "lease": "manager-1",
        "epoch": 7,
        "event_": "x",
    }


def test_people_read_text_with_colours_on_a_terminal_only() -> None:
    for stream, coloured in ((Terminal(), True), (io.StringIO(), False)):
        undo = log.configure(stream, form="text" if not coloured else "auto")
        log.EventLog("bus").warning("slow-consumer", subject="a b", pending=3)
        undo()
        [line] = lines(stream)
        assert 'WARNING bus slow-consumer subject="a b" pending=3' in line
        assert line.startswith("\x1b[33m") is coloured


def test_levels(stream: io.StringIO) -> None:
    events = log.EventLog("bus")
    events.debug("unseen")
    events.error("seen")
    events.event("seen-too", level=logging.WARNING)
    assert [json.loads(line)["event"] for line in lines(stream)] == ["seen", "seen-too"]


def test_an_errors_stack_is_for_debugging_only(stream: io.StringIO) -> None:
    def fail() -> None:
        try:
            raise ValueError("why")
        except ValueError as error:
            log.EventLog("bus").error("failed", error=error)

    fail()
    undo = log.configure(stream, level="debug")
    fail()
    undo()
    brief, *full = [json.loads(line) for line in lines(stream)]
    assert brief["error"] == "ValueError: why"
    assert "stack" not in brief
    assert "test_log.py" in full[0]["stack"]


def test_the_trace_of_the_running_task_is_attached(stream: io.StringIO) -> None:
    working_for = trace.start(bytes(range(24)))
    token = trace.current.set(working_for)
    try:
        log.EventLog("bus").info("inside")
    finally:
        trace.current.reset(token)
    log.EventLog("bus").info("outside")
    inside, outside = map(json.loads, lines(stream))
    assert (inside["trace_id"], inside["span_id"]) == (working_for.trace_id, working_for.span_id)
    assert "trace_id" not in outside


def test_an_event_that_clients_repeat_does_not_displace_others(
    stream: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    events, now_s = log.EventLog("manage"), 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    for number in range(3000):
        events.warning("bad-event", number=number)
    events.warning("other")
    now_s = 1.0
    events.warning("bad-event")
    written = [json.loads(line) for line in lines(stream)]
    assert [line["event"] for line in written].count("bad-event") == 1001
    assert [line["event"] for line in written].count("other") == 1
    assert written[-1]["omitted"] == 2000


def test_undoing_restores_what_was() -> None:
    logger = logging.getLogger("muster")
    before = (logger.level, logger.propagate, list(logger.handlers))
    log.configure(io.StringIO(), level="debug")()
    assert (logger.level, logger.propagate, list(logger.handlers)) == before


anything = st.one_of(
    st.text(max_size=20),
    st.integers(),
    st.floats(),
    st.none(),
    st.binary(max_size=9),
    st.just("\ud800"),
    st.just("x" * 9999),
)


@given(
    st.dictionaries(
        st.from_regex(r"[a-z_]{1,8}", fullmatch=True).filter(lambda k: k not in ("level", "error")),
        anything,
        max_size=4,
    )
)
def test_an_event_is_one_bounded_line_for_any_facts(facts: dict[str, object]) -> None:
    for form in ("json", "text"):
        stream = io.StringIO()
        undo = log.configure(stream, form=form)
        log.EventLog("bus").info("happened", **facts)
        undo()
        text = stream.getvalue()
        assert len(text.splitlines()) == 1
        assert len(text.encode()) < 60_000
        assert not any(ord(character) < 32 for character in text[:-1])
        if form == "json":
            assert json.loads(text)["event"] == "happened"
