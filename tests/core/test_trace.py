from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.core import errors
from muster.core.telemetry import trace

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def read(**headers: str) -> tuple[trace.TraceContext | None, list[str]]:
    malformed: list[str] = []
    return trace.extract(headers, malformed.append), malformed


def test_the_specifications_example() -> None:
    actual, malformed = read(traceparent=PARENT, tracestate="rojo=00f067aa0ba902b7,congo=t61rcWkgMzE")
    assert actual == trace.TraceContext(
        "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", 1, "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE"
    )
    assert actual.sampled
    assert actual.parent == PARENT
    assert malformed == []


def test_a_child_stays_in_the_trace_and_passes_it_on() -> None:
    first = trace.start(bytes(range(24)))
    child = first.child(b"12345678")
    assert (child.trace_id, child.sampled) == (first.trace_id, True)
    assert child.span_id == b"12345678".hex() != first.span_id
    headers = trace.inject(child, {"Traceparent": "old", "other": "kept"})
    assert headers == {"other": "kept", "traceparent": child.parent}
    assert trace.extract(headers) == child


def test_header_names_are_read_in_any_case() -> None:
    assert read(Traceparent=PARENT)[0] is not None
    assert read()[0] is None


@pytest.mark.parametrize(
    "parent",
    [
        "",
        "garbage",
        PARENT.upper(),
        PARENT[:-1],
        PARENT + "-extra",
        PARENT.replace("00-", "ff-", 1),
        "00-" + "0" * 32 + "-00f067aa0ba902b7-01",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-" + "0" * 16 + "-01",
        PARENT.replace("-01", "-0x"),
        "00-" + "٣" * 32 + "-00f067aa0ba902b7-01",
    ],
)
def test_a_malformed_parent_is_ignored_and_counted(parent: str) -> None:
    assert read(traceparent=parent, tracestate="a=b") == (None, ["traceparent"])


def test_a_later_version_is_read_as_this_one() -> None:
    actual, malformed = read(traceparent=PARENT.replace("00-", "cc-", 1) + "-what-comes")
    assert (actual and actual.parent, malformed) == (PARENT, [])


@pytest.mark.parametrize(
    "state",
    [
        "novalue",
        "A=b",
        "a=b=c",
        "a=é",
        "a=1,a=2",
        ",".join(f"k{n}=v" for n in range(33)),
        "a=" + "x" * 257,
        "x" * 5000,
    ],
)
def test_a_malformed_state_costs_only_itself(state: str) -> None:
    actual, malformed = read(traceparent=PARENT, tracestate=state)
    assert actual == trace.extract({"traceparent": PARENT})
    assert malformed == ["tracestate"]


def test_a_long_state_loses_whole_members_from_the_end() -> None:
    members = [f"k{n}=" + "v" * 100 for n in range(7)]
    actual, _ = read(traceparent=PARENT, tracestate=" , ".join(members))
    assert actual is not None
    assert actual.state == ",".join(members[:4])


@given(st.text(max_size=120), st.text(max_size=120))
def test_no_header_is_ever_an_error(parent: str, state: str) -> None:
    actual, malformed = read(traceparent=parent, tracestate=state)
    assert actual is None
    assert malformed == ["traceparent"]
    actual, _ = read(traceparent=PARENT, tracestate=state)
    assert actual is not None
    assert trace.extract(trace.inject(actual)) == actual


def test_ids_need_the_right_number_of_random_bytes_and_are_never_zero() -> None:
    with pytest.raises(errors.InvalidInput):
        trace.start(b"short")
    with pytest.raises(errors.InvalidInput):
        trace.start(bytes(24)).child(b"short")
    zero = trace.start(bytes(24), sampled=False)
    assert trace.extract(trace.inject(zero)) == zero
    assert not zero.sampled
