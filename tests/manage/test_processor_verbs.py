"""Requests of users and managers to the registry, and the replies, case by case."""

from __future__ import annotations

from typing import Any

import pytest

from muster.core import errors
from muster.manage import protocol
from muster.manage.registry import assignments, records
from tests.manage.assignment_cases import DOWN, DRAINED, UP, State, check, having, report, spec, two

# Applying


def test_what_is_applied_again_has_a_new_generation_where_it_differs():
    core = having(spec("x"))
    assert (core.resources["x"].generation, core.resources["x"].by) == (1, "ann")
    assert not core.apply([spec("x")], "bob")
    core.accept(core.apply([spec("x", group="g")], "bob"))
    assert (core.resources["x"].generation, core.resources["x"].by) == (2, "bob")
    core.accept(core.rename("x", "y", "ann"))
    core.accept(core.apply([spec("y", group="h")], "ann"))
    assert (core.resources["y"].generation, core.resources["y"].formerly) == (4, "x")


@pytest.mark.parametrize(
    ("applied", "match"),
    [
        (spec("x", agent="b"), "'x' is on 'a' and cannot move to 'b'"),
        (spec("x", type="process"), "'x' is a memory and cannot become a process"),
        (spec("leaving"), "'leaving' is being deleted"),
        (spec("old"), "'old' is being renamed"),
    ],
)
def test_what_cannot_be_applied(applied: protocol.ResourceSpec, match: str):
    core = having(spec("x"), spec("old"), spec("leaving"))
    core.accept(core.rename("old", "new", "ann"))
    core.accept(core.delete(["leaving"], "ann"))
    with pytest.raises(errors.Conflict, match=match):
        core.apply([spec("fine"), applied], "ann")


# Draining


@pytest.mark.parametrize(
    ("before", "desired", "then"),
    [
        (UP, DRAINED, DRAINED),
        (UP, UP, None),
        (DOWN, DRAINED, None),
        (DOWN, UP, None),  # it was not drained
        (DRAINED, UP, UP),
        (DRAINED, DRAINED, None),
    ],
)
def test_draining_and_its_end(before, desired, then):
    core = having(spec("x", desired=before))
    changes = core.set_desired("x", desired, "bob")
    if then is None:
        assert not changes
    else:
        assert changes.resources == {
            "x": records.ResourceRecord(spec=spec("x", desired=then), generation=2, by="bob")
        }
    core.accept(core.delete(["x"], "ann"))
    assert not core.set_desired("x", desired, "bob"), "it is being deleted"


def test_a_machine_is_drained_and_what_is_on_it_cannot_be_undrained():
    core = having(spec("x"), spec("down", desired=DOWN))
    core.accept(records.RegistryChanges(agents={"a": records.AgentRecord(zone="north")}))
    assert not core.set_desired("a", UP, "ann")
    changes = core.set_desired("a", DRAINED, "ann")
    assert changes.agents == {"a": records.AgentRecord(zone="north", cordoned=True)}
    core.accept(changes)
    assert not core.set_desired("a", DRAINED, "ann")
    with pytest.raises(errors.Conflict, match="'x' is on 'a', which is drained"):
        core.set_desired("x", UP, "ann")
    assert core.set_desired("x", DRAINED, "ann"), "also when the machine works again"
    assert not core.set_desired("down", UP, "ann")
    core.accept(core.set_desired("a", UP, "ann"))
    assert not core.agents["a"].cordoned
    with pytest.raises(errors.NotFound, match="no resource or agent 'b'"):
        core.set_desired("b", DRAINED, "ann")


# Renaming


