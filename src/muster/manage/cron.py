"""Cron schedules: five fields in the local time of a time zone. Pure.

    minute  hour  day of month  month  day of week (0 or 7 is Sunday)
    30      2     *             *      mon-fri

A field is `*`, a number, a range `a-b`, either with a step `/n`, or several of these separated by commas.
Months and days of the week have names. If both the day of month and the day of week are restricted, either is
enough. `@hourly`, `@daily`, `@weekly`, `@monthly` and `@yearly` are short for the usual ones.

When the clocks are changed, a time that they skip is due as much later (02:30 becomes 03:30), and of an hour
that they repeat only the first counts, unless the schedule is for every hour: then both do.
"""

from __future__ import annotations

import bisect
import calendar
import datetime
import difflib
import functools
import zoneinfo
from collections.abc import Iterator
from dataclasses import dataclass

from muster.core import errors

ALIASES = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}
YEARS_MAX = 9  # between two 29ths of February there are up to eight
TEXT_MAX = 200
_MONTHS = {name.lower(): number for number, name in enumerate(calendar.month_abbr) if name}
_DAYS = {name: number for number, name in enumerate(("sun", "mon", "tue", "wed", "thu", "fri", "sat"))}


@dataclass(frozen=True, slots=True)
class _CronField:
    name: str
    first: int
    last: int
    names: dict[str, int]


_FIELDS = (
    _CronField("minute", 0, 59, {}),
    _CronField("hour", 0, 23, {}),
    _CronField("day of month", 1, 31, {}),
    _CronField("month", 1, 12, _MONTHS),
    _CronField("day of week", 0, 7, _DAYS),
)


@dataclass(frozen=True, slots=True)
class CronSchedule:
    minutes: tuple[int, ...]
    hours: tuple[int, ...]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]  # 0: Sunday
    by_day: bool  # whether the day of month is restricted
    by_weekday: bool
    zone: zoneinfo.ZoneInfo

    def next_after(self, at_ms: int) -> int | None:
        """The first time after ``at_ms``; None: there is none."""
        return next(self.times_after(at_ms), None)

    def times_after(self, at_ms: int) -> Iterator[int]:
        """The times after ``at_ms``, in order."""
        last = datetime.datetime.fromtimestamp(at_ms / 1000, self.zone).date()
        day = last - datetime.timedelta(days=1)  # a time that the clocks skip may be due after midnight
        for _ in range(366 * YEARS_MAX):
            if self._is_on(day):
                times = _times_of(self, day)
                yield from times[bisect.bisect_right(times, at_ms) :]
            try:
                day += datetime.timedelta(days=1)
            except OverflowError:
                return

    def _is_on(self, day: datetime.date) -> bool:
        if day.month not in self.months:
            return False
        in_month, in_week = day.day in self.days, day.isoweekday() % 7 in self.weekdays
        return (in_month or in_week) if self.by_day and self.by_weekday else (in_month and in_week)


@functools.lru_cache(maxsize=256)
def _times_of(schedule: CronSchedule, day: datetime.date) -> tuple[int, ...]:
    times = set()
    folds = (0, 1) if len(schedule.hours) == 24 else (0,)
    for hour in schedule.hours:
        for minute in schedule.minutes:
            for fold in folds:
                local = datetime.datetime.combine(day, datetime.time(hour, minute, fold=fold), schedule.zone)
                at = local.astimezone(datetime.UTC)
                if fold and at.astimezone(schedule.zone).replace(fold=0) != local.replace(fold=0):
                    continue  # it is skipped, and due as much later
                times.add(int(at.timestamp() * 1000))
    return tuple(sorted(times))


@functools.lru_cache(maxsize=1024)
def parse(text: str, time_zone: str = "UTC") -> CronSchedule:
    """Raises `errors.InvalidInput`, which says what would be right; also for a schedule that is never due."""
    zone = _zone(time_zone)
    words = ALIASES.get(text.strip().lower(), text).split()
    if len(text) > TEXT_MAX or len(words) != len(_FIELDS):
        near = difflib.get_close_matches(text.strip().lower(), ALIASES, 1)
        raise errors.InvalidInput(
            f"{text[:TEXT_MAX]!r} has {len(words)} fields instead of 5",
            hint=f"did you mean {near[0]!r}?"
            if near
            else "minute, hour, day of month, month, day of week: '30 2 * * mon-fri'",
        )
    minutes, hours, days, months, weekdays = map(_numbers, _FIELDS, words)
    schedule = CronSchedule(
        minutes=tuple(sorted(minutes)),
        hours=tuple(sorted(hours)),
        days=days,
        months=months,
        weekdays=frozenset(day % 7 for day in weekdays),
        by_day=not words[2].startswith("*"),
        by_weekday=not words[4].startswith("*"),
        zone=zone,
    )
    if schedule.next_after(0) is None:
        raise errors.InvalidInput(f"{text!r} is never due", hint="no month has such a day")
    return schedule


def _numbers(field: _CronField, text: str) -> frozenset[int]:
    numbers: set[int] = set()
    for part in text.split(","):
        span, slash, step = part.partition("/")
        if slash and not (step.isdecimal() and 0 < int(step) <= field.last):
            raise _invalid(field, part, f"the step has to be from 1 to {field.last}")
        low, dash, high = span.partition("-")
        first = field.first if span == "*" else _number(field, low, part)
        if span == "*" or (slash and not dash):
            last = field.last
        else:
            last = _number(field, high, part) if dash else first
        if last < first:
            raise _invalid(field, part, "the range ends before it begins")
        numbers.update(range(first, last + 1, int(step or 1)))
    return frozenset(numbers)


def _number(field: _CronField, text: str, part: str) -> int:
    if text.lower() in field.names:
        return field.names[text.lower()]
    if text.isascii() and text.isdecimal() and field.first <= int(text[:4]) <= field.last:
        return int(text[:4])
    named = f" or {next(iter(field.names))} to {list(field.names)[-1]}" if field.names else ""
    raise _invalid(field, part, f"it is {field.first} to {field.last}{named}")


def _invalid(field: _CronField, part: str, hint: str) -> errors.InvalidInput:
    return errors.InvalidInput(f"{part!r} is not a {field.name}", hint=hint)


def _zone(name: str) -> zoneinfo.ZoneInfo:
    try:
        return zoneinfo.ZoneInfo(name)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError) as error:
        known = zoneinfo.available_timezones()
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]!r}?" if near else "such as UTC or Europe/Berlin"
        if not known and name != "UTC":
            hint = "this machine has no time zones: install its package tzdata"
        raise errors.InvalidInput(f"no time zone {name!r}", hint=hint) from error
