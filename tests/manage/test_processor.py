"""Records, assignments and messages to managers; `test_registry_model` tests them with random events."""

from __future__ import annotations

import collections

import msgspec
import pytest

from muster.manage import protocol
from muster.manage.registry import assignments, records
from tests.manage.assignment_cases import (
    DOWN,
    DRAINED,
    UP,
    State,
    assign,
    check,
    having,
    own,
    pages,
    renew,
    report,
    spec,
    two,
)


def test_changes_are_true_where_there_is_something_to_write():
    assert not records.RegistryChanges(epoch=7)
    record = records.ResourceRecord(spec=spec("x"), generation=1)
    for changes in (
        records.RegistryChanges(resources={"x": record}),
        records.RegistryChanges(owners={"x": None}),
        records.RegistryChanges(statuses={"x": None}),
        records.RegistryChanges(agents={"a": None}),
    ):
        assert changes


def test_the_resources_of_a_manager_are_counted():
    core = having(spec("x", agent="a"), spec("y", agent="b"), spec("z", agent="b"))
    own(core, {"x": "m1", "y": "m1", "z": "m2"})
    assert [core.owned_count(manager) for manager in ("m1", "m2", "m3")] == [2, 1, 0]


# What was stored, and which managers are informed


def test_managers_are_notified_of_a_machine_that_is_drained_or_works_again():
    core = two()
    for agent, received in (
        (records.AgentRecord(), set()),
        (records.AgentRecord(cordoned=True), {"m"}),
        (records.AgentRecord(cordoned=True, zone="north"), set()),
        (records.AgentRecord(), {"m"}),
        (None, set()),
        (records.AgentRecord(cordoned=True), {"m"}),
    ):
        assert core.accept(records.RegistryChanges(agents={"a": agent})) == received
        assert core.agents.get("a") == agent
    assert core.epoch == 2, "what gives no epoch takes none back"


def test_managers_are_notified_of_changes_of_a_resource_its_dependencies_and_dependants():
    core = two()
    changed = core.apply([spec("db", agent="b", group="g")], "ann")
    assert core.accept(changed) == {"m", "n"}
    changed = core.apply([spec("web", depends_on=("db",), group="g")], "ann")
    assert core.accept(changed) == {"m", "n"}
    assert core.accept(core.apply([spec("alone", agent="c", group="g")], "ann")) == set(), "it has no owner"
    removed = records.RegistryChanges(resources={"web": None}, owners={"web": None})
    assert core.accept(removed) == {"n"}
    check(core)


def test_managers_are_notified_of_a_new_owner():
    core = two()
    changes = records.RegistryChanges(
        owners={"alone": records.ResourceOwner(manager="n", epoch=9, boot=1)}, epoch=9
    )
    assert core.accept(changes) == {"n"}
    assert core.epoch == 9
    core.accept(records.RegistryChanges(epoch=4))
    assert core.epoch == 9


def test_dependants_are_notified_when_it_comes_up_or_goes_down():
    core = two()
    for state, received in (
        (State.STARTING, {"m"}),  # the first that is known of it
        (State.LATE, set()),
        (State.UP, {"m"}),
        (State.UP, set()),
        (State.DOWN, {"m"}),
        (State.FAILED, set()),
    ):
        assert report(core, "db", state) == received, state
    core.accept(records.RegistryChanges(statuses={"db": None, "web": None}))
    assert core.statuses == {}


def test_the_names_stay_sorted():
    core = having(spec("b"), spec("c"))
    assert core.sorted_names == ["b", "c"]
    core.accept(core.apply([spec("a")], "ann"))
    assert core.sorted_names == ["a", "b", "c"]
    core.accept(records.RegistryChanges(resources={"b": None}))
    assert core.sorted_names == ["a", "c"]
    core.accept(core.apply([spec("a", group="g")], "ann"))
    assert core.sorted_names == ["a", "c"]
    assert core.sorted_names is core.sorted_names, "it is kept"


