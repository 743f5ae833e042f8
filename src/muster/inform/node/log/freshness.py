"""How recent is what a node has of the log, and the time of the log."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from muster.core import errors
from muster.inform import settings as settings_
from muster.inform.node import shared_rounds
from muster.inform.node.log import context_log
from muster.inform.node.replicas import replica_table

GAP_S = 0.2  # after this time, check whether the follower is slow or at a gap
STALLED_S = 20.0  # a node that the log did not reply to for so long does not know how old its requests are
WRITE_S = 40.0  # how long a node tries a write; its client waits for 30 s


class LogFreshness:
    """``uptime_s``: a clock that is never set."""

    def __init__(
        self,
        node: str,
        log: context_log.ContextLog,
        settings: settings_.InformSettings,
        *,
        now_ns: Callable[[], int],
        uptime_s: Callable[[], float],
    ) -> None:
        self.now_s = uptime_s
        self.fresh_at_s = -float("inf")  # the last time at which all records of the log had been received
        self.log_end = shared_rounds.SharedRounds(self._read_log_end)
        self._node = node
        self._log = log
        self._timeout_s = settings.timeout_s
        self._reads_by_lease = settings.reads_by_lease
        # Of the clock of the log, before `now_s`. The wall clock is a first guess.
        self._log_ahead_ns = now_ns() - _ns(uptime_s())

    def restart(self) -> None:
        """The log is read from its beginning."""
        self.fresh_at_s = -float("inf")

    async def close(self) -> None:
        await self.log_end.close()

    async def refresh(self, timeout_s: float, *, confirmed: bool = False) -> None:
        """Receive all records that the log had when this was called; `errors.Unavailable` if that fails.

        ``confirmed``: by most replicas of the log. Otherwise a leader may be believed that was cut off from
        them within the last seconds.
        """
        started_at_s = self.now_s()
        await self.catch_up(timeout_s, confirmed=confirmed)
        self.fresh_at_s = max(self.fresh_at_s, started_at_s)

    async def catch_up(self, timeout_s: float, *, confirmed: bool = False) -> None:
        """Wait until the follower has received all current records of the log."""
        log = self._log
        try:
            async with asyncio.timeout(timeout_s):
                if confirmed and (log.is_replicated or self._reads_by_lease):
                    await log.confirm()
                    return
                end = await asyncio.shield(self.log_end.next())
                while log.applied < end:
                    try:
                        async with asyncio.timeout(GAP_S):
                            await log.advanced()
                    except TimeoutError:
                        if await log.is_gap(log.applied + 1, end):
                            log.advance(end)
        except TimeoutError:
            raise errors.TimedOut(f"no reply from the log to {self._node} in {timeout_s:g} s") from None

    def when_confirmed(self, then: Callable[[bool], None]) -> None:
        """Call ``then`` later, without a task: whether all that the log had when this was called is known to
        be applied. Otherwise `refresh` says more."""
        log, started_at_s = self._log, self.now_s()
        by_page = log.is_replicated or self._reads_by_lease
        end: asyncio.Future[int] = log.confirmation() if by_page else self.log_end.next()

        def ended(_: asyncio.Future[int]) -> None:
            is_confirmed = not end.cancelled() and end.exception() is None
            if is_confirmed and (by_page or log.applied >= end.result()):
                self.fresh_at_s = max(self.fresh_at_s, started_at_s)
                then(True)
            else:
                then(False)

        end.add_done_callback(ended)

    def require_recent(self, begun_s: float, key: str) -> None:
        """Reject a write that may be older than the log recognises repeated writes; ``begun_s``: when it
        arrived here.

        A process that was frozen, or a machine that was suspended, continues with requests of that time.
        Their clients have long got a reply from another node, and other clients have written since.
        """
        if self.is_stalled or self.now_s() - begun_s > WRITE_S:
            raise errors.TimedOut(f"{key!r} was not stored in time; it may be stored by another node")

    @property
    def is_stalled(self) -> bool:
        """Whether the log has not replied for long: then requests that arrive may be as old.

        The next reply of the log comes after all requests that the connection had buffered.
        """
        return self.now_s() - self.fresh_at_s > STALLED_S

    async def _read_log_end(self) -> int:
        async with asyncio.timeout(self._timeout_s):
            sent_at_s = self.now_s()
            end = await self._log.state()
        self._observe_log_time(sent_at_s, end.now_ns, self.now_s())
        return end.last_sequence

    def _observe_log_time(self, sent_at_s: float, log_ns: int, received_at_s: float) -> None:
        """The log's clock was read between two readings of this node's. Change the difference no more than
        these three require: the round trip is not a difference."""
        least_ns, most_ns = log_ns - _ns(received_at_s), log_ns - _ns(sent_at_s)
        self._log_ahead_ns = max(least_ns, min(self._log_ahead_ns, most_ns))

    def log_now_ns(self) -> int:
        """The time by the clock of the log. All nodes measure leases by it, whatever their wall clocks say,
        and also while these are being set."""
        return _ns(self.now_s()) + self._log_ahead_ns

    def is_live(self, replica: replica_table.Replica) -> bool:
        """Whether its context exists now. The time is read only for a lease: most contexts have none."""
        return replica.is_live(self.log_now_ns() if replica.expires_at_ns else 0)

    def age_s(self, replica: replica_table.Replica) -> float:
        fresh_at_s = self.fresh_at_s
        if replica.fresh_at_s > fresh_at_s:
            fresh_at_s = replica.fresh_at_s
        return max(0.0, self.now_s() - fresh_at_s)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
