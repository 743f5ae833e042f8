"""The state machine of leases, without clock, broker or randomness.

A lease is a key. The process that stored it holds it. The revision of that first store is the *epoch*, which
is part of every act, so that a receiver can reject a former holder (`muster.bus.leases.EpochFence`). The
lease expires after its time to live unless it is stored again.

    WAITING ──free, expired, or its holder's connection closed──> CLAIMING ──stored──> HELD
       ^                                                            │                   │  ^
       └──────────────── conflict, or unknown outcome ─────────────┘    disconnected,  │  │ renewed
                                                                         out of time    v  │
    LOST <────────── another's record, or no record ── HELD or SUSPENDED <──────────── SUSPENDED

How two holders at the same time are prevented:

- A holder counts its time from before it *sent* the successful store, and stops ``MARGIN`` before the end.
  A candidate counts from when it first saw the newest record, which is later.  Both use their own clock;
  the broker's does not matter.
- A holder without a connection does not act, because the broker reports the closed connection and another
  process may take over at once.  If none did, a renewal over the new connection resumes the same lease.
- Every change is conditional on the revision it was based on, so only one of several candidates succeeds.

The remaining gap is the time between the loss of a connection in the broker and in its client. In this gap,
and when the process of a holder is paused, only the epoch protects: receivers must check it.

When the storage does not respond, for example during an election of its leader (4 to 9 s), no holder can
renew. A holder whose time is over does not act, but it has not lost the lease: it renews as soon as the
storage responds. A candidate therefore takes an expired lease only after the storage has responded to it for
`GRACE` of the time to live, and the holder did not renew meanwhile. The broker deletes a record after
`STORED` times to live; this matters only for a lease without candidates. If the clock of the broker is set
forward, it deletes records earlier: then a candidate waits until the time of the holder is over.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from muster.bus import api

RENEWALS = 3  # a lease is renewed this many times in its time to live
MARGIN = 0.1  # of the time to live: for clocks that run at different rates, and for pauses of the process
GRACE = 0.25  # of the time to live: for a holder to renew after the storage did not respond
READS = 3  # in the time of grace
TIMEOUT = 1 / 6  # of the time to live: for a reply of the storage; shorter than the time of grace
STORED = 4  # times to live until the broker deletes a record; longer than an election
RETRY_S = 0.25
CLOSED_KEPT = 1024


class LeaseRecord(msgspec.Struct, frozen=True):
    """The value of a lease's key."""

    holder: str
    # random per acquisition: distinguishes the own record from that of another process of the same name
    claim: str
    broker: str
    connection: int
    ttl_s: float
    epoch: int = 0  # 0 in the first record: its revision is the epoch
    broker_name: str = ""

    @property
    def held_over(self) -> api.ConnectionId:
        return api.ConnectionId(self.broker, self.connection, self.broker_name)


class LeasePhase(enum.Enum):
    WAITING = "waiting"
    CLAIMING = "claiming"
    HELD = "held"
    SUSPENDED = "suspended"
    LOST = "lost"
    RELEASED = "released"


# Instructions.


@dataclass(frozen=True, slots=True)
class StoreLease:
    """Store the record if ``revision`` is still the key's; None: if the key is not there."""

    record: LeaseRecord
    revision: int | None
    attempt: int  # to be passed back with the outcome


@dataclass(frozen=True, slots=True)
class RemoveLease:
    revision: int


@dataclass(frozen=True, slots=True)
class ReadLease:
    """Read the key and pass the result to `LeaseCandidate.read` or `LeaseCandidate.unread`."""


@dataclass(frozen=True, slots=True)
class LeaseGained:
    epoch: int


@dataclass(frozen=True, slots=True)
class LeaseLost:
    reason: str


Instruction = StoreLease | RemoveLease | ReadLease | LeaseGained | LeaseLost