def test_with_a_resource_its_status_goes():
    core = two()
    report(core, "db")
    core.accept(records.RegistryChanges(resources={"db": None}, owners={"db": None}))
    assert core.statuses == {}
    check(core)


# Managers


def test_reports_of_a_manager_may_change_assignments():
    core = having()
    for boot, leaving, matters in (
        (1, False, True),
        (1, False, False),
        (2, False, True),
        (2, True, True),
        (2, True, False),
        (2, False, True),
    ):
        assert core.renew("m", protocol.RenewRequest(boot=boot, leaving=leaving), 0.0) is matters
    assert core.renewed == {"m"}


def test_no_renewal_outlasts_the_time_that_a_successor_waits():
    core = having()
    assert core.ttl_s == 15.0
    assert core.granted_s(13.5) == core.granted_s(11.25) == 15.0, "the registry renews its lease"
    assert core.granted_s(3.0) == 6.75
    assert core.granted_s(0.0) == 3.75
    now = 100.0
    assert core.unknown_until(now, None) == 115.0, "a full time to live if nothing is known"
    assert core.unknown_until(now, 98.5) == 104.5, "the lease of the former registry has just expired"
    assert core.unknown_until(now, 50.0) == 104.5, "long enough for every manager that lives to renew"
    assert core.unknown_until(now, 112.0) == 115.0
    for lease_s in (0.0, 3.0, 7.5, 13.5):
        granted_at = 90.0
        former_until = granted_at + lease_s
        assert granted_at + core.granted_s(lease_s) <= core.unknown_until(now, former_until)


def test_managers_do_not_expire_because_the_registry_could_not_act():
    core = having()
    renew(core, "m", now=10.0)
    renew(core, "recent", now=29.0)
    core.resume(30.0)
    assert core.expire(34.4) == []
    renew(core, "m", now=34.4)
    assert core.expire(44.0) == ["recent"], "it did not renew again"
    core = having()
    renew(core, "gone", now=10.0)
    core.resume(30.0)
    assert core.expire(34.5) == ["gone"]


def test_a_shorter_renewal_expires_sooner():
    core = having()
    core.renew("m", protocol.RenewRequest(boot=1), 10.0, ttl_s=8.0)
    assert core.next_expiry() == 18.0


def test_a_manager_expires_when_its_time_is_over_and_not_before():
    core = having()
    assert core.next_expiry() is None
    renew(core, "late", now=10.0)
    renew(core, "later", now=11.0)
    assert core.next_expiry() == 25.0
    assert core.expire(24.9) == []
    assert core.expire(25.0) == ["late"]
    assert (list(core.managers), core.renewed, core.next_expiry()) == (["later"], {"late", "later"}, 26.0)


@pytest.mark.parametrize(
    ("connection", "grace_s", "name", "expires_at"),
    [(7, 2.0, "m", 5.0), (7, 60.0, "m", 15.0), (8, 2.0, None, 15.0)],
)
def test_a_manager_whose_connection_closed_has_a_short_time_left(connection, grace_s, name, expires_at):
    core = having()
    renew(core, "other", broker="b", connection=9)
    renew(core, "m", broker="b", connection=7)
    assert core.connection_closed("b", connection, 3.0, grace_s) == name
    assert core.connection_closed("c", 7, 3.0, grace_s) is None, "another broker's"
    assert (core.managers["m"].expires_at, core.managers["other"].expires_at) == (expires_at, 15.0)


# Pages


