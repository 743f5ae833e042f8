"""Entries with a count: names, per-instance values, spread, affinity, requests, and fewer or more of them."""

from __future__ import annotations

import collections
import json
from typing import Any

import pytest

from muster.core import errors
from muster.manage import manifest, protocol
from muster.manage.adapters import plugins
from muster.manage.registry import agent_selection, assignments, records
from muster.manage.registry.rollouts import plan
from tests.manage import test_as_desired
from tests.manage.test_registry import RegistryWorld, until

run = test_as_desired.run  # a fixture


def fleet(**agents: dict[str, Any]) -> assignments.AssignmentProcessor:
    state = assignments.AssignmentProcessor(term=1, ttl_s=15.0)
    for name, fields in agents.items():
        state.agents[name] = records.AgentRecord(types=("memory",), **fields)
    return state


def entry(name: str, count: int | None = None, **more: Any) -> dict[str, Any]:
    return {"name": name, "type": "memory", "count": count, **more}


def place(state: assignments.AssignmentProcessor, *entries: dict[str, Any]) -> list[protocol.ResourceSpec]:
    return agent_selection.place_entries(state, list(entries))


def apply(
    state: assignments.AssignmentProcessor, *entries: dict[str, Any]
) -> dict[str, protocol.ResourceSpec]:
    specs = place(state, *entries)
    changes = state.apply(specs, "ann")
    gone = plan.superfluous(state.resources, specs, agent_selection.counted_entries(list(entries)))
    changes.resources |= state.delete(gone, "ann", after=changes.resources).resources
    state.accept(changes)
    state.accept(records.RegistryChanges(resources=dict.fromkeys(gone)))
    return {name: resource.spec for name, resource in state.resources.items()}


ZONES: dict[str, dict[str, Any]] = {
    "a1": {"zone": "a"},
    "a2": {"zone": "a"},
    "a3": {"zone": "a"},
    "b1": {"zone": "b"},
}


def test_instances_have_stable_names_and_values_of_their_own():
    config = {
        "value": ["--port={8000+index}", "{zone}/{agent}/{name}", "${HOME} {index", {"deep": "{index}"}]
    }
    state = fleet(**ZONES)
    before = apply(state, entry("web", 2, config=config, labels={"number": "{index}"}))
    assert sorted(before) == ["web-1", "web-2"]
    assert before["web-1"].config == {"value": ["--port=8001", "a/a1/web-1", "${HOME} {index", {"deep": "1"}]}
    assert before["web-2"].labels == {"number": "2"}
    assert (before["web-2"].entry, before["web-2"].index) == ("web", 2)
    assert before["web-2"].update == protocol.UpdatePolicy(), "one after the other, if nothing else is said"
    after = apply(state, entry("web", 4, config=config, labels={"number": "{index}"}))
    assert {name: after[name] for name in before} == before
    assert sorted(after) == ["web-1", "web-2", "web-3", "web-4"]
    assert sorted(apply(state, entry("web", 1))) == ["web-1"]
    assert apply(state, entry("web", 0)) == {}


def test_instances_are_a_group_of_their_own():
    state = fleet(a={})
    specs = apply(state, entry("web", 2), entry("api", 1, group="front"), entry("one", agent="a"))
    assert [specs[name].group for name in ("web-1", "web-2", "api-1", "one")] == [
        *("web", "web", "front", "default")
    ]
    later = apply(state, entry("late", agent="a", depends_on=["group:web"]))
    assert later["late"].depends_on == ("web-1", "web-2")


def test_instances_are_not_renamed():
    """The next apply would delete what has another name."""
    state = fleet(a={})
    apply(state, entry("web", 2))
    with pytest.raises(errors.Refused, match="'web-1' is an instance of 'web', which names it"):
        state.rename("web-1", "front", "ann")


def test_braces_of_an_entry_without_a_count_stay():
    (spec,) = place(fleet(**ZONES), entry("web", agent="a1", config={"value": "{index}"}))
    assert spec.config == {"value": "{index}"}


@pytest.mark.parametrize(
    ("spread", "zones", "most"), [("zone", {"a": 3, "b": 3}, 3), ("agent", {"a": 5, "b": 1}, 2)]
)
def test_instances_are_spread(spread, zones, most):
    state = fleet(**ZONES)
    specs = apply(state, entry("web", 6, placement={"spread": spread})).values()
    assert collections.Counter(state.zone_of(spec.agent) for spec in specs) == zones
    assert max(collections.Counter(spec.agent for spec in specs).values()) == most


def test_a_dependency_on_an_entry_or_a_group_is_one_on_all_of_its_instances():
    state = fleet(**ZONES)
    entries = [entry("db", 3, group="data"), entry("app", depends_on=["db"], agent="a1")]
    assert apply(state, *entries)["app"].depends_on == ("db-1", "db-2", "db-3")
    later = apply(state, entry("late", depends_on=["group:data"], agent="a1"))
    assert later["late"].depends_on == ("db-1", "db-2", "db-3")
    with pytest.raises(errors.Conflict, match=r"late depend\(s\) on 'db-3'"):
        apply(state, entry("db", 2, group="data"), entry("app", depends_on=["db"], agent="a1"))
    shrunk = [
        entry("db", 2, group="data"),
        *(entry(name, depends_on=["db"], agent="a1") for name in ("app", "late")),
    ]
    assert apply(state, *shrunk)["late"].depends_on == ("db-1", "db-2")


