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
    others = [row for row in actual if isinstance(row, messages.NodeReport)]
    back = columns.from_batch(report_rows.to_batch(quick)) if quick else []
    assert sorted([*back, *others], key=_key) == sorted(sent, key=_key)
    assert all(set(row.metrics) - set(columns.STANDARD_METRICS) for row in others)


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
    data = b'{"kind":"node-report/1","machine":"m","sequence":1,"at_ms":1,"period_s":1,"metrics":{"a":%b}}'
    with pytest.raises(errors.InvalidInput):
        report_rows.decode(data % figure)
