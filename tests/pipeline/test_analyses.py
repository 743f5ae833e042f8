"""Analyses of the history on data whose answers are known: full disks, outliers, the capacity report."""

import datetime
import random

import msgspec
import pyarrow as pa
import pytest

from muster.analyses import capacity_page, capacity_report, disk_forecast, outliers
from muster.core import errors, messages
from muster.core.reports import columns
from muster.pipeline.fleet import rollups
from muster.pipeline.history import data_files, delta, tables
from tests.pipeline import test_history, traffic

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.may_leak("threads", "files", "processes", reason="Spark keeps its workers for later tests"),
]

T0 = test_history.T0
HOUR = test_history.HOUR
DAY = 24 * HOUR


def store_hourly(root, rows: list[dict[str, object]]) -> None:
    """Rows of `hourly`: machine, hour (a number from `T0`), and some columns."""
    schema = tables.definition(tables.HOURLY).file_schema
    whole = [
        {"group": "web", "zone": "z", "reports": 10, **row, "hour": T0 + int(row["hour"]) * HOUR}  # type: ignore[call-overload]
        for row in rows
    ]
    arrays = []
    for field in schema:
        values = [row.get(field.name) for row in whole]
        is_time = field.name == "hour"
        made = pa.array(values, pa.timestamp("ms", tz="UTC") if is_time else field.type)
        arrays.append(made.cast(field.type))
    written = data_files.write(root, tables.HOURLY, pa.Table.from_arrays(arrays, schema=schema), "hour")
    delta.HistoryTable(root, tables.HOURLY).commit(written.files, ("hours", 0))


def disk(machine: str, values: list[float]) -> list[dict[str, object]]:
    return [
        {"machine": machine, "hour": hour, "disk_percent_max": value} for hour, value in enumerate(values)
    ]


def test_a_full_disk_is_forecast_with_an_interval_that_contains_it(tmp_path, spark):
    hours = 48
    noise = random.Random(3)
    now_ms = T0 + hours * HOUR
    store_hourly(
        tmp_path,
        [
            *disk("steady", [40.0 + hour for hour in range(hours)]),  # full at hour 60
            *disk("noisy", [40.0 + hour / 2 + noise.gauss(0, 2) for hour in range(hours)]),  # at hour 120
            *disk("cleaned", [90.0] * 20 + [50.0 + hour for hour in range(28)]),  # at hour 70
            *disk("idle", [70.0 + noise.gauss(0, 1) for _ in range(hours)]),
            *disk("shrinking", [90.0 - hour / 10 for hour in range(hours)]),
            *disk("young", [10.0 + 8 * hour for hour in range(6)]),
            *disk("slow", [10.0 + hour / 1000 for hour in range(hours)]),  # in ten years
            *disk("full", [min(100.0, 70.0 + hour) for hour in range(hours)]),
        ],
    )
    rows = disk_forecast.forecast(spark, tmp_path, now_ms=now_ms)
    by_machine = {row.machine: row for row in rows}
    assert [row.machine for row in rows] == ["full", "steady", "cleaned", "noisy"]
    steady, noisy, cleaned = (by_machine[name] for name in ("steady", "noisy", "cleaned"))
    assert steady.full_ms == pytest.approx(T0 + 60 * HOUR, abs=1000)
    assert (steady.earliest_ms, steady.latest_ms) == pytest.approx((steady.full_ms,) * 2, abs=1000)
    assert (steady.disk_percent, steady.hours) == (87.0, hours)
    assert steady.percent_per_day == pytest.approx(24.0)
    assert cleaned.full_ms == pytest.approx(T0 + 70 * HOUR, abs=1000)
    assert cleaned.hours == 28
    assert noisy.earliest_ms < T0 + 120 * HOUR < noisy.latest_ms
    assert noisy.earliest_ms < noisy.full_ms < noisy.latest_ms
    assert noisy.latest_ms - noisy.earliest_ms < 3 * DAY
    assert 0.8 < noisy.r2 < 1
    assert by_machine["full"].full_ms == now_ms
    assert len(disk_forecast.forecast(spark, tmp_path, now_ms=now_ms, within_s=DAY / 1000)) == 3
    assert [row.machine for row in disk_forecast.forecast(spark, tmp_path, now_ms=now_ms, limit=1)] == [
        "full"
    ]


