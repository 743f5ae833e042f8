from __future__ import annotations

from collections import Counter
from typing import Any

from muster.monitor import parents, protocol


def beat(sequence: int = 1, **more: Any) -> protocol.Beat:
    return protocol.Beat(boot=1, sequence=sequence, period_s=1.0, hold_s=1.0, **more)


def test_the_first_of_the_list_that_lives():
    choice = parents.Parents("s", ("a", "b"))
    assert choice.choose(0.0) is None
    choice.heard("b", beat(), 0.0)
    assert choice.choose(0.0) == "b"
    choice.heard("a", beat(), 1.0)
    assert choice.choose(1.0) == "a"
    choice.heard("b", beat(2), 3.0)
    assert choice.choose(4.0) == "b"  # a has been silent for three beats
    assert choice.choose(9.0) is None


def test_the_root_always_lives():
    assert parents.Parents("c", ("a", "root")).choose(0.0) == "root"


def test_an_old_beat_that_comes_late_is_no_sign_of_life():
    choice = parents.Parents("s", ("a",))
    choice.heard("a", beat(5), 0.0)
    choice.heard("a", beat(4), 2.0)
    assert choice.choose(3.0) is None


def test_who_has_no_list_spreads_over_the_living_and_only_the_orphans_move():
    children = {f"s{i}": parents.Parents(f"s{i}") for i in range(600)}
    for choice in children.values():
        for channel in ("a", "b", "c"):
            choice.heard(channel, beat(), 0.0)
        choice.heard("inner", beat(sensors=False), 0.0)
    before = {name: choice.choose(0.0) for name, choice in children.items()}
    assert set(before.values()) == {"a", "b", "c"}
    assert min(Counter(before.values()).values()) > 150
    for choice in children.values():
        for channel in ("a", "b"):
            choice.heard(channel, beat(2), 3.0)
    after = {name: choice.choose(3.0) for name, choice in children.items()}
    assert set(after.values()) == {"a", "b"}
    assert all(after[name] == parent for name, parent in before.items() if parent != "c")


def test_a_channel_that_drains_is_left():
    choice = parents.Parents("s")
    choice.heard("a", beat(), 0.0)
    choice.heard("a", beat(2, open=False), 0.5)
    assert choice.choose(0.6) is None
