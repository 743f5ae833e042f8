"""When a client tries to reconnect, and how long an attempt may take.

After a broker restart all clients of a fleet connect at once. Together they come back if none of their work
is wasted:

- The delay before an attempt doubles, half of it is random, and it is short again only after a connection has
  lasted for `STABLE_S`. A broker that is overloaded accepts connections and closes them soon after; clients
  that then started with short delays again would keep it overloaded.
- A broker to which the network connection succeeds, but which has not completed the handshake, has a queue.
  A client that gives up loses its place and adds work. So after failed attempts it waits longer for the
  handshake. The network connection itself keeps the short timeout: an address that does not respond is
  unreachable, not busy.
- A process with many connections starts a limited number of attempts at a time (`AttemptSlots`). Otherwise
  they would delay each other until all of them time out.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Callable
from typing import ClassVar

BASE_S = 0.05
CAP_S = 5.0
STABLE_S = 10.0  # a connection that lasted so long ends a series of attempts
HANDSHAKE_S_MAX = 15.0
QUICK_ATTEMPTS = 2  # a frozen broker must not hold up the way to another one
ATTEMPTS_AT_ONCE = 32  # in one process
SLOT_S = 1.0  # an attempt that takes longer waits for its broker, and other attempts may begin


class ReconnectionPlan:
    """The attempts of one connection since it was last stable. Pure: times are those of one clock."""

    def __init__(self) -> None:
        self.attempts = 0
        self._connected_at_s: float | None = None

    def connected(self, now_s: float) -> None:
        self._connected_at_s = now_s

    def next_delay_s(self, now_s: float, random: float) -> float:
        """Count another attempt, and return the time before it. ``random``: from 0 to 1."""
        if self._connected_at_s is not None:
            if now_s - self._connected_at_s >= STABLE_S:
                self.attempts = 0
            self._connected_at_s = None
        longest_s = min(CAP_S, BASE_S * 2.0 ** min(self.attempts, 20))
        self.attempts += 1
        return longest_s * (0.5 + random / 2)

    def handshake_s(self, connect_s: float) -> float:
        """How long this attempt waits for each reply of the broker; ``connect_s``: the first ones."""
        doubled = max(0, min(self.attempts - QUICK_ATTEMPTS, 20))
        return max(connect_s, min(HANDSHAKE_S_MAX, connect_s * 2.0**doubled))


class AttemptSlots:
    """Limits the attempts to reconnect that the connections of one event loop make at a time."""

    _by_loop: ClassVar[weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, AttemptSlots]] = (
        weakref.WeakKeyDictionary()
    )

    def __init__(self, number: int) -> None:
        self._free = asyncio.Semaphore(number)

    @classmethod
    def of_loop(cls) -> AttemptSlots:
        return cls._by_loop.setdefault(asyncio.get_running_loop(), cls(ATTEMPTS_AT_ONCE))

    async def take(self) -> Callable[[], None]:
        """Wait for a free slot. Returns what releases it, which may be called several times."""
        await self._free.acquire()
        release = contextlib.ExitStack()
        release.callback(self._free.release)
        timer = asyncio.get_running_loop().call_later(SLOT_S, release.close)
        release.callback(timer.cancel)
        return release.close
