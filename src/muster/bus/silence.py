"""Detects a peer that is silent: a broker, or the other end of a direct connection.

A frozen process keeps its sockets open, so only its silence shows. Progress with a backlog of unsent data
counts as a sign of life: a ping waits behind it, and a slow network is not a frozen peer. Pure.
"""

from __future__ import annotations

INTERVAL_S = 2.0  # shorter than a broker's own interval: it then does not ping this client
INTERVALS_MAX = 2  # a peer from which nothing arrives for longer is given up


class SilenceWatch:
    def __init__(self) -> None:
        self.intervals = 0  # in which nothing arrived: the peer is to be pinged
        self._heard = (0, 0)  # blocks received and bytes unsent, an interval ago

    def observe(self, blocks: int, unsent_bytes: int) -> None:
        """Called every `INTERVAL_S`; ``blocks`` have been received in all."""
        before, self._heard = self._heard, (blocks, unsent_bytes)
        alive = blocks != before[0] or unsent_bytes < before[1]
        self.intervals = 0 if alive else self.intervals + 1

    @property
    def is_lost(self) -> bool:
        return self.intervals > INTERVALS_MAX
