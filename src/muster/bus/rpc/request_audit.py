"""The audit of administrative requests: one `Decision` for each, in the stream ``decisions``.

The service writes it, so it does not matter which program sent the request.  A record that cannot be stored
is logged and counted; the act is not undone for it.

The audit log is bounded in bytes, and any identity can cause rejected requests. So that an identity cannot
displace the history of others in this way, records of rejected requests have a budget for each identity:
beyond it they are counted, and one record states the count. Requests that were executed, or may have been,
are always recorded.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable

from muster.bus import api
from muster.core import errors, leaky_buckets, messages, subjects
from muster.core.telemetry import log
from muster.supervision import tasks

MAX_BYTES = 256 << 20
MAX_AGE_S = 365 * 86400.0

REFUSED = leaky_buckets.BucketBudget(100, 300.0)  # records of refused and failed requests of one identity
SUMMARY_S = 300.0  # after which a record states how many were not stored
SUMMARY = "not-recorded"  # the operation in such a record

_BOUNDED = (messages.DecisionOutcome.REFUSED, messages.DecisionOutcome.FAILED)

events = log.EventLog("audit")


class Refusals:
    """Decides which records of rejected requests are stored: those within the budget of their key.

    ``summarise`` stores one record for a key, with the number of those that were not stored.
    """

    def __init__(
        self, summarise: Callable[[str, int], Awaitable[None]], budget: leaky_buckets.BucketBudget = REFUSED
    ) -> None:
        self.suppressed = 0  # in all
        self._summarise = summarise
        self._buckets: leaky_buckets.LeakyBuckets[str] = leaky_buckets.LeakyBuckets(budget)
        self._counts: Counter[str] = Counter()  # since the last summary
        self._timer: asyncio.TimerHandle | None = None
        self._tasks = tasks.TaskSupervisor("audit")

    def admit(self, key: str) -> bool:
        """Whether a record is to be stored; if not, it is counted."""
        loop = asyncio.get_running_loop()
        if not self._buckets.wait_s(key, loop.time()):
            self._buckets.add(key, loop.time())
            return True
        self.suppressed += 1
        if key not in self._counts and len(self._counts) >= leaky_buckets.KEYS_MAX:
            key = "-"
        self._counts[key] += 1
        if self._timer is None:
            self._timer = loop.call_later(SUMMARY_S, self._summarise_later)
        return False

    def _summarise_later(self) -> None:
        self._timer = None
        self._tasks.spawn("summary", self._summarise_all())

    async def _summarise_all(self) -> None:
        counts, self._counts = self._counts, Counter()
        for key, count in counts.items():
            await self._summarise(key, count)

    async def close(self) -> None:
        """Store the summaries now."""
        if self._timer is not None:
            self._timer.cancel()
            self._summarise_later()
        await self._tasks.wait_idle()


def summary(key: str, count: int) -> dict[str, str]:
    """The text of the record of suppressed records."""
    return {
        "what": SUMMARY,
        "target": key,
        "why": f"{count} refused or failed requests of {key} were not recorded one by one",
        "count": f"{count}",
    }


class RequestAudit:
    """Writes for the services of one part. ``epoch``: the term under which they act, if they have one.

    It uses the existing stream or creates it: only the domain process may change its limits.
    """

    def __init__(
        self,
        bus: api.Bus,
        part: str,
        *,
        epoch: Callable[[], int] = int,
        refused: leaky_buckets.BucketBudget = REFUSED,
    ) -> None:
        self.lost = 0  # records that could not be stored
        self.refusals = Refusals(self._summarise, refused)
        self._bus = bus
        self._part = part
        self._epoch = epoch
        self._stream: api.Stream | None = None

    def use(self, bus: api.Bus) -> None:
        """Write over another connection from now on."""
        if bus is not self._bus:
            self._bus, self._stream = bus, None

    async def close(self) -> None:
        await self.refusals.close()

    async def _summarise(self, identity: str, count: int) -> None:
        await self._store(who=identity, outcome=messages.DecisionOutcome.REFUSED, **summary(identity, count))

    async def record(
        self,
        what: str,
        target: str,
        why: str,
        *,
        who: str,
        outcome: messages.DecisionOutcome = messages.DecisionOutcome.DONE,
        on_behalf_of: str = "",
        budget: str = "",
        **details: str,
    ) -> None:
        """Returns when the record is stored, or cannot be stored.

        ``budget``: the key of `Refusals`, where ``who`` is only claimed.
        """
        of_others = outcome in _BOUNDED and who != self._bus.identity
        if of_others and not self.refusals.admit(budget or who):
            return
        await self._store(what, target, why, who, outcome, on_behalf_of, **details)

    async def _store(
        self,
        what: str,
        target: str,
        why: str,
        who: str,
        outcome: messages.DecisionOutcome,
        on_behalf_of: str = "",
        **details: str,
    ) -> None:
        try:
            decision = messages.Decision(
                id=secrets.token_hex(8),
                who=who[:256],
                on_behalf_of=on_behalf_of[:256],
                what=subjects.token(what),
                target=target[:256] or "-",
                why=why[:4096] or f"{who} asked",
                at_ms=int(time.time() * 1000),
                epoch=self._epoch(),
                outcome=outcome,
                details={name: value[:1000] for name, value in details.items()},
            )
            if self._stream is None:
                self._stream = await self._open()
            await self._stream.publish(
                subjects.log_subject(self._part, "decision", what), messages.encode(decision)
            )
        except errors.MusterError as error:
            self.lost += 1
            events.error("not-recorded", what=what, target=target, by=who, error=error)

    async def _open(self) -> api.Stream:
        try:
            return await self._bus.open_stream(messages.DECISIONS_STREAM)
        except errors.NotFound:
            return await self._bus.stream(stream_settings())


def stream_settings(
    *, max_bytes: int = MAX_BYTES, max_age_s: float = MAX_AGE_S, replicas: int = 1
) -> api.StreamSettings:
    return api.StreamSettings(
        name=messages.DECISIONS_STREAM,
        subjects=(messages.DECISIONS_SUBJECTS,),
        max_bytes=max_bytes,
        max_age_s=max_age_s,
        replicas=replicas,
    )
