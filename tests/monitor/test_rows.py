from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.core import errors, messages
from muster.core.reports import columns
from muster.monitor.channel import report_rows
from tests.core import test_reports


@given(test_reports.rows)
def test_the_quick_way_and_the_other_give_the_same_columns(sent):
    shapes = report_rows.ReportShapes(10)
    for row in sent:  # then the metrics of machines are known
        shapes.decode(messages.encode(row))
    actual = [shapes.decode(messages.encode(row)) for row in sent]
    quick = [row for row in actual if isinstance(row, report_rows.StandardReportRow)]
    wide = [row for row in actual if isinstance(row, report_rows.WideReportRow | report_rows.ShapedReportRow)]
    back = [
        *(
            row for row in actual if isinstance(row, messages.NodeReport)
        ),  # the sum of its metrics is too large
        *(columns.from_batch(report_rows.to_batch(quick)) if quick else []),
        *(columns.from_batch(report_rows.wide_to_batch(wide)) if wide else []),
    ]
    assert sorted(back, key=_key) == sorted(sent, key=_key)


def test_long_reports_with_any_metrics_give_the_same_columns_as_messages():
    metrics = {f"m{number}": float(number) for number in range(60)}
    sent = [
        messages.NodeReport(machine="a", sequence=1, at_ms=1, period_s=1.0, metrics=metrics),
        messages.NodeReport(machine="b" * 256, sequence=1, at_ms=2, period_s=1.0, group="g" * 256),
        messages.NodeReport(
            machine="c", sequence=2, at_ms=3, period_s=1.0, metrics={**metrics, "cpu_percent": 3.0}
        ),
        messages.NodeReport(
            machine="d", sequence=1, at_ms=1, period_s=1.0, metrics={"cpu_percent": 7.0, "x": 1.0}
        ),
    ]
    shapes = report_rows.ReportShapes(10)
    expected = columns.to_batch(sent)
    any_: type = report_rows.WideReportRow
    shaped: type = report_rows.ShapedReportRow
    for kinds in ((any_, any_, any_, any_), (shaped, any_, shaped, any_)):  # b and d: none, and few
        rows: list[Any] = [shapes.decode(messages.encode(row)) for row in sent]
        assert [isinstance(row, kind) for row, kind in zip(rows, kinds, strict=True)] == [True] * 4
        assert report_rows.wide_to_batch(rows).equals(expected)


LONG = {f"m{number}": float(number) for number in range(60)}


def report(machine: str, metrics: dict[str, float]) -> messages.NodeReport:
    return messages.NodeReport(machine=machine, sequence=1, at_ms=1, period_s=1.0, metrics=metrics)


def test_a_machine_that_reports_other_metrics_than_before_is_decoded_again():
    shapes = report_rows.ReportShapes(10)
    fewer = {name: value for name, value in LONG.items() if name != "m7"}
    for metrics in (LONG, {**LONG, "other": 1.0}, fewer, {**fewer, 'a"\\': 1.0, "b\n": 2.0}):
        for kind in (report_rows.WideReportRow, report_rows.ShapedReportRow):
            row = shapes.decode(messages.encode(report("a", metrics)))
            assert isinstance(row, kind if "b\n" not in metrics else report_rows.WideReportRow)
            assert report_rows.wide_to_batch([row]).equals(columns.to_batch([report("a", metrics)]))


def test_the_memory_for_metrics_and_machines_is_bounded(monkeypatch):
    monkeypatch.setattr(report_rows, "SHAPES_MAX", 1)
    shapes = report_rows.ReportShapes(2)

    def is_shaped(machine: str, metrics: dict[str, float]) -> bool:
        row = shapes.decode(messages.encode(report(machine, metrics)))
        return isinstance(row, report_rows.ShapedReportRow)

    assert [is_shaped("a", LONG), is_shaped("a", LONG)] == [False, True]
    assert [is_shaped("b", {**LONG, "other": 1.0}) for _ in range(2)] == [False, False]
    assert [is_shaped(machine, LONG) for machine in "bbcc"] == [False, True, False, True]
    assert not is_shaped("a", LONG)  # forgotten when c came


def test_a_known_machine_cannot_report_a_figure_that_is_not_finite():
    shapes = report_rows.ReportShapes(10)
    good = messages.encode(report("a", LONG))
    for _ in range(2):
        shapes.decode(good)
    with pytest.raises(errors.InvalidInput):
        shapes.decode(good.replace(b"59.0", b"1e999"))


def _key(row: messages.NodeReport) -> bytes:
    return msgspec.json.encode(row, order="deterministic")


def test_messagepack_goes_the_other_way():
    row = messages.NodeReport(machine="m", sequence=1, at_ms=1, period_s=1.0)
    assert report_rows.decode(messages.encode(row, "msgpack")) == row


@given(st.binary(max_size=60) | st.text(max_size=60).map(str.encode))
def test_rubbish_is_an_error_of_ours(data):
    with pytest.raises(errors.MusterError):
        report_rows.decode(data)


@pytest.mark.parametrize("figure", [b"1e999", b"NaN", b"Infinity", b"-1e400"])
def test_no_figure_that_is_not_finite(figure):
    data = b'{"kind":"node-report/1","machine":"m","sequence":1,"at_ms":1,"period_s":1,"metrics":{"a":%b%b}}'
    for more in (b"", b"".join(b',"m%d":1.0' % number for number in range(80))):
        with pytest.raises(errors.InvalidInput):
            report_rows.decode(data % (figure, more))
