"""The configuration of a broker: validated, and written so that the server reads the same values."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.bus.brokers import binary, config, topology
from muster.core import errors

SETTLED = config.BrokerConfig(
    name="one", directory=Path("/d"), port=4222, monitor_port=8222, leaf=config.BrokerListener(port=7422)
)


def document(settings: config.BrokerConfig) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(config.render(settings).partition("\n")[2])
    return read


def test_durable_means_synced_unless_configured_otherwise():
    assert document(SETTLED)["jetstream"]["sync_interval"] == "always"
    weaker = dataclasses.replace(SETTLED, storage=config.BrokerStorage(sync_interval_s=2))
    assert document(weaker)["jetstream"]["sync_interval"] == "2000ms"
    least = dataclasses.replace(SETTLED, storage=config.BrokerStorage(sync_interval_s=0.0004))
    assert document(least)["jetstream"]["sync_interval"] == "1ms"  # the server reads 0 as two minutes
    assert "jetstream" not in document(dataclasses.replace(SETTLED, storage=None))


def test_the_monitor_is_on_loopback_wherever_the_broker_listens():
    public = dataclasses.replace(SETTLED, host="0.0.0.0", plaintext=True)
    assert document(public)["http"] == "127.0.0.1:8222"


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"name": "a b"}, "cannot be a broker's name"),
        ({"name": ""}, "cannot be a broker's name"),
        ({"name": "../up"}, "cannot be a broker's name"),
        ({"directory": Path("relative")}, "not absolute"),
        ({"host": "0.0.0.0"}, "without TLS"),
        ({"host": "192.0.2.1"}, "without TLS"),
        ({"port": 70_000}, "70000 is not a port"),
        ({"monitor_port": 4222}, "port 4222 is used by port and monitor_port"),
        ({"storage": None, "mqtt": config.BrokerListener(port=1883)}, "MQTT needs durable storage"),
        ({"gateway": config.ClusterGateway(name="east", port=7222)}, "a gateway joins clusters"),
        (
            {
                "cluster": config.BrokerCluster(name="west", port=6222),
                "gateway": config.ClusterGateway(name="east", port=7222),
            },
            "must bear the name of its cluster",
        ),
        (
            {"trust": config.OperatorTrust(operator_jwt="o", system_account="A", accounts={})},
            "is not among the accounts",
        ),
        ({"advertise": "a\nport: 1"}, "a configuration cannot hold"),
        ({"directory": Path("/d/\udcff")}, "a configuration cannot hold"),
        ({"directory": Path("/d/\x7f")}, "a configuration cannot hold"),
    ],
)
def test_what_would_harm_is_refused_before_a_server_sees_it(changes, complaint):
    with pytest.raises(errors.InvalidInput, match=complaint):
        config.render(dataclasses.replace(SETTLED, **changes))


def test_a_port_that_is_not_settled_is_not_written():
    with pytest.raises(errors.InvalidInput, match="the port of leaf is not known yet"):
        config.render(dataclasses.replace(SETTLED, leaf=config.BrokerListener()))


@given(st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1))
def test_any_printable_text_comes_back_as_it_was(text):
    settings = dataclasses.replace(SETTLED, system_secret=text, advertise=text)
    read = document(settings)
    assert read["client_advertise"] == text
    assert read["accounts"]["$SYS"]["users"][0]["password"] == text


def test_a_secret_in_an_address_is_escaped():
    assert config.peer_url("::1", 6222, "a/b@c") == "nats://muster-peer:a%2Fb%40c@[::1]:6222"


def test_every_member_of_a_cluster_has_routes_to_all_others_and_not_to_itself():
    everybody = [
        dataclasses.replace(
            SETTLED, name=f"b{port}", cluster=config.BrokerCluster(name="c", port=port, secret="s")
        )
        for port in (6001, 6002, 6003)
    ]
    other_cluster = dataclasses.replace(SETTLED, name="x", cluster=config.BrokerCluster(name="d", port=6004))
    wired = topology.with_routes(everybody[0], [*everybody, other_cluster], ("nats://far:6222",))
    assert wired.cluster
    assert wired.cluster.routes == (
        "nats://far:6222",
        "nats://muster-peer:s@127.0.0.1:6002",
        "nats://muster-peer:s@127.0.0.1:6003",
    )


def test_a_cluster_of_one_in_a_super_cluster_has_a_route_to_itself_so_that_it_may_store():
    alone = dataclasses.replace(
        SETTLED,
        cluster=config.BrokerCluster(name="east", port=6001),
        gateway=config.ClusterGateway(name="east", port=7001),
    )
    wired = topology.with_routes(alone, [alone])
    assert wired.cluster
    assert wired.cluster.routes == ("nats://127.0.0.1:6001",)


def test_the_reference_page_shows_the_table_of_features():
    rows = [f"| {row.name} | {binary.show(row.since)} | {row.used_for} |" for row in binary.FEATURES]
    table = "\n".join(["| feature | since | used for |", "|---|---|---|", *rows])
    page = (Path(__file__).parents[2] / "docs" / "reference" / "brokers.md").read_text("utf-8")
    assert page.split("<!-- features -->\n")[1].split("\n<!-- /features -->")[0] == table
