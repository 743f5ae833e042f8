"""Who may act: the rules of `muster.bus.lease_state`, one by one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from muster.bus import api, lease_state
from muster.bus.lease_state import LeaseGained, LeaseLost, LeasePhase, ReadLease, RemoveLease, StoreLease

HERE, THERE, LATER = (api.ConnectionId("b", number) for number in (1, 2, 3))
TTL_S = 10.0


def other(connection: api.ConnectionId = THERE) -> lease_state.LeaseRecord:
    return lease_state.LeaseRecord("other", "theirs", connection.broker, connection.number, TTL_S)


def only(instructions: Sequence[lease_state.Instruction]) -> lease_state.Instruction:
    (instruction,) = instructions
    return instruction


def waiting() -> lease_state.LeaseCandidate:
    one = lease_state.LeaseCandidate("me", "mine", ttl_s=TTL_S)
    assert only(one.connected(HERE, 0.0)) == ReadLease()
    return one


def claiming() -> tuple[lease_state.LeaseCandidate, StoreLease]:
    one = waiting()
    store = only(one.observed(None, None, 0.0))
    assert isinstance(store, StoreLease)
    return one, store


def holding() -> lease_state.LeaseCandidate:
    one, store = claiming()
    assert only(one.stored(store.attempt, 7, 0.0, 0.1)) == LeaseGained(7)
    assert one.held_at(0.1)
    return one


def test_a_free_lease_is_claimed_and_its_revision_is_the_epoch():
    one, store = claiming()
    assert store.revision is None
    assert (store.record.holder, store.record.epoch) == ("me", 0)
    assert (store.record.broker, store.record.connection) == ("b", 1)
    assert only(one.stored(store.attempt, 7, 0.0, 0.1)) == LeaseGained(7)


def test_one_that_is_held_is_waited_for_until_it_is_gone():
    one = waiting()
    assert not one.observed(5, other(), 0.0)
    assert one.phase is LeasePhase.WAITING
    store = only(one.observed(6, None, 1.0))
    assert isinstance(store, StoreLease)
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
    assert isinstance(store, StoreLease)
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
    assert isinstance(renewal, StoreLease)
    assert (renewal.revision, renewal.record.epoch) == (7, 7)
    assert not one.stored(renewal.attempt, 8, 3.4, 3.5)
    assert one.epoch == 7, "renewing does not change it"
    assert one.held_at(3.4 + 8.9)
    assert not one.held_at(3.4 + 9.0), "time counts from before it was sent, less a margin"


def test_it_stops_believing_when_it_could_not_renew():
    one = holding()
    renewal = only(one.tick(3.4))
    assert isinstance(renewal, StoreLease)
    assert not one.failed(renewal.attempt, 8.0)
    assert isinstance(only(one.tick(8.3)), StoreLease)
    assert only(one.tick(9.0)) == LeaseLost("it could not be renewed in time")
    assert only(one.stored(renewal.attempt + 1, 9, 8.3, 9.1)) == RemoveLease(9), (
        "too late: others may have it"
    )


def test_a_conflict_is_looked_into():
    one = holding()
    renewal = only(one.tick(3.4))
    assert isinstance(renewal, StoreLease)
    assert only(one.conflicted(renewal.attempt, 3.5)) == ReadLease()
    mine = renewal.record
    assert not one.observed(8, mine, 3.6), "our own, whose acknowledgement was lost"
    again = only(one.tick(4.0))
    assert isinstance(again, StoreLease)
    assert again.revision == 8
    one.conflicted(again.attempt, 4.1)
    assert only(one.observed(9, other(), 4.2)) == LeaseLost("another process has taken over")


def test_a_late_acknowledgement_is_no_tenure():
    one, store = claiming()
    assert not one.stored(store.attempt, 7, 0.0, 9.5)
    assert one.phase is LeasePhase.WAITING
    assert not one.held_at(9.5)
    assert only(one.tick(10.0)) == ReadLease()


def test_without_a_connection_it_does_not_believe_and_resumes_the_same_tenure():
    one = holding()
    one.disconnected()
    assert not one.held_at(0.2)
    assert not one.tick(4.0)
    renewal = only(one.connected(LATER, 4.1))
    assert isinstance(renewal, StoreLease)
    assert (renewal.record.connection, renewal.record.epoch) == (LATER.number, 7)
    assert not one.stored(renewal.attempt, 8, 4.1, 4.2), "nobody is told twice"
    assert one.held_at(4.2)


def test_a_record_that_names_a_dead_connection_is_written_anew_before_it_counts():
    one, store = claiming()
    one.disconnected()
    assert only(one.connected(LATER, 0.5)) == ReadLease()
    renewal = only(one.stored(store.attempt, 7, 0.0, 0.6))
    assert isinstance(renewal, StoreLease)
    assert renewal.record.connection == LATER.number
    assert not one.held_at(0.6)
    assert only(one.stored(renewal.attempt, 8, 0.7, 0.8)) == LeaseGained(7)


def test_release_removes_only_what_is_ours():
    one = holding()
    assert only(one.release()) == RemoveLease(7)
    assert one.phase is LeasePhase.RELEASED
    assert not waiting().release()
    busy = holding()
    renewal = only(busy.tick(3.4))
    assert isinstance(renewal, StoreLease)
    assert not busy.release(), "a renewal is under way: under which revision is not known yet"
    assert only(busy.stored(renewal.attempt, 8, 3.4, 3.5)) == RemoveLease(8)


def test_old_news_is_ignored():
    one = waiting()
    one.observed(9, other(), 0.0)
    assert not one.observed(8, None, 0.1)
    assert one.phase is LeasePhase.WAITING


def test_what_is_remembered_of_closed_connections_is_bounded():
    one = waiting()
    for number in range(3 * lease_state.CLOSED_KEPT):
        one.closed(api.ConnectionId("b", 100 + number), 0.0)
    assert len(one._closed) == lease_state.CLOSED_KEPT


# When it acts


def test_wake_at_is_when_it_renews_or_looks_again_or_stops_believing():
    one = lease_state.LeaseCandidate("me", "mine", ttl_s=TTL_S)
    times = [one.wake_at]
    assert times == [None], "without a connection there is nothing to do"
    one = waiting()
    times = [one.wake_at]
    one.disconnected()
    times.append(one.wake_at)
    assert times == [TTL_S, None], "it looks again after a whole lease without news"
    one, store = claiming()
    times = [one.wake_at]
    one.stored(store.attempt, 7, 0.0, 0.1)
    times.append(one.wake_at)
    assert times == [None, TTL_S / 3], "the answer comes first"
    one.tick(TTL_S / 3)
    times = [one.wake_at]
    one.disconnected()
    times.append(one.wake_at)
    one.tick(9.0)
    times.append(one.wake_at)
    assert times == [9.0, 9.0, None], "while it cannot renew, only its end is left"


def test_it_acts_exactly_when_it_asked_to_be_woken():
    one = holding()
    assert isinstance(only(one.tick(TTL_S / 3)), StoreLease)
    one = waiting()
    assert one.tick(TTL_S - 0.1) == ()
    assert only(one.tick(TTL_S)) == ReadLease()
    assert one.tick(TTL_S + 0.1) == ()
    assert one.wake_at == 2 * TTL_S


def test_news_of_another_holder_is_believed_for_a_whole_lease():
    one = waiting()
    assert one.observed(5, other(), 4.0) == ()
    assert one.wake_at == 4.0 + TTL_S
    assert one.tick(4.1) == ()


def test_while_a_store_is_under_way_nothing_else_is_stored():
    one, _ = claiming()
    assert one.tick(100.0) == ()
    assert one.observed(None, None, 100.0) == ()
    one = holding()
    one.tick(3.4)
    assert one.tick(3.5) == ()


def test_without_a_connection_nothing_is_claimed():
    one = waiting()
    one.disconnected()
    assert one.tick(100.0) == ()
    assert one.observed(None, None, 100.0) == ()
    assert one.closed(THERE, 100.0) == ()
    assert one.phase is LeasePhase.WAITING


# Claims whose outcome is not known


@pytest.mark.parametrize(("epoch", "gained"), [(0, 7), (5, 5)])
def test_its_own_record_is_a_claim_whose_acknowledgement_was_lost(epoch: int, gained: int):
    one = waiting()
    mine = lease_state.LeaseRecord("me", "mine", HERE.broker, HERE.number, TTL_S)
    if epoch:
        mine = lease_state.LeaseRecord("me", "mine", HERE.broker, HERE.number, TTL_S, epoch)
    renewal = only(one.observed(7, mine, 20.0))
    assert isinstance(renewal, StoreLease)
    assert (renewal.revision, renewal.record.epoch) == (7, gained)
    assert not one.held_at(20.0), "how much of its time is left is not known"
    assert only(one.stored(renewal.attempt, 8, 20.0, 20.1)) == LeaseGained(gained)


def test_a_claim_that_failed_is_looked_into_a_little_later():
    one, store = claiming()
    assert one.failed(store.attempt, 1.0) == ()
    assert one.phase is LeasePhase.WAITING
    assert one.wake_at == 1.0 + lease_state.RETRY_S
    assert only(one.tick(1.0 + lease_state.RETRY_S)) == ReadLease()


def test_a_claim_that_conflicted_is_looked_into_at_once():
    one, store = claiming()
    assert only(one.conflicted(store.attempt, 1.0)) == ReadLease()
    assert one.phase is LeasePhase.WAITING
    assert isinstance(only(one.observed(8, None, 1.1)), StoreLease), "it was removed meanwhile"


def test_a_renewal_that_failed_at_the_end_of_its_time_is_the_end():
    one = holding()
    renewal = only(one.tick(3.4))
    assert isinstance(renewal, StoreLease)
    assert only(one.failed(renewal.attempt, 9.0)) == LeaseLost("it could not be renewed in time")


def test_what_is_heard_of_an_earlier_attempt_says_nothing():
    one, first = claiming()
    one.conflicted(first.attempt, 1.0)
    second = only(one.observed(8, None, 1.1))
    assert isinstance(second, StoreLease)
    assert second.attempt != first.attempt
    assert one.stored(first.attempt, 7, 0.0, 1.2) == ()
    assert one.failed(first.attempt, 1.3) == ()
    assert one.conflicted(first.attempt, 1.4) == ()
    assert one.phase is LeasePhase.CLAIMING
    assert only(one.stored(second.attempt, 9, 1.1, 1.5)) == LeaseGained(9)


def test_after_its_end_nothing_is_decided():
    one = holding()
    renewal = only(one.tick(3.4))
    assert isinstance(renewal, StoreLease)
    one.tick(9.0)
    assert one.failed(renewal.attempt, 9.1) == ()
    assert one.conflicted(renewal.attempt, 9.1) == ()
    assert one.observed(20, None, 9.2) == ()
    assert one.closed(THERE, 9.3) == ()
    assert one.tick(100.0) == ()
    assert one.ended


def test_an_acknowledgement_at_the_end_of_its_time_is_too_late():
    one, store = claiming()
    assert one.stored(store.attempt, 7, 0.0, 9.0) == ()
    assert (one.phase, one.wake_at) == (LeasePhase.WAITING, 9.0 + lease_state.RETRY_S)
    assert one.closed(THERE, 9.1) == (), "first it looks what is there"
    again = only(one.observed(8, None, 9.2))
    assert isinstance(again, StoreLease)
    assert again.record.epoch == 0, "another claim, another epoch"
    assert only(one.stored(again.attempt, 9, 9.2, 9.3)) == LeaseGained(9)


def test_an_acknowledgement_without_a_connection_is_no_tenure_yet():
    one, store = claiming()
    one.disconnected()
    assert one.stored(store.attempt, 7, 0.0, 0.2) == ()
    assert (one.phase, one.held_at(0.2)) == (LeasePhase.SUSPENDED, False)
    assert one.wake_at == 9.0


# While it holds


def test_a_holder_that_finds_its_record_gone_has_lost():
    assert only(holding().observed(8, None, 1.0)) == LeaseLost("the record is missing")
    assert only(holding().observed(8, other(), 1.0)) == LeaseLost("another process has taken over")


def test_a_holder_that_sees_its_own_record_goes_on():
    one, store = claiming()
    one.stored(store.attempt, 7, 0.0, 0.1)
    assert one.observed(7, store.record, 1.0) == ()
    assert one.held_at(1.0)
    renewal = only(one.observed(8, store.record, 3.4))
    assert isinstance(renewal, StoreLease), "its renewal is due"
    assert renewal.revision == 8


def test_a_holder_ignores_old_news_and_closed_connections_of_others():
    one = holding()
    assert one.observed(6, other(), 1.0) == ()
    assert one.closed(THERE, 1.0) == ()
    assert one.held_at(1.0)


def test_a_suspended_holder_that_releases_removes_its_record():
    one = holding()
    one.disconnected()
    assert only(one.release()) == RemoveLease(7)


def test_a_claim_under_way_is_removed_when_its_revision_is_known():
    one, store = claiming()
    assert one.release() == ()
    assert only(one.stored(store.attempt, 7, 0.0, 0.1)) == RemoveLease(7)


def test_a_renewal_is_acknowledged_without_an_instruction():
    one = holding()
    renewal = only(one.tick(3.4))
    assert isinstance(renewal, StoreLease)
    assert one.stored(renewal.attempt, 8, 3.4, 3.5) == ()
    assert one.phase is LeasePhase.HELD
