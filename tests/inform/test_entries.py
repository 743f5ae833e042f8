"""Activities and service entries: contexts with rules of their own."""

from __future__ import annotations

import time

import hypothesis
import pytest
from hypothesis import strategies as st

from muster.core import errors
from muster.inform import activities as inform_activities
from muster.inform import service_entries
from muster.predicates.backends import python
from muster.predicates.syntax import parser

NOW_NS = 1_700_000_000 * 10**9


# The rules.


def test_a_child_does_not_outlive_its_parent():
    outer = inform_activities.begin("a", None, 60, NOW_NS)
    inner = inform_activities.begin("b", outer, 600, NOW_NS)
    assert (inner.parent, inner.expires_at_ns) == ("a", outer.expires_at_ns)
    assert inform_activities.begin("c", outer, 10, NOW_NS).expires_at_ns < outer.expires_at_ns


def test_nothing_happens_to_a_completed_activity():
    done = inform_activities.complete(inform_activities.begin("a", None, 60, NOW_NS), [], NOW_NS)
    with pytest.raises(inform_activities.InvalidActivityState):
        inform_activities.complete(done, [], NOW_NS)
    with pytest.raises(inform_activities.InvalidActivityState):
        inform_activities.begin("b", done, 60, NOW_NS)
    with pytest.raises(inform_activities.InvalidActivityState):
        inform_activities.replace(done, b"x")


def test_an_activity_with_active_children_does_not_complete():
    with pytest.raises(inform_activities.ChildActivityPending, match="b"):
        inform_activities.complete(inform_activities.begin("a", None, 60, NOW_NS), ["b"], NOW_NS)


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, 1e12, float("nan")])
def test_timeouts_out_of_range_are_refused(timeout_s):
    with pytest.raises(inform_activities.ActivityTimeoutOutOfRange):
        inform_activities.begin("a", None, timeout_s, NOW_NS)


def test_a_timeout_is_printed_without_trailing_zeros():
    with pytest.raises(
        inform_activities.ActivityTimeoutOutOfRange, match=r"of 1,073,741,824 s: .* at most 2,592,000 s"
    ):
        inform_activities.check_timeout(float(1 << 30))


DEGREES = st.floats(-180, 180, allow_nan=False)


@hypothesis.given(DEGREES, DEGREES, DEGREES, st.floats(-90, 90), st.floats(-90, 90), st.floats(-90, 90))
def test_the_box_is_the_box(west, east, lon, south, north, lat):
    hypothesis.assume(south <= north)
    matches = python.compile(
        parser.parse(service_entries.predicate(box=service_entries.GeoBox(west, south, east, north)))
    )
    inside_lon = west <= lon <= east if west <= east else lon >= west or lon <= east
    assert matches({"kind": "service", "lon": lon, "lat": lat}.get) == (inside_lon and south <= lat <= north)


def test_an_entry_survives_being_a_context_and_its_own_words_are_kept_from_metadata():
    with pytest.raises(errors.InvalidInput, match="name"):
        service_entries.to_attributes(service_entries.ServiceEntry(name="a", metadata={"name": "b"}))
    with pytest.raises(errors.InvalidInput):
        service_entries.to_attributes(service_entries.ServiceEntry(name=""))


# Over nodes.


async def test_activities_begin_nest_hold_contents_and_complete(start_node, inform):
    await start_node("n1")
    activities = inform_activities.Activities(inform, time.time_ns)
    activities.timeout_s = 100
    outer = await activities.begin()
    inner = await activities.begin(parent=outer.id, timeout_s=50)
    await activities.set_contents(outer.id, b"<order/>")
    assert (await activities.get(outer.id)).contents == b"<order/>"
    with pytest.raises(inform_activities.ChildActivityPending):
        await activities.complete(outer.id)
    await activities.complete(inner.id)
    await activities.complete(outer.id)
    assert await activities.status(outer.id) is inform_activities.ActivityStatus.COMPLETED
    assert await activities.status("never begun") is inform_activities.ActivityStatus.NO_ACTIVITY
    with pytest.raises(inform_activities.InvalidActivityState):
        await activities.begin(parent=outer.id)
    with pytest.raises(inform_activities.ActivityTimeoutOutOfRange):
        await activities.begin(timeout_s=0)
    assert len((await inform.find("kind = 'session' AND status = 'COMPLETED'")).contexts) == 2


async def test_service_entries_are_found_beside_contexts(start_node, inform):
    await start_node("n1")
    entries = service_entries.ServiceEntries(inform)
    made = await entries.save(
        service_entries.ServiceEntry(
            name="maps",
            access=("http://h/maps",),
            categories=("uddi:types=wsdl",),
            metadata={"lat": 39.1, "lon": -86.5, "owner_team": "gis"},
            description=b"all maps",
        )
    )
    await entries.save(
        service_entries.ServiceEntry(name="far", metadata={"lat": 0.0, "lon": 0.0}), lease_s=60
    )
    assert await entries.get(made.id) == service_entries.from_context(await inform.get(f"service/{made.id}"))
    box = service_entries.GeoBox(-90, 35, -80, 45)
    assert [entry.name for entry in await entries.find(box=box)] == ["maps"]
    assert [entry.name for entry in await entries.find("categories CONTAINS 'uddi:types=wsdl'")] == ["maps"]
    assert [context.key for context in (await inform.find("owner_team = 'gis'")).contexts] == [
        f"service/{made.id}"
    ]
    await entries.delete(made.id)
    assert [entry.name for entry in await entries.find()] == ["far"]
