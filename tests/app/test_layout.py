"""From settings to brokers: which there are, how they are joined, what each may use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from muster.app.brokers import broker_configs
from muster.bus.brokers import config
from muster.core.settings import domain, loader

TRUSTED = broker_configs.BrokerTrustFiles(
    operator=config.OperatorTrust(operator_jwt="o", system_account="A", accounts={"A": "jwt"}), secret="s"
)


def made(**bus: Any) -> list[config.BrokerConfig]:
    whole = loader.load(domain.BaseSettings, flags={f"bus.{name}": value for name, value in bus.items()})
    return broker_configs.broker_configs(whole, TRUSTED, Path("/data"))


def test_one_broker_needs_no_cluster():
    (one,) = made(port=4222)
    assert (one.name, one.directory, one.port, one.cluster) == ("local-1", Path("/data/local-1"), 4222, None)
    assert one.trust is TRUSTED.operator
    assert one.storage is not None
    assert one.storage.sync_interval_s is None  # synced before it is acknowledged


def test_a_mesh_has_one_cluster_and_counts_its_ports_up():
    found = made(brokers=3, port=4222, websocket=True, websocket_port=8080)
    assert [one.port for one in found] == [4222, 4223, 4224]
    assert [one.websocket.port for one in found if one.websocket] == [8080, 8081, 8082]
    assert {one.cluster.name for one in found if one.cluster} == {"local"}
    assert {one.gateway for one in found} == {None}


def test_free_ports_stay_free():
    assert {one.port for one in made(brokers=3, port=0)} == {0}


def test_only_some_brokers_store_and_only_those_speak_mqtt():
    found = made(brokers=3, storage_brokers=2, mqtt=True)
    assert [one.storage is not None for one in found] == [True, True, False]
    assert [one.mqtt is not None for one in found] == [True, True, False]


def test_a_super_cluster_has_a_gateway_on_every_broker():
    found = made(layout="super-cluster", clusters=2, brokers=2)
    assert [one.name for one in found] == ["local-c1-1", "local-c1-2", "local-c2-1", "local-c2-2"]
    for one in found:
        assert one.gateway is not None
        assert one.cluster is not None
        assert one.gateway.name == one.cluster.name == one.name[:-2]
        config.check(one)


def test_a_leaf_tree_hangs_leaves_level_by_level():
    whole = loader.load(
        domain.BaseSettings, flags={"bus.layout": "leaf-tree", "bus.leaves": 6, "bus.fan_out": 2}
    )
    assert broker_configs.leaf_parents(whole) == {
        "local-leaf-1": "local-1",
        "local-leaf-2": "local-1",
        "local-leaf-3": "local-leaf-1",
        "local-leaf-4": "local-leaf-1",
        "local-leaf-5": "local-leaf-2",
        "local-leaf-6": "local-leaf-2",
    }
    leaves = broker_configs.broker_configs(whole, TRUSTED, Path("/data"))[1:]
    assert [one.storage.domain for one in leaves if one.storage] == list(broker_configs.leaf_parents(whole))


def test_the_weaker_sync_is_the_user_s_choice():
    (one,) = made(sync="interval", sync_interval_s=2)
    assert one.storage is not None
    assert one.storage.sync_interval_s == 2
