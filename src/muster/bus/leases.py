"""Leases: at most one holder, and an epoch to reject former holders.

    async with await leases.Leases.open(bus) as all_leases:
        async with await all_leases.acquire("manage.registry") as lease:
            while lease.held:
                await act(epoch=lease.epoch)

All parts of Muster that allow one active process use this module. `muster.bus.lease_state` decides; this
module stores, watches and notifies. A holder renews the lease three times within its time to live. A waiting
process acquires the lease when it is released, when it expires, and at once when a broker reports that the
connection of the holder is closed. When it begins to wait and after a reconnection it asks the brokers for
that connection, because it may have missed the report: a process that was restarted does not wait for the
lease of its predecessor to expire.

The brokers report that on `DISCONNECTED`. They publish it in the system account as
``$SYS.ACCOUNT.<account>.DISCONNECT``; an account that imports that stream under this subject gets the
takeover at once, any other waits for the time to live.

6 s is the default. A process that does not run for so long loses its leases, also one on a machine that was
suspended; after 5.4 s without a renewal it does not act. An election of a stream's leader (4 to 9 s, during
which nothing can be renewed) can suspend a holder, and does not replace it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Self

import msgspec

from muster.bus import api, lease_state
from muster.core import errors, lifecycle, subjects
from muster.core.telemetry import log
from muster.supervision import tasks

events = log.EventLog("bus")

BUCKET = "leases"
TTL_S = 6.0
TIMEOUT_S_MIN = 0.5
SUSPENDED_S_MIN = 0.2  # the clocks are read one after the other; less than the margin of a lease
DISCONNECTED = f"{subjects.CONNECTIONS}.disconnect"


def _boot_ahead_s() -> float:
    """How far the clock that goes on in suspend is ahead of the loop's clock, which stops."""
    if not hasattr(time, "CLOCK_BOOTTIME"):
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - time.clock_gettime(time.CLOCK_MONOTONIC)


_BOOT_AHEAD_S = _boot_ahead_s()


def suspended_s() -> float:
    """How long this machine has been suspended since this process began."""
    seconds = _boot_ahead_s() - _BOOT_AHEAD_S
    return seconds if seconds > SUSPENDED_S_MIN else 0.0


class EpochFence:
    """For receivers: stores the highest epoch seen, and rejects lower ones."""

    def __init__(self, epoch: int = 0) -> None:
        self.epoch = epoch

    def check(self, epoch: int) -> None:
        if epoch < self.epoch:
            raise errors.StaleEpoch(
                f"epoch {epoch} has been superseded by {self.epoch}", epoch=epoch, current=self.epoch
            )
        self.epoch = epoch


class Lease:
    """A held lease. ``lost`` is set at its end, for any reason; acquiring it again needs another
    `acquire`."""

    def __init__(self, name: str, epoch: int, run: _Run) -> None:
        self.name = name
        self.epoch = epoch
        self.lost = asyncio.Event()
        self.lost_because: str | None = None
        self._run = run

    def __repr__(self) -> str:
        return f"<lease {self.name!r} epoch {self.epoch} {self._run.candidate.phase.value}>"

    @property
    def held(self) -> bool:
        """Whether the holder may act now. False while it is disconnected or could not renew in time, although
        the lease is not lost yet."""
        return self._run.held()

    @property
    def lapses(self) -> int:
        """How often `held` was False and became True again, however short that was."""
        return self._run.candidate.lapses

    @property
    def remaining_s(self) -> float:
        """How long the holder may act if no renewal succeeds."""
        return self._run.candidate.remaining_s(self._run.now())

    @property
    def former_until(self) -> float | None:
        """When the time of the holder before this one ends or ended, by the loop's clock; None: unknown."""
        return self._run.candidate.former_until

    async def release(self) -> None:
        await self._run.release()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.release()


