from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.core import errors, units


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90.0),
        ("0.5", 0.5),
        ("15s", 15.0),
        (" 250 ms ", 0.25),
        ("1h30m", 5400.0),
        ("1h 30min", 5400.0),
        ("7d", 604800.0),
        ("2w", 1209600.0),
        ("10us", 1e-5),
    ],
)
def test_durations_as_people_write_them(text: str, seconds: float) -> None:
    assert units.parse_duration_s(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text", ["", "s", "-1s", "1 fortnight", "1e3s", "nan", "inf", "1s!", "٣s", "1" * 400, "1s" * 3 + "x"]
)
def test_what_is_not_a_duration_is_refused(text: str) -> None:
    with pytest.raises(errors.InvalidInput):
        units.parse_duration_s(text)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("1kB", 1000),
        ("1KiB", 1024),
        ("64MiB", 64 << 20),
        ("1.5 GB", 1_500_000_000),
        ("2TiB", 2 << 40),
    ],
)
def test_sizes_as_people_write_them(text: str, size: int) -> None:
    assert units.parse_size_bytes(text) == size


@pytest.mark.parametrize("text", ["", "64M", "64m", "-1B", "1XB", "MiB", "1 MiB MiB", "0x10", "9" * 400])
def test_what_is_not_a_size_is_refused(text: str) -> None:
    with pytest.raises(errors.InvalidInput):
        units.parse_size_bytes(text)


@given(st.text(max_size=60))
def test_any_text_is_a_value_or_a_clear_error(text: str) -> None:
    for parse in (units.parse_duration_s, units.parse_size_bytes):
        with contextlib.suppress(errors.InvalidInput):
            assert parse(text) >= 0


@given(st.integers(0, 1 << 60))
def test_a_size_reads_back(size: int) -> None:
    assert units.parse_size_bytes(units.format_size(size)) == size


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0 s"),
        (35e-6, "35 µs"),
        (0.99994e-3, "1 ms"),
        (0.25, "250 ms"),
        (0.9996, "1 s"),
        (3.214, "3.21 s"),
        (42, "42 s"),
        (119.4, "119 s"),
        (119.6, "2m"),
        (190, "3m10s"),
        (3605, "1h"),
        (28_541, "7h55m"),
        (86_399.6, "1d"),
        (1_047_600, "12d03h"),
        (-0.25, "-250 ms"),
        (float("inf"), "inf s"),
        (float("nan"), "nan s"),
    ],
)
def test_a_measured_duration_has_one_or_two_units(seconds, shown):
    assert units.rounded_duration(seconds) == shown


def test_a_count_has_its_noun_in_the_right_number():
    texts = [units.format_count(number, "row") for number in (0, 1, 2_000)]
    assert texts == ["0 rows", "1 row", "2,000 rows"]
