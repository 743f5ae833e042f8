from __future__ import annotations

import collections

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.core import duplicates
from muster.monitor.channel import known_machines

NOW_MS = 1_700_000_000_000
reports = st.lists(
    st.tuples(
        st.sampled_from("abcde"),
        st.integers(1, 3),
        st.integers(0, 6) | st.integers(60, 70),
        st.sampled_from([1.0, 10.0]),
    ),
    max_size=12,
)


def make(machines_max: int = 100) -> tuple[known_machines.KnownMachines, collections.Counter[str]]:
    dropped = collections.Counter[str]()
    return known_machines.KnownMachines(machines_max, dropped), dropped


def observe_all(
    known: known_machines.KnownMachines, chunk: list[tuple[str, int, int, float]], now_ms: int = NOW_MS
) -> list[bool]:
    machines = [report[0].encode() for report in chunk]
    boot, sequence = (np.array([report[place] for report in chunk], np.int64) for place in (1, 2))
    period_s = np.array([report[3] for report in chunk], np.float64)
    new: list[bool] = known.observe_all(machines, boot, sequence, period_s, now_ms).tolist()
    return new


@given(st.lists(reports, max_size=8), st.sampled_from([1, 2, 4, 6, 100]))
def test_many_reports_are_observed_as_one_by_one(chunks, machines_max):
    (together, dropped), (single, expected) = make(machines_max), make(machines_max)
    for number, chunk in enumerate(chunks):
        now_ms = NOW_MS + 5_000 * number
        assert observe_all(together, chunk, now_ms) == [
            single.observe(machine.encode(), boot, sequence, period_s * 1000, now_ms)
            for machine, boot, sequence, period_s in chunk
        ]
        assert dropped == expected
        assert together.gaps == single.gaps
        assert together.count(now_ms + 3_000) == single.count(now_ms + 3_000)


def test_the_next_report_of_a_machine_is_new_and_a_repeated_one_is_not():
    known, dropped = make()
    for sequence in range(1, 100):
        assert observe_all(known, [("a", 1, sequence, 10.0), ("b", 1, sequence, 10.0)]) == [True, True]
        assert observe_all(known, [("a", 1, sequence, 10.0)]) == [False]
    assert dropped == {"duplicate": 99}
    assert observe_all(known, [("a", 1, 99 - duplicates.KEPT, 10.0)]) == [False]
    assert dropped == {"duplicate": 99, "late": 1}
    assert observe_all(known, [("c", 1, 2, 10.0), ("c", 1, 3, 10.0), ("c", 1, 3, 10.0)]) == [
        True,
        True,
        False,
    ]
    assert known.gaps == 0


def test_missing_reports_are_counted_until_they_arrive():
    known, _ = make()
    observe_all(known, [("a", 1, 1, 10.0), ("a", 1, 5, 10.0)])
    assert known.gaps == 3
    observe_all(known, [("a", 1, 4, 10.0)])
    assert known.gaps == 2


@pytest.mark.parametrize(
    ("silent_ms", "expected"),
    [(0, (1, 0)), (20_000, (1, 0)), (20_001, (1, 1)), (60_000, (1, 1)), (60_001, (0, 0))],
)
def test_a_machine_is_missing_after_two_periods_and_gone_after_six(silent_ms, expected):
    known, _ = make()
    observe_all(known, [("a", 1, 1, 30.0)])
    observe_all(known, [("a", 1, 2, 10.0)])  # its period has changed
    assert known.count(NOW_MS + silent_ms) == expected


def test_up_to_half_of_the_maximum_no_machine_is_forgotten():
    known, dropped = make(machines_max=10)
    for sequence in range(1, 20):
        for machine in "abcde":
            assert observe_all(known, [(machine, 1, sequence, 10.0)]) == [True]
    for machine in "abcde":
        assert observe_all(known, [(machine, 1, 1, 10.0)]) == [False]
    assert dropped == {"duplicate": 5}
    assert known.count(NOW_MS) == (5, 0)


def test_usual_reports_are_observed_together_however_many_machines_are_known(monkeypatch):
    known, _ = make(machines_max=4)
    observe_all(known, [(name, 1, 1, 10.0) for name in "ab"])
    monkeypatch.setattr(known, "observe", None)  # one by one
    assert observe_all(known, [(name, 1, 2, 10.0) for name in "ab"]) == [True, True]


def test_machines_that_were_silent_for_longest_are_forgotten_and_their_places_used_again():
    known, _ = make(machines_max=8)
    for number in range(100):
        now_ms = NOW_MS + 10 * number
        assert observe_all(known, [(f"m{number}", 1, 1, 10.0), ("a", 1, number, 10.0)], now_ms) == [
            True,
            True,
        ]
        assert known.count(now_ms)[0] <= 8
    assert observe_all(known, [("a", 1, 99, 10.0), ("m99", 1, 1, 10.0)]) == [False, False]
    assert observe_all(known, [("m0", 1, 1, 10.0)]) == [True]
    assert len(known._boot) == known_machines._FIRST_SIZE


def test_an_old_machine_that_reports_while_others_are_forgotten_keeps_its_place():
    known, _ = make(machines_max=4)
    for machine in "bac":  # the third begins a new generation: b and a are old
        observe_all(known, [(machine, 1, 5, 10.0)])
    observe_all(known, [("d", 1, 5, 10.0)])
    assert observe_all(known, [("a", 1, 6, 10.0)]) == [True]  # b is forgotten
    assert observe_all(known, [("e", 1, 1, 10.0)]) == [True]  # at the place of b
    assert observe_all(known, [("a", 1, 7, 10.0), ("a", 1, 7, 10.0)]) == [True, False]
    assert known.count(NOW_MS) == (4, 0)