def test_a_manager_is_sent_what_it_does_not_know_yet():
    core = two()
    (first,), totals = pages(core, "m", protocol.RenewRequest(boot=1))
    assert (first.term, first.session, first.ttl_s, first.anew, first.more) == (1, 100, 15.0, True, False)
    assert [(resource.spec.name, resource.epoch) for resource in first.assigned] == [("web", 1)]
    assert (first.revision, totals.revision) == (core.changes.revision,) * 2
    (second,), totals = pages(core, "m", totals)
    assert (second.anew, second.assigned, second.released) == (False, (), ())
    own(core, {"web": "n"})
    (third,), totals = pages(core, "m", totals)
    assert (third.anew, third.assigned, third.released) == (False, (), ("web",))
    own(core, {"web": "m"})
    own(core, {"web": "n"})
    own(core, {"web": "m"})
    (fourth,), totals = pages(core, "m", totals)
    assert ([resource.spec.name for resource in fourth.assigned], fourth.released) == (["web"], ())


@pytest.mark.parametrize("field", ["term", "session", "revision"])
def test_renewals_of_another_registry_are_ignored(field: str):
    core = two()
    _, totals = pages(core, "m", protocol.RenewRequest(boot=1))
    granted = core.renewal_page("m", msgspec.structs.replace(totals, **{field: getattr(totals, field) + 1}))
    assert granted.anew
    assert [resource.spec.name for resource in granted.assigned] == ["web"]


def test_an_expired_manager_gets_all_assignments_again():
    core = two()
    _, totals = pages(core, "m", protocol.RenewRequest(boot=1))
    for number in (1, 2):
        core.managers["m"].expires_at = 0.0
        assert core.expire(0.0) == ["m"]
        own(core, {"alone": "n"})
        renew(core, "m")
        granted = core.renewal_page("m", totals)
        assert (granted.anew, granted.session) == (True, 100 + number)
        assert [resource.spec.name for resource in granted.assigned] == ["web"]
        _, totals = pages(core, "m", totals)
        check(core)
    assert not core.renewal_page("n", pages(core, "n", protocol.RenewRequest(boot=1))[1]).anew, (
        "the others go on"
    )


def test_what_an_expired_manager_loses_is_not_kept_for_it():
    core = two()
    core.managers["m"].expires_at = 0.0
    core.expire(0.0)
    own(core, {"web": "n"})
    check(core)
    core = two()
    own(core, {"web": "n"})
    core.managers["m"].expires_at = 0.0
    core.expire(0.0)
    check(core)


@pytest.mark.parametrize(
    ("count", "sizes"), [(0, [0]), (1, [1]), (2, [2]), (3, [3]), (4, [3, 1]), (6, [3, 3]), (7, [3, 3, 1])]
)
def test_a_page_has_no_more_than_so_many(count: int, sizes: list[int], monkeypatch):
    monkeypatch.setattr(protocol, "PAGE", 3)
    names = [f"r{number}" for number in range(count)]
    core = having(*map(spec, names))
    renew(core, "m", "n")
    own(core, dict.fromkeys(names, "m"))
    actual, totals = pages(core, "m", protocol.RenewRequest(boot=1))
    assert [len(page.assigned) for page in actual] == sizes
    assert sorted(resource.spec.name for page in actual for resource in page.assigned) == names
    own(core, dict.fromkeys(names, "n"))
    actual, _ = pages(core, "m", totals)
    assert [len(page.released) for page in actual] == sizes
    assert sorted(item for page in actual for item in page.released) == names


def test_a_page_has_no_more_than_so_many_bytes_but_one_item_at_least(monkeypatch):
    names = [f"r{number}" for number in range(6)]
    core = having(*map(spec, names))
    renew(core, "m", "n")
    own(core, dict.fromkeys(names, "m"))
    (complete,), totals = pages(core, "m", protocol.RenewRequest(boot=1))
    size = len(msgspec.msgpack.encode(complete.assigned[0]))
    for max_bytes, sizes in ((1, [1] * 6), (2 * size, [2, 2, 2]), (3 * size - 1, [2, 2, 2])):
        monkeypatch.setattr(protocol, "PAGE_BYTES", max_bytes)
        actual, _ = pages(core, "m", protocol.RenewRequest(boot=1))
        assert [len(page.assigned) for page in actual] == sizes
        assert sorted(resource.spec.name for page in actual for resource in page.assigned) == names
    own(core, dict.fromkeys(names, "n"))
    monkeypatch.setattr(protocol, "PAGE_BYTES", 1)
    actual, _ = pages(core, "m", totals)
    assert [len(page.released) for page in actual] == [1] * 6


