"""The configuration of a broker: data in, the text for the server out.

The server's format is a superset of JSON, so the text is JSON: quoting is exact for every path. The server
does not support the escape ``\\u00XX``; so control characters are rejected here.

A port of 0 means a free one. `Broker` replaces the zeros before it renders, because others (routes, gateways,
the restart after a crash) depend on the number.

One set of certificates serves all listeners of a broker: clients, WebSocket, MQTT, routes, gateways and leaf
links. Routes and gateways always verify both ends, so the certificate of a broker must be valid for server
and client use. A listener that other machines can reach requires TLS unless ``plaintext`` is set.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from muster.core import errors
from muster.core.net import hosts

MIB = 1024 * 1024
GIB = 1024 * MIB

SYSTEM_USER = "muster-system"
PEER_USER = "muster-peer"
LAME_DUCK_S = 30  # the shortest the server allows; it only spreads the good-byes of connected clients
LAME_DUCK_GRACE_S = 1
LEAF_RECONNECT = "250ms"
# Longer than the server's own 2: a fleet that reconnects waits for the cores of its broker (1.5 ms for each
# client), and clients that are refused for their lateness add work. Clients wait as long.
HANDSHAKE_S = 15
ROUTE_PING_S = 1.0  # between brokers: elections begin 4 s after a leader was last heard
ACCOUNTS_INTERVAL = "2s"  # a broker of a cluster that was down learns revocations from the others after it
PING_MAX = 2  # pings without a reply before a connection is closed

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_HEAD = "# Written by muster, and rewritten when a link or a certificate changes: edits are lost."
_UNREADABLE = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")  # control characters; bytes that were no text


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerTls:
    cert_file: Path
    key_file: Path
    ca_file: Path
    # require a certificate of clients too; routes and gateways always require one
    verify_clients: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerStorage:
    """Durable storage (JetStream) on this broker.

    ``sync_interval_s`` None syncs every message before it is acknowledged, which makes a single broker
    durable. A number is faster (about twenty times, for single publishes), but a crash of the machine loses
    messages acknowledged within that interval.
    """

    directory: Path | None = None  # None: "store" in the broker's own
    file_bytes_max: int = 10 * GIB
    memory_bytes_max: int = 256 * MIB
    sync_interval_s: float | None = None
    domain: str | None = None  # separates the storage of a leaf from that of its hub


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerListener:
    port: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerCluster:
    """A full mesh. Every member lists the others; ``secret`` authenticates members where there is no TLS.

    ``founders``: the brokers that share the storage when this one starts with an empty store, itself
    included. Without them NATS waits for a second broker before it stores anything. ``pins``: the
    fingerprints of the keys of all members; others are refused, also with a certificate of the authority.
    """

    name: str
    port: int = 0
    routes: tuple[str, ...] = ()
    secret: str | None = None
    founders: tuple[str, ...] = ()
    advertises: bool = True  # its address to the clients of the others
    pins: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterGateway:
    """The gateway of a cluster to the other clusters of a super-cluster: their names and URLs."""

    name: str
    port: int = 0
    remotes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    secret: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafRemote:
    """A leaf link that this broker maintains to another."""

    id: str
    urls: tuple[str, ...]  # one remote broker or cluster, with all its URLs
    far: str | None = None  # the name of the far broker, where it is known
    account: str | None = None  # the local one that it joins to the far one
    credentials_file: Path | None = None


class AccountResolver(enum.Enum):
    """Where a broker stores the account JWTs.

    ``MEMORY``: they are in its configuration, and a change rewrites and reloads the configuration of every
    broker. ``FULL``: they are in a folder and shared among the brokers, and a change is pushed to one of them
    over the system account.
    """

    MEMORY = "memory"
    FULL = "full"


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorTrust:
    """The trusted operator. Without it the broker accepts every client: for tests, and for the machine of a
    single user."""

    operator_jwt: str
    system_account: str  # its public key, one of `accounts`
    accounts: Mapping[str, str]  # public key: JWT
    resolver: AccountResolver = AccountResolver.FULL


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerConfig:
    name: str
    directory: Path  # for its configuration, log, process id file and, by default, the store
    host: str = "127.0.0.1"
    port: int = 0
    monitor_port: int = 0  # always on loopback: it has no authentication
    advertise: str | None = None  # host:port for clients, if it differs from the listen address
    tls: BrokerTls | None = None
    plaintext: bool = False  # listen on other addresses than loopback without TLS
    storage: BrokerStorage | None = field(default_factory=BrokerStorage)
    cluster: BrokerCluster | None = None
    gateway: ClusterGateway | None = None
    leaf: BrokerListener | None = field(default_factory=BrokerListener)
    remotes: tuple[LeafRemote, ...] = ()
    websocket: BrokerListener | None = None
    mqtt: BrokerListener | None = None
    trust: OperatorTrust | None = None
    system_secret: str | None = None  # without `trust`: the password of SYSTEM_USER on the system account
    payload_bytes_max: int = MIB + MIB // 16  # a context of 1 MiB and what travels with it
    pending_bytes_max: int = 64 * MIB  # for a client that reads too slowly; then it is cut off
    connections_max: int = 65_536
    ping_interval_s: float = 2.25  # a silent peer is disconnected after at most four times this
    log_bytes_max: int = 16 * MIB
    log_files_max: int = 3

    @property
    def config_path(self) -> Path:
        return self.directory / "broker.conf"

    @property
    def log_path(self) -> Path:
        return self.directory / "broker.log"

    @property
    def output_path(self) -> Path:
        """Output of the process before its log was open, or during a crash."""
        return self.directory / "broker.out"

    @property
    def pid_path(self) -> Path:
        return self.directory / "broker.pid"

    @property
    def process_path(self) -> Path:
        """The description of its process (`muster.bus.brokers.server_process`)."""
        return self.directory / "process.json"

    @property
    def pipe_path(self) -> Path:
        return self.directory / "guardian"

    @property
    def store_path(self) -> Path | None:
        return None if self.storage is None else self.storage.directory or self.directory / "store"

    @property
    def accounts_path(self) -> Path:
        return self.directory / "accounts"


def authority(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def reachable(host: str) -> str:
    """An address under which a listener on ``host`` can be reached from this machine."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def peer_url(host: str, port: int, secret: str | None = None) -> str:
    """A route's or a gateway's address, with the secret that opens it."""
    return f"nats://{user_info(PEER_USER, secret) if secret else ''}{authority(host, port)}"