def test_the_interval_contains_the_true_value_as_often_as_stated(tmp_path, spark):
    """200 machines with the same trend and noise whose hours resemble each other."""
    hours, chance = 72, random.Random(11)
    rows: list[dict[str, object]] = []
    for number in range(200):
        level = 0.0
        for hour in range(hours):
            level = 0.5 * level + chance.gauss(0, 1)
            rows.append({"machine": f"m{number}", "hour": hour, "disk_percent_max": 30 + 0.4 * hour + level})
    store_hourly(tmp_path, rows)
    truth_ms = T0 + int(70 / 0.4 * HOUR)
    made = disk_forecast.forecast(spark, tmp_path, now_ms=T0 + hours * HOUR)
    covered = sum(row.earliest_ms <= truth_ms <= row.latest_ms for row in made)
    assert len(made) == 200
    assert covered >= 0.88 * len(made)


def test_forecasts_and_outliers_read_the_partitions_of_their_days(tmp_path, spark):
    store_hourly(tmp_path, disk("m", [float(hour) for hour in range(72)]))
    period = {"from_ms": T0 + 30 * HOUR, "to_ms": T0 + 40 * HOUR}
    for frame in (
        disk_forecast.forecast_frame(spark, tmp_path, **period),
        outliers.outlier_frame(spark, tmp_path, **period),
    ):
        assert "PartitionFilters: [isnotnull(day" in frame._jdf.queryExecution().toString()
        assert {path.rpartition("/")[0][-10:] for path in frame.inputFiles()} == {"2023-11-16"}


def test_machines_unlike_their_group_are_found(tmp_path, spark):
    rows: list[dict[str, object]] = []
    for hour in range(3):
        for number in range(20):
            cpu = 20.0 + number % 5
            memory = 50.0
            if number == 7:
                cpu = 80.0
            if number == 9:
                memory = 50.5  # different, but hardly
            rows += [
                {
                    "machine": f"{group}{number}",
                    "group": group,
                    "hour": hour,
                    "cpu_percent_mean": cpu + (60 if group == "db" and number != 7 else 0),
                    "memory_percent_mean": memory,
                    "uptime_s_mean": float(number * 1000),
                }
                for group in ("web", "db")
            ]
        rows += [
            {"machine": f"small{number}", "group": "small", "hour": hour, "cpu_percent_mean": 90.0 * number}
            for number in range(3)
        ]
    rows.append({"machine": "web3", "hour": 3, "cpu_percent_mean": None})
    store_hourly(tmp_path, rows)
    period = {"from_ms": T0, "to_ms": T0 + 4 * HOUR}
    (web,) = outliers.outliers(spark, tmp_path, **period)
    # db7 with 80 % is like the others of its group, which have 80 to 84 %.
    assert (web.machine, web.metric, web.value, web.group_median) == ("web7", "cpu_percent", 80.0, 22.0)
    assert web.score == pytest.approx((80 - 22) / 1.4826)
    assert web.machines == 20
    assert outliers.outliers(spark, tmp_path, **period, score_min=50.0) == []
    with pytest.raises(errors.NotFound):
        outliers.outliers(spark, tmp_path / "nowhere", **period)


def test_a_full_processor_is_unlike_a_diverse_group_unless_others_are_nearly_full(tmp_path, spark):
    """A machine at 99 % in groups whose machines differ from each other."""
    chance = random.Random(1)
    groups = {
        "skewed": [chance.gammavariate(4, 8) for _ in range(98)],  # as in `muster simulate`: 6 to 70 %
        "two-kinds": [2.0] * 9 + [20.0] * 2 + [38.0] * 9,  # median 20 %
        "any": [5.0 * number for number in range(20)],  # 0 to 95 %
    }
    store_hourly(
        tmp_path,
        [
            {"machine": f"{group}{number}", "group": group, "hour": 0, "cpu_percent_mean": cpu}
            for group, values in groups.items()
            for number, cpu in enumerate([99.0, *values])
        ],
    )
    rows = outliers.outliers(spark, tmp_path, from_ms=T0, to_ms=T0 + HOUR)
    assert [row.machine for row in rows] == ["skewed0", "two-kinds0"]
    assert rows[1].group_median == 20.0
    assert rows[1].score == pytest.approx((99 - 20) / 20)