def test_a_renamed_resource_keeps_its_owner_and_status_under_a_higher_epoch():
    core = two()
    report(core, "db")
    changes = core.rename("db", "store", "bob")
    assert core.accept(changes) == {"m", "n"}
    assert "db" not in core.resources
    assert "db" not in core.statuses
    assert core.resources["store"] == records.ResourceRecord(
        spec=spec("store", agent="b"), generation=2, by="bob", formerly="db"
    )
    assert core.owners["store"] == records.ResourceOwner(manager="n", epoch=3, boot=1)
    assert core.statuses["store"].state is State.UP
    assert core.resources["web"].spec.depends_on == ("store",)
    assert core.resources["web"].generation == 1, "nothing else of it changed"
    check(core)


def test_what_depends_on_several_follows_the_one_that_is_renamed():
    core = having(spec("a1"), spec("a2"), spec("web", depends_on=("a1", "a2")))
    core.accept(core.rename("a2", "a3", "ann"))
    assert core.resources["web"].spec.depends_on == ("a1", "a3")
    assert (core.owners, core.statuses) == ({}, {}), "they had no manager"


@pytest.mark.parametrize(
    ("name", "to", "error", "match"),
    [
        ("none", "new", errors.NotFound, "no resource 'none'"),
        ("x", "other", errors.AlreadyExists, "the resource 'other' already exists"),
        ("x", "old", errors.Conflict, "'old' is being renamed"),
        ("moved", "third", errors.Conflict, "'moved' is being renamed"),
        ("leaving", "new", errors.Conflict, "'leaving' is being deleted"),
        ("broker", "new", errors.Refused, "belongs to a topology"),
        ("x", "not a name", errors.InvalidInput, "not a name"),
    ],
)
def test_what_cannot_be_renamed(name: str, to: str, error: type[Exception], match: str):
    core = having(
        spec("x"), spec("other"), spec("old"), spec("leaving"), spec("broker", labels={"topology": "t"})
    )
    core.accept(core.rename("old", "moved", "ann"))
    core.accept(core.delete(["leaving"], "ann"))
    with pytest.raises(error, match=match):
        core.rename(name, to, "ann")


def test_one_that_is_being_renamed_can_be_renamed_back():
    core = having(spec("old"), spec("x"))
    core.accept(core.rename("old", "new", "ann"))
    core.accept(core.rename("new", "old", "ann"))
    assert (core.resources["old"].formerly, core.resources["old"].generation) == ("new", 3)


# Deleting


def test_what_others_need_is_deleted_only_with_them():
    core = two()
    with pytest.raises(errors.Conflict, match=r"web depend\(s\) on 'db'"):
        core.delete(["db"], "ann")
    with pytest.raises(errors.NotFound, match="no resource 'none'"):
        core.delete(["none"], "ann")
    assert core.delete(["db", "web"], "ann").resources.keys() == {"db", "web"}
    core.accept(core.delete(["web"], "bob"))
    web = core.resources["web"]
    assert (web.deleting, web.by, web.generation) == (True, "bob", 2)
    assert not core.delete(["web"], "ann"), "it is being deleted"
    core.accept(core.delete(["db"], "ann"))
    assert core.resources["db"].deleting


def test_what_needed_it_once_does_not_keep_it():
    core = two()
    core.accept(core.apply([spec("web")], "ann"))
    assert core.delete(["db"], "ann")


def test_by_force_it_is_removed_at_once():
    core = two()
    report(core, "web")
    changes = core.delete(["web"], "ann", force=True)
    nothing = {"web": None}
    assert (changes.resources, changes.owners, changes.statuses) == (nothing, nothing, nothing)
    assert core.accept(changes) == {"n"}
    check(core)


def test_with_a_machine_that_is_forgotten_its_resources_go():
    core = two()
    core.accept(records.RegistryChanges(agents={"a": records.AgentRecord()}))
    with pytest.raises(errors.NotFound, match="no agent 'b'"):
        core.forget("b")
    core.accept(core.forget("a"))
    assert (set(core.resources), set(core.owners)) == ({"db", "alone"}, {"db"})
    assert core.agents == {"a": records.AgentRecord(cordoned=True, forgotten=True)}
    check(core)
    core.accept(core.remove_agent("a"))
    assert core.agents == {}
    assert not core.remove_agent("a")


