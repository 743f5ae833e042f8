"""From settings to brokers: their number, their links, their shares of memory and disk."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from muster.app.brokers import broker_configs
from muster.bus.brokers import config
from muster.core.settings import domain, loader

TRUSTED = broker_configs.BrokerTrustFiles(
    operator=config.OperatorTrust(operator_jwt="o", system_account="A", accounts={"A": "jwt"}), secret="s"
)
FILE = Path("/data/file.pem")


def made(**bus: Any) -> list[config.BrokerConfig]:
    settings = loader.load(domain.BaseSettings, flags={f"bus.{name}": value for name, value in bus.items()})
    return broker_configs.broker_configs(settings, TRUSTED, Path("/data"))


def test_one_broker_needs_no_cluster():
    (broker_config,) = made(port=4222)
    assert (broker_config.name, broker_config.directory, broker_config.port, broker_config.cluster) == (
        "local-1",
        Path("/data/local-1"),
        4222,
        None,
    )
    assert broker_config.trust is TRUSTED.operator
    assert broker_config.storage is not None
    assert broker_config.storage.sync_interval_s is None  # synced before it is acknowledged


def test_a_mesh_has_one_cluster_and_counts_its_ports_up():
    configs = made(brokers=3, port=4222, websocket=True, websocket_port=8080)
    assert [broker_config.port for broker_config in configs] == [4222, 4223, 4224]
    assert [broker_config.websocket.port for broker_config in configs if broker_config.websocket] == [
        8080,
        8081,
        8082,
    ]
    assert {broker_config.cluster.name for broker_config in configs if broker_config.cluster} == {"local"}
    assert {broker_config.gateway for broker_config in configs} == {None}


def test_an_ipv6_address_is_advertised_in_brackets():
    trusted = dataclasses.replace(TRUSTED, tls=config.BrokerTls(cert_file=FILE, key_file=FILE, ca_file=FILE))
    flags = {"bus.host": "::", "bus.names": ["fd00::1", "other.example"]}
    settings = loader.load(domain.BaseSettings, flags=flags)
    (broker_config,) = broker_configs.broker_configs(settings, trusted, Path("/data"))
    assert broker_config.advertise == "[fd00::1]"


def test_free_ports_stay_free():
    assert {broker_config.port for broker_config in made(brokers=3, port=0)} == {0}


def test_only_brokers_with_storage_accept_mqtt():
    configs = made(brokers=3, storage_brokers=2, mqtt=True)
    assert [broker_config.storage is not None for broker_config in configs] == [True, True, False]
    assert [broker_config.mqtt is not None for broker_config in configs] == [True, True, False]


def test_a_super_cluster_has_a_gateway_on_every_broker():
    configs = made(layout="super-cluster", clusters=2, brokers=2)
    assert [item.name for item in configs] == ["local-c1-1", "local-c1-2", "local-c2-1", "local-c2-2"]
    for broker_config in configs:
        assert broker_config.gateway is not None
        assert broker_config.cluster is not None
        assert broker_config.gateway.name == broker_config.cluster.name == broker_config.name[:-2]
        config.check(broker_config)


def test_a_leaf_tree_hangs_leaves_level_by_level():
    settings = loader.load(
        domain.BaseSettings, flags={"bus.layout": "leaf-tree", "bus.leaves": 6, "bus.fan_out": 2}
    )
    assert broker_configs.leaf_parents(settings) == {
        "local-leaf-1": "local-1",
        "local-leaf-2": "local-1",
        "local-leaf-3": "local-leaf-1",
        "local-leaf-4": "local-leaf-1",
        "local-leaf-5": "local-leaf-2",
        "local-leaf-6": "local-leaf-2",
    }
    leaves = broker_configs.broker_configs(settings, TRUSTED, Path("/data"))[1:]
    assert [leaf.storage.domain for leaf in leaves if leaf.storage] == list(
        broker_configs.leaf_parents(settings)
    )


def test_the_weaker_sync_is_the_user_s_choice():
    (broker_config,) = made(sync="interval", sync_interval_s=2)
    assert broker_config.storage is not None
    assert broker_config.storage.sync_interval_s == 2
