"""Monitors the durable storage: writes are acknowledged, and nothing that was stored is missing.

*Writes.* A broker whose disk is full, or whose cluster has no leader, runs and forwards messages, but
acknowledges none. So the domain stores a small value every few seconds. It is ready only while these writes
are acknowledged.

*Integrity.* The last sequence of every stream is recorded in a file. A stream that ends earlier after a
restart has lost its last messages. All streams are also read completely, after the start and once a day, for
messages that a broker cannot read any more (`muster.bus.streams.integrity`). A loss is recorded in the
activity log, published as a critical alert, and shown by ``muster status`` and ``muster doctor`` for seven
days. Where another broker has the messages, it becomes the leader of the stream, and the damaged replica is
created again from it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from muster.app import identities
from muster.app.brokers import broker_set
from muster.app.components import component
from muster.app.components import context as context_
from muster.bus import api, leases
from muster.bus.client import client
from muster.bus.rpc import request_audit
from muster.bus.streams import integrity
from muster.core import errors, files, health, messages, subjects, units
from muster.trust.permissions import roles

WRITE_PERIOD_S = 2.0
WRITE_TIMEOUT_S = 3.0
SILENT_S = 4.0  # without an acknowledged write for longer the storage is down
MARK_PERIOD_S = 10.0
READ_PERIOD_S = 86_400.0
REMEMBERED_S = 7 * 86_400.0
KEY = "storage"
RULE = "storage"
FILE = "streams.json"


class StreamLoss(msgspec.Struct, frozen=True):
    """Messages that a stream has lost."""

    stream: str
    what: str
    at_s: float
    repaired: bool = False

    def __str__(self) -> str:
        return f"the stream {self.stream} lost {self.what}" + (
            "; they were restored from another broker" if self.repaired else ""
        )


class StreamRecords(msgspec.Struct):
    """The content of the file."""

    marks: dict[str, integrity.StreamMark] = {}
    losses: list[StreamLoss] = []


class StorageMonitor:
    """Whether writes are acknowledged. Vital: without storage the domain is not ready."""

    name = "storage"
    depends_on: Sequence[str] = ()
    vital = True

    def __init__(self, brokers: broker_set.BrokerSet | None) -> None:
        self._brokers = brokers
        self._context: context_.ComponentContext
        self._bus: client.NatsBus
        self._stream: api.Stream | None = None  # the bucket of leases, which every service uses
        self._acknowledged_at_s = float("inf")  # until it is started
        self._full = ""  # full disks of brokers: small writes may still fit
        self._problem = ""  # of the last write, or of a broker

    async def start(self, context: context_.ComponentContext) -> None:
        self._context = context
        self._bus = await connect(context)
        self._acknowledged_at_s = time.monotonic()
        await self.check()
        context.tasks.loop("writes", self._check_forever)

    async def stop(self) -> None:
        await self._bus.close()

    @property
    def silent_s(self) -> float:
        """The time since the last acknowledged write."""
        return time.monotonic() - self._acknowledged_at_s

    def problem(self) -> str:
        """Why no message can be stored at present; empty if they are."""
        if self.silent_s > SILENT_S:
            silence = units.rounded_duration(round(self.silent_s))
            return f"no write has been acknowledged for {silence}: {self._problem}"
        return self._full

    def health(self) -> component.ComponentHealth:
        problem = self.problem()
        if problem:
            return component.ComponentHealth(health.HealthState.DOWN, problem)
        return component.ComponentHealth()

    async def check(self) -> None:
        """Store a value."""
        try:
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                if self._stream is None:
                    self._stream = await self._bus.open_stream(f"KV_{leases.BUCKET}")
                await self._stream.publish(f"$KV.{leases.BUCKET}.{KEY}", b"%d" % time.time_ns())
        except errors.NotFound:  # no service has stored anything yet
            self._acknowledged_at_s = time.monotonic()
        except (errors.MusterError, TimeoutError) as error:
            self._problem = await self._cause() or str(error) or "the brokers do not acknowledge it"
            self._context.log.warning("storage-silent", silent_s=round(self.silent_s, 1), why=self._problem)
        else:
            self._acknowledged_at_s, self._problem = time.monotonic(), ""
        if self._brokers is not None:
            self._full = await asyncio.to_thread(self._brokers.full_disks)

    async def _cause(self) -> str:
        """The problems that the domain's own brokers report."""
        if self._brokers is None:
            return ""
        reported = await asyncio.gather(
            *(member.problem() for member in self._brokers.running.brokers.values())
        )
        return "; ".join(str(problem) for problem in reported if problem is not None)

    async def _check_forever(self) -> None:
        while True:
            await asyncio.sleep(WRITE_PERIOD_S)
            await self.check()