def total(scope: str, name: str, at_ms: int, value: float, machines: int) -> rollups.ScopeTotals:
    many = rollups.ScopeTotals(scope, name, at_ms)
    traffic.fold(many.cell, test_history._column(value))
    many.cell.table.machines[0] = machines
    return many


@pytest.fixture
def week(tmp_path):
    """From Wednesday to Sunday, two machines more every day, and a peak on Friday at noon."""
    totals = []
    for hour in range(5 * 24):
        at_ms = T0 + hour * HOUR
        value = 90.0 if hour == 60 else 40.0
        totals.append(total("system", "", at_ms, value, 10 + 2 * (hour // 24)))
        totals.append(total("group", "web", at_ms, value, 7))
    test_history.store_groups(tmp_path, 0, totals)
    alert = messages.Alert(
        rule="fire",
        about="group:web",
        severity=messages.Severity.CRITICAL,
        state=messages.AlertState.FIRING,
        since_ms=T0,
        at_ms=T0,
    )
    test_history.store_alerts(tmp_path, 0, [alert])
    test_history.store(tmp_path, 0, [traffic.report("m", 1, T0, metrics={"reads.users": 3.0})])
    store_hourly(tmp_path, disk("leak<1>", [10.0 + hour / 2 for hour in range(5 * 24)]))
    return tmp_path


def test_the_capacity_report_has_the_figures_of_its_period(week, spark):
    report = capacity_report.make(
        spark, week, "week", datetime.date(2023, 11, 18), reports_per_s_limit=5.0, with_demand=True
    )
    assert (report.period, report.machines_max) == ("2023-W46", 18)
    assert report.machines_per_day == pytest.approx(2.0)
    assert len(report.hours) == 120
    assert max(report.hours, key=lambda hour: hour.means["cpu_percent"]).at_ms == T0 + 60 * HOUR
    assert {hour.means["cpu_percent"] for hour in report.hours} == {40.0, 90.0}
    (group,) = report.groups
    assert (group.group, group.machines) == ("web", 7)
    assert group.cpu_percent == pytest.approx((119 * 40 + 90) / 120)
    (full,) = report.disks
    assert full.full_ms == pytest.approx(T0 + 180 * HOUR, abs=1000)
    assert [(alert.rule, alert.times) for alert in report.alerts] == [("fire", 1)]
    page = capacity_page.render(report)
    assert page.count("<svg") == 6
    assert "<polyline" in page
    assert "leak&lt;1&gt;" in page
    assert "leak<1>" not in page
    assert "<td>web</td>" in page
    assert "<td>users</td>" in page
    assert "Demand" not in capacity_page.render(msgspec.structs.replace(report, demand=None))
    with pytest.raises(errors.NotFound, match="2023-12"):
        capacity_report.make(spark, week, "month", datetime.date(2023, 12, 1))
    frame = capacity_report.hours_frame(spark, week, from_ms=T0 + DAY, to_ms=T0 + 2 * DAY)
    assert "PartitionFilters: [isnotnull(day" in frame._jdf.queryExecution().toString()
    assert {path.rpartition("/")[0][-10:] for path in frame.inputFiles()} == {"2023-11-16"}


@pytest.mark.parametrize(
    ("period", "day", "expected"),
    [
        ("week", "2030-01-01", ("2030-W01", "2029-12-31", "2030-01-07")),
        ("month", "2030-12-31", ("2030-12", "2030-12-01", "2031-01-01")),
    ],
)
def test_periods_are_calendar_weeks_and_months(period, day, expected):
    name, from_ms, to_ms = capacity_report.bounds(period, datetime.date.fromisoformat(day))
    days = [
        datetime.datetime.fromtimestamp(at_ms / 1000, datetime.UTC).date().isoformat()
        for at_ms in (from_ms, to_ms)
    ]
    assert (name, *days) == expected


def test_growth_needs_three_days():
    assert capacity_report.growth([(0, 5), (DAY, 6)]) is None
    assert capacity_report.growth([(0, 5), (DAY, 8), (2 * DAY, 11)]) == pytest.approx(3.0)
    assert len(columns.STANDARD_METRICS) == len(outliers.METRICS) + 1