class LeaseCandidate:
    """One attempt to acquire a lease, from waiting to its loss. Events in, instructions out."""

    def __init__(self, holder: str, claim: str, *, ttl_s: float) -> None:
        self.phase = LeasePhase.WAITING
        self.epoch = 0
        self._holder = holder
        self._claim = claim
        self._ttl_s = ttl_s
        self._connection: api.ConnectionId | None = None
        self._closed: dict[api.ConnectionId, None] = {}  # in order of their closing
        self._revision = 0  # of the newest record seen or stored; equivalent: revisions begin at 1
        self._record: LeaseRecord | None = None  # another's, while waiting; None: the key is free
        self._known = False  # whether the key has been read
        self._seen_at = 0.0  # when this record was first seen
        self._responds_since: float | None = None  # the storage, to reads of an expired record
        self._writing = False
        self._attempt = 0
        self._written_over: api.ConnectionId | None = None
        self._gained = False
        # When the own time of the holder before this one is over; None: unknown.
        self.former_until: float | None = None
        self.lapses = 0  # how often the holder could not act, although the lease was not lost
        self._deadline = 0.0
        self._deleted_at = 0.0  # the broker has deleted the record if it was not renewed
        self._sent_at: float | None = None  # the first store of those whose outcome is not known
        self._act_at = 0.0  # time of the next renewal or read

    def held_at(self, now: float) -> bool:
        """Whether the holder may act: also correct if `tick` is late because the process was paused."""
        return self.phase is LeasePhase.HELD and now < self._deadline

    def remaining_s(self, now: float) -> float:
        """How long the holder may act if no renewal succeeds."""
        return max(0.0, self._deadline - now) if self.phase is LeasePhase.HELD else 0.0

    @property
    def ended(self) -> bool:
        return self.phase in (LeasePhase.LOST, LeasePhase.RELEASED)

    @property
    def wake_at(self) -> float | None:
        """The latest time of the next `tick`; None: only after another event."""
        may_act = not self.ended and not self._writing and self._connection is not None
        if self.phase in (LeasePhase.HELD, LeasePhase.SUSPENDED):
            return min(self._deleted_at, self._act_at) if may_act else self._deleted_at
        return self._act_at if may_act else None

    # Events.

    def connected(self, connection: api.ConnectionId, now: float) -> Sequence[Instruction]:
        self._connection = connection
        self._writing = False  # a write over the old connection may never be acknowledged
        self._act_at = now
        if self.phase is LeasePhase.CLAIMING:
            self.phase = LeasePhase.WAITING
        return self.tick(now)

    def disconnected(self) -> None:
        self._connection = None
        self._responds_since = None
        if not self._gained:
            self.former_until = None  # renewals of the holder may be missed
        if self.phase is LeasePhase.HELD:
            self.phase = LeasePhase.SUSPENDED
            self.lapses += 1

    def closed(self, connection: api.ConnectionId, now: float) -> Sequence[Instruction]:
        """The broker reports that this connection is closed."""
        self._closed[connection] = None
        if len(self._closed) > CLOSED_KEPT:
            del self._closed[next(iter(self._closed))]
        return self._claim_if_free(now) if self.phase is LeasePhase.WAITING else ()

    def observed(
        self, revision: int | None, record: LeaseRecord | None, now: float, *, expired: bool = False
    ) -> Sequence[Instruction]:
        """The value of the key was read: None for both if it does not exist (or was deleted)."""
        if revision is None:
            revision = self._revision
        if self.ended or revision < self._revision:
            return ()
        if self.phase in (LeasePhase.HELD, LeasePhase.SUSPENDED):
            if record is None or record.claim != self._claim:
                return self._lose(
                    "another process has taken over" if record else "the record is missing", now
                )
            if revision > self._revision and self._sent_at is not None:
                # Stored, and the acknowledgement was lost or late.
                self._renewed(self._sent_at, now)
                if self._gained and record.held_over == self._connection:
                    self.phase = LeasePhase.HELD
                else:
                    self._act_at = now
            self._revision = revision
            return self.tick(now)
        if revision > self._revision or record is None:
            self._seen_at, self._responds_since = now, None
        if record is None:
            # A released record may have been renewed shortly before. So may one that expired, if the clock of
            # the broker was set: what was seen of it counts.
            known = self.former_until if expired else None
            self.former_until = None if known is None else max(now, known)
        elif revision > self._revision or self.former_until is None:
            # Its holder counts from before it stored the record, which was not later than now.
            self.former_until = now + record.ttl_s * (1 - MARGIN)
        self._revision, self._record, self._known = revision, record, True
        self._act_at = now + self._ttl_s
        if record is not None and record.claim == self._claim:
            # A claim whose acknowledgement was lost. Its remaining time is unknown: renew.
            self.epoch = record.epoch or revision
            self.phase = LeasePhase.SUSPENDED
            self._deadline, self._deleted_at, self._act_at = now, now + self._ttl_s * STORED, now
            return self.tick(now)
        if record is not None and record.ttl_s:
            self._act_at = max(now, self._seen_at + record.ttl_s * (1 - GRACE))
        return self._claim_if_free(now) if self.phase is LeasePhase.WAITING else ()

    def read(self, revision: int | None, record: LeaseRecord | None, now: float) -> Sequence[Instruction]:
        """The storage returned the value of the key; arguments as for `observed`."""
        instructions = self.observed(revision, record, now)
        if instructions or self.phase is not LeasePhase.WAITING or self._act_at > now:
            return instructions
        assert self._record is not None
        if self._responds_since is None:
            self._responds_since = now
        self._act_at = now + self._record.ttl_s * GRACE / READS
        return self._claim_if_free(now)

    def unread(self, now: float) -> None:
        """The storage did not respond."""
        self._responds_since = None
        self._act_at = now + RETRY_S

    def stored(self, attempt: int, revision: int, sent_at: float, now: float) -> Sequence[Instruction]:
        if self.ended:
            return (RemoveLease(revision),)  # too late: release it for others
        if attempt != self._attempt:
            return ()  # superseded: the later attempt determines the state
        self._writing = False
        self._revision = max(revision, self._revision)
        self.epoch = self.epoch or revision
        self._renewed(sent_at, now)
        if self._connection is None or self._connection != self._written_over or now >= self._deadline:
            # The record names a closed connection: others may take it for lost. Or it was acknowledged too
            # late. Write it again.
            self.phase = LeasePhase.SUSPENDED
            self._act_at = now
            return self.tick(now)
        self.phase = LeasePhase.HELD
        if self._gained:
            return ()
        self._gained = True
        return (LeaseGained(self.epoch),)

    def conflicted(self, attempt: int, now: float) -> Sequence[Instruction]:
        """The key changed: by another process, or by a write of this one whose acknowledgement was lost. Read
        it."""
        return self._unsure(attempt, now, at_once=True)

    def failed(self, attempt: int, now: float) -> Sequence[Instruction]:
        """It is unknown whether it was stored."""
        return self._unsure(attempt, now, at_once=False)

    def _unsure(self, attempt: int, now: float, *, at_once: bool) -> Sequence[Instruction]:
        if self.ended or attempt != self._attempt:
            return ()
        self._writing = False
        if self.phase is LeasePhase.CLAIMING:
            self.phase = LeasePhase.WAITING
        self._act_at = now + RETRY_S
        return (ReadLease(),) if at_once else self.tick(now)

    def tick(self, now: float) -> Sequence[Instruction]:
        if self.phase in (LeasePhase.HELD, LeasePhase.SUSPENDED):
            if now >= self._deleted_at:
                return self._lose("it could not be renewed in time", now)
            if now >= self._act_at and not self._writing and self._connection is not None:
                return self._store(self._revision, now)
        elif self.phase is LeasePhase.WAITING and now >= self._act_at and self._connection is not None:
            self._act_at = now + self._ttl_s
            return (ReadLease(),)
        return ()

    def release(self) -> Sequence[Instruction]:
        was, self.phase = self.phase, LeasePhase.RELEASED
        # A write in progress is removed when its revision is known.
        return (
            (RemoveLease(self._revision),)
            if was in (LeasePhase.HELD, LeasePhase.SUSPENDED) and not self._writing
            else ()
        )

    # Deciding.

    def _claim_if_free(self, now: float) -> Sequence[Instruction]:
        if not self._known or self._writing or self._connection is None:
            return ()
        there = self._record
        if there is None:
            if self.former_until is not None and now < self.former_until:
                self._act_at = self.former_until  # its holder may not have noticed that its record expired
                return ()
            self.phase = LeasePhase.CLAIMING
            # After an expiry, the revision of its marker: then no process held the lease in between.
            return self._store(None if self.former_until is None else self._revision, now)
        if there.held_over in self._closed or self._has_expired(there, now):
            self.phase = LeasePhase.CLAIMING
            return self._store(self._revision, now)
        return ()

    def _has_expired(self, record: LeaseRecord, now: float) -> bool:
        """Its time is over, and its holder did not renew it although the storage responds. A record of
        another version has no time and does not expire."""
        if not record.ttl_s or self._responds_since is None:
            return False
        responds_s = now - self._responds_since
        return now >= self._seen_at + record.ttl_s and responds_s >= record.ttl_s * GRACE

    def _renewed(self, sent_at: float, now: float) -> None:
        if self._gained and now >= self._deadline and self.phase is LeasePhase.HELD:
            self.lapses += 1
        self._sent_at = None
        self._deadline = sent_at + self._ttl_s * (1 - MARGIN)
        self._deleted_at = sent_at + self._ttl_s * (STORED + MARGIN)
        self._act_at = sent_at + self._ttl_s / RENEWALS

    def _store(self, revision: int | None, now: float) -> Sequence[Instruction]:
        assert self._connection is not None
        self._writing = True
        if self._sent_at is None:
            self._sent_at = now
        self._attempt += 1
        self._written_over = self._connection
        record = LeaseRecord(
            holder=self._holder,
            claim=self._claim,
            broker=self._connection.broker,
            connection=self._connection.number,
            ttl_s=self._ttl_s,
            epoch=self.epoch,
            broker_name=self._connection.broker_name,
        )
        return (StoreLease(record, revision, self._attempt),)

    def _lose(self, reason: str, now: float) -> Sequence[Instruction]:
        if not self._gained:  # not reported as gained yet: it was only a claim
            self.phase, self.epoch, self._known = LeasePhase.WAITING, 0, False
            self._act_at = now + RETRY_S
            return ()
        self.phase = LeasePhase.LOST
        return (LeaseLost(reason),)
