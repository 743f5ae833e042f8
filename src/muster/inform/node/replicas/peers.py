"""The nodes: this one with its load; the others with proximity, load, and when each last sent something.

Updated by Server-Information requests and responses.  Their round trip is the proximity, smoothed because one
slow reply does not mean distance.  Pure: the caller passes the time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from muster.inform import protocol
from muster.inform import settings as settings_
from muster.inform.node.replicas import placement, replica_table

SMOOTHING = 0.3
HOLDERS_MAX = 1_000  # every record lists all of them
FAR_MS = 1_000.0  # of a node without a measured round trip


@dataclass(slots=True)
class _Seen:
    information: protocol.ServerInformation
    heard_at_s: float
    proximity_ms: float | None = None


class NodeDirectory:
    def __init__(
        self,
        me: str,
        settings: settings_.InformSettings,
        held: replica_table.ReplicaTable,
        *,
        zone: str = "default",
    ) -> None:
        self.load = protocol.NodeLoad()  # of this node
        self._me = me
        self._zone = zone
        self._held = held
        self._settings = settings
        self._seen: dict[str, _Seen] = {}
        self._names: list[str] | None = None  # sorted; built on demand
        self.generation = 0  # incremented when a node joins or leaves

    def observe(
        self, information: protocol.ServerInformation, now_s: float, *, round_trip_s: float | None = None
    ) -> bool:
        """Record a message of a node. Return whether the node is new."""
        if information.node == self._me:
            return False
        seen = self._seen.get(information.node)
        is_new = seen is None
        if seen is None:
            seen = self._seen[information.node] = _Seen(information, now_s)
            self._changed()
        seen.information, seen.heard_at_s = information, now_s
        if round_trip_s is not None:
            measured_ms = round_trip_s * 1000
            old_ms = seen.proximity_ms
            seen.proximity_ms = measured_ms if old_ms is None else old_ms + SMOOTHING * (measured_ms - old_ms)
        return is_new

    def remove(self, node: str) -> None:
        """Remove a node that did not reply, until it sends something again."""
        if self._seen.pop(node, None) is not None:
            self._changed()

    def _changed(self) -> None:
        self.generation += 1
        self._names = None

    def restart_timers(self, now_s: float) -> None:
        """Restart the timers of all nodes, because this node was disconnected."""
        for seen in self._seen.values():
            seen.heard_at_s = now_s

    def remove_lost(self, now_s: float) -> list[str]:
        """Remove the nodes that sent nothing for too long, and return them."""
        lost = [
            node for node, seen in self._seen.items() if now_s - seen.heard_at_s > self._settings.lost_after_s
        ]
        for node in lost:
            self.remove(node)
        return lost

    @property
    def nodes(self) -> list[str]:
        """The other nodes, sorted. Callers must not modify the list."""
        if self._names is None:
            self._names = sorted(self._seen)
        return self._names

    def information(self) -> protocol.ServerInformation:
        """Of this node."""
        held = self._held
        return protocol.ServerInformation(self._me, self.load, self._zone, held.temporary, held.memory_bytes)

    def replica_target(self) -> int:
        if self._settings.full_replication:
            return min(len(self.nodes) + 1, HOLDERS_MAX)
        return self._settings.replicas

    def choose(self) -> tuple[str, ...]:
        """The holders of a new context."""
        return tuple(
            placement.rank(self.candidates(), self.replica_target(), watermark=self._settings.watermark)
        )

    def candidates(self) -> list[placement.ReplicaCandidate]:
        """All live nodes, with this node at distance 0."""
        others = [
            placement.ReplicaCandidate(
                node,
                seen.information.load.ratio,
                FAR_MS if seen.proximity_ms is None else seen.proximity_ms,
                seen.information.zone,
            )
            for node, seen in self._seen.items()
        ]
        return [placement.ReplicaCandidate(self._me, self.load.ratio, 0.0, self._zone), *others]

    def views(self, now_s: float, nodes: Iterable[str] | None = None) -> list[protocol.NodeInfo]:
        """``nodes``, or all nodes sorted."""
        if nodes is None:
            nodes = sorted([self._me, *self._seen])
        return [self._view(node, now_s) for node in nodes]

    def _view(self, node: str, now_s: float) -> protocol.NodeInfo:
        if node == self._me:
            return _view(self.information(), 0.0, 0.0)
        seen = self._seen[node]
        proximity_ms = FAR_MS if seen.proximity_ms is None else seen.proximity_ms
        return _view(seen.information, proximity_ms, now_s - seen.heard_at_s)


def _view(
    information: protocol.ServerInformation, proximity_ms: float, heard_s_ago: float
) -> protocol.NodeInfo:
    return protocol.NodeInfo(
        information.node,
        information.load,
        round(proximity_ms, 3),
        round(heard_s_ago, 3),
        information.zone,
        information.temporary,
        information.memory_bytes,
    )
