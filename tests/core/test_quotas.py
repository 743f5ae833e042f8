from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.core import errors, quotas

QUOTA = quotas.Quota("queues", 3, "message.queues_per_identity", 100, "message.bytes_per_identity")
STEPS = st.lists(st.tuples(st.sampled_from("ab"), st.integers(-2, 2), st.integers(-60, 60)), max_size=60)


@given(STEPS)
def test_what_is_checked_before_it_is_stored_never_exceeds_the_quota(steps):
    stored, model = quotas.StoredAmounts(), {"a": (0, 0), "b": (0, 0)}
    for identity, items, size in steps:
        had_items, had_bytes = model[identity]
        if had_items + items < 0 or had_bytes + size < 0:
            continue
        try:
            stored.check(identity, QUOTA, items, size)
        except errors.LimitExceeded:
            assert (items > 0 and had_items + items > 3) or (size > 0 and had_bytes + size > 100)
            continue
        stored.change(identity, items, size)
        model[identity] = had_items + items, had_bytes + size
        assert all(number <= 3 and size <= 100 for number, size in model.values())
        assert stored.of(identity) == model[identity]
    assert stored.bytes == sum(size for _, size in model.values())
    assert {identity: stored.of(identity) for identity in model} == model


def test_no_limit():
    quotas.StoredAmounts().check("a", quotas.Quota("queues", 0, ""), 10**9, 10**12)


def test_the_error_names_the_quota():
    stored = quotas.StoredAmounts()
    stored.change("ann", 3)
    with pytest.raises(errors.LimitExceeded, match="ann has 3 queues, of 3 that one identity") as refused:
        stored.check("ann", QUOTA, 1)
    assert "message.queues_per_identity" in (refused.value.hint or "")
