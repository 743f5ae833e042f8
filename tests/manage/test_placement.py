"""From a manifest's entries to specifications, against what there is already."""

from __future__ import annotations

from typing import Any

import pytest

from muster.core import errors
from muster.manage import placement, processor


def entry(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "type": "memory", "agent": "a", **more}


def having(*entries: dict[str, Any]) -> processor.Processor:
    state = processor.Processor(term=1, ttl_s=15.0)
    state.accept(state.apply(placement.specifications(state, list(entries)), "test"))
    return state


def test_a_circle_is_found_through_what_is_there_already():
    state = having(entry("c"), entry("b", depends_on=["c"]), entry("a", depends_on=["b"]))
    with pytest.raises(errors.InvalidInput, match=r"circle: . -> . -> . -> ."):
        placement.specifications(state, [entry("c", depends_on=["a"])])
    assert placement.specifications(state, [entry("d", depends_on=["a"])])[0].depends_on == ("a",)


def test_what_a_dependency_needs_may_have_been_forgotten_with_its_agent():
    state = having(entry("gone"), entry("b", depends_on=["gone"]))
    state.accept(processor.Changes(resources={"gone": None}))
    assert placement.specifications(state, [entry("new", depends_on=["b"])])
    with pytest.raises(errors.InvalidInput, match="'gone', which is not there"):
        placement.specifications(state, [entry("b", depends_on=["gone"])])


def test_a_group_has_those_that_are_there_and_those_that_come_with_it():
    state = having(entry("old", group="db"))
    found = placement.specifications(state, [entry("new", group="db"), entry("web", depends_on=["group:db"])])
    assert found[1].depends_on == ("new", "old")


def test_resources_go_where_least_is_and_each_counts_for_the_next():
    state = having(entry("one"))
    for name in ("a", "b"):
        state.agents[name] = processor.Agent(types=("memory",))
    free = [{"name": f"n{number}", "type": "memory", "where": "zone = 'default'"} for number in range(3)]
    assert [one.agent for one in placement.specifications(state, free)] == ["b", "a", "b"]