def user_info(user: str, password: str) -> str:
    """The user info before the host of a URL."""
    return f"{quote(user, safe='')}:{quote(password, safe='')}@"


LISTENERS = ("port", "monitor_port", "cluster", "gateway", "leaf", "websocket", "mqtt")


def ports(config: BrokerConfig) -> Iterator[tuple[str, str, int]]:
    """All configured listeners: field, host and port."""
    for listener in LISTENERS:
        value = getattr(config, listener)
        if isinstance(value, int):
            yield listener, "127.0.0.1" if listener == "monitor_port" else config.host, value
        elif value is not None:
            yield listener, config.host, value.port


def with_port(config: BrokerConfig, listener: str, port: int) -> BrokerConfig:
    value = getattr(config, listener)
    changes: dict[str, Any] = {
        listener: port if isinstance(value, int) else dataclasses.replace(value, port=port)
    }
    return dataclasses.replace(config, **changes)


def check(config: BrokerConfig) -> None:
    """`errors.InvalidInput` for settings that the server would reject, or that would be unsafe."""
    if not _NAME.fullmatch(config.name):
        raise errors.InvalidInput(
            f"{config.name!r} cannot be a broker's name",
            hint="use up to 64 letters, digits, '-', '_' and '.', beginning with a letter or digit",
        )
    if not config.directory.is_absolute():
        raise errors.InvalidInput(f"broker {config.name}: its directory {config.directory} is not absolute")
    if not hosts.is_loopback(config.host) and config.tls is None and not config.plaintext:
        raise errors.InvalidInput(
            f"broker {config.name} would listen on {config.host} without TLS",
            hint="configure certificates, use 127.0.0.1, or allow plain text explicitly",
        )
    if config.mqtt is not None and config.storage is None:
        raise errors.InvalidInput(
            f"broker {config.name}: MQTT needs durable storage on the same broker",
            hint="give it storage, or open MQTT on a broker that has it",
        )
    if config.gateway is not None and config.cluster is None:
        raise errors.InvalidInput(
            f"broker {config.name}: a gateway joins clusters", hint="give the broker a cluster of one"
        )
    if (
        config.gateway is not None
        and config.cluster is not None
        and config.gateway.name != config.cluster.name
    ):
        raise errors.InvalidInput(
            f"broker {config.name}: its gateway {config.gateway.name!r} must bear the name of its cluster, "
            f"{config.cluster.name!r}"
        )
    if config.trust is not None and config.trust.system_account not in config.trust.accounts:
        raise errors.InvalidInput(
            f"broker {config.name}: system account {config.trust.system_account} is not among the accounts"
        )
    used: dict[int, str] = {}
    for listener, _, port in ports(config):
        if not 0 <= port <= 65_535:
            raise errors.InvalidInput(f"broker {config.name}: {port} is not a port ({listener})")
        if port and used.setdefault(port, listener) != listener:
            raise errors.InvalidInput(
                f"broker {config.name}: port {port} is used by {used[port]} and {listener}"
            )


