"""Grants on queues: what their patterns match, and what they never do."""

from __future__ import annotations

import pytest

from muster.core import queue_names
from muster.trust.permissions import queue_rights, roles

TEMPORARY = f"{queue_names.TEMPORARY}c1:1"


def allows(grant: str, queue: str, right: str = "browse") -> bool:
    return queue_rights.allows([queue_rights.QueueGrant.parse(grant)], queue, right)


@pytest.mark.parametrize("pattern", ["*", "**", "*s", "dead-*", "d*s", "*-letters*"])
def test_dead_letters_are_granted_only_by_their_name(pattern):
    assert not allows(f"{pattern}:browse", queue_names.DEAD_LETTERS)
    assert allows("dead-letters:browse", queue_names.DEAD_LETTERS)


@pytest.mark.parametrize("pattern", ["*", "**", "*1", "t*", "*c1*"])
def test_temporary_queues_need_a_pattern_with_their_prefix(pattern):
    assert not allows(f"{pattern}:browse", TEMPORARY)
    assert allows("temporary:c1*:browse", TEMPORARY)


def test_other_queues_match_by_the_pattern():
    assert allows("orders-*:browse", "orders-eu")
    assert not allows("orders-*:browse", "returns-eu")
    assert not allows("orders-*:send", "orders-eu")
    assert allows("**:browse", "orders")


def test_an_operator_may_do_all_with_every_queue():
    grants = queue_rights.of_role(roles.Role.OPERATOR)
    for queue in ("orders", queue_names.DEAD_LETTERS, TEMPORARY):
        assert all(queue_rights.allows(grants, queue, right) for right in queue_rights.QueueRight)
