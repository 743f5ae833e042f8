"""Fences: nodes that are the primary of nothing any more, and who the primaries are instead. Pure.

A fence is a page on the subject of the fenced node. It names the live nodes, as its writer sees them. The
primary of each context of that node is from then on the best of the holders among them, or of all if no
holder is left, by the selection of the paper (`placement.rank`). All nodes compute the same from the log; a
record states it when the context is written again.
"""

from __future__ import annotations

from collections.abc import Sequence

from muster.inform import protocol
from muster.inform.node.replicas import placement

Holders = tuple[str, ...]


class NodeFence(protocol.InformMessage, frozen=True):
    sequence: int
    node: str
    live: list[protocol.FenceCandidate]


def holders_now(fences: Sequence[NodeFence], holders: Holders, sequence: int) -> Holders:
    """The holders that a record at ``sequence`` names, after the fences since."""
    for fence in fences:
        if fence.sequence > sequence and holders and holders[0] == fence.node:
            holders = moved(holders, fence.node, fence.live)
    return holders


def moved(holders: Holders, node: str, live: Sequence[protocol.FenceCandidate]) -> Holders:
    candidates = [
        placement.ReplicaCandidate(other.node, other.load, other.proximity_ms, other.zone)
        for other in live
        if other.node != node
    ]
    held = [candidate for candidate in candidates if candidate.node in holders]
    chosen = placement.rank(held or candidates, 1)
    if not chosen:
        return holders
    rest = [holder for holder in holders if holder not in (chosen[0], node)]
    return (chosen[0], *rest, node) if held else (chosen[0], *rest)  # as many as before