def test_the_resources_of_a_live_machine_that_is_forgotten_are_deleted_by_their_managers():
    core = two()
    core.accept(records.RegistryChanges(agents={"a": records.AgentRecord()}))
    with pytest.raises(errors.Conflict, match="not forgotten"):
        core.remove_agent("a")
    core.accept(core.forget("a", "ann", is_live=True))
    assert {name for name, resource in core.resources.items() if resource.deleting} == {"web"}
    assert core.resources["web"].by == "ann"
    assert not core.forget("a", "bob", is_live=True).resources, "they are being deleted already"


def test_a_forgotten_machine_returns_to_service_with_an_undrain():
    core = two()
    core.accept(records.RegistryChanges(agents={"a": records.AgentRecord()}))
    core.accept(core.forget("a"))
    core.accept(core.set_desired("a", protocol.DesiredState.UP, "ann"))
    assert core.agents == {"a": records.AgentRecord()}


# Checkpoints


def checkpoint(
    core: assignments.AssignmentProcessor, name: str, epoch: int, **fields: Any
) -> tuple[Any, dict[str, int]]:
    return core.apply_checkpoints("m", {name: (epoch, protocol.ResourceStatus(**fields))})


def test_only_checkpoints_of_the_owner_with_its_epoch_are_accepted():
    core = two()
    assert checkpoint(core, "web", 1)[1] == {}
    assert checkpoint(core, "web", 0)[1] == {"web": 1}
    assert checkpoint(core, "web", 2)[1] == {"web": 1}
    assert checkpoint(core, "db", 2)[1] == {"db": 2}, "another manager's"
    assert checkpoint(core, "alone", 1)[1] == {"alone": 0}, "it has no manager"
    assert checkpoint(core, "none", 1)[1] == {"none": 0}
    for name, epoch in (("web", 0), ("db", 2), ("none", 1)):
        assert not checkpoint(core, name, epoch)[0]


def test_an_agent_that_obeys_a_higher_epoch_gets_one_above():
    core = two()
    for superseded_by, epoch in (
        (1, None),
        (2, 3),
        (900, 901),
        (assignments.EPOCH_MAX - 1, assignments.EPOCH_MAX),
    ):
        changes, refused = checkpoint(core, "web", 1, superseded_by=superseded_by)
        assert not refused
        if epoch is None:
            assert list(changes.statuses) == ["web"], "that is its own"
        else:
            assert changes.owners == {"web": records.ResourceOwner(manager="m", epoch=epoch, boot=1)}
            assert not changes.statuses
    changes, refused = checkpoint(core, "web", 1, superseded_by=assignments.EPOCH_MAX)
    assert (bool(changes), refused) == (False, {"web": 1})


def test_what_is_gone_is_removed_where_that_was_asked_for():
    core = two()
    changes, _ = checkpoint(core, "web", 1, gone=True)
    assert list(changes.statuses) == ["web"]
    assert not changes.resources, "it was not deleted"
    core.accept(core.delete(["web"], "ann"))
    changes, _ = checkpoint(core, "web", 1)
    assert not changes.resources, "it is still there"
    changes, _ = checkpoint(core, "web", 1, gone=True)
    nothing = {"web": None}
    assert (changes.resources, changes.owners, changes.statuses) == (nothing, nothing, nothing)


def test_a_renaming_ends_when_its_desired_state_was_applied():
    core = two()
    core.accept(core.rename("web", "site", "ann"))
    epoch = core.owners["site"].epoch
    assert not checkpoint(core, "site", epoch, generation=1)[0].resources
    changes, _ = checkpoint(core, "site", epoch, generation=2)
    assert changes.resources["site"].formerly == ""
    core.accept(changes)
    assert not checkpoint(core, "site", epoch, generation=2)[0].resources, "once"
