"""Who may act: the rules of `muster.bus.tenure`, one by one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from muster.bus import api, tenure
from muster.bus.tenure import Gained, Look, Lost, Phase, Remove, Store

HERE, THERE, LATER = (api.ConnectionId("b", number) for number in (1, 2, 3))
TTL_S = 10.0


def other(connection: api.ConnectionId = THERE) -> tenure.Record:
    return tenure.Record("other", "theirs", connection.broker, connection.number, TTL_S)


def only(instructions: Sequence[tenure.Instruction]) -> tenure.Instruction:
    (instruction,) = instructions
    return instruction


def waiting() -> tenure.Candidate:
    one = tenure.Candidate("me", "mine", ttl_s=TTL_S)
    assert only(one.connected(HERE, 0.0)) == Look()
    return one


def claiming() -> tuple[tenure.Candidate, Store]:
    one = waiting()
    store = only(one.observed(None, None, 0.0))
    assert isinstance(store, Store)
    return one, store


def holding() -> tenure.Candidate:
    one, store = claiming()
    assert only(one.stored(store.attempt, 7, 0.0, 0.1)) == Gained(7)
    assert one.held_at(0.1)
    return one


def test_a_free_lease_is_claimed_and_its_revision_is_the_epoch():
    one, store = claiming()
    assert store.revision is None
    assert (store.record.holder, store.record.epoch) == ("me", 0)
    assert (store.record.broker, store.record.connection) == ("b", 1)
    assert only(one.stored(store.attempt, 7, 0.0, 0.1)) == Gained(7)


def test_one_that_is_held_is_waited_for_until_it_is_gone():
    one = waiting()
    assert not one.observed(5, other(), 0.0)
    assert one.phase is Phase.WAITING
    store = only(one.observed(6, None, 1.0))
    assert isinstance(store, Store)
    assert store.revision is None


@pytest.mark.parametrize("report_first", [True, False])
def test_it_is_taken_at_once_when_the_holders_connection_closed(report_first: bool):
    one = waiting()
    if report_first:
        assert not one.closed(THERE, 0.0)
        taken = one.observed(5, other(), 0.1)
    else:
        assert not one.observed(5, other(), 0.0)
        assert not one.closed(LATER, 0.1), "somebody else's"
        taken = one.closed(THERE, 0.2)
    store = only(taken)
    assert isinstance(store, Store)
    assert store.revision == 5, "compared with what was seen: of several takers one wins"


def test_a_holder_that_roamed_in_time_is_left_alone():
    one = waiting()
    one.observed(5, other(THERE), 0.0)
    one.observed(6, other(LATER), 0.1)
    assert not one.closed(THERE, 0.2)


def test_it_is_renewed_at_a_third_of_its_time():
    one = holding()
    assert one.wake_at == pytest.approx(TTL_S / 3)
    assert not one.tick(3.0)
    renewal = only(one.tick(3.4))
    assert isinstance(renewal, Store)
    assert (renewal.revision, renewal.record.epoch) == (7, 7)
    assert not one.stored(renewal.attempt, 8, 3.4, 3.5)
    assert one.epoch == 7, "renewing does not change it"
    assert one.held_at(3.4 + 8.9)
    assert not one.held_at(3.4 + 9.0), "time counts from before it was sent, less a margin"


def test_it_stops_believing_when_it_could_not_renew():
    one = holding()
    renewal = only(one.tick(3.4))
    assert isinstance(renewal, Store)
    assert not one.failed(renewal.attempt, 8.0)
    assert isinstance(only(one.tick(8.3)), Store)
    assert only(one.tick(9.0)) == Lost("it could not be renewed in time")
    assert only(one.stored(renewal.attempt + 1, 9, 8.3, 9.1)) == Remove(9), "too late: others may have it"


def test_a_conflict_is_looked_into():
    one = holding()
    renewal = only(one.tick(3.4))
    assert isinstance(renewal, Store)
    assert only(one.conflicted(renewal.attempt, 3.5)) == Look()
    mine = renewal.record
    assert not one.observed(8, mine, 3.6), "our own, whose acknowledgement was lost"
    again = only(one.tick(4.0))
    assert isinstance(again, Store)
    assert again.revision == 8
    one.conflicted(again.attempt, 4.1)
    assert only(one.observed(9, other(), 4.2)) == Lost("another has taken over")


def test_a_late_acknowledgement_is_no_tenure():
    one, store = claiming()
    assert not one.stored(store.attempt, 7, 0.0, 9.5)
    assert one.phase is Phase.WAITING
    assert not one.held_at(9.5)
    assert only(one.tick(10.0)) == Look()


def test_without_a_connection_it_does_not_believe_and_resumes_the_same_tenure():
    one = holding()
    one.disconnected()
    assert not one.held_at(0.2)
    assert not one.tick(4.0)
    renewal = only(one.connected(LATER, 4.1))
    assert isinstance(renewal, Store)
    assert (renewal.record.connection, renewal.record.epoch) == (LATER.number, 7)
    assert not one.stored(renewal.attempt, 8, 4.1, 4.2), "nobody is told twice"
    assert one.held_at(4.2)


def test_a_record_that_names_a_dead_connection_is_written_anew_before_it_counts():
    one, store = claiming()
    one.disconnected()
    assert only(one.connected(LATER, 0.5)) == Look()
    renewal = only(one.stored(store.attempt, 7, 0.0, 0.6))
    assert isinstance(renewal, Store)
    assert renewal.record.connection == LATER.number
    assert not one.held_at(0.6)
    assert only(one.stored(renewal.attempt, 8, 0.7, 0.8)) == Gained(7)


def test_release_removes_only_what_is_ours():
    one = holding()
    assert only(one.release()) == Remove(7)
    assert one.phase is Phase.RELEASED
    assert not waiting().release()
    busy = holding()
    renewal = only(busy.tick(3.4))
    assert isinstance(renewal, Store)
    assert not busy.release(), "a renewal is under way: under which revision is not known yet"
    assert only(busy.stored(renewal.attempt, 8, 3.4, 3.5)) == Remove(8)


def test_old_news_is_ignored():
    one = waiting()
    one.observed(9, other(), 0.0)
    assert not one.observed(8, None, 0.1)
    assert one.phase is Phase.WAITING


def test_what_is_remembered_of_closed_connections_is_bounded():
    one = waiting()
    for number in range(3 * tenure.CLOSED_KEPT):
        one.closed(api.ConnectionId("b", 100 + number), 0.0)
    assert len(one._closed) == tenure.CLOSED_KEPT
