from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from muster.monitor import parent_selection, protocol


def beat(sequence: int = 1, **more: Any) -> protocol.ChannelHeartbeat:
    return protocol.ChannelHeartbeat(
        **{"boot": 1, "sequence": sequence, "period_s": 1.0, "hold_s": 1.0, **more}
    )


def test_the_first_of_the_list_that_is_alive():
    choice = parent_selection.ParentSelector("s", ("a", "b"))
    assert choice.choose(0.0) is None
    choice.record_heartbeat("b", beat(), 0.0)
    assert choice.choose(0.0) == "b"
    choice.record_heartbeat("a", beat(), 1.0)
    assert choice.choose(1.0) == "a"
    choice.record_heartbeat("b", beat(2), 3.0)
    assert choice.choose(4.0) == "b"  # a has been silent for three beats
    assert choice.choose(9.0) is None


def test_the_root_always_is_alive():
    assert parent_selection.ParentSelector("c", ("a", "root")).choose(0.0) == "root"


def test_an_old_beat_that_comes_late_is_no_sign_of_life():
    choice = parent_selection.ParentSelector("s", ("a",))
    choice.record_heartbeat("a", beat(5), 0.0)
    choice.record_heartbeat("a", beat(4), 2.0)
    assert choice.choose(3.0) is None


def test_sensors_without_a_list_use_live_channels_and_only_orphans_move():
    children = {f"s{i}": parent_selection.ParentSelector(f"s{i}") for i in range(600)}
    for choice in children.values():
        for channel in ("a", "b", "c"):
            choice.record_heartbeat(channel, beat(), 0.0)
        choice.record_heartbeat("inner", beat(sensors=False), 0.0)
    before = {name: choice.choose(0.0) for name, choice in children.items()}
    assert set(before.values()) == {"a", "b", "c"}
    assert min(Counter(before.values()).values()) > 150
    for choice in children.values():
        for channel in ("a", "b"):
            choice.record_heartbeat(channel, beat(2), 3.0)
    after = {name: choice.choose(3.0) for name, choice in children.items()}
    assert set(after.values()) == {"a", "b"}
    assert all(after[name] == parent for name, parent in before.items() if parent != "c")


def test_a_channel_that_drains_is_left():
    choice = parent_selection.ParentSelector("s")
    choice.record_heartbeat("a", beat(), 0.0)
    choice.record_heartbeat("a", beat(2, open=False), 0.5)
    assert choice.choose(0.6) is None


@pytest.mark.parametrize("period_s", [1.0, 10.0, 60.0])
def test_children_leave_a_dead_channel_within_two_periods(period_s):
    """However the death falls between two beats and two reports, with beats of 0.4 of the period."""
    beat_s = 0.4 * period_s
    for step in range(100):
        died_s = 10 * period_s + step / 100 * period_s
        choice = parent_selection.ParentSelector("s", ("a", "b"))
        now_s, sequence = 0.0, 0
        while now_s < died_s + 3 * period_s:
            sequence += 1
            for channel in ("a", "b"):
                if channel == "b" or now_s <= died_s:
                    choice.record_heartbeat(channel, beat(sequence, period_s=beat_s), now_s)
            now_s += beat_s
        reports_s = [number * period_s for number in range(14) if number * period_s > died_s]
        moved_s = next(at_s for at_s in reports_s if choice.choose(at_s) == "b")
        assert moved_s - died_s <= 2 * period_s
