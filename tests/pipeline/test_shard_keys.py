"""Which shard a message goes to."""

import os
import random
import time
from typing import Any

import pyarrow as pa
import pytest

from muster.bus import api
from muster.core.reports import columns
from muster.pipeline.fleet import blocks, shards
from muster.pipeline.source import piece_files, rows, shard_keys, spark_internals
from tests.pipeline import traffic


def stored(
    data: bytes, sequence: int, *, subject: str = traffic.SUBJECT, **headers: str
) -> api.StoredMessage:
    return api.StoredMessage(subject, data, headers, sequence, sequence * 1_000_000_000)


def opened(*messages: api.StoredMessage, keys=(7, 9)) -> list[dict[str, Any]]:
    batches = shard_keys.with_shard_key(messages, keys, len(keys))
    return [row for batch in batches for row in batch.to_pylist()]


def piece_of(row: dict[str, Any]) -> blocks.ReportPiece:
    return blocks.ReportPiece.read(row["sequence"], row["reports"])


def machines_of(row: dict[str, Any]) -> list[str]:
    names: list[str] = piece_of(row).batch.column("machine").to_pylist()
    return names


def test_messages_are_joined_and_divided_by_machine():
    names = [f"m{n}" for n in range(50)]
    bodies = [
        traffic.body([traffic.report(name, 1, 1) for name in names], dropped={"late": 3}),
        traffic.body([traffic.report(name, 2, 2) for name in reversed(names)], partial=True),
    ]
    rows = opened(
        stored(bodies[0], 1),
        stored(b"rubbish", 2),
        stored(bodies[1], 3),
        stored(b"", 4, subject="muster.monitor.from.pipeline.batch.root.tick"),
    )
    parts = [row for row in rows if row["reports"] is not None]
    assert [(row["part"], row["sequence"], row["stored_ms"]) for row in parts] == [
        (7, 3, 3000),
        (9, 3, 3000),
    ]
    assert sorted(name for row in parts for name in machines_of(row)) == sorted(names * 2)
    for row in parts:
        batch = piece_of(row).batch
        numbers = shards.shards_of(batch.column("machine"), 2)
        assert {(7, 9)[shard] for shard in numbers.tolist()} == {row["part"]}
        half = batch.num_rows // 2
        assert batch.column("stream_sequence").to_pylist() == [1] * half + [3] * half
        assert batch.column("stored_ms").to_pylist() == [1000] * half + [3000] * half
        assert batch.column("partial").to_pylist() == [False] * half + [True] * half
    dropped = {row["part"]: piece_of(row).dropped for row in parts}
    first = (7, 9)[shards.shards_of(pa.array(names[:1]), 2)[0]]
    assert dropped == {7: [], 9: [], first: [(0, {"late": 3})]}, "reported once"
    clocks = [row for row in rows if row["reports"] is None]
    assert {(row["part"], row["stored_ms"]) for row in clocks} == {(7, 4000), (9, 4000)}
    assert [row["counts"] for row in clocks] == ['{"channel late":3,"malformed":1}', None]
    assert [row["activity"] for row in clocks] == ["[[1000,4000]]"] * 2


def test_reports_go_through_a_file_that_is_removed_when_it_is_read(tmp_path):
    body = traffic.body([traffic.report(f"m{n}", 1, 1) for n in range(20)], dropped={"late": 3})
    inline = [row for row in opened(stored(body, 1)) if row["reports"] is not None]
    batches = shard_keys.with_shard_key([stored(body, 1)], (7, 9), 2, folder=str(tmp_path))
    rows = [row for batch in batches for row in batch.to_pylist()]
    assert all(row["reports"] is None for row in rows)
    rows = [row for row in rows if row["reports_file"] is not None]
    pieces = [piece_files.take(row["sequence"], row["reports_file"]) for row in rows]
    assert list(tmp_path.iterdir()) == []
    assert [row["part"] for row in rows] == [row["part"] for row in inline]
    for piece, row in zip(pieces, inline, strict=True):
        assert piece.batch.equals(piece_of(row).batch)
        assert (piece.sequence, piece.dropped) == (1, piece_of(row).dropped)


def test_files_of_a_failed_attempt_are_removed_at_once_and_of_other_queries_after_an_hour(tmp_path):
    for name, age_s in (("own", 0), ("old", piece_files.ABANDONED_S + 60), ("new", 60)):
        piece_files.write_bytes(str(tmp_path / name), b"piece")
        os.utime(tmp_path / name, (time.time() - age_s,) * 2)
    piece_files.clear(str(tmp_path / "own"))
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


def test_the_periods_in_which_messages_were_stored_are_known_to_every_shard():
    times = (1, 16, 17, 33, 40)
    rows = opened(*(stored(b"", at_s, subject="muster.monitor.from.p.batch.root.tick") for at_s in times))
    assert [row["activity"] for row in rows] == ["[[1000,17000],[33000,40000]]"] * 2


