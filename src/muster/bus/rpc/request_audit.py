"""The audit of administrative requests: one `Decision` for each, in the stream ``decisions``.

`ActivityWriter` is the only writer of that stream.  A service writes the record of a request itself
(`RequestAudit`), so it does not matter which program sent the request.  A record that cannot be stored is
logged and counted; the act is not undone for it.

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
from collections.abc import Awaitable, Callable, Mapping

from muster.bus import api
from muster.core import errors, leaky_buckets, messages, subjects
from muster.core.telemetry import log, trace
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


def activity(
    who: str,
    what: str,
    target: str,
    why: str = "",
    outcome: messages.DecisionOutcome = messages.DecisionOutcome.DONE,
    *,
    on_behalf_of: str = "",
    epoch: int = 0,
    details: Mapping[str, str] = {},
) -> messages.Decision:
    """A record of what happens now, in the trace of the running task. Texts that are too long are cut."""
    running = trace.current.get()
    return messages.Decision(
        id=secrets.token_hex(8),
        who=who[:256] or "-",
        on_behalf_of=on_behalf_of[:256],
        what=what,
        target=target[:256] or "-",
        why=why[:4096] or f"requested by {who}",
        at_ms=int(time.time() * 1000),
        epoch=epoch,
        outcome=outcome,
        details={name: value[:1000] for name, value in details.items()},
        trace_id=running.trace_id if running else "",
    )


class ActivityWriter:
    """Stores records of one part. ``settings``: the limits of the stream, given by the domain process only;
    other processes use the existing stream or create it.
    """

    def __init__(self, bus: api.Bus, part: str, settings: api.StreamSettings | None = None) -> None:
        self._bus = bus
        self._part = part
        self._settings = settings
        self._stream: api.Stream | None = None

    async def store(self, record: messages.Decision) -> None:
        """A record that is stored twice is one record."""
        subject = subjects.log_subject(self._part, "decision", subjects.token(record.what))
        stream = await self.open()
        await stream.publish(subject, messages.encode(record), message_id=record.id)

    @property
    def is_open(self) -> bool:
        return self._stream is not None

    async def open(self) -> api.Stream:
        if self._stream is None:
            self._stream = await self._open()
        return self._stream

    async def _open(self) -> api.Stream:
        if self._settings is not None:
            return await self._bus.stream(self._settings)
        try:
            return await self._bus.open_stream(messages.DECISIONS_STREAM)
        except errors.NotFound:
            return await self._bus.stream(stream_settings())


class RequestAudit:
    """Writes for the services of one part. ``epoch``: the term under which they act, if they have one."""

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
        self._writer = ActivityWriter(bus, part)

    def use(self, bus: api.Bus) -> None:
        """Write over another connection from now on."""
        if bus is not self._bus:
            self._bus, self._writer = bus, ActivityWriter(bus, self._part)

    async def close(self) -> None:
        await self.refusals.close()

    async def _summarise(self, identity: str, count: int) -> None:
        outcome = messages.DecisionOutcome.REFUSED
        why = f"{count} refused or failed requests of {identity} were not recorded one by one"
        details = {"count": f"{count}"}
        await self._store(activity(identity, SUMMARY, identity, why, outcome, details=details))

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
        epoch = self._epoch()
        await self._store(
            activity(who, what, target, why, outcome, on_behalf_of=on_behalf_of, epoch=epoch, details=details)
        )

    async def _store(self, record: messages.Decision) -> None:
        try:
            await self._writer.store(record)
        except errors.MusterError as error:
            self.lost += 1
            events.error("not-recorded", what=record.what, target=record.target, by=record.who, error=error)


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
