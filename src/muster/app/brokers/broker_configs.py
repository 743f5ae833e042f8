"""From the settings of a domain to the configuration of each of its brokers. Pure."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muster.app import log_files
from muster.app.brokers import addresses
from muster.app.machines import membership
from muster.bus.brokers import config
from muster.core.net import hosts
from muster.core.settings import bus as settings_bus
from muster.core.settings import domain as settings_domain

COMPANION = "-companion"


@dataclass(frozen=True, slots=True)
class BrokerTrustFiles:
    """What brokers receive in addition to settings. ``secret`` authenticates the routes between them."""

    operator: config.OperatorTrust
    secret: str
    tls: config.BrokerTls | None = None


def broker_configs(
    settings: settings_domain.BaseSettings,
    trusted: BrokerTrustFiles,
    folder: Path,
    machines: membership.MachineList | None = None,
) -> list[config.BrokerConfig]:
    """The brokers of the domain's layout, each with its own folder below ``folder``. On each of several
    ``machines`` there is one.

    Leaves of a tree come last and without their links, because the addresses of their parents are known only
    at run time.
    """
    bus = settings.bus
    name = settings.domain.name
    if bus.route_port and machines is not None:
        return list(_of_machine(settings, trusted, folder, machines))
    clusters = bus.clusters if bus.layout == "super-cluster" else 1
    configs: list[config.BrokerConfig] = []

    def add(own_name: str, **differences: Any) -> None:
        configs.append(_broker(settings, trusted, folder, own_name, len(configs), **differences))

    for cluster_name in _numbered(name, clusters, "c"):
        joined = bus.layout == "super-cluster"
        cluster = cluster_name if bus.brokers > 1 or joined else None
        for number, own_name in enumerate(_numbered(cluster_name, bus.brokers, ""), start=1):
            add(own_name, stores=_stores(bus, number), cluster=cluster, joined=joined)
    for number in range(1, bus.leaves + 1):
        add(f"{name}-leaf-{number}", stores=True, leaf=True)
    return configs


def _of_machine(
    settings: settings_domain.BaseSettings,
    trusted: BrokerTrustFiles,
    folder: Path,
    machines: membership.MachineList,
) -> Iterator[config.BrokerConfig]:
    """A member of the cluster of all machines. Certificates admit its peers, so there is no secret.

    While it is the only one that stores, it has a companion without storage: NATS elects no leader of the
    storage before it has a route to another broker.
    """
    here = machines.here
    made = _broker(settings, trusted, folder, here.broker, 0, stores=here.stores)
    cluster = config.BrokerCluster(
        name=settings.domain.name,
        port=settings.bus.route_port,
        routes=tuple(other.route for other in machines.brokers if other is not here),
        founders=tuple(other.broker for other in machines.storing),
        pins=machines.pins,
    )
    yield dataclasses.replace(made, cluster=cluster)
    if machines.storing == (here,):
        companion = _broker(settings, trusted, folder, here.broker + COMPANION, None, stores=False)
        yield dataclasses.replace(
            companion,
            host="127.0.0.1",
            advertise=None,
            websocket=None,
            leaf=None,
            cluster=config.BrokerCluster(name=settings.domain.name, advertises=False, pins=machines.pins),
        )


def extra(
    settings: settings_domain.BaseSettings,
    trusted: BrokerTrustFiles,
    folder: Path,
    name: str,
    *,
    storage: bool,
) -> config.BrokerConfig:
    """A broker in addition to those of the settings, on free ports, with its own storage."""
    return _broker(settings, trusted, folder, name, None, stores=storage, leaf=True)


def _broker(
    settings: settings_domain.BaseSettings,
    trusted: BrokerTrustFiles,
    folder: Path,
    name: str,
    index: int | None,  # from 0, if ports are counted up from the settings; None: free ports
    *,
    stores: bool,
    cluster: str | None = None,
    joined: bool = False,
    leaf: bool = False,
) -> config.BrokerConfig:
    bus = settings.bus

    def port(first: int) -> int:
        return first + index if first and index is not None else 0

    return config.BrokerConfig(
        name=name,
        directory=folder / name,
        host=bus.host,
        port=port(bus.port),
        tls=trusted.tls,
        # Otherwise it would advertise addresses that its certificate may not include.
        advertise=_advertised(bus) if trusted.tls else None,
        plaintext=bus.tls == "off",
        storage=_storage(bus, name if leaf else None) if stores else None,
        cluster=config.BrokerCluster(name=cluster, secret=trusted.secret) if cluster else None,
        gateway=config.ClusterGateway(name=cluster, secret=trusted.secret) if cluster and joined else None,
        websocket=config.BrokerListener(port=port(bus.websocket_port)) if bus.websocket else None,
        mqtt=config.BrokerListener(port=port(bus.mqtt_port)) if bus.mqtt and stores else None,
        trust=trusted.operator,
        payload_bytes_max=bus.max_payload_bytes,
        connections_max=bus.max_connections,
        ping_interval_s=bus.ping_interval_s,
        log_bytes_max=log_files.broker_file_bytes(settings, broker_count(settings)),
    )


def _advertised(bus: settings_bus.BusSettings) -> str | None:
    """The name for clients of a broker that listens on all addresses."""
    if bus.host not in hosts.EVERYWHERE:
        return None
    return addresses.bracketed(bus.names[0] if bus.names else socket.gethostname())


def broker_count(settings: settings_domain.BaseSettings) -> int:
    bus = settings.bus
    return (bus.clusters if bus.layout == "super-cluster" else 1) * bus.brokers + bus.leaves


def leaf_parents(settings: settings_domain.BaseSettings) -> dict[str, str]:
    """The parent broker of each leaf: level by level, ``fan_out`` below each."""
    bus = settings.bus
    roots = list(_numbered(settings.domain.name, bus.brokers, ""))
    leaves = [f"{settings.domain.name}-leaf-{number}" for number in range(1, bus.leaves + 1)]
    parents = [*roots, *leaves]
    return {leaf: parents[index // bus.fan_out] for index, leaf in enumerate(leaves)}


def _numbered(name: str, count: int, mark: str) -> Iterator[str]:
    for number in range(1, count + 1):
        yield name if mark and count == 1 else f"{name}-{mark}{number}"


def _stores(bus: settings_bus.BusSettings, number: int) -> bool:
    return bus.storage_brokers == 0 or number <= bus.storage_brokers


def _storage(bus: settings_bus.BusSettings, domain: str | None) -> config.BrokerStorage:
    """``domain`` separates the storage of a leaf from that of its parent brokers."""
    return config.BrokerStorage(
        file_bytes_max=bus.storage_disk_bytes,
        memory_bytes_max=bus.storage_memory_bytes,
        sync_interval_s=None if bus.sync == "always" else bus.sync_interval_s,
        domain=domain,
    )
