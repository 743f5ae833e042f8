"""The history from its end, a page at a time."""

import random
from pathlib import Path
from typing import Any

import pytest

from muster.core import errors
from muster.pipeline.fleet import rollups
from muster.pipeline.history import newest_first, search, tables
from tests.pipeline import test_history, traffic

T0 = test_history.T0


def pages(root: Path, history_search: search.HistorySearch, limit: int) -> list[dict[str, Any]]:
    """All pages, one after the other, as a reader requests them."""
    collected: list[dict[str, Any]] = []
    mark: newest_first.PageCursor | None = None
    while True:
        rows, mark = newest_first.read_page(root, history_search, limit, mark)
        assert rows.num_rows <= limit
        collected += rows.to_pylist()
        if mark is None:
            return collected
        assert rows.num_rows == limit
        mark = newest_first.PageCursor.parse(str(mark))


def test_pages_hold_every_row_once_the_newest_first(tmp_path):
    """Whatever lies in which file, and however many rows have the same time."""
    shuffled = random.Random(5)
    rows = [
        traffic.report(f"m{n % 13}", n, T0 + shuffled.choice((0, 7, 1000, 5000)), group="g")
        for n in range(1, 301)
    ]
    shuffled.shuffle(rows)
    for batch in range(20):
        test_history.store(tmp_path, batch, rows[batch::20])
    history_search = search.HistorySearch(columns=("machine", "sequence", "reported_at"))
    complete = pages(tmp_path, history_search, 1000)
    assert len(complete) == 300
    times = [row["reported_at"] for row in complete]
    assert times == sorted(times, reverse=True)
    assert sorted(row["sequence"] for row in complete) == list(range(1, 301))
    for limit in (37, 100, 299, 300):
        assert pages(tmp_path, history_search, limit) == complete
    values = pages(tmp_path, search.HistorySearch(where="machine = 'm3'", columns=("machine", "sequence")), 5)
    assert [row["machine"] for row in values] == ["m3"] * 23
    bounded = pages(
        tmp_path, search.HistorySearch(from_ms=T0 + 7, to_ms=T0 + 5000, columns=("reported_at",)), 9
    )
    assert bounded == [{"reported_at": at} for at in times if T0 + 7 <= at.timestamp() * 1000 < T0 + 5000]


def test_what_is_written_meanwhile_moves_no_page(tmp_path):
    for batch in range(10):
        test_history.store(tmp_path, batch, [traffic.report("m", batch + 1, T0 + batch * 1000)])
    history_search = search.HistorySearch(columns=("sequence",))
    first, mark = newest_first.read_page(tmp_path, history_search, 4)
    test_history.store(tmp_path, 10, [traffic.report("m", 11, T0 + 60_000)])
    second, _ = newest_first.read_page(tmp_path, history_search, 4, mark)
    assert first.column("sequence").to_pylist() == [10, 9, 8, 7]
    assert second.column("sequence").to_pylist() == [6, 5, 4, 3]


def test_files_that_end_earlier_are_not_read(tmp_path, monkeypatch):
    for batch in range(4 * newest_first.FILES_AT_ONCE):
        test_history.store(tmp_path, batch, [traffic.report("m", batch + 1, T0 + batch * 1000)])
    read: list[int] = []
    scan = search.scan

    def watched(values: Any, history_search: search.HistorySearch) -> Any:
        read.append(len(values.files))
        return scan(values, history_search)

    monkeypatch.setattr(search, "scan", watched)
    rows, _ = newest_first.read_page(tmp_path, search.HistorySearch(columns=("sequence",)), 5)
    assert rows.column("sequence").to_pylist() == [64, 63, 62, 61, 60]
    assert read == [newest_first.FILES_AT_ONCE]


def test_other_kinds_have_an_order_too_and_nothing_has_no_pages(tmp_path):
    assert pages(tmp_path, search.HistorySearch(), 5) == []
    window_ms = 10_000
    for number in range(3):
        many = rollups.ScopeTotals("group", "web", T0 + number * window_ms)
        traffic.fold(many.cell, test_history._column(50.0))
        test_history.store_groups(tmp_path, number, [many])
    history_search = search.HistorySearch(
        tables.GROUPS, "cpu_percent_mean = 50", columns=("window_start", "name")
    )
    actual = pages(tmp_path, history_search, 1)
    assert [int(row["window_start"].timestamp() * 1000) - T0 for row in actual] == [20_000, 10_000, 0]
    with pytest.raises(errors.InvalidInput, match="no table 'weeks'"):
        newest_first.read_page(tmp_path, search.HistorySearch("weeks"), 5)


@pytest.mark.parametrize("text", ["", ".", "1", "1.", ".1", "-1.1", "1.1.1", "٣.1", "1." + "9" * 16, "a.b"])
def test_a_mark_that_is_none_is_refused(text):
    with pytest.raises(errors.InvalidInput, match="not a cursor of the history"):
        newest_first.PageCursor.parse(text)


def test_a_mark_does_not_keep_the_whole_history():
    with pytest.raises(errors.LimitExceeded, match="of one millisecond"):
        newest_first.PageCursor.parse(f"1.{newest_first.SHOWN_MAX + 1}")