# What a resource waits for


@pytest.mark.parametrize(
    ("cordoned", "desired", "in_force"),
    [
        (None, UP, UP),
        (False, UP, UP),
        (True, UP, DRAINED),
        (True, DOWN, DOWN),
        (True, DRAINED, DRAINED),
        (False, DOWN, DOWN),
    ],
)
def test_on_a_drained_machine_nothing_runs(cordoned, desired, in_force):
    core = having(spec("web", desired=desired))
    if cordoned is not None:
        core.accept(records.RegistryChanges(agents={"a": records.AgentRecord(cordoned=cordoned)}))
    assert core.desired_state("web") is in_force


def test_it_waits_until_its_dependencies_are_up_or_not_meant_to_run():
    core = two()
    assert core.waits_for("web") == ("db",)
    assert core.waits_for("db") == ()
    report(core, "db", State.STARTING)
    assert core.waits_for("web") == ("db",)
    report(core, "db", State.UP)
    assert core.waits_for("web") == ()
    report(core, "db", State.DOWN)
    assert core.waits_for("web") == ("db",)
    core.accept(core.apply([spec("db", agent="b", desired=DOWN)], "ann"))
    assert core.waits_for("web") == ()


def test_what_ran_once_waits_for_nothing():
    core = two()
    report(core, "web", generation=0)
    assert core.waits_for("web") == ("db",), "it was never brought there"
    report(core, "web", State.DOWN, generation=1)
    assert core.waits_for("web") == ()


def test_it_waits_for_what_is_not_there():
    core = two()
    core.accept(records.RegistryChanges(resources={"db": None}, owners={"db": None}))
    assert core.waits_for("web") == ("db",)


def test_what_is_deleted_waits_for_what_needs_it_and_is_deleted_too():
    core = two()
    core.accept(core.delete(["db", "web"], "ann"))
    assert core.waits_for("db") == ("web",)
    assert core.waits_for("web") == ()
    core.accept(records.RegistryChanges(resources={"web": None}, owners={"web": None}))
    assert core.waits_for("db") == ()


def test_only_the_first_names_it_waits_for_are_shown(monkeypatch):
    monkeypatch.setattr(assignments, "WAITS_MAX", 2)
    needs = ("d", "b", "c")
    core = having(*map(spec, needs), spec("web", depends_on=needs))
    assert core.waits_for("web") == ("d", "b"), "in its own order"
    users = [spec(name, depends_on=("db",)) for name in needs]
    core = having(spec("db"), *users)
    core.accept(core.delete(["db", *needs], "ann"))
    assert core.waits_for("db") == ("b", "c")


def test_an_assignment_contains_all_that_a_manager_needs():
    core = two()
    report(core, "db")
    core.accept(records.RegistryChanges(agents={"b": records.AgentRecord(cordoned=True)}))
    core.accept(core.rename("db", "store", "bob"))
    renamed = core.assignment("store")
    assert (renamed.spec.name, renamed.spec.desired, renamed.generation) == ("store", DRAINED, 2)
    assert (renamed.formerly, renamed.deleting, renamed.waits_for) == ("db", False, ())
    assert renamed.epoch == core.owners["store"].epoch == 3
    assert renamed.status is not None
    assert renamed.status.state is State.UP
    core.accept(core.delete(["web"], "ann"))
    assert core.assignment("web").deleting


# Assignments


