"""The rules of `muster.bus.lease_state`: which candidate may act."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from muster.bus import api, lease_state
from muster.bus.lease_state import LeaseGained, LeaseLost, LeasePhase, ReadLease, RemoveLease, StoreLease

HERE, THERE, LATER = (api.ConnectionId("b", number) for number in (1, 2, 3))
TTL_S = 10.0
DELETED_S = TTL_S * (lease_state.STORED + lease_state.MARGIN)  # after a store: the broker has no record


def other(connection: api.ConnectionId = THERE) -> lease_state.LeaseRecord:
    return lease_state.LeaseRecord("other", "theirs", connection.broker, connection.number, TTL_S)


def only(instructions: Sequence[lease_state.Instruction]) -> lease_state.Instruction:
    (instruction,) = instructions
    return instruction


def waiting() -> lease_state.LeaseCandidate:
    candidate = lease_state.LeaseCandidate("me", "mine", ttl_s=TTL_S)
    assert only(candidate.connected(HERE, 0.0)) == ReadLease()
    return candidate


def claiming() -> tuple[lease_state.LeaseCandidate, StoreLease]:
    candidate = waiting()
    store = only(candidate.observed(None, None, 0.0))
    assert isinstance(store, StoreLease)
    return candidate, store


def holding() -> lease_state.LeaseCandidate:
    first, store = claiming()
    assert only(first.stored(store.attempt, 7, 0.0, 0.1)) == LeaseGained(7)
    assert first.held_at(0.1)
    return first


def test_a_free_lease_is_claimed_and_its_revision_is_the_epoch():
    first, store = claiming()
    assert store.revision is None
    assert (store.record.holder, store.record.epoch) == ("me", 0)
    assert (store.record.broker, store.record.connection) == ("b", 1)
    assert only(first.stored(store.attempt, 7, 0.0, 0.1)) == LeaseGained(7)


def test_one_that_is_held_is_waited_for_until_it_is_gone():
    candidate = waiting()
    assert not candidate.observed(5, other(), 0.0)
    assert candidate.phase is LeasePhase.WAITING
    store = only(candidate.observed(6, None, 1.0))
    assert isinstance(store, StoreLease)
    assert store.revision is None


@pytest.mark.parametrize("report_first", [True, False])
def test_it_is_taken_at_once_when_the_holders_connection_closed(report_first: bool):
    candidate = waiting()
    if report_first:
        assert not candidate.closed(THERE, 0.0)
        taken = candidate.observed(5, other(), 0.1)
    else:
        assert not candidate.observed(5, other(), 0.0)
        assert not candidate.closed(LATER, 0.1), "it belongs to another candidate"
        taken = candidate.closed(THERE, 0.2)
    store = only(taken)
    assert isinstance(store, StoreLease)
    assert store.revision == 5, "compared with what was seen: of several takers one wins"


def test_a_holder_that_roamed_in_time_is_left_alone():
    candidate = waiting()
    candidate.observed(5, other(THERE), 0.0)
    candidate.observed(6, other(LATER), 0.1)
    assert not candidate.closed(THERE, 0.2)


def test_it_is_renewed_at_a_third_of_its_time():
    candidate = holding()
    assert candidate.wake_at == pytest.approx(TTL_S / 3)
    assert not candidate.tick(3.0)
    renewal = only(candidate.tick(3.4))
    assert isinstance(renewal, StoreLease)
    assert (renewal.revision, renewal.record.epoch) == (7, 7)
    assert not candidate.stored(renewal.attempt, 8, 3.4, 3.5)
    assert candidate.epoch == 7, "renewing does not change it"
    assert candidate.held_at(3.4 + 8.9)
    assert not candidate.held_at(3.4 + 9.0), "time counts from before it was sent, less a margin"


def test_it_does_not_act_when_it_could_not_renew_and_continues_when_it_can():
    candidate = holding()
    renewal = only(candidate.tick(3.4))
    assert isinstance(renewal, StoreLease)
    assert not candidate.failed(renewal.attempt, 8.0)
    assert isinstance(only(candidate.tick(8.3)), StoreLease)
    assert (candidate.held_at(8.9), candidate.held_at(9.0)) == (True, False)
    assert not candidate.failed(renewal.attempt + 1, 11.0), "an election, for example"
    again = only(candidate.tick(11.3))
    assert isinstance(again, StoreLease)
    assert (again.revision, again.record.epoch) == (7, 7)
    assert not candidate.stored(again.attempt, 8, 11.3, 11.4)
    assert candidate.held_at(11.4), "no other process has taken it: the same lease"


def test_it_is_lost_when_the_broker_has_deleted_its_record():
    candidate = holding()
    renewal = only(candidate.tick(3.4))
    assert isinstance(renewal, StoreLease)
    assert only(candidate.tick(DELETED_S)) == LeaseLost("it could not be renewed in time")
    assert only(candidate.stored(renewal.attempt, 9, 8.3, DELETED_S)) == RemoveLease(9), (
        "too late: others may have it"
    )


def reads(candidate: lease_state.LeaseCandidate, revision: int, first: float, last: float) -> float | None:
    """The storage returns this revision to all reads; the time of the claim."""
    now = first
    while now <= last:
        for instruction in candidate.tick(now):
            assert instruction == ReadLease()
            if claims := candidate.read(revision, other(), now):
                store = only(claims)
                assert isinstance(store, StoreLease)
                assert store.revision == revision, "a renewal meanwhile makes the claim fail"
                return now
        now += 0.1
    return None


def test_an_expired_lease_is_taken_when_its_time_is_over():
    candidate = waiting()
    assert not candidate.read(5, other(), 2.0)
    claimed_at = reads(candidate, 5, 2.0, 30.0)
    assert claimed_at is not None
    assert 2.0 + TTL_S <= claimed_at <= 2.0 + TTL_S + 0.9
    assert candidate.former_until is not None
    assert candidate.former_until <= claimed_at, "its former holder does not act any more"


def test_a_renewal_begins_the_time_again():
    candidate = waiting()
    candidate.observed(5, other(), 2.0)
    assert reads(candidate, 5, 2.0, 11.5) is None
    candidate.observed(6, other(), 11.6)
    claimed_at = reads(candidate, 6, 11.6, 60.0)
    assert claimed_at is not None
    assert claimed_at >= 11.6 + TTL_S


def test_after_an_election_the_holder_has_time_to_renew():
    candidate = waiting()
    candidate.observed(5, other(), 0.0)
    assert only(candidate.tick(7.5)) == ReadLease()
    now = 7.5
    while now < 14.0:  # no leader
        candidate.unread(now)
        assert candidate.wake_at is not None
        now = candidate.wake_at
        assert only(candidate.tick(now)) == ReadLease()
    assert not candidate.read(5, other(), 14.1), "the first reply: holders can renew only now"
    claimed_at = reads(candidate, 5, 14.1, 60.0)
    assert claimed_at is not None
    grace_s = TTL_S * lease_state.GRACE
    assert 14.1 + grace_s <= claimed_at <= 14.1 + grace_s + 0.9


def test_reads_before_a_disconnection_prove_nothing_after_it():
    candidate = waiting()
    candidate.observed(5, other(), 0.0)
    assert reads(candidate, 5, 0.0, 9.8) is None
    candidate.disconnected()
    assert only(candidate.connected(LATER, 12.0)) == ReadLease()
    assert not candidate.read(5, other(), 12.0)
    claimed_at = reads(candidate, 5, 12.0, 60.0)
    assert claimed_at is not None
    assert claimed_at >= 12.0 + TTL_S * lease_state.GRACE


def test_a_value_that_is_no_record_does_not_expire():
    candidate = waiting()
    unknown = lease_state.LeaseRecord("", "", "", 0, ttl_s=0, epoch=5)
    now = 0.0
    while now < 100.0:
        assert not candidate.read(5, unknown, now)
        assert candidate.wake_at == now + TTL_S
        now += TTL_S
        assert only(candidate.tick(now)) == ReadLease()


def test_a_conflict_is_looked_into():
    candidate = holding()
    renewal = only(candidate.tick(3.4))
    assert isinstance(renewal, StoreLease)
    assert only(candidate.conflicted(renewal.attempt, 3.5)) == ReadLease()
    mine = renewal.record
    assert not candidate.observed(8, mine, 3.6), "our own, whose acknowledgement was lost"
    assert (candidate.held_at(3.4 + 8.9), candidate.held_at(3.4 + 9.0)) == (True, False), "it was renewed"
    again = only(candidate.tick(3.4 + 3.4))
    assert isinstance(again, StoreLease)
    assert again.revision == 8
    candidate.conflicted(again.attempt, 7.0)
    assert only(candidate.observed(9, other(), 7.1)) == LeaseLost("another process has taken over")


def test_a_renewal_without_a_reply_counts_from_the_first_attempt():
    candidate = holding()
    renewal = only(candidate.tick(3.4))
    assert isinstance(renewal, StoreLease)
    assert not candidate.failed(renewal.attempt, 5.0)
    second = only(candidate.tick(5.3))
    assert isinstance(second, StoreLease)
    assert only(candidate.conflicted(second.attempt, 5.4)) == ReadLease(), "the first was stored"
    assert not candidate.read(8, renewal.record, 5.5)
    assert (candidate.held_at(3.4 + 8.9), candidate.held_at(3.4 + 9.0)) == (True, False)


def test_a_renewal_over_a_former_connection_is_repeated():
    candidate = holding()
    renewal = only(candidate.tick(3.4))
    assert isinstance(renewal, StoreLease)
    candidate.disconnected()
    second = only(candidate.connected(LATER, 4.0))
    assert isinstance(second, StoreLease)
    candidate.conflicted(second.attempt, 4.1)
    third = only(candidate.read(8, renewal.record, 4.2))
    assert isinstance(third, StoreLease)
    assert not candidate.held_at(4.2), "others may take it: its connection is closed"
    assert (third.revision, third.record.connection) == (8, LATER.number)


def test_a_claim_that_was_acknowledged_too_late_is_stored_again():
    first, store = claiming()
    again = only(first.stored(store.attempt, 7, 0.0, 9.5))
    assert isinstance(again, StoreLease)
    assert not first.held_at(9.5)
    assert again.revision == 7
    assert only(first.stored(again.attempt, 8, 9.5, 9.6)) == LeaseGained(7)


def test_a_holder_without_connection_is_suspended_and_resumes_the_same_tenure():
    candidate = holding()
    candidate.disconnected()
    assert not candidate.held_at(0.2)
    assert not candidate.tick(4.0)
    renewal = only(candidate.connected(LATER, 4.1))
    assert isinstance(renewal, StoreLease)
    assert (renewal.record.connection, renewal.record.epoch) == (LATER.number, 7)
    assert not candidate.stored(renewal.attempt, 8, 4.1, 4.2), "the holder is notified once"
    assert candidate.held_at(4.2)


def test_a_record_with_a_closed_connection_is_rewritten_before_it_is_valid():
    first, store = claiming()
    first.disconnected()
    assert only(first.connected(LATER, 0.5)) == ReadLease()
    renewal = only(first.stored(store.attempt, 7, 0.0, 0.6))
    assert isinstance(renewal, StoreLease)
    assert renewal.record.connection == LATER.number
    assert not first.held_at(0.6)
    assert only(first.stored(renewal.attempt, 8, 0.7, 0.8)) == LeaseGained(7)


def test_release_removes_only_what_is_ours():
    candidate = holding()
    assert only(candidate.release()) == RemoveLease(7)
    assert candidate.phase is LeasePhase.RELEASED
    assert not waiting().release()
    busy = holding()
    renewal = only(busy.tick(3.4))
    assert isinstance(renewal, StoreLease)
    assert not busy.release(), "a renewal is under way: under which revision is not known yet"
    assert only(busy.stored(renewal.attempt, 8, 3.4, 3.5)) == RemoveLease(8)


def test_old_news_is_ignored():
    candidate = waiting()
    candidate.observed(9, other(), 0.0)
    assert not candidate.observed(8, None, 0.1)
    assert candidate.phase is LeasePhase.WAITING


def test_what_is_remembered_of_closed_connections_is_bounded():
    candidate = waiting()
    for number in range(3 * lease_state.CLOSED_KEPT):
        candidate.closed(api.ConnectionId("b", 100 + number), 0.0)
    assert len(candidate._closed) == lease_state.CLOSED_KEPT


# When it acts


def test_wake_at_is_the_time_of_the_next_renewal_check_or_suspension():
    candidate = lease_state.LeaseCandidate("me", "mine", ttl_s=TTL_S)
    times = [candidate.wake_at]
    assert times == [None], "without a connection there is nothing to do"
    candidate = waiting()
    times = [candidate.wake_at]
    candidate.disconnected()
    times.append(candidate.wake_at)
    assert times == [TTL_S, None], "it looks again after a whole lease without news"
    candidate, store = claiming()
    times = [candidate.wake_at]
    candidate.stored(store.attempt, 7, 0.0, 0.1)
    times.append(candidate.wake_at)
    assert times == [None, TTL_S / 3], "the answer comes first"
    candidate.tick(TTL_S / 3)
    times = [candidate.wake_at]
    candidate.disconnected()
    times.append(candidate.wake_at)
    candidate.tick(DELETED_S)
    times.append(candidate.wake_at)
    assert times == [DELETED_S, DELETED_S, None], "while it cannot renew, only its end is left"


def test_it_acts_exactly_when_it_asked_to_be_woken():
    candidate = holding()
    assert isinstance(only(candidate.tick(TTL_S / 3)), StoreLease)
    candidate = waiting()
    assert candidate.tick(TTL_S - 0.1) == ()
    assert only(candidate.tick(TTL_S)) == ReadLease()
    assert candidate.tick(TTL_S + 0.1) == ()
    assert candidate.wake_at == 2 * TTL_S


def test_another_holder_is_watched_until_its_lease_is_about_to_expire():
    candidate = waiting()
    assert candidate.observed(5, other(), 4.0) == ()
    assert candidate.wake_at == 4.0 + TTL_S * (1 - lease_state.GRACE)
    assert candidate.tick(4.1) == ()


def test_while_a_store_is_under_way_nothing_else_is_stored():
    first, _ = claiming()
    assert first.tick(100.0) == ()
    assert first.observed(None, None, 100.0) == ()
    first = holding()
    first.tick(3.4)
    assert first.tick(3.5) == ()


def test_without_a_connection_nothing_is_claimed():
    candidate = waiting()
    candidate.disconnected()
    assert candidate.tick(100.0) == ()
    assert candidate.observed(None, None, 100.0) == ()
    assert candidate.closed(THERE, 100.0) == ()
    assert candidate.phase is LeasePhase.WAITING


# Claims whose outcome is not known


@pytest.mark.parametrize(("epoch", "gained"), [(0, 7), (5, 5)])
def test_its_own_record_is_a_claim_whose_acknowledgement_was_lost(epoch: int, gained: int):
    candidate = waiting()
    mine = lease_state.LeaseRecord("me", "mine", HERE.broker, HERE.number, TTL_S)
    if epoch:
        mine = lease_state.LeaseRecord("me", "mine", HERE.broker, HERE.number, TTL_S, epoch)
    renewal = only(candidate.observed(7, mine, 20.0))
    assert isinstance(renewal, StoreLease)
    assert (renewal.revision, renewal.record.epoch) == (7, gained)
    assert not candidate.held_at(20.0), "how much of its time is left is not known"
    assert only(candidate.stored(renewal.attempt, 8, 20.0, 20.1)) == LeaseGained(gained)


def test_a_claim_that_failed_is_looked_into_a_little_later():
    first, store = claiming()
    assert first.failed(store.attempt, 1.0) == ()
    assert first.phase is LeasePhase.WAITING
    assert first.wake_at == 1.0 + lease_state.RETRY_S
    assert only(first.tick(1.0 + lease_state.RETRY_S)) == ReadLease()


def test_a_claim_that_conflicted_is_looked_into_at_once():
    first, store = claiming()
    assert only(first.conflicted(store.attempt, 1.0)) == ReadLease()
    assert first.phase is LeasePhase.WAITING
    assert isinstance(only(first.observed(8, None, 1.1)), StoreLease), "it was removed meanwhile"


def test_a_renewal_that_failed_at_the_end_of_its_time_is_the_end():
    candidate = holding()
    renewal = only(candidate.tick(3.4))
    assert isinstance(renewal, StoreLease)
    lost = only(candidate.failed(renewal.attempt, DELETED_S))
    assert lost == LeaseLost("it could not be renewed in time")


def test_events_of_an_earlier_attempt_are_ignored():
    attempt, first = claiming()
    attempt.conflicted(first.attempt, 1.0)
    second = only(attempt.observed(8, None, 1.1))
    assert isinstance(second, StoreLease)
    assert second.attempt != first.attempt
    assert attempt.stored(first.attempt, 7, 0.0, 1.2) == ()
    assert attempt.failed(first.attempt, 1.3) == ()
    assert attempt.conflicted(first.attempt, 1.4) == ()
    assert attempt.phase is LeasePhase.CLAIMING
    assert only(attempt.stored(second.attempt, 9, 1.1, 1.5)) == LeaseGained(9)


def test_after_its_end_nothing_is_decided():
    candidate = holding()
    renewal = only(candidate.tick(3.4))
    assert isinstance(renewal, StoreLease)
    candidate.tick(DELETED_S)
    assert candidate.failed(renewal.attempt, DELETED_S) == ()
    assert candidate.conflicted(renewal.attempt, DELETED_S) == ()
    assert candidate.observed(20, None, DELETED_S) == ()
    assert candidate.closed(THERE, DELETED_S) == ()
    assert candidate.tick(100.0) == ()
    assert candidate.ended


def test_a_claim_that_another_process_took_before_it_was_known_is_no_tenure():
    first, store = claiming()
    again = only(first.stored(store.attempt, 7, 0.0, 9.0))
    assert isinstance(again, StoreLease)
    assert only(first.conflicted(again.attempt, 9.1)) == ReadLease()
    assert first.read(8, other(), 9.2) == ()
    assert first.phase is LeasePhase.WAITING
    assert first.closed(THERE, 9.3) == (), "first it looks what is there"
    third = only(first.observed(9, None, 9.4))
    assert isinstance(third, StoreLease)
    assert third.record.epoch == 0, "another claim, another epoch"
    assert only(first.stored(third.attempt, 10, 9.4, 9.5)) == LeaseGained(10)


def test_an_acknowledgement_without_a_connection_is_no_tenure_yet():
    first, store = claiming()
    first.disconnected()
    assert first.stored(store.attempt, 7, 0.0, 0.2) == ()
    assert (first.phase, first.held_at(0.2)) == (LeasePhase.SUSPENDED, False)
    assert first.wake_at == DELETED_S


# While it holds


def test_a_holder_that_finds_its_record_gone_has_lost():
    assert only(holding().observed(8, None, 1.0)) == LeaseLost("the record is missing")
    assert only(holding().observed(8, other(), 1.0)) == LeaseLost("another process has taken over")


def test_a_holder_that_sees_its_own_record_continues():
    first, store = claiming()
    first.stored(store.attempt, 7, 0.0, 0.1)
    assert first.observed(7, store.record, 1.0) == ()
    assert first.held_at(1.0)
    renewal = only(first.observed(8, store.record, 3.4))
    assert isinstance(renewal, StoreLease), "its renewal is due"
    assert renewal.revision == 8


def test_a_holder_ignores_old_news_and_closed_connections_of_others():
    candidate = holding()
    assert candidate.observed(6, other(), 1.0) == ()
    assert candidate.closed(THERE, 1.0) == ()
    assert candidate.held_at(1.0)


def test_a_suspended_holder_that_releases_removes_its_record():
    candidate = holding()
    candidate.disconnected()
    assert only(candidate.release()) == RemoveLease(7)


def test_a_claim_under_way_is_removed_when_its_revision_is_known():
    first, store = claiming()
    assert first.release() == ()
    assert only(first.stored(store.attempt, 7, 0.0, 0.1)) == RemoveLease(7)


def test_a_renewal_is_acknowledged_without_an_instruction():
    candidate = holding()
    renewal = only(candidate.tick(3.4))
    assert isinstance(renewal, StoreLease)
    assert candidate.stored(renewal.attempt, 8, 3.4, 3.5) == ()
    assert candidate.phase is LeasePhase.HELD


def test_a_holder_knows_when_the_time_of_the_one_before_it_ends():
    candidate = waiting()
    assert not candidate.observed(5, other(), 10.0)
    assert candidate.former_until == 10.0 + TTL_S * (1 - lease_state.MARGIN)
    assert not candidate.observed(5, other(), 12.0)
    assert candidate.former_until == 10.0 + TTL_S * (1 - lease_state.MARGIN), "the same renewal, read again"
    store = only(candidate.observed(6, None, 20.0, expired=True))
    assert candidate.former_until == 20.0
    assert isinstance(store, StoreLease)
    assert store.revision == 6, "if another process held it in between, the claim fails"


def test_the_time_of_a_holder_is_waited_for_if_the_clock_of_the_broker_was_set():
    """The broker deletes the record of a holder that renewed it just before, and does not know of it yet."""
    candidate = waiting()
    assert not candidate.observed(5, other(), 10.0)
    assert not candidate.observed(6, None, 11.0, expired=True)
    ends = 10.0 + TTL_S * (1 - lease_state.MARGIN)
    assert candidate.phase is LeasePhase.WAITING
    assert (candidate.former_until, candidate.wake_at) == (ends, ends)
    assert not candidate.tick(ends - 0.1)
    assert only(candidate.tick(ends)) == ReadLease()
    store = only(candidate.read(None, None, ends))
    assert isinstance(store, StoreLease)
    assert only(candidate.stored(store.attempt, 7, ends, ends)) == LeaseGained(7)


def test_it_does_not_know_that_of_an_expired_lease_whose_renewals_it_did_not_see():
    candidate = waiting()
    assert not candidate.observed(5, other(), 10.0)
    candidate.disconnected()
    assert only(candidate.connected(LATER, 11.0)) == ReadLease()
    assert isinstance(only(candidate.observed(6, None, 12.0, expired=True)), StoreLease)
    assert candidate.former_until is None


def test_it_does_not_know_that_of_a_released_lease_or_after_a_disconnection():
    candidate = waiting()
    assert not candidate.observed(5, other(), 10.0)
    store = only(candidate.observed(6, None, 11.0))
    assert candidate.former_until is None, "it may have been renewed unseen"
    assert isinstance(store, StoreLease)
    assert store.revision is None
    candidate = waiting()
    assert not candidate.observed(5, other(), 10.0)
    candidate.disconnected()
    assert candidate.former_until is None
