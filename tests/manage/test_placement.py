"""From a manifest's entries to specifications, against what there is already."""

from __future__ import annotations

import collections
import json
from typing import Any

import pytest

from muster.core import errors
from muster.manage import manifest, placement, processor, protocol, views


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


def test_many_are_placed_without_looking_at_every_agent_for_each(monkeypatch):
    state, looked = having(), 0
    for number in range(200):
        state.agents[f"a{number:03}"] = processor.Agent(types=("memory",), labels={"rack": str(number % 2)})
    attributes = views.agent_attributes

    def counted(name: str, agent: processor.Agent) -> dict[str, Any]:
        nonlocal looked
        looked += 1
        return attributes(name, agent)

    monkeypatch.setattr(views, "agent_attributes", counted)
    wheres = ["rack = '1'", "rack IN ('0', '1')"]
    entries = [{"name": f"n{i}", "type": "memory", "where": wheres[i % 2]} for i in range(400)]
    found = collections.Counter(one.agent for one in placement.specifications(state, entries))
    assert looked == 400, "each agent once for each expression"
    assert set(found.values()) == {2}, "evenly, although both select some of the same"


def test_what_depends_on_a_large_group_is_refused_by_name():
    many = [entry(f"n{number}", group="db") for number in range(protocol.DEPENDENCIES_MAX + 1)]
    last = entry("web", depends_on=["group:db"])
    state = having(*many[:-1])
    assert len(placement.specifications(state, [last])[0].depends_on) == protocol.DEPENDENCIES_MAX
    with pytest.raises(errors.LimitExceeded, match="'web' depends on more than 1000 resources"):
        placement.specifications(state, [many[-1], last])
    with pytest.raises(
        manifest.Fault, match=r"resources\[1001\].depends_on: 'web' depends on more than 1000"
    ):
        manifest.read(json.dumps({"resources": [*many, last]}), {"memory": lambda _: None})


def test_a_specification_that_fits_into_no_message_is_refused():
    labels = {f"label{number}": "x" * 1_000 for number in range(600)}
    with pytest.raises(errors.LimitExceeded, match="the specification of 'web' is over"):
        placement.specifications(having(), [entry("web", labels=labels)])
