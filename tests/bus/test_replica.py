"""A broker without a cluster reads the replicas that one of a cluster has left."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from muster.bus import api
from muster.bus.brokers import broker, config, network
from muster.bus.client import client
from muster.bus.streams import replica
from muster.core import errors


@pytest.mark.may_block(reason="it copies a store")
async def test_a_replica_is_read_without_its_cluster(tmp_path: Path):
    async with network.mesh(3, tmp_path / "cluster") as cluster:
        async with await client.connect(cluster.urls, identity="writer") as bus:
            settings = api.StreamSettings("kept", subjects=("kept.>",), max_bytes=1 << 20, replicas=3)
            stream = await bus.stream(settings)
            for number in range(20):
                await stream.publish("kept.a", b"%d" % number)
            leader = (await bus.storage.call("STREAM.INFO.kept"))["cluster"]["leader"]
        store = cluster[leader].config.store_path
    assert store is not None
    alone = tmp_path / "alone"
    shutil.copytree(store / "jetstream", alone / "store/jetstream", ignore=shutil.ignore_patterns("_js_"))
    assert replica.make_single(alone / "store" / "jetstream") == ["kept"]
    single = broker.Broker(config.BrokerConfig(name="alone", directory=alone))
    await single.start()
    try:
        async with await client.connect([single.url], identity="reader") as bus:
            stream = await bus.open_stream("kept")
            assert [message.data async for message in stream.read(1)] == [b"%d" % n for n in range(20)]
    finally:
        await single.stop()


def test_a_file_that_is_damaged_is_not_used(tmp_path: Path):
    meta = tmp_path / "A" / "streams" / "kept" / replica.META
    meta.parent.mkdir(parents=True)
    meta.write_bytes(b'{"name": "kept", "num_replicas": 3}')
    meta.with_name(replica.SUM).write_text(replica.checksum("kept", meta.read_bytes()))
    assert replica.make_single(tmp_path) == ["kept"]
    assert replica.make_single(tmp_path) == ["kept"]
    meta.write_bytes(meta.read_bytes() + b" ")
    with pytest.raises(errors.InvalidInput, match="is damaged"):
        replica.make_single(tmp_path)
