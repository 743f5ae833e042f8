"""What a node knows of the others: who they are, how near, how loaded, and when they were last heard.

Fed by Server-Information requests and responses; the round trip of the pair is the proximity, smoothed
because one slow answer is no distance.  Pure: the caller brings the time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from muster.inform import protocol
from muster.inform.node.replicas import placement

SMOOTHING = 0.3
FAR_MS = 1_000.0  # of a node that was heard and never measured


@dataclass(slots=True)
class _Seen:
    information: protocol.ServerInformation
    heard_at_s: float
    proximity_ms: float | None = None


class NodeDirectory:
    def __init__(self, me: str, *, lost_after_s: float) -> None:
        self._me = me
        self._lost_after_s = lost_after_s
        self._seen: dict[str, _Seen] = {}
        self._names: list[str] | None = None  # in order; made when it is asked for
        self.generation = 0  # grows when somebody comes or goes

    def heard(
        self, information: protocol.ServerInformation, now_s: float, *, round_trip_s: float | None = None
    ) -> bool:
        """Whether this node is new here."""
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

    def silent(self, node: str) -> None:
        """It did not answer us: out of sight until it is heard again."""
        if self._seen.pop(node, None) is not None:
            self._changed()

    def _changed(self) -> None:
        self.generation += 1
        self._names = None

    def excuse(self, now_s: float) -> None:
        """We were deaf ourselves: everybody's time begins anew."""
        for seen in self._seen.values():
            seen.heard_at_s = now_s

    def lose(self, now_s: float) -> list[str]:
        """Those not heard for too long; they are forgotten with this."""
        lost = [node for node, seen in self._seen.items() if now_s - seen.heard_at_s > self._lost_after_s]
        for node in lost:
            self.silent(node)
        return lost

    @property
    def nodes(self) -> list[str]:
        """The others, in order. Callers must not change the list."""
        if self._names is None:
            self._names = sorted(self._seen)
        return self._names

    def candidates(self, own: protocol.ServerInformation) -> list[placement.ReplicaCandidate]:
        """Everybody alive, with ourselves at no distance."""
        others = [
            placement.ReplicaCandidate(
                node,
                seen.information.load.ratio,
                FAR_MS if seen.proximity_ms is None else seen.proximity_ms,
                seen.information.zone,
            )
            for node, seen in self._seen.items()
        ]
        return [placement.ReplicaCandidate(self._me, own.load.ratio, 0.0, own.zone), *others]

    def views(
        self, own: protocol.ServerInformation, now_s: float, nodes: Iterable[str] | None = None
    ) -> list[protocol.NodeInfo]:
        """``nodes``, or all in their order; ``own`` describes this node."""
        if nodes is None:
            nodes = sorted([self._me, *self._seen])
        return [self._view(node, own, now_s) for node in nodes]

    def _view(self, node: str, own: protocol.ServerInformation, now_s: float) -> protocol.NodeInfo:
        if node == self._me:
            return _view(own, 0.0, 0.0)
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
