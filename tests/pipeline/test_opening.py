"""Which shard a message goes to."""

from typing import Any

import pyarrow.compute as pc
import pytest

from muster.bus import api
from muster.core.reports import columns
from muster.pipeline.fleet import state
from muster.pipeline.job import query
from muster.pipeline.source import shard_keys
from tests.pipeline import traffic


def stored(
    data: bytes, sequence: int, *, subject: str = traffic.SUBJECT, **headers: str
) -> api.StoredMessage:
    return api.StoredMessage(subject, data, headers, sequence, sequence * 1_000_000_000)


def opened(*messages: api.StoredMessage, keys=(7, 9)) -> list[dict[str, Any]]:
    return [row for batch in shard_keys.with_shard_key(messages, keys) for row in batch.to_pylist()]


def groups_of(data: bytes) -> set[str]:
    return set(pc.unique(columns.decode(data)[0].column("group")).to_pylist())


def test_a_message_of_one_group_passes_unopened_and_a_mixed_one_is_divided():
    names = [f"g{n}" for n in range(8)]
    mixed = traffic.body([traffic.report(f"m-{name}", 1, 1, group=name) for name in names])
    rows = opened(
        stored(b"whatever it is", 1, **{columns.GROUP_HEADER: "g3"}),
        stored(mixed, 2),
        stored(b"rubbish", 3),
        stored(b"", 4, subject="muster.monitor.from.pipeline.batch.root.tick"),
    )
    first, *parts = [row for row in rows if row["data"] is not None]
    assert (first["data"], first["grp"]) == (b"whatever it is", "g3")
    assert first["shard"] == (7, 9)[state.shard_of("g3", 2)]
    assert set().union(*(groups_of(row["data"]) for row in parts)) == set(names)
    for row in parts:
        assert {(7, 9)[state.shard_of(name, 2)] for name in groups_of(row["data"])} == {row["shard"]}
    clocks = [row for row in rows if row["data"] is None]
    assert {(row["shard"], row["stored_ms"]) for row in clocks} == {(7, 4000), (9, 4000)}
    assert [row["counts"] for row in clocks] == ['{"malformed":1}', None]


def test_a_header_that_lies_is_found_out_where_the_message_is_opened():
    body = traffic.body([traffic.report("m", 1, 1, group="theirs")])
    rows = opened(stored(body, 1, **{columns.GROUP_HEADER: "mine"}))
    watched = query.ShardProcessor(state.FleetState(state.FleetStatePlan()))
    assert watched.open(rows) == ([], [])
    assert watched.feed([], []).counts["forged"] == 1


@pytest.mark.parametrize(("shards", "partitions"), [(2, 2), (4, 2), (16, 4), (1, 1)])
def test_keys_spread_evenly_over_the_partitions(shards, partitions):
    keys = shard_keys.keys(shards, partitions)
    assert len(set(keys)) == shards
    used = [shard_keys._hash(key) % partitions for key in keys]
    assert {used.count(one) for one in range(partitions)} == {shards // partitions}


def test_the_hash_is_sparks_own():
    """What Spark answers to ``SELECT hash(0), hash(1), hash(42), hash(-1)``."""
    assert [shard_keys._hash(number & 0xFFFFFFFF) for number in (0, 1, 42, -1)] == [
        933211791,
        -559580957,
        29417773,
        -1604776387,
    ]
