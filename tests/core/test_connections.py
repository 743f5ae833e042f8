"""Connections of a server, counted by client address."""

from __future__ import annotations

from muster.core.net import connection_limits


def test_an_address_has_its_own_limit_and_all_have_one():
    made = connection_limits.ConnectionLimits(4, 2)
    assert [made.add(number, "10.0.0.1") for number in range(3)] == [True, True, False]
    assert made.add("other", "10.0.0.2")
    made.discard(0)
    made.discard(0)
    assert made.add(3, "10.0.0.1")
    assert not made.add(4, "10.0.0.1")
    assert made.add("third", "10.0.0.3")
    assert not made.add("fourth", "10.0.0.4")
    assert len(made) == 4
    assert made.refused == {"address": 2, "connections": 1}
    for name in (1, 3, "other", "third"):
        made.discard(name)
    assert len(made) == 0
    assert not made._of_address


def test_a_client_of_ipv6_counts_by_its_network():
    made = connection_limits.ConnectionLimits(10, 1)
    assert made.add(1, "2001:db8::1")
    assert not made.add(2, "2001:db8::2")
    assert made.add(3, "2001:db8:0:1::1")


def test_without_a_limit_for_an_address():
    made = connection_limits.ConnectionLimits(3, None)
    assert [made.add(number, "10.0.0.1") for number in range(4)] == [True, True, True, False]