def counts(core: assignments.AssignmentProcessor) -> list[int]:
    counter = collections.Counter(owner.manager for owner in core.owners.values())
    return [counter[name] for name in sorted(core.managers)]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        # Two of four too many: two are moved. One too many: it is left.
        ([4, 0], [2, 2]),
        ([3, 1], [3, 1]),
        ([1, 3], [1, 3]),
        # An even share of 20: up to a tenth more stays …
        ([22, 18], [22, 18]),
        ([23, 17], [20, 20]),
        # … unless another lacks more than a tenth.
        ([22, 22, 16], [20, 20, 20]),
        ([21, 21, 17], [20, 20, 19]),
        ([21, 21, 18], [21, 21, 18]),
        ([10, 0, 0], [4, 3, 3]),
    ],
)
def test_resources_are_moved_only_where_managers_differ_much(before: list[int], after: list[int]):
    owners = {
        f"r{manager}-{number:02}": f"m{manager}"
        for manager, count in enumerate(before)
        for number in range(count)
    }
    core = having(*map(spec, owners))
    renew(core, *(f"m{manager}" for manager in range(len(before))))
    own(core, owners)
    changes = core.assign()
    core.accept(changes)
    assert counts(core) == after
    assert len(changes.owners) == sum(max(0, had - has) for had, has in zip(before, after, strict=True))
    assert not core.assign(), "once is enough"
    check(core)


def test_what_has_no_owner_goes_to_those_that_have_least():
    core = having(spec("x"), spec("y"), spec("z"))
    renew(core, "m", "n")
    own(core, {"x": "m"})
    core.accept(core.apply([spec("new"), spec("newer")], "ann"))
    changes = core.assign()
    assert [owner and owner.manager for owner in changes.owners.values()] == ["n", "m", "n", "m"]
    assert [owner and owner.epoch for owner in changes.owners.values()] == [2, 3, 4, 5]
    assert changes.epoch == 5


def test_the_first_epoch_is_one():
    core = having(spec("x"), spec("y"))
    renew(core, "m", boot=7)
    changes = core.assign()
    assert changes.owners == {
        "x": records.ResourceOwner(manager="m", epoch=1, boot=7),
        "y": records.ResourceOwner(manager="m", epoch=2, boot=7),
    }


def test_without_managers_nothing_is_assigned():
    core = having(spec("x"))
    assert core.assign() == records.RegistryChanges(epoch=0)
    renew(core, "m", leaving=True)
    assert core.assign() == records.RegistryChanges(epoch=0)


def test_a_manager_that_leaves_was_restarted_or_expired_loses_what_it_has():
    core = having(*map(spec, "wxyz"))
    renew(core, "m", "n")
    own(core, {"w": "m", "x": "m", "y": "n", "z": "n"})
    renew(core, "m", leaving=True)
    assert assign(core) == dict.fromkeys("wxyz", "n")
    renew(core, "n", boot=2)
    before = dict(core.owners)
    assert assign(core) == dict.fromkeys("wxyz", "n")
    for name, owner in core.owners.items():
        assert owner.boot == 2
        assert owner.epoch > before[name].epoch
    renew(core, "o", now=100.0)
    core.expire(100.0)
    assert assign(core) == dict.fromkeys("wxyz", "o")


def test_at_most_so_many_owners_change_at_once(monkeypatch):
    monkeypatch.setattr(assignments, "ASSIGNED_MAX", 2)
    core = having(*map(spec, "vwxyz"))
    renew(core, "m")
    sizes = []
    while changes := core.assign():
        sizes.append(len(changes.owners))
        core.accept(changes)
    assert sizes == [2, 2, 1]


def test_an_epoch_is_above_the_last_of_its_resource_and_of_all():
    core = having(spec("x"), spec("y"))
    renew(core, "m")
    assign(core)
    raised = msgspec.structs.replace(core.owners["x"], epoch=900)
    core.accept(records.RegistryChanges(owners={"x": raised}, epoch=2))
    renew(core, "m", boot=2)
    assign(core)
    assert {name: owner.epoch for name, owner in core.owners.items()} == {"x": 901, "y": 4}
    assert core.epoch == 4, "an agent raises its own resources only"