def render(config: BrokerConfig) -> str:
    """The text the server reads. Every port must be known by now."""
    check(config)
    for listener, _, port in ports(config):
        if port == 0:
            raise errors.InvalidInput(f"broker {config.name}: the port of {listener} is not known yet")
    try:
        body = json.dumps(_plain(_document(config)), indent=2, ensure_ascii=False)
    except ValueError as error:
        raise errors.InvalidInput(f"broker {config.name}: {error}") from None
    return f"{_HEAD}\n{body}\n"


def _plain(value: Any) -> Any:
    """With paths as text; ValueError for text that the server cannot read."""
    match value:
        case dict():
            return {_plain(key): _plain(inner) for key, inner in value.items()}
        case list():
            return [_plain(inner) for inner in value]
        case str() | Path():
            text = str(value)
            if _UNREADABLE.search(text):
                raise ValueError(f"{text!r} has a character that a configuration cannot hold")
            return text
    return value


def _document(config: BrokerConfig) -> dict[str, Any]:
    document: dict[str, Any] = {
        "server_name": config.name,
        "host": config.host,
        "port": config.port,
        "http": f"127.0.0.1:{config.monitor_port}",
        "pid_file": config.pid_path,
        "log_file": config.log_path,
        "logfile_size_limit": config.log_bytes_max,
        "logfile_max_num": config.log_files_max,
        "max_payload": config.payload_bytes_max,
        "max_pending": config.pending_bytes_max,
        "max_connections": config.connections_max,
        **_pings(config.ping_interval_s),
        "lame_duck_duration": f"{LAME_DUCK_S}s",
        "lame_duck_grace_period": f"{LAME_DUCK_GRACE_S}s",
    }
    tls = _tls(config.tls, verify=config.tls is not None and config.tls.verify_clients)
    if config.advertise is not None:
        document["client_advertise"] = config.advertise
    document |= tls
    if config.storage is not None:
        document["jetstream"] = {"store_dir": config.store_path, **_storage(config.storage)}
    peer_tls = _tls(config.tls, verify=True)
    if config.cluster is not None:
        document["cluster"] = {
            "name": config.cluster.name,
            "host": config.host,
            "port": config.cluster.port,
            "routes": list(config.cluster.routes),
            "no_advertise": not config.cluster.advertises,
            **_pings(min(config.ping_interval_s, ROUTE_PING_S)),
            **_secret(config.cluster.secret),
            **_pinned(peer_tls, config.cluster.pins),
        }
    if config.gateway is not None:
        document["gateway"] = {
            "name": config.gateway.name,
            "host": config.host,
            "port": config.gateway.port,
            "reject_unknown_cluster": True,
            "gateways": [
                {"name": name, "urls": list(urls)} for name, urls in sorted(config.gateway.remotes.items())
            ],
            **_secret(config.gateway.secret),
            **peer_tls,
        }
    leafnodes: dict[str, Any] = {}
    if config.leaf is not None:
        leafnodes |= {"host": config.host, "port": config.leaf.port, **tls}
    if config.remotes:
        leafnodes["remotes"] = [_remote(remote, config.tls) for remote in config.remotes]
    if leafnodes:
        # A reload that adds a link may close it again while accounts are reloaded.
        document["leafnodes"] = leafnodes | {"reconnect": LEAF_RECONNECT}
    if config.websocket is not None:
        document["websocket"] = {
            "host": config.host,
            "port": config.websocket.port,
            **(tls or {"no_tls": True}),
        }
    if config.mqtt is not None:
        document["mqtt"] = {"host": config.host, "port": config.mqtt.port, **tls}
    if config.trust is not None:
        document |= trust_document(config.trust, config.accounts_path)
        document["authorization"] = {"timeout": HANDSHAKE_S}
    else:
        secret = config.system_secret
        users = [] if secret is None else [{"user": SYSTEM_USER, "password": secret}]
        document |= {"system_account": "$SYS", "accounts": {"$SYS": {"users": users}}}
    return document