def test_affinity_and_anti_affinity_are_about_resources_that_are_there_or_come_with_it():
    state = fleet(**ZONES)
    apply(state, entry("cache", agent="a2", group="cache"))
    apart = {"anti_affinity": "group = 'web'"}
    specs = apply(state, entry("web", 4, group="web", placement=apart))
    assert {specs[f"web-{n}"].agent for n in range(1, 5)} == set(ZONES)
    with pytest.raises(errors.Unavailable, match=r"'web-5': none of 4 agents is suitable: 4 host something"):
        apply(state, entry("web", 5, group="web", placement=apart))
    near = apply(state, entry("near", 2, placement={"affinity": "group = 'cache'"}))
    assert {near[f"near-{n}"].agent for n in (1, 2)} == {"a2"}
    with pytest.raises(errors.Unavailable, match="host nothing that matches the affinity"):
        place(state, entry("lonely", placement={"affinity": "group = 'none'"}))


def test_requests_are_compared_with_what_machines_report():
    state = fleet(
        small={"facts": {"cpus": 2, "memory_mb": 1000}},
        large={"facts": {"cpus": 8, "memory_mb": 4000}},
    )
    specs = apply(state, entry("web", 5, placement={"cpu": 2, "memory_mb": 500}))
    assert collections.Counter(spec.agent for spec in specs.values()) == {"small": 1, "large": 4}
    with pytest.raises(errors.Unavailable, match="2 have less than 2 cpus left"):
        apply(state, entry("web", 6, placement={"cpu": 2, "memory_mb": 500}))
    apply(state, entry("web", 4, placement={"cpu": 2, "memory_mb": 500}))
    assert apply(state, entry("tall", 1, placement={"memory_mb": 1500}))["tall-1"].agent == "large"


@pytest.mark.parametrize(
    ("fields", "place", "says"),
    [
        ({"count": -1}, "resources[0].count", ">= 0"),
        ({"count": 2, "name": "x" * 127}, "resources[0].name", "longer than 128"),
        ({"placement": {"spread": "rack"}}, "resources[0].placement.spread", "Invalid enum"),
        ({"placement": {"affinity": "group ="}}, "resources[0].placement.affinity", "affinity"),
        ({"count": 1, "agent": "a", "where": "zone = 'b'"}, "resources[0].agent", "exactly one"),
        ({"count": 2, "config": {"comand": ["{index}"]}}, "resources[0].config.comand", "unknown field"),
    ],
)
def test_bad_entries_are_refused_with_their_field(fields, place, says):
    good = {"name": "web", "type": "process", "config": {"command": ["serve", "{index}"]}}
    text = json.dumps({"resources": [{**good, **({"count": 2} if "agent" not in fields else {}), **fields}]})
    with pytest.raises(manifest.ManifestError, match=says) as failure:
        manifest.read(text, plugins.config_validators())
    assert failure.value.field == place


def test_an_instance_has_no_name_of_another_entry():
    entries = [{"name": name, "type": "process", "config": {"command": ["x"]}} for name in ("web", "web-2")]
    text = json.dumps({"resources": [{**entries[0], "count": 2}, {**entries[1], "agent": "a"}]})
    with pytest.raises(manifest.ManifestError, match="duplicate name 'web-2'"):
        manifest.read(text, plugins.config_validators())


def test_more_and_fewer_of_a_running_service(run):
    def text(count: int, **config: Any) -> str:
        update = {"min_healthy_time_s": 3.0}
        one = {"name": "web", "type": "service", "group": "web", "count": count, "update": update}
        return json.dumps({"resources": [{**one, "config": config}]})

    async def scenario(world: RegistryWorld) -> None:
        await world.client.apply(text(2), wait_s=60)
        starts = test_as_desired.starts
        await world.client.apply(text(3), wait_s=60)
        assert [starts(world, f"web-{number}") for number in (1, 2, 3)] == [1, 1, 1]
        planned = await world.client.plan(text(2, healthy=True))
        assert [(step.name, step.act, step.wave) for step in planned] == [
            ("web-1", "change", 1),
            ("web-2", "change", 2),
            ("web-3", "delete", 3),
        ]
        done = await world.client.apply(text(2, healthy=True), wait_s=120)
        assert (done.counts, done.deleting) == ({"change": 2, "delete": 1}, ["web-3"])
        assert await world.client.names() == ["web-1", "web-2"]
        undone = await world.client.undo("web")
        await world.client.wait_rollout(undone.id, timeout_s=120)
        await until(lambda: "web-3" in world.registry.state.resources)
        assert world.registry.state.resources["web-1"].spec.config == {}
        put = await world.client.put("web-2", labels={"by": "hand"})
        assert (put.spec.entry, put.spec.index, put.spec.labels) == ("web", 2, {"by": "hand"})
        with pytest.raises(errors.InvalidInput, match="several resources"):
            await world.client.create({"name": "api", "type": "service", "count": 2})
        with pytest.raises(errors.InvalidInput, match="changes with its manifest"):
            await world.client.put("web-2", count=3)
        await world.client.delete_manifest(text(3))
        await world.client.wait_gone("web-1", "web-2", "web-3", timeout_s=60)

    run(scenario)
