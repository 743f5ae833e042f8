from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.core import errors, health, messages
from muster.core.reports import columns
from tests.core import test_messages

standard = st.dictionaries(st.sampled_from(columns.STANDARD_METRICS), test_messages.finite, max_size=6)
rows = st.lists(
    st.builds(
        lambda report, more: messages.NodeReport(
            machine=report.machine,
            group=report.group,
            zone=report.zone,
            boot=report.boot,
            sequence=report.sequence,
            at_ms=report.at_ms,
            period_s=report.period_s,
            dropped=report.sequence // 2,
            metrics={**report.metrics, **more},
            services=report.services,
        ),
        test_messages.node_reports,
        standard,
    ),
    min_size=1,
    max_size=5,
)


def node_report(**more: Any) -> messages.NodeReport:
    return messages.NodeReport(machine="m", sequence=1, at_ms=5, period_s=10.0, **more)


@given(rows, st.sampled_from([None, "lz4", "zstd"]))
def test_rows_survive_arrow(rows, compression):
    facts = columns.BatchInfo(channel="c", sequence=7, dropped={"duplicate": 3}, partial=True)
    batch, read = columns.decode(
        columns.encode(columns.to_batch(rows, partial=True), facts, compression=compression)
    )
    assert read == facts
    assert columns.from_batch(batch) == rows
    assert batch.schema.equals(columns.node_schema())


def test_compression_makes_a_batch_smaller_as_asked():
    batch = columns.to_batch([node_report(metrics={"cpu_percent": 50.0, "processes": 200.0})] * 1000)
    plain, lz4, zstd = (
        len(columns.encode(batch, columns.BatchInfo(channel="c"), compression=codec))
        for codec in (None, "lz4", "zstd")
    )
    assert zstd < lz4 < plain / 5


def test_a_metric_that_was_not_measured_is_null_and_a_new_one_is_extra():
    batch = columns.to_batch([node_report(metrics={"cpu_percent": 0.0, "gpu_percent": 3.0})])
    row = batch.to_pylist()[0]
    assert row["cpu_percent"] == 0.0
    assert row["load_1m"] is None
    assert row["extra"] == [("gpu_percent", 3.0)]


def test_names_of_metrics_may_be_codes_or_plain():
    batch = columns.to_batch(
        [node_report(metrics={"a": 1.0, "b": 2.0}), node_report(), node_report(metrics={"b": 3.0})]
    )
    assert pa.types.is_dictionary(batch["extra"].type.key_type)
    place = batch.schema.get_field_index("extra")
    plain = batch.set_column(place, "extra", batch["extra"].cast(pa.map_(pa.string(), pa.float64())))
    read, _ = columns.decode(columns.encode(plain, columns.BatchInfo(channel="c")))
    assert read.schema.equals(columns.node_schema())
    assert columns.from_batch(read) == columns.from_batch(batch)


def test_a_metric_has_a_name():
    batch = columns.to_batch([node_report(metrics={"a": 1.0})])
    names = pa.DictionaryArray.from_arrays(pa.array([0], pa.int32()), pa.array([None], pa.string()))
    place = batch.schema.get_field_index("extra")
    nameless = batch.set_column(
        place,
        batch.schema.field(place),
        pa.MapArray.from_arrays(pa.array([0, 1], pa.int32()), names, pa.array([1.0])),
    )
    with pytest.raises(columns.ReportSchemaMismatch, match="without a name"):
        columns.decode(columns.encode(nameless, columns.BatchInfo(channel="c")))


@given(rows, st.data())
def test_a_part_of_a_batch_needs_only_its_own_names(rows, data):
    batch = columns.to_batch(rows)
    start = data.draw(st.integers(0, len(rows) - 1))
    part = batch.slice(start, data.draw(st.integers(1, len(rows))))
    small = columns.without_unused_names(part)
    assert columns.from_batch(small) == rows[start : start + part.num_rows]
    names = small["extra"].keys.dictionary.to_pylist()
    used = {name for pairs in part["extra"].to_pylist() for name, _ in pairs or ()}
    assert sorted(names) == sorted(used)


def test_the_state_is_the_worst_of_the_services():
    states = (health.HealthState.UP, health.HealthState.DOWN, health.HealthState.LATE)
    services = tuple(messages.ServiceReport(name=state.value, state=state) for state in states)
    batch = columns.to_batch(
        [node_report(), node_report(services=services[:1]), node_report(services=services)]
    )
    assert batch["state"].to_pylist() == ["up", "up", "down"]


def test_a_reader_takes_columns_by_name():
    batch = columns.to_batch([node_report(metrics={"cpu_percent": 4.0})])
    order = list(reversed(batch.schema.names))
    newer = batch.select([name for name in order if name != "load_1m"]).append_column("later", pa.array([1]))
    facts = columns.BatchInfo()
    read, _ = columns.decode(columns.encode(newer, facts))
    assert columns.from_batch(read) == [node_report(metrics={"cpu_percent": 4.0})]


def _stream(batch: Any, metadata: dict[bytes, bytes]) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema.with_metadata(metadata)) as writer:
        writer.write_batch(batch.replace_schema_metadata(metadata))
    data: bytes = sink.getvalue().to_pybytes()
    return data


good = columns.encode(columns.to_batch([node_report()]), columns.BatchInfo())


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "malformed"),
        (good[: len(good) // 2], "malformed"),
        (b"\xff" * 200, "malformed"),
        (bytes(columns.MAX_BATCH_BYTES + 1), "too-large"),
        (_stream(pa.RecordBatch.from_pydict({"a": [1]}), {}), "wrong-schema"),
        (_stream(pa.RecordBatch.from_pydict({"a": [1]}), {b"muster": b"{]"}), "wrong-schema"),
        (_stream(pa.RecordBatch.from_pydict({"a": [1]}), {b"muster": b"{}"}), "wrong-schema"),
        (
            _stream(pa.RecordBatch.from_pydict({"a": [1]}), {b"muster": b'{"schema":"node-reports/9"}'}),
            "wrong-version",
        ),
        (
            _stream(
                columns.to_batch([node_report()]).set_column(0, "machine", pa.array([{"x": 1}])),
                {b"muster": b"{}"},
            ),
            "wrong-schema",
        ),
    ],
)
def test_what_is_no_batch_is_refused_by_reason(data, code):
    with pytest.raises(errors.MusterError) as refused:
        columns.decode(data)
    assert refused.value.code == code


@given(st.integers(0, len(good) - 1), st.integers(0, 255))
def test_a_flipped_byte_is_an_error_of_ours_or_harmless(position, byte):
    data = good[:position] + bytes([byte]) + good[position + 1 :]
    try:
        batch, _ = columns.decode(data)
        columns.from_batch(batch)
    except errors.MusterError:
        pass


def test_the_subject_of_a_result_holds_any_name_in_one_token():
    assert columns.result_subject("p", "system") == "muster.pipeline.from.p.report.system"
    assert columns.result_subject("p", "group", "web") == "muster.pipeline.from.p.report.group.web"
    assert columns.result_subject("p", "group", "a.b c").count(".") == 6
