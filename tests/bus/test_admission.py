"""The pure core of admission: budgets of identities, pending requests, answers to refusals."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from muster.bus.rpc import admission
from muster.core import leaky_buckets

STEPS = st.lists(
    st.tuples(
        st.floats(0, 0.5), st.sampled_from("ab"), st.integers(0, 200_000), st.sampled_from([0.0, 1, 20])
    ),
    max_size=200,
)


@settings(max_examples=60)
@given(st.floats(0.001, 1), STEPS)
def test_no_identity_costs_more_than_its_share(share, steps):
    """What is admitted in all is at most one second's budget, what the time forgave, and the last request."""
    core, now_s, spent = admission.Admission(share), 0.0, {"a": 0.0, "b": 0.0}
    per_s = 1000 * share
    burst = max(1, round(per_s))
    for wait_s, identity, size, cost in steps:
        now_s += wait_s
        if core.receive(identity, size, now_s):
            assert spent[identity] <= burst + now_s * per_s + 1e-6
            spent[identity] += admission.RECEIVED + size / admission.RECEIVED_BYTES
            core.charge(identity, cost, now_s)
            spent[identity] += min(cost, burst)  # beyond twice the budget a debt is not remembered
        assert core.is_over(identity, now_s) or core.receive(identity, 0, now_s)


@given(STEPS)
def test_a_flood_of_one_identity_leaves_the_budget_of_others(steps):
    core, now_s = admission.Admission(0.005), 0.0
    for wait_s, _, size, cost in steps:
        now_s += wait_s
        core.receive("flood", size, now_s)
        core.charge("flood", cost, now_s)
    assert core.receive("quiet", 0, now_s)
    assert core.receive("flood", 0, now_s + 3.0), "a budget is back after two seconds at the latest"


@given(st.lists(st.tuples(st.floats(0, 0.4), st.sampled_from("ab")), max_size=100))
def test_a_refusal_is_answered_at_most_once_a_second(steps):
    core, now_s = admission.Admission(), 0.0
    answered: dict[str, list[float]] = {"a": [], "b": []}
    for wait_s, identity in steps:
        now_s += wait_s
        if core.may_answer(identity, now_s):
            answered[identity].append(now_s)
    for times in answered.values():
        assert all(later - earlier > 0.999 for earlier, later in itertools.pairwise(times))


def test_the_identities_that_are_remembered_are_bounded():
    core = admission.Admission()
    for number in range(leaky_buckets.KEYS_MAX + 100):
        core.receive(str(number), 0, 0.0)
    assert len(core._costs) == leaky_buckets.KEYS_MAX


@given(st.integers(1, 8), st.lists(st.tuples(st.booleans(), st.sampled_from("abc")), max_size=100))
def test_one_identity_has_at_most_half_of_the_pending_requests(limit, steps):
    pending, own = admission.PendingRequests(limit), {"a": 0, "b": 0, "c": 0}
    for begins, identity in steps:
        if begins:
            assert pending.has_room(identity) == (
                sum(own.values()) < limit and own[identity] < (limit + 1) // 2
            )
            if pending.has_room(identity):
                pending.begin(identity)
                own[identity] += 1
        elif own[identity]:
            pending.end(identity)
            own[identity] -= 1
