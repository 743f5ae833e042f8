"""Which shard a message goes to."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from muster.bus import api
from muster.core.reports import columns
from muster.pipeline.fleet import state
from muster.pipeline.source import shard_keys
from tests.pipeline import traffic


def stored(
    data: bytes, sequence: int, *, subject: str = traffic.SUBJECT, **headers: str
) -> api.StoredMessage:
    return api.StoredMessage(subject, data, headers, sequence, sequence * 1_000_000_000)


def opened(*messages: api.StoredMessage, keys=(7, 9)) -> list[dict[str, Any]]:
    return [row for batch in shard_keys.with_shard_key(messages, keys) for row in batch.to_pylist()]


def machines_of(data: bytes) -> list[str]:
    names: list[str] = columns.decode(data)[0].column("machine").to_pylist()
    return names


def test_a_message_is_divided_by_machine():
    names = [f"m{n}" for n in range(50)]
    body = traffic.body([traffic.report(name, 1, 1) for name in names], dropped={"late": 3})
    rows = opened(
        stored(body, 2),
        stored(b"rubbish", 3),
        stored(b"", 4, subject="muster.monitor.from.pipeline.batch.root.tick"),
    )
    parts = [row for row in rows if row["data"] is not None]
    assert [row["shard"] for row in parts] == [7, 9]
    assert sorted(name for row in parts for name in machines_of(row["data"])) == sorted(names)
    for row in parts:
        shards = state.shards_of(pa.array(machines_of(row["data"])), 2)
        assert {(7, 9)[shard] for shard in shards.tolist()} == {row["shard"]}
    dropped = [columns.decode(row["data"])[1].dropped for row in parts]
    assert dropped == [{"late": 3}, {}]  # reported once
    clocks = [row for row in rows if row["data"] is None]
    assert {(row["shard"], row["stored_ms"]) for row in clocks} == {(7, 4000), (9, 4000)}
    assert [row["counts"] for row in clocks] == ['{"malformed":1}', None]


def test_a_single_shard_receives_messages_unopened():
    (message, _) = opened(stored(b"whatever it is", 1), keys=(5,))
    assert (message["shard"], message["data"]) == (5, b"whatever it is")


def test_any_fleet_is_divided_evenly():
    for pattern in ("web-{}", "10.0.{}.7", "ü{}", "{:08}", "{}"):
        names = pa.array([pattern.format(number) for number in range(8000)])
        counts = np.bincount(state.shards_of(names, 8), minlength=8)
        assert counts.min() > 850, pattern
        assert counts.max() < 1150, pattern


def test_the_shard_of_a_machine_depends_on_its_name_only():
    names = pa.array(["a", "", "bc", "a", "ünter", "b" * 2000, ""])
    shards = state.shards_of(names, 1000)
    for place, name in enumerate(names.to_pylist()):
        assert state.shards_of(pa.array([name]), 1000)[0] == shards[place]
        assert state.shards_of(names.slice(place), 1000)[0] == shards[place]
    # Of a stored state: another value would count machines twice after an upgrade.
    assert state.shards_of(pa.array(["web-1", "web-2", "db-1"]), 4096).tolist() == [266, 1948, 3114]


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
