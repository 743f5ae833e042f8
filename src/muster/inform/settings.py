"""The settings of an information node."""

from __future__ import annotations

from typing import Annotated

from muster.core import errors
from muster.core.settings import sections
from muster.inform import access_rules
from muster.inform.mounts import registry
from muster.inform.node.replicas import demand

doc = sections.field_doc

_MIB = 1 << 20
_GIB = 1 << 30
_DAY_S = 86400.0


class InformSettings(sections.SettingsSection, frozen=True, kw_only=True):
    """Information nodes: where contexts are kept, how many copies, and when copies move."""

    enabled: Annotated[bool, doc("Whether information nodes run in this process.")] = True
    nodes: Annotated[
        int,
        doc(
            "Information nodes in this process. More than one guards against nothing here, and shows how "
            "copies are placed and move.",
            ge=1,
            le=16,
        ),
    ] = 1
    copies: Annotated[
        int,
        doc(
            "minimum-fault-tolerance-watermark: permanent copies of each context. Each one more survives one "
            "more lost node and is one more place to write to; acknowledged writes are safe in the log "
            "whatever this is.",
            ge=1,
            le=64,
        ),
    ] = 3
    full_replication: Annotated[
        bool,
        doc(
            "Every node holds every context (with more than 1,000 nodes: 1,000 of them): all reads are "
            "local, and every node needs the room."
        ),
    ] = False
    memory_bytes: Annotated[
        int,
        doc(
            "Memory for contexts on one node. Beyond it, values that are not asked for stay on disk only and "
            "cost a read from there; an entry of some 450 bytes stays for each context.",
            ge=_MIB,
        ),
    ] = _GIB
    contexts_max: Annotated[
        int, doc("Permanent copies at which a node calls itself full: one half of its load.", ge=1)
    ] = 1_000_000
    messages_per_s_max: Annotated[
        float, doc("Requests of users in a second at which a node calls itself full: the other half.", gt=0)
    ] = 20_000.0
    watermark: Annotated[
        float,
        doc(
            "A node whose load is above this share hands new contexts to others. Low spreads early; high "
            "keeps contexts near their writers.",
            gt=0,
            le=1,
        ),
    ] = 0.8
    timeout_s: Annotated[
        float,
        doc(
            "How long a node waits for another before it counts as silent (and its primaries are moved). "
            "Too short deposes nodes that were only slow, which costs an append; too long delays writes "
            "after a node died.",
            gt=0,
        ),
    ] = 10.0
    hedge_s: Annotated[
        float,
        doc(
            "A read that no holder has answered for so long is put to the log as well, which knows what is "
            "there and what is not. Shorter than the way to the farthest holder, it only adds load.",
            gt=0,
        ),
    ] = 0.25
    refresh_s: Annotated[
        float,
        doc("Time between two rounds of Server-Information: load and proximity are as old as that.", gt=0),
    ] = 10.0
    lost_after_s: Annotated[
        float,
        doc(
            "A node not heard for so long is lost, and its copies are made again elsewhere. It must outlast "
            "an election in the brokers (4 to 9 s).",
            gt=0,
        ),
    ] = 35.0
    interval_s: Annotated[
        float, doc("dynamic-replication-time-interval: how often demand is looked at.", gt=0)
    ] = 100.0
    replicate_per_s: Annotated[
        float, doc("replication-threshold: requests in a second above which a context gets further copies.")
    ] = 0.18
    delete_per_s: Annotated[
        float, doc("deletion-threshold: below it a temporary copy goes. Must be below the one to replicate.")
    ] = 0.03
    migration_ratio: Annotated[
        float, doc("A node with more than this share of the demand takes the context over.", gt=0, le=1)
    ] = 0.6
    replication_ratio: Annotated[
        float, doc("A node with more than this share of the demand gets a temporary copy.", gt=0, le=1)
    ] = 0.2
    history: Annotated[
        int,
        doc(
            "Versions of each context that the log keeps. Watchers that fall behind by more hear that they "
            "missed something.",
            ge=1,
            le=10_000,
        ),
    ] = 16
    tombstone_s: Annotated[
        float,
        doc(
            "How long a deleted context is remembered. A node that was away for longer reads everything "
            "again.",
            gt=0,
        ),
    ] = _DAY_S
    mounts: Annotated[
        tuple[registry.MountSettings, ...],
        doc(
            "Other registries that are searched beside our own: a name, a kind (etcd, uddi), a url, and for "
            "etcd a prefix. Their entries are read under mount/NAME/, and each search asks all of them anew."
        ),
    ] = ()
    rules: Annotated[
        tuple[access_rules.AccessRule, ...],
        doc("Who may read and write which keys; the first rule that covers a key decides."),
    ] = ()

    def __post_init__(self) -> None:
        if self.delete_per_s >= self.replicate_per_s:
            raise errors.InvalidInput(
                f"inform.delete_per_s = {self.delete_per_s:g} must be below inform.replicate_per_s = "
                f"{self.replicate_per_s:g}, or copies would come and go"
            )
        if self.replication_ratio >= self.migration_ratio:
            raise errors.InvalidInput(
                f"inform.replication_ratio = {self.replication_ratio:g} must be below "
                f"inform.migration_ratio = {self.migration_ratio:g}, or nothing would ever be replicated"
            )
        if self.lost_after_s <= 2 * self.refresh_s:
            raise errors.InvalidInput(
                f"inform.lost_after_s = {self.lost_after_s:g} must be over twice inform.refresh_s = "
                f"{self.refresh_s:g}, or one lost message loses a node"
            )

    @property
    def thresholds(self) -> demand.DemandThresholds:
        return demand.DemandThresholds(
            self.interval_s,
            self.replicate_per_s,
            self.delete_per_s,
            self.migration_ratio,
            self.replication_ratio,
        )


DEFAULT = InformSettings()