class Leases(lifecycle.ClosingContext):
    """The leases of a domain, through one connection."""

    def __init__(self, bus: api.Bus, bucket: api.KeyValue, ttl_s: float) -> None:
        self._bus = bus
        self._bucket = bucket
        self._ttl_s = ttl_s
        self._runs: dict[_Run, None] = {}  # in the order in which they began
        self._asked: dict[api.ConnectionId, bool] = {}  # whether it is closed, since this connection was made
        self._tasks = tasks.TaskSupervisor("leases")
        self._hearing: api.Subscription | None = None
        self._end_state = bus.on_state(self._state_changed)

    @classmethod
    async def open(cls, bus: api.Bus, *, ttl_s: float = TTL_S, replicas: int = 1) -> Self:
        if ttl_s < 1:
            raise errors.InvalidInput(f"a lease of {ttl_s:g} s: the broker counts in seconds, at least one")
        bucket = await bus.key_value(api.KeyValueSettings(BUCKET, max_bytes=16 << 20, replicas=replicas))
        leases = cls(bus, bucket, ttl_s)
        try:
            leases._hearing = await bus.subscribe(DISCONNECTED, handler=leases._heard)
        except errors.Forbidden:
            events.info("closed-connections-unheard", identity=bus.identity)
        return leases

    async def close(self) -> None:
        """Release everything held through this."""
        self._end_state()
        for run in list(self._runs):
            await run.release()
        await self._tasks.close()
        if self._hearing is not None:
            await self._hearing.close()

    async def acquire(self, name: str, *, timeout_s: float | None = None) -> Lease:
        """Wait for the lease; `errors.TimedOut` if it is not acquired within ``timeout_s``."""
        lease = await self._gained(self._new_run(name, wait=True), timeout_s)
        assert lease is not None
        return lease

    async def try_acquire(self, name: str, *, timeout_s: float = api.DURABLE_TIMEOUT_S) -> Lease | None:
        """The lease if no other process holds it now, without waiting for its holder.

        `errors.TimedOut` if the storage does not respond within ``timeout_s``.
        """
        return await self._gained(self._new_run(name, wait=False), timeout_s)

    def _new_run(self, name: str, *, wait: bool) -> _Run:
        return _Run(self._bus, self._bucket, name, self._ttl_s, self._forget, self._waits_for, wait=wait)

    def _forget(self, run: _Run) -> None:
        self._runs.pop(run, None)

    def _waits_for(self, run: _Run, connection: api.ConnectionId) -> None:
        """A lease is held over this connection: ask the brokers for it, once for all leases."""
        if connection not in self._asked:
            self._asked[connection] = False
            self._tasks.spawn("ask", self._ask(connection))
        elif self._asked[connection]:
            run.closed(connection)

    async def _ask(self, connection: api.ConnectionId) -> None:
        with contextlib.suppress(errors.Unavailable):
            if await self._bus.is_closed(connection):
                self._asked[connection] = True
                self._closed(connection)

    def _closed(self, connection: api.ConnectionId) -> None:
        for run in list(self._runs):
            run.closed(connection)

    async def _gained(self, run: _Run, timeout_s: float | None) -> Lease | None:
        self._runs[run] = None
        try:
            async with asyncio.timeout(timeout_s):
                lease = await run.gained()
        except BaseException as error:
            await run.release()
            if isinstance(error, TimeoutError):
                raise errors.TimedOut(
                    f"the lease {run.name!r} could not be acquired within {timeout_s:g} s"
                ) from None
            raise
        if lease is None:
            await run.release()
        return lease

    async def holder(self, name: str) -> tuple[str, int] | None:
        """The holder and its epoch."""
        entry = await self._bucket.get(name)
        record = _record(entry, self._ttl_s)
        return (record.holder, record.epoch or entry.revision) if record and entry else None

    async def announce(self, key: str, text: str) -> None:
        """Store a text beside the leases for their time to live: repeat it to keep it."""
        await self._bucket.put(key, text.encode(), ttl_s=self._ttl_s)

    async def announced(self, pattern: str) -> list[str]:
        """The texts of all keys that match."""
        entries = [await self._bucket.get(key) for key in await self._bucket.keys(pattern)]
        return [entry.value.decode() for entry in entries if entry is not None and entry.value is not None]

    def _state_changed(self, state: api.ConnectionState) -> None:
        self._asked.clear()
        for run in list(self._runs):
            run.state_changed(state)

    def _heard(self, message: api.Message) -> None:
        """A broker's report of a closed connection."""
        try:
            report = json.loads(message.data)
            connection = api.ConnectionId(report["server"]["id"], int(report["client"]["id"]))
        except (ValueError, KeyError, TypeError, RecursionError):
            events.warning("strange-report", subject=message.subject, data=message.data[:200])
            return
        self._closed(connection)


