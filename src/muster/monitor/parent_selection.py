"""Which channel to report to: chosen from the beats one hears.

Where a list of parents is given, the first of them that lives is taken.  Otherwise each child ranks all
channels that take sensors by a hash of both names and takes the highest that lives: children spread evenly,
all agree without talking, and the children of a dead channel spread over the others.

A channel that is silent for `SILENT_BEATS` of its own beats is taken for dead.  To move is always safe: what
arrives by two ways is counted once.  Pure: times are brought along.
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
        # A channel that restarted has another boot, which is higher or lower as its clock was corrected.
        if known is None or beat.boot != known[0].boot or beat.sequence > known[0].sequence:
            self._heartbeats[channel] = (beat, now_s)

    def choose(self, now_s: float) -> str | None:
        """The parent to use now; None while none lives."""
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
