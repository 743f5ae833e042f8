"""The settings of an information node."""

from __future__ import annotations

from typing import Annotated

from muster.core import errors
from muster.core.net import hosts
from muster.core.settings import sections
from muster.inform import access_rules
from muster.inform.mounts import registry

doc = sections.field_doc

_MIB = 1 << 20
_GIB = 1 << 30
_DAY_S = 86400.0


class InformSettings(sections.SettingsSection, frozen=True, kw_only=True):
    """Information nodes: how many replicas a context has, and when replicas move."""

    enabled: Annotated[bool, doc("Whether information nodes run in this process.")] = True
    processes: Annotated[
        bool,
        doc(
            "Run each node in a process of its own (about 60 MB), so that reads and searches of contexts do "
            "not delay queues, notifications and leases. Off: in the process of the domain."
        ),
    ] = True
    nodes: Annotated[
        int,
        doc(
            "Information nodes of this domain on this machine. Several nodes on one machine "
            "add no safety; they show how replicas are placed and move.",
            ge=1,
            le=16,
        ),
    ] = 1
    replicas: Annotated[
        int,
        doc(
            "minimum-fault-tolerance-watermark: permanent replicas of each context. Each additional replica "
            "survives one more lost node and costs one more write. Acknowledged writes are safe in the log "
            "with any value.",
            ge=1,
            le=64,
        ),
    ] = 3
    full_replication: Annotated[
        bool,
        doc(
            "Store every context on every node (with more than 1,000 nodes: on 1,000 of them). Reads "
            "are local, and every node needs the memory."
        ),
    ] = False
    memory_bytes: Annotated[
        int,
        doc(
            "Memory for contexts on one node. Beyond it, unused values are on disk and cost a disk read; "
            "an entry of some 450 bytes for each context stays in memory.",
            ge=_MIB,
        ),
    ] = _GIB
    contexts_max: Annotated[
        int, doc("Permanent replicas at which a node counts as full: one of the two load factors.", ge=1)
    ] = 1_000_000
    messages_per_s_max: Annotated[
        float, doc("Client requests per second at which a node counts as full: the other load factor.", gt=0)
    ] = 20_000.0
    watermark: Annotated[
        float,
        doc(
            "A node whose load is above this share places new contexts on other nodes. A low value spreads "
            "contexts early; a high value keeps them near their writers.",
            gt=0,
            le=1,
        ),
    ] = 0.8
    timeout_s: Annotated[
        float,
        doc(
            "How long a node waits for a reply of another node. Then the primaries of that node are moved, "
            "unless it is connected and answers a warning in the log within 2 s. Too short refuses writes to "
            "nodes that are slow. Too long delays writes after the loss of a node.",
            gt=0,
        ),
    ] = 10.0
    hedge_s: Annotated[
        float,
        doc(
            "If no holder replies to a read in this time, the node also reads the log. "
            "A value below the round trip to the farthest holder only adds load.",
            gt=0,
        ),
    ] = 0.25
    reads_by_lease: Annotated[
        bool,
        doc(
            "A primary answers linearizable reads from its memory for 4 s after it appended a page to the "
            "log; the first read after that appends one. Such a read is several times as fast, but correct "
            "only if no clock of a node (CLOCK_BOOTTIME) runs a fifth faster than that of another. A node "
            "that does not reply is replaced up to 5 s later. Off: the log confirms each read."
        ),
    ] = False
    refresh_s: Annotated[
        float,
        doc("Time between two rounds of Server-Information: the maximum age of load and proximity.", gt=0),
    ] = 10.0
    lost_after_s: Annotated[
        float,
        doc(
            "A node that sends nothing for so long is lost, and its replicas are created again elsewhere. It "
            "must be longer than an election in the brokers (4 to 9 s).",
            gt=0,
        ),
    ] = 35.0
    interval_s: Annotated[
        float, doc("dynamic-replication-time-interval: how often demand is evaluated.", gt=0)
    ] = 100.0
    replicate_per_s: Annotated[
        float, doc("replication-threshold: requests per second above which a context gets more replicas.")
    ] = 0.18
    delete_per_s: Annotated[
        float,
        doc("deletion-threshold: below it a temporary replica is deleted. Must be below replicate_per_s."),
    ] = 0.03
    migration_ratio: Annotated[
        float, doc("A node with more than this share of the demand becomes the primary.", gt=0, le=1)
    ] = 0.6
    replication_ratio: Annotated[
        float, doc("A node with more than this share of the demand gets a temporary replica.", gt=0, le=1)
    ] = 0.2
    sensor: Annotated[
        str,
        doc(
            "URL of the intake of this machine's sensor, such as http://127.0.0.1:9125: nodes report to it "
            "how often their clients read each context, for `muster pipeline demand`. Empty: that of the "
            "sensor of the same domain, if it has one."
        ),
    ] = ""
    direct_ports: Annotated[
        tuple[hosts.Port, ...],
        doc(
            "Ports on which node processes accept direct connections, one for each node (0: a free port, "
            "also for further nodes), on `bus.host`. Clients that cannot connect to them, for instance "
            "because of a firewall, use the brokers. Empty: all use the brokers."
        ),
    ] = (0,)
    history: Annotated[
        int,
        doc(
            "Versions of each context in the log. A watcher that falls behind by more gets an error.",
            ge=1,
            le=10_000,
        ),
    ] = 16
    contexts_per_identity: Annotated[
        int,
        doc(
            "Contexts of one writer on a node. Each takes memory, some 500 bytes without its value, on every "
            "node that holds it. 0: no limit. Operators have none.",
            ge=0,
        ),
    ] = 250_000
    share_per_identity: Annotated[
        sections.Fraction,
        doc(
            "Share of `retention.contexts.max_bytes` that the contexts of one writer may use, with their "
            "history and deletions. A higher share lets fewer identities fill the log. The last 5 % are kept "
            "for deletions and for operators."
        ),
    ] = 0.25
    tombstone_s: Annotated[
        float,
        doc(
            "How long the deletion of a context stays in the log. A node that was offline longer reads the "
            "whole log again.",
            gt=0,
        ),
    ] = _DAY_S
    mounts: Annotated[
        tuple[registry.MountSettings, ...],
        doc(
            "Other registries that are searched together with the contexts: a name, a kind (etcd, uddi), a "
            "url, and for etcd a prefix. Their entries have keys under mount/NAME/ and are not cached."
        ),
    ] = ()
    rules: Annotated[
        tuple[access_rules.AccessRule, ...],
        doc("Read and write access by key; the first rule that matches a key decides."),
    ] = ()

    def __post_init__(self) -> None:
        if self.delete_per_s >= self.replicate_per_s:
            raise errors.InvalidInput(
                f"inform.delete_per_s = {self.delete_per_s:g} must be below inform.replicate_per_s = "
                f"{self.replicate_per_s:g}, or replicas would be created and deleted repeatedly"
            )
        if self.replication_ratio >= self.migration_ratio:
            raise errors.InvalidInput(
                f"inform.replication_ratio = {self.replication_ratio:g} must be below "
                f"inform.migration_ratio = {self.migration_ratio:g}, or nothing would ever be replicated"
            )
        if self.lost_after_s <= 2 * self.refresh_s:
            raise errors.InvalidInput(
                f"inform.lost_after_s = {self.lost_after_s:g} must be more than twice inform.refresh_s = "
                f"{self.refresh_s:g}, or a node would be lost after one lost message"
            )


DEFAULT = InformSettings()
