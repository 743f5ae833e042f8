"""Cron schedules: which times are due, also when the clocks are changed."""

from __future__ import annotations

import datetime
import itertools

import pytest

from muster.core import errors
from muster.manage import cron


def due(text: str, zone: str, after: str, count: int) -> list[str]:
    """The times after ``after``, in UTC."""
    at_ms = int(datetime.datetime.fromisoformat(f"{after}+00:00").timestamp() * 1000)
    times = itertools.islice(cron.parse(text, zone).times_after(at_ms), count)
    utc = [datetime.datetime.fromtimestamp(time_ms / 1000, datetime.UTC) for time_ms in times]
    return [at.strftime("%m-%dT%H:%M") for at in utc]


@pytest.mark.parametrize(
    ("text", "after", "times"),
    [
        ("30 2 * * *", "2026-11-19T02:29", ["11-19T02:30", "11-20T02:30"]),
        ("30 2 * * *", "2026-11-19T02:30", ["11-20T02:30"]),
        ("*/20 9-10 * * *", "2026-11-19T09:20", ["11-19T09:40", "11-19T10:00", "11-19T10:20"]),
        ("0 0 * * mon-fri", "2026-11-20T12:00", ["11-23T00:00"]),  # a Friday
        ("0 0 * * 7", "2026-11-20T12:00", ["11-22T00:00"]),
        ("0 0 13 * fri", "2026-11-01T00:00", ["11-06T00:00", "11-13T00:00", "11-20T00:00"]),
        ("0 0 31 jan,mar *", "2026-01-31T12:00", ["03-31T00:00"]),
        ("0 0 29 feb *", "2026-01-01T00:00", ["02-29T00:00"]),
        ("5,1-2 0 1 1 *", "2026-12-01T00:00", ["01-01T00:01", "01-01T00:02", "01-01T00:05"]),
        ("50/5 0 1 1 *", "2026-12-01T00:00", ["01-01T00:50", "01-01T00:55"]),
        ("@Hourly", "2026-12-31T23:10", ["01-01T00:00"]),
    ],
)
def test_the_times_that_follow(text, after, times):
    assert due(text, "UTC", after, len(times)) == times


@pytest.mark.parametrize(
    ("text", "after", "times"),
    [
        # 2026-03-29: 02:00 becomes 03:00 (01:00 UTC)
        ("30 2 * * *", "2026-03-28T12:00", ["03-29T01:30", "03-30T00:30"]),
        ("30 2,3 * * *", "2026-03-29T00:00", ["03-29T01:30", "03-30T00:30"]),  # both are the same time
        ("*/30 * * * *", "2026-03-29T00:20", ["03-29T00:30", "03-29T01:00", "03-29T01:30"]),
        # 2026-10-25: 03:00 becomes 02:00 (01:00 UTC)
        ("30 2 * * *", "2026-10-24T12:00", ["10-25T00:30", "10-26T01:30"]),
        ("30 * * * *", "2026-10-25T00:00", ["10-25T00:30", "10-25T01:30", "10-25T02:30"]),
    ],
)
def test_changes_of_the_clocks(text, after, times):
    assert due(text, "Europe/Berlin", after, len(times)) == times


def test_a_time_that_is_skipped_at_midnight_is_due_on_the_next_day():
    # In Santiago, 2026-09-06 begins at 01:00.
    assert due("30 0 * * sun", "America/Santiago", "2026-09-05T00:00", 2) == ["09-06T04:30", "09-13T03:30"]


@pytest.mark.parametrize("day", range(0, 366, 5))
def test_the_times_are_in_order_and_the_next_one_is_the_first(day):
    at_ms = int(datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC).timestamp() * 1000) + day * 86_400_000
    schedule = cron.parse("*/17 */3 * * *", "Europe/Berlin")
    times = list(itertools.islice(schedule.times_after(at_ms), 40))
    assert times == sorted(set(times))
    for earlier, later in itertools.pairwise(times):
        assert schedule.next_after(earlier) == schedule.next_after(later - 1) == later


@pytest.mark.parametrize(
    ("text", "zone", "error", "hint"),
    [
        ("61 * * * *", "UTC", "'61' is not a minute", "it is 0 to 59"),
        ("* * * * mon-xyz", "UTC", "'mon-xyz' is not a day of week", "sun to sat"),
        ("5-1 * * * *", "UTC", "'5-1' is not a minute", "ends before it begins"),
        ("*/0 * * * *", "UTC", "'*/0' is not a minute", "from 1 to 59"),
        ("* * *", "UTC", "3 fields instead of 5", "minute, hour"),
        ("@dayly", "UTC", "fields instead of 5", "did you mean '@daily'?"),
        ("0 0 31 2 *", "UTC", "never due", "no month has such a day"),
        ("@daily", "Europe/Berln", "no time zone 'Europe/Berln'", "did you mean 'Europe/Berlin'?"),
        ("@daily", "/etc/passwd", "no time zone", "such as UTC"),
        ("٣ * * * *", "UTC", "is not a minute", "it is 0 to 59"),
    ],
)
def test_an_error_says_what_would_be_right(text, zone, error, hint):
    with pytest.raises(errors.InvalidInput) as caught:
        cron.parse(text, zone)
    assert error in str(caught.value)
    assert hint in str(caught.value.hint)