def test_a_copy_of_a_stored_message_is_counted_and_not_processed():
    body = traffic.body([traffic.report("m", 1, 1)])
    copy = api.StoredMessage(traffic.SUBJECT, body, {}, 2, 2_000_000_000, is_copy=True)
    parts = opened(stored(body, 1), copy, keys=(5,))
    assert [machines_of(row) for row in parts if row["reports"]] == [["m"]]
    assert parts[-1]["counts"] == '{"copied":1}'


def test_lost_messages_are_counted_even_if_nothing_is_left():
    (row,) = [row for batch in shard_keys.with_shard_key([], [5], 1, lost=3) for row in batch.to_pylist()]
    assert (row["part"], row["counts"]) == (5, '{"lost-messages":3}')


def test_a_large_batch_is_divided_in_parts(monkeypatch):
    monkeypatch.setattr(shard_keys, "ROWS", 20)
    bodies = [traffic.body([traffic.report(f"m{n}", number, 1) for n in range(15)]) for number in range(5)]
    rows = opened(*(stored(body, number + 1) for number, body in enumerate(bodies)), keys=(5,))
    assert [row["sequence"] for row in rows] == [2, 4, 5, 0]
    assert [piece_of(row).batch.num_rows for row in rows[:-1]] == [30, 30, 15]


@pytest.mark.parametrize("name", ["", "x" * 257])
def test_a_message_with_an_impossible_name_is_refused_by_itself(name):
    good = traffic.body([traffic.report("m", 1, 1)])
    row = columns.to_batch([traffic.report("m", 1, 1)])
    bad = columns.encode(row.set_column(0, "machine", pa.array([name])), columns.BatchInfo(channel="c1"))
    rows = opened(stored(bad, 1), stored(good, 2), keys=(5,))
    assert machines_of(rows[0]) == ["m"]
    assert rows[1]["counts"] == '{"wrong-schema":1}'


@pytest.mark.parametrize("partitions", [1, 2, 16])
def test_each_partition_has_a_key(partitions):
    keys = shard_keys.keys(partitions)
    assert [spark_internals.partition_of(key, partitions) for key in keys] == list(range(partitions))
    assert shard_keys.keys(partitions, 1) == keys[:1]


def test_partitions_have_the_shards_in_turn():
    names = pa.array([f"m{n}" for n in range(100)])
    body = traffic.body([traffic.report(name, 1, 1) for name in names.to_pylist()])
    (batch,) = (
        part for part in shard_keys.with_shard_key([stored(body, 1)], (7, 9), 6) if part.num_rows == 6
    )
    listed = batch.to_pylist()
    assert [(row["shard"], row["part"]) for row in listed] == [(n, (7, 9)[n % 2]) for n in range(6)]
    for row in listed:
        assert (shards.shards_of(piece_of(row).batch.column("machine"), 6) == row["shard"]).all()


def test_what_channels_dropped_is_counted_by_reason():
    bodies = [
        traffic.body([traffic.report("m1", number, 1)], dropped={"overload": number, "Strange": 1})
        for number in (1, 2)
    ]
    rows = opened(*(stored(body, number) for number, body in enumerate(bodies, 1)))
    (counts,) = [row["counts"] for row in rows if row["counts"]]
    assert counts == '{"channel overload":3,"channel other":2}'


def _nested() -> bytes:
    """A batch whose facts are nested more deeply than a decoder allows."""
    nested = {columns.METADATA_KEY: b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"}
    batch = columns.to_batch([traffic.report("bad", 1, 1)]).replace_schema_metadata(nested)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


def test_a_message_with_facts_that_are_nested_too_deeply_is_refused_by_itself():
    rows = opened(stored(_nested(), 1), stored(traffic.body([traffic.report("good", 1, 1)]), 2))
    assert [name for row in rows if row["reports"] for name in machines_of(row)] == ["good"]
    assert [row["counts"] for row in rows if row["counts"]] == ['{"wrong-schema":1}']


def test_no_message_ends_a_query():
    good = bytearray(traffic.body([traffic.report("a", 1, 1, metrics={"queue": 2.0})]))
    chance = random.Random(3)
    bodies = [b"", b"rubbish", _nested()]
    for _ in range(300):
        bad = bytearray(good)
        for _ in range(chance.choice((1, 3, 20))):
            bad[chance.randrange(len(bad))] = chance.randrange(256)
        bodies.append(bytes(bad[: chance.choice((len(bad), chance.randrange(len(bad))))]))
    decoders = [rows.RowDecoder(name, rows.spark_schema(known)) for name, known in rows.SCHEMAS.items()]
    for number, body in enumerate(bodies):
        for decoder in decoders:
            for batch in decoder.decode([stored(body, number)]):
                batch.validate(full=True)
        opened(stored(body, number))
