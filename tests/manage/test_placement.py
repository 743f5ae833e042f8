"""From the entries of a manifest to specifications, given the existing resources."""

from __future__ import annotations

import collections
import contextlib
import json
from typing import Any

import msgspec
import pytest

from muster.core import errors
from muster.manage import manifest, protocol
from muster.manage.registry import agent_selection, assignments, records, views


def entry(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "type": "memory", "agent": "a", **more}


def having(*entries: dict[str, Any]) -> assignments.AssignmentProcessor:
    state = assignments.AssignmentProcessor(term=1, ttl_s=15.0)
    state.accept(state.apply(agent_selection.place_entries(state, list(entries)), "test"))
    return state


def test_a_circle_is_found_through_what_is_there_already():
    state = having(entry("c"), entry("b", depends_on=["c"]), entry("a", depends_on=["b"]))
    with pytest.raises(errors.InvalidInput, match=r"cycle: . -> . -> . -> ."):
        agent_selection.place_entries(state, [entry("c", depends_on=["a"])])
    assert agent_selection.place_entries(state, [entry("d", depends_on=["a"])])[0].depends_on == ("a",)


def test_nothing_can_depend_on_what_is_being_deleted():
    state = having(entry("db"))
    state.accept(state.delete(["db"], "test"))
    with pytest.raises(errors.Conflict, match="'web' depends on 'db', which is being deleted"):
        agent_selection.place_entries(state, [entry("web", depends_on=["db"])])


def test_what_a_dependency_needs_may_have_been_forgotten_with_its_agent():
    state = having(entry("gone"), entry("b", depends_on=["gone"]))
    state.accept(records.RegistryChanges(resources={"gone": None}))
    assert agent_selection.place_entries(state, [entry("new", depends_on=["b"])])
    with pytest.raises(errors.InvalidInput, match="'gone', which does not exist"):
        agent_selection.place_entries(state, [entry("b", depends_on=["gone"])])


def test_a_circle_is_found_within_what_is_new():
    with pytest.raises(errors.InvalidInput, match="cycle"):
        agent_selection.place_entries(having(), [entry("a", depends_on=["b"]), entry("b", depends_on=["a"])])


def test_a_group_has_those_that_are_there_and_those_that_come_with_it():
    state = having(entry("old", group="db"))
    place_entries = agent_selection.place_entries(
        state, [entry("new", group="db"), entry("web", depends_on=["group:db"])]
    )
    assert place_entries[1].depends_on == ("new", "old")


def test_resources_go_where_least_is_and_each_counts_for_the_next():
    state = having(entry("one"))
    for name in ("a", "b"):
        state.agents[name] = records.AgentRecord(types=("memory",))
    free = [{"name": f"n{number}", "type": "memory", "where": "zone = 'default'"} for number in range(3)]
    assert [place_entry.agent for place_entry in agent_selection.place_entries(state, free)] == [
        "b",
        "a",
        "b",
    ]


def test_many_are_placed_without_looking_at_every_agent_for_each(monkeypatch):
    state, looked = having(), 0
    for number in range(200):
        state.agents[f"a{number:03}"] = records.AgentRecord(
            types=("memory",), labels={"rack": str(number % 2)}
        )
    attributes = views.agent_attributes

    def counted(name: str, agent: records.AgentRecord) -> dict[str, Any]:
        nonlocal looked
        looked += 1
        return attributes(name, agent)

    monkeypatch.setattr(views, "agent_attributes", counted)
    wheres = ["rack = '1'", "rack IN ('0', '1')"]
    entries = [{"name": f"n{i}", "type": "memory", "where": wheres[i % 2]} for i in range(400)]
    counter = collections.Counter(
        place_entry.agent for place_entry in agent_selection.place_entries(state, entries)
    )
    assert looked == 400, "each agent once for each expression"
    assert set(counter.values()) == {2}, "evenly, although both select some of the same"


def test_what_depends_on_a_large_group_is_refused_by_name():
    many = [entry(f"n{number}", group="db") for number in range(protocol.DEPENDENCIES_MAX + 1)]
    last = entry("web", depends_on=["group:db"])
    state = having(*many[:-1])
    assert len(agent_selection.place_entries(state, [last])[0].depends_on) == protocol.DEPENDENCIES_MAX
    with pytest.raises(errors.LimitExceeded, match="'web' depends on more than 1000 resources"):
        agent_selection.place_entries(state, [many[-1], last])
    with pytest.raises(
        manifest.ManifestError, match=r"resources\[1001\].depends_on: 'web' depends on more than 1000"
    ):
        manifest.read(json.dumps({"resources": [*many, last]}), {"memory": lambda _: None})


def test_a_specification_that_fits_into_no_message_is_refused():
    labels = {f"label{number}": "x" * 1_000 for number in range(600)}
    with pytest.raises(errors.LimitExceeded, match="the specification of 'web' is over"):
        agent_selection.place_entries(having(), [entry("web", labels=labels)])


def test_the_largest_configuration_and_specification_are_accepted_and_a_byte_more_is_not():
    largest = protocol.CONFIG_BYTES_MAX - len('{"text":""}')
    for size, refused in ((largest, False), (largest + 1, True)):
        with pytest.raises(errors.LimitExceeded) if refused else contextlib.nullcontext():
            agent_selection.place_entries(having(), [entry("web", config={"text": "x" * size})])
    least = agent_selection.place_entries(having(), [entry("web", labels={"text": "x"})])[0]
    largest = protocol.SPEC_BYTES_MAX - len(msgspec.json.encode(least)) + 1
    for size, refused in ((largest, False), (largest + 1, True)):
        with pytest.raises(errors.LimitExceeded) if refused else contextlib.nullcontext():
            agent_selection.place_entries(having(), [entry("web", labels={"text": "x" * size})])


