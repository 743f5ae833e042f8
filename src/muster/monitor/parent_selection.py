"""Selection of the channel to report to, from received heartbeats. Pure: callers pass the time.

With a list of parents, the first one that is alive is used.  Otherwise each child ranks all channels that
accept sensors by a hash of both names and uses the highest one that is alive (rendezvous hashing): children
are distributed evenly without coordination, and the children of a failed channel are distributed over the
others.

A channel that is silent for `SILENT_BEATS` of its heartbeat periods is considered dead.  Moving is always
safe: duplicates are counted once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from muster.monitor import protocol

SILENT_BEATS = 2.5


class ParentSelector:
    def __init__(self, child: str, preferred: Sequence[str] = ()) -> None:
        self._child = child
        self._preferred = tuple(preferred)
        self._heartbeats: dict[str, tuple[protocol.ChannelHeartbeat, float]] = {}

    def record_heartbeat(self, channel: str, beat: protocol.ChannelHeartbeat, now_s: float) -> None:
        known = self._heartbeats.get(channel)
        # A restarted channel has another boot number, possibly a lower one if its clock was corrected.
        if known is None or beat.boot != known[0].boot or beat.sequence > known[0].sequence:
            self._heartbeats[channel] = (beat, now_s)

    def choose(self, now_s: float) -> str | None:
        """The parent to use now; None if none is alive."""
        if self._preferred:
            living = (
                name for name in self._preferred if name == protocol.ROOT or self._is_alive(name, now_s)
            )
            return next(living, None)
        for name in [channel for channel in self._heartbeats if not self._is_alive(channel, now_s)]:
            del self._heartbeats[name]
        open_ = [name for name, (beat, _) in self._heartbeats.items() if beat.sensors]
        return max(open_, key=self._rank, default=None)

    def _is_alive(self, name: str, now_s: float) -> bool:
        if name not in self._heartbeats:
            return False
        beat, at_s = self._heartbeats[name]
        return beat.open and now_s - at_s <= SILENT_BEATS * beat.period_s

    def _rank(self, channel: str) -> bytes:
        return hashlib.blake2b(f"{channel}\n{self._child}".encode(), digest_size=8).digest()