class _Run:
    """Executes the instructions of one candidate."""

    def __init__(
        self,
        bus: api.Bus,
        bucket: api.KeyValue,
        name: str,
        ttl_s: float,
        on_end: Callable[[_Run], None],
        on_wait: Callable[[_Run, api.ConnectionId], None],
        *,
        wait: bool = True,
    ) -> None:
        for level in name.split("."):
            subjects.token(level)
        self._bus = bus
        self._bucket = bucket
        self.name = name
        self._ttl_s = ttl_s
        self._timeout_s = max(TIMEOUT_S_MIN, ttl_s * lease_state.TIMEOUT)
        self._on_end = on_end
        self._on_wait = on_wait
        self._wait = wait
        self._loop = asyncio.get_running_loop()
        self._lease: Lease | None = None
        self._gained: asyncio.Future[Lease | None] = self._loop.create_future()  # None: another holds it
        self._alarm: asyncio.TimerHandle | None = None
        self._tasks = tasks.TaskSupervisor(f"lease {name}")
        self._watching: asyncio.Task[None] | None = None
        self.candidate = lease_state.LeaseCandidate(bus.identity, secrets.token_hex(8), ttl_s=ttl_s)

    async def gained(self) -> Lease | None:
        if self._wait:
            self._watching = self._tasks.loop("watch", self._watch)
        self.state_changed(self._bus.state)
        return await self._gained

    def now(self) -> float:
        """The loop's time, as if it went on in suspend: what expired meanwhile has expired."""
        return self._loop.time() + suspended_s()

    def held(self) -> bool:
        return self.candidate.held_at(self.now())

    # Events.

    def state_changed(self, state: api.ConnectionState) -> None:
        connection = self._bus.connection
        if state is api.ConnectionState.CONNECTED and connection is not None:
            self._execute(self.candidate.connected(connection, self.now()))
        else:
            self.candidate.disconnected()
            self._set_alarm()

    def closed(self, connection: api.ConnectionId) -> None:
        self._execute(self.candidate.closed(connection, self.now()))

    async def release(self) -> None:
        if not self.candidate.ended:
            self._execute(self.candidate.release())
            self._finish("released")
        await self._tasks.wait_idle()

    async def _watch(self) -> None:
        """Pass changes to the candidate while it waits."""
        try:
            seen = False
            async with await self._bucket.watch(self.name) as watch:
                async for entry in watch:
                    if entry is not None:
                        seen = True
                        observed = functools.partial(self.candidate.observed, expired=entry.expired)
                        self._observe(entry.revision, _record(entry, self._ttl_s), decide=observed)
                    elif not seen and self.candidate.phase is lease_state.LeasePhase.WAITING:
                        # Free when the watch began. The record of the first read may have been released
                        # since.
                        self._observe(None, None, decide=self.candidate.observed)
        except errors.MusterError as error:
            if not self._gained.done():
                self._gained.set_exception(error)

    def _observe(
        self,
        revision: int | None,
        record: lease_state.LeaseRecord | None,
        *,
        decide: Callable[..., Sequence[lease_state.Instruction]],
    ) -> None:
        self._execute(decide(revision, record, self.now()))
        if record is not None and self.candidate.phase is lease_state.LeasePhase.WAITING:
            self._on_wait(self, record.held_over)

    # Instructions.

    def _execute(self, instructions: Sequence[lease_state.Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case lease_state.StoreLease():
                    self._tasks.spawn("store", self._store(instruction))
                case lease_state.RemoveLease(revision):
                    self._tasks.spawn("remove", self._remove(revision))
                case lease_state.ReadLease():
                    self._tasks.spawn("read", self._look())
                case lease_state.LeaseGained(epoch):
                    self._begin(epoch)
                case lease_state.LeaseLost(reason):
                    self._finish(reason)
        self._set_alarm()

    def _set_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if self.candidate.wake_at is not None:
            self._alarm = self._loop.call_at(self.candidate.wake_at - suspended_s(), self._wake)

    def _wake(self) -> None:
        self._alarm = None
        self._execute(self.candidate.tick(self.now()))

    async def _store(self, instruction: lease_state.StoreLease) -> None:
        sent_at = self.now()
        value, stored_s = msgspec.json.encode(instruction.record), self._ttl_s * lease_state.STORED
        try:
            async with asyncio.timeout(self._timeout_s):
                if instruction.revision is None:
                    revision = await self._bucket.create(self.name, value, ttl_s=stored_s)
                else:
                    revision = await self._bucket.update(
                        self.name, value, revision=instruction.revision, ttl_s=stored_s
                    )
        except (errors.AlreadyExists, errors.Conflict):
            self._execute(self.candidate.conflicted(instruction.attempt, self.now()))
        except (errors.Unavailable, TimeoutError):
            self._execute(self.candidate.failed(instruction.attempt, self.now()))
        except errors.MusterError as error:
            self._execute(self.candidate.failed(instruction.attempt, self.now()))
            if not self._gained.done():
                self._gained.set_exception(error)
        else:
            self._execute(self.candidate.stored(instruction.attempt, revision, sent_at, self.now()))

    async def _remove(self, revision: int) -> None:
        with contextlib.suppress(errors.Conflict, errors.Unavailable):
            await self._bucket.delete(self.name, revision=revision)

    async def _look(self) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                entry = await self._bucket.get(self.name)
        except (errors.Unavailable, TimeoutError):
            self.candidate.unread(self.now())
            self._set_alarm()
            return
        except errors.MusterError as error:
            if not self._gained.done():
                self._gained.set_exception(error)
            return
        record = _record(entry, self._ttl_s)
        self._observe(entry.revision if entry else None, record, decide=self.candidate.read)
        held_by_another = entry is not None and self.candidate.phase is lease_state.LeasePhase.WAITING
        if held_by_another and not self._wait and not self._gained.done():
            self._gained.set_result(None)

    def _begin(self, epoch: int) -> None:
        self._lease = Lease(self.name, epoch, self)
        if self._watching is not None:
            self._watching.cancel()
        events.info("lease-gained", lease=self.name, holder=self._bus.identity, epoch=epoch)
        if not self._gained.done():
            self._gained.set_result(self._lease)

    def _finish(self, reason: str) -> None:
        if self._watching is not None:
            self._watching.cancel()
        if self._lease is not None:
            events.info("lease-ended", lease=self.name, holder=self._bus.identity, reason=reason)
            self._lease.lost_because = reason
            self._lease.lost.set()
        if not self._gained.done():
            self._gained.set_exception(
                errors.NotConnected(f"the lease {self.name!r} was not acquired: closed")
            )
        self._on_end(self)


class _OtherRecord(msgspec.Struct):
    """What records of all versions have."""

    holder: str


def _record(entry: api.KeyValueEntry | None, ttl_s: float) -> lease_state.LeaseRecord | None:
    """The record; for a value that is none, one of an unknown holder. It expires after the time of a lease,
    which it may have replaced: a client can have the broker store one of its replies under any key. A record
    of another version does not expire."""
    if entry is None or entry.value is None:
        return None
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return msgspec.json.decode(entry.value, type=lease_state.LeaseRecord)
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        msgspec.json.decode(entry.value, type=_OtherRecord)
        ttl_s = 0.0
    return lease_state.LeaseRecord(
        holder="", claim="", broker="", connection=0, ttl_s=ttl_s, epoch=entry.revision
    )
