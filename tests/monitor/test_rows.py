from __future__ import annotations

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
    actual = [report_rows.decode(messages.encode(row)) for row in sent]
    quick = [row for row in actual if isinstance(row, report_rows.ReportRow)]
    wide = [row for row in actual if isinstance(row, report_rows.WideReportRow)]
    back = [
        *(
            row for row in actual if isinstance(row, messages.NodeReport)
        ),  # the sum of its metrics is too large
        *(columns.from_batch(report_rows.to_batch(quick)) if quick else []),
        *(columns.from_batch(report_rows.wide_to_batch(wide)) if wide else []),
    ]
    assert sorted(back, key=_key) == sorted(sent, key=_key)


def test_long_reports_with_any_metrics_give_the_same_columns_as_messages():
    metrics = {f"m{number}": float(number) for number in range(40)}
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
    actual = [report_rows.decode(messages.encode(row)) for row in sent]
    wide = [row for row in actual if isinstance(row, report_rows.WideReportRow)]
    assert len(wide) == len(sent)
    assert report_rows.wide_to_batch(wide).equals(columns.to_batch(sent))


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