class IntegrityMonitor:
    """Whether everything that was stored can be read."""

    name = "integrity"
    depends_on: Sequence[str] = (StorageMonitor.name,)
    vital = False

    def __init__(
        self, brokers: broker_set.BrokerSet | None, *, now_s: Callable[[], float] = time.time
    ) -> None:
        self._brokers = brokers
        self._now_s = now_s
        self._context: context_.ComponentContext
        self._bus: client.NatsBus
        self._audit: request_audit.RequestAudit
        self._stack = contextlib.AsyncExitStack()
        self._file: Path
        self._records = StreamRecords()

    async def start(self, context: context_.ComponentContext) -> None:
        self._context = context
        self._bus = await connect(context)
        self._stack.push_async_callback(self._bus.close)
        self._audit = request_audit.RequestAudit(context.bus, "bus")
        self._stack.push_async_callback(self._audit.close)
        self._file = context.folder.brokers / FILE
        self._records = await asyncio.to_thread(load, self._file)
        context.tasks.loop("sequences", self._compare_forever)
        context.tasks.loop("reading", self._read_forever)

    async def stop(self) -> None:
        await self._stack.aclose()

    @property
    def losses(self) -> list[StreamLoss]:
        return [loss for loss in self._records.losses if self._now_s() - loss.at_s < REMEMBERED_S]

    def health(self) -> component.ComponentHealth:
        losses = self.losses
        facts = {"losses": [msgspec.to_builtins(loss) for loss in losses]}
        if all(loss.repaired for loss in losses):
            return component.ComponentHealth(reason="; ".join(map(str, losses)), facts=facts)
        return component.ComponentHealth(health.HealthState.DOWN, "; ".join(map(str, losses)), facts)

    def open_alerts(self) -> list[messages.Alert]:
        """The alerts that are firing now."""
        return [_alert(loss) for loss in self.losses if not loss.repaired]

    async def compare(self) -> None:
        """Compare the last sequences of all streams with the recorded ones, and record them."""
        now = await integrity.marks(self._bus)
        before = self._records.marks
        for name, mark in now.items():
            lost = integrity.regression(before.get(name), mark)
            if lost:
                await self._report(StreamLoss(name, lost, self._now_s()))
        ours = self._context.settings.retention.streams(len(roles.STREAMS["message"]))
        for name in before.keys() - now.keys():
            if name in ours and before[name].last:
                await self._report(
                    StreamLoss(name, "all messages: it does not exist any more", self._now_s())
                )
        if now != before:
            self._records.marks = now
            await self._save()

    async def read_all(self) -> None:
        """Read all streams, report messages that are missing, and restore them where possible."""
        for name in await self._bus.streams():
            missing = await integrity.missing_sequences(self._bus, name)
            if missing:
                restored = await self._restore(name, missing)
                what = f"{integrity.count(missing):,} messages, {integrity.describe(missing)}"
                loss = StreamLoss(name, what, self._now_s(), restored)
                known = any(
                    (other.stream, other.what, other.repaired) == (name, what, restored)
                    for other in self.losses
                )
                if not known:
                    await self._report(loss)

    async def _restore(self, name: str, missing: integrity.Ranges) -> bool:
        """Whether another broker has the messages; the damaged replica is then created again."""
        if self._brokers is None:
            return False
        try:
            damaged = await integrity.find_intact_leader(self._bus, name, missing)
            if damaged is None:
                return await integrity.readable(self._bus, name, missing)
            placed = await integrity.replicas(self._bus, name)
            await self._brokers.recreate_replica(damaged, name, placed)
        except (errors.MusterError, OSError) as error:  # a TimeoutError is an OSError
            self._context.log.error("not-restored", stream=name, error=error)
            return False
        return True

    async def _report(self, loss: StreamLoss) -> None:
        self._context.log.error("data-lost", stream=loss.stream, what=loss.what, repaired=loss.repaired)
        kept = [known for known in self.losses if known != loss]
        self._records.losses = [*kept, loss]
        await self._save()
        await self._audit.record(
            "data-lost",
            loss.stream,
            str(loss),
            who=self._context.bus.identity,
            outcome=messages.DecisionOutcome.DONE if loss.repaired else messages.DecisionOutcome.FAILED,
        )
        if not loss.repaired:
            await self._context.bus.publish(subjects.to_all("bus", "alert"), messages.encode(_alert(loss)))

    async def _save(self) -> None:
        await asyncio.to_thread(files.write, self._file, msgspec.json.encode(self._records))

    async def _compare_forever(self) -> None:
        while True:
            try:
                await self.compare()
            except (errors.MusterError, OSError) as error:  # retried in the next period
                self._context.log.warning("integrity-unknown", error=error)
            await asyncio.sleep(MARK_PERIOD_S)

    async def _read_forever(self) -> None:
        while True:
            try:
                await self.read_all()
            except (errors.MusterError, OSError) as error:
                self._context.log.warning("integrity-unknown", error=error)
            await asyncio.sleep(READ_PERIOD_S)


async def connect(context: context_.ComponentContext) -> client.NatsBus:
    """As the administrator, who may read and write all streams."""
    bus = await context.connect(identities.ADMINISTRATOR, roles.Role.OPERATOR)
    assert isinstance(bus, client.NatsBus)
    return bus


def load(file: Path) -> StreamRecords:
    try:
        return msgspec.json.decode(file.read_bytes(), type=StreamRecords)
    except (FileNotFoundError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return StreamRecords()


def _alert(loss: StreamLoss) -> messages.Alert:
    at_ms = int(loss.at_s * 1000)
    return messages.Alert(
        rule=RULE,
        about=f"stream:{loss.stream}",
        severity=messages.Severity.CRITICAL,
        state=messages.AlertState.FIRING,
        since_ms=at_ms,
        at_ms=at_ms,
        value=None,
        reason=str(loss),
    )
