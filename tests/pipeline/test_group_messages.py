"""Reports of groups that are encoded in columns: equal to those that are encoded as objects."""

import msgspec
import numpy as np
import pyarrow as pa
import pytest

from muster.core import messages
from muster.core.reports import columns, sketches
from muster.pipeline.fleet import cell_arrays, cells, rollups

T0 = 1_700_000_000_000
NAMES = ["web", "größte", "quiet", "z" * 256]


def table_of(rows: int, seed: int = 1) -> cells.CellTable:
    """Some metrics are missing; the last row has nothing."""
    chance = np.random.default_rng(seed)
    row = np.repeat(np.arange(rows), 5)[: 5 * (rows - 1)]  # nothing in the last one
    values = chance.lognormal(3, 2, (len(cells.METRICS), len(row)))
    values[3, row == 1] = np.nan
    table = cells.CellTable(rows)
    state = chance.integers(0, len(cells.STATES), len(row))
    yes = np.ones(len(row), np.bool_)
    table.add_reports(row, values, T0 + np.arange(len(row)), state, row == 1, yes)
    figures = cell_arrays.extra_figures(row, np.arange(len(row)) % 3, values[0])
    table.add_figures(*figures, ["gpu", "queue_länge", "a" * 40])
    for name in ("cpu_percent", "memory_percent"):
        table.add_ranks(name, row[row != 1], values[0, row != 1], np.arange(len(row))[row != 1], 2)
    table.compact(2)
    table.name_machines(pa.array([f"m{number}-{'ü' * (number % 4)}" for number in range(len(row))]))
    table.dropped[1] = {"full": 7}
    table.merged[0] = sketches.DistinctSketch.of(["x", "y"])
    return table


def totals_of(table: cells.CellTable, scope: str = "group") -> list[rollups.ScopeTotals]:
    return [
        rollups.ScopeTotals(scope, name, T0, 10_000, cells.WindowCell(table, row), 5, row)
        for row, name in enumerate(NAMES)
    ]


@pytest.mark.parametrize("scope", ["group", "zone"])
def test_encoded_reports_equal_reports_of_objects(scope):
    first, other = table_of(len(NAMES)), table_of(len(NAMES), seed=2)
    mixed = [*totals_of(first, scope), *totals_of(other, scope)][::-1]
    decoded = [messages.decode(data, columns.GroupReport) for data in rollups.encoded_reports(mixed)]
    assert decoded == [rollups.group_report(many) for many in mixed]
    web = decoded[-1]
    assert web.metrics["cpu_percent"].p99 is not None
    assert web.metrics["gpu"].p50 is None
    assert len(web.top["cpu_percent"]) == 2
    assert decoded[-2].top == {}
    assert "memory_used_bytes" not in decoded[-2].metrics, "not measured"
    assert decoded[0].metrics == {}, "a group without reports"


def test_a_part_of_a_table_is_encoded_as_the_whole():
    totals = totals_of(table_of(len(NAMES)))
    whole = rollups.encoded_reports(totals)
    assert rollups.encoded_reports(totals[1:2]) == whole[1:2]
    assert rollups.encoded_reports(totals[2:]) == whole[2:]
    assert rollups.encoded_reports([]) == []


def test_a_metric_without_quantiles_has_none():
    table = cells.CellTable(1)
    table.total[0], table.count[0, 0], table.sum[0, 0] = 2, 2, 5.0
    table.min[0, 0], table.max[0, 0] = 2.0, 3.0
    many = rollups.ScopeTotals("group", "web", T0, cell=cells.WindowCell(table))
    (data,) = rollups.encoded_reports([many])
    report = messages.decode(data, columns.GroupReport)
    assert report.metrics == {"cpu_percent": columns.MetricRollup(count=2, sum=5.0, min=2.0, max=3.0)}


def test_tables_keep_the_machines_of_their_rankings():
    """Packed and merged, as from several shards."""
    shares = [cells.CellTable.unpack(table_of(3, seed).pack()) for seed in (1, 2)]
    merged = cells.CellTable(3)
    for table in shares:
        merged.add(table, np.arange(3))
        table.compact(2)
    merged.compact(2)
    every = [entry for table in shares for entry in table.ranking(0)["cpu_percent"]]
    assert len({name for _, name in every}) > 2
    assert merged.ranking(0)["cpu_percent"] == sorted(every, reverse=True)[:2]


@pytest.mark.parametrize("rows", [[0, 1], [1, 3], [0, 2, 3], [3], []])
def test_selected_rows_of_a_table_have_the_same_reports(rows):
    table = table_of(len(NAMES))
    whole = [rollups.group_report(many) for many in totals_of(table)]
    part = cells.CellTable.unpack(table.select(np.array(rows, np.int64)).pack())
    part.compact(2)
    assert len(part) == len(rows)
    for row, former in enumerate(rows):
        many = rollups.ScopeTotals("group", NAMES[former], T0, 10_000, cells.WindowCell(part, row), 5, former)
        assert rollups.group_report(many) == whole[former]


@pytest.mark.parametrize("first", [0, 1 << 60])  # the other does not fit into an integer with row and rank
def test_the_highest_of_each_row_are_in_order_and_equal_ones_by_machine(first):
    chance = np.random.default_rng(5)
    row, machines = chance.integers(0, 30, 2000), first + chance.permutation(2000)
    values = np.round(chance.random(2000), 2)
    expected = [
        (at, value, machine)
        for at in range(30)
        for value, machine in sorted(
            zip(values[row == at].tolist(), machines[row == at].tolist(), strict=True),
            key=lambda pair: (-pair[0], pair[1]),
        )[:7]
    ]
    order = cell_arrays._descending(row, values, machines)
    ranked = list(zip(*(column[order].tolist() for column in (row, values, machines)), strict=True))
    assert [entry for at in range(30) for entry in [e for e in ranked if e[0] == at][:7]] == expected
    assert [entry[0] for entry in ranked] == sorted(row.tolist())


def test_packed_figures_are_the_same_whatever_they_are():
    """Most cells have one report, whose value is sum, minimum and maximum."""
    count = np.array([[0, 1, 2, 1], [1, 0, 3, 0]])
    sums = np.array([[0.0, 5.0, 7.0, 4.0], [-1.5, 0.0, 9.0, 0.0]])
    least = np.array([[np.inf, 5.0, 3.0, 2.0], [-1.5, np.inf, 1.0, np.inf]])
    most = np.array([[-np.inf, 5.0, 4.0, np.inf], [-1.5, -np.inf, 5.0, -np.inf]])
    stored = cell_arrays.packed_figures(count, sums, least, most)
    for actual, expected in zip(
        cell_arrays.unpacked_figures(stored, count), (sums, least, most), strict=True
    ):
        np.testing.assert_array_equal(actual, expected)
    ones = np.ones(1000, np.int64)
    values = np.random.default_rng(1).random(1000)
    assert len(msgspec.msgpack.encode(cell_arrays.packed_figures(ones, values, values, values))) < 8_300