def test_the_value_of_a_secret_is_refused_with_its_place():
    with pytest.raises(
        errors.InvalidInput, match=r"config\.db\.password contains the value of a secret"
    ) as caught:
        agent_selection.place_entries(having(), [entry("web", config={"db": {"password": "pw"}})])
    assert caught.value.hint == manifest.REFERENCE_HINT
    reference = {"db": {"password": {"secret": "env:PW"}}}
    assert agent_selection.place_entries(having(), [entry("web", config=reference)])[0].config == reference


# Agents


def fleet(**agents: records.AgentRecord) -> assignments.AssignmentProcessor:
    state = having()
    state.agents.update(agents)
    return state


def place(state: assignments.AssignmentProcessor, *names: str, where: str = "zone = 'default'") -> list[str]:
    entries = [{"name": name, "type": "memory", "where": where} for name in names]
    return [spec.agent for spec in agent_selection.place_entries(state, entries)]


@pytest.mark.parametrize(
    ("agent", "refused"),
    [
        (None, False),  # not enrolled yet
        (records.AgentRecord(types=()), False),  # its types are unknown
        (records.AgentRecord(types=("process", "memory")), False),
        (records.AgentRecord(types=("process",)), True),
    ],
)
def test_a_named_agent_is_refused_only_if_it_is_known_to_lack_the_adapter(agent, refused):
    state = fleet() if agent is None else fleet(a=agent)
    if refused:
        with pytest.raises(errors.InvalidInput, match="'a' has no adapter of type 'memory'"):
            agent_selection.place_entries(state, [entry("web")])
    else:
        assert agent_selection.place_entries(state, [entry("web")])[0].agent == "a"


def test_an_entry_selects_its_agent():
    with pytest.raises(errors.InvalidInput, match="'web': `agent` or `where` is required"):
        agent_selection.place_entries(having(), [{"name": "web", "type": "memory"}])


@pytest.mark.parametrize(
    "other",
    [
        records.AgentRecord(types=("memory",), cordoned=True),
        records.AgentRecord(types=("process",)),
        records.AgentRecord(types=()),
        records.AgentRecord(types=("memory",), zone="south"),
    ],
)
def test_only_agents_that_fit_are_chosen(other):
    state = fleet(a=other, b=records.AgentRecord(types=("memory", "process")))
    assert place(state, "n1", "n2") == ["b", "b"]


def test_each_new_resource_counts_as_one():
    state = having(entry("one"), entry("two"))
    for name in ("a", "b"):
        state.agents[name] = records.AgentRecord(types=("memory",))
    assert place(state, "n1", "n2", "n3", "n4", "n5") == ["b", "b", "a", "b", "a"]


def test_what_is_placed_stays_while_its_agent_fits_although_another_has_less():
    state = having(entry("one"), entry("two"))
    state.agents["a"] = records.AgentRecord(types=("memory",))
    state.agents["b"] = records.AgentRecord(types=("memory",), labels={"rack": "7"})
    assert place(state, "one") == ["a"]
    assert place(state, "one", where="rack = '7'") == ["b"]
    assert place(state, "new") == ["b"]


def test_expressions_that_select_the_same_agents_share_their_counts():
    state = fleet(**{name: records.AgentRecord(types=("memory",), labels={"rack": "7"}) for name in "abc"})
    entries = [
        {"name": f"n{number}", "type": "memory", "where": where}
        for number, where in enumerate(["rack = '7'", "zone = 'default'"] * 3)
    ]
    assert [spec.agent for spec in agent_selection.place_entries(state, entries)] == [*"abcabc"]


@pytest.mark.parametrize(
    ("where", "hint"),
    [
        ("zone = 'south'", None),
        ("zoen = 'default'", "no agent has an attribute zoen; did you mean zone?"),
        ("zone = 'south' AND xyzzy = 1 AND zoen = 2", "no agent has an attribute xyzzy"),
    ],
)
def test_where_nothing_fits_the_first_unknown_attribute_is_named(where, hint):
    with pytest.raises(errors.Unavailable, match="'n1': no known agent matches") as caught:
        place(fleet(a=records.AgentRecord(types=("memory",))), "n1", where=where)
    assert caught.value.hint == hint


def test_without_any_agent_no_attribute_is_blamed():
    with pytest.raises(errors.Unavailable) as caught:
        place(fleet(), "n1", where="zoen = 'default'")
    assert caught.value.hint is None


def test_what_is_on_a_drained_machine_stays_there_when_it_is_applied_again():
    drained = records.AgentRecord(types=("memory",), cordoned=True)
    state = having(entry("one"))
    state.agents.update(a=drained, b=records.AgentRecord(types=("memory",)))
    again = [{"name": "one", "type": "memory", "where": "zone = 'default'", "labels": {"tier": "2"}}]
    state.accept(state.apply(agent_selection.place_entries(state, again), "test"))
    assert (state.resources["one"].spec.agent, state.resources["one"].generation) == ("a", 2)
    assert place(state, "one", "new") == ["a", "b"]
    state.agents["b"] = drained
    assert place(state, "one") == ["a"]
    with pytest.raises(errors.Unavailable, match=r"'new': all agents that match .* are drained"):
        place(state, "one", "new")