def _pings(interval_s: float) -> dict[str, Any]:
    return {"ping_interval": _duration(interval_s), "ping_max": PING_MAX}


def _storage(storage: BrokerStorage) -> dict[str, Any]:
    interval_s = storage.sync_interval_s
    document: dict[str, Any] = {
        "max_file_store": storage.file_bytes_max,
        "max_memory_store": storage.memory_bytes_max,
        "sync_interval": "always" if interval_s is None else _duration(interval_s),
    }
    if storage.domain is not None:
        document["domain"] = storage.domain
    return document


def _remote(remote: LeafRemote, tls: BrokerTls | None) -> dict[str, Any]:
    document: dict[str, Any] = {"urls": list(remote.urls)}
    if remote.account is not None:
        document["account"] = remote.account
    if remote.credentials_file is not None:
        document["credentials"] = remote.credentials_file
    if tls is not None and any(urlsplit(url).scheme in ("tls", "wss") for url in remote.urls):
        document |= _tls(tls, verify=False)
    return document


def _tls(tls: BrokerTls | None, *, verify: bool) -> dict[str, Any]:
    if tls is None:
        return {}
    files = {"cert_file": tls.cert_file, "key_file": tls.key_file, "ca_file": tls.ca_file}
    return {"tls": {**files, "timeout": HANDSHAKE_S, **({"verify": True} if verify else {})}}


def _pinned(tls: dict[str, Any], pins: tuple[str, ...]) -> dict[str, Any]:
    return {"tls": tls["tls"] | {"pinned_certs": list(pins)}} if tls and pins else tls


def _secret(secret: str | None) -> dict[str, Any]:
    return {} if secret is None else {"authorization": {"user": PEER_USER, "password": secret}}


def trust_document(trust: OperatorTrust, accounts_path: Path) -> dict[str, Any]:
    """The part of a configuration that has no secrets and is the same for all brokers of a domain."""
    resolver: Any = "MEMORY"
    if trust.resolver is AccountResolver.FULL:
        resolver = {
            "type": "full",
            "dir": str(accounts_path),
            "allow_delete": True,
            "interval": ACCOUNTS_INTERVAL,
        }
    return {
        "operator": trust.operator_jwt,
        "system_account": trust.system_account,
        "resolver": resolver,
        "resolver_preload": dict(sorted(trust.accounts.items())),
    }


def _duration(seconds: float) -> str:
    return f"{max(1, round(seconds * 1000))}ms"  # the server takes 0 for its own default, minutes
