"""Who may act: the deciding half of leases, without clock, broker or randomness.

A lease is a key.  Whoever stored it holds it; the revision of that first store is the tenure's *epoch*, and
travels with every act, so that a receiver can refuse whoever was superseded (`muster.bus.leases.EpochFence`).
The record lives as long as its time to live unless stored again.

    WAITING ──free, expired, or its holder's connection closed──> CLAIMING ──stored──> HELD
       ^                                                            │                   │  ^
       └───────────────────── conflict, or nobody knows ────────────┘      disconnected │  │ renewed
                                                                                        v  │
    LOST <── another's record, or not renewed in time ── HELD or SUSPENDED <────────── SUSPENDED

What keeps two from acting at once:

- A holder counts its time from before it *sent* the store that succeeded, and stops believing ``margin_s``
  before the broker would let the record go.  The broker counts from when it stored it, which is later.
- A holder without a connection does not believe, because the broker reports the closed connection and
  another may take over at once.  If nobody did, a renewal over the new connection resumes the same tenure.
- Every change is compared with the revision it was based on, so of several takers one wins.

What remains is the moment between the broker dropping a connection and its client noticing; there, and when
a holder's process is paused, only the epoch protects: receivers must check it.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from muster.bus import api

RENEWALS = 3  # a lease is renewed this many times in its time to live
MARGIN = 0.1  # of the time to live: for clocks that run at different rates, and for what a pause may hide
RETRY_S = 0.25
CLOSED_KEPT = 1024  # equivalent: any bound of this order serves


class LeaseRecord(msgspec.Struct, frozen=True):
    """What stands under a lease's key."""

    holder: str
    claim: str  # drawn by the holder for this tenure: tells its own records from those of a namesake
    broker: str
    connection: int
    ttl_s: float
    epoch: int = 0  # 0 in the first record of a tenure: its revision is the epoch


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
    attempt: int  # to be told with the outcome


@dataclass(frozen=True, slots=True)
class RemoveLease:
    revision: int


@dataclass(frozen=True, slots=True)
class ReadLease:
    """Read the key and tell what is there."""


@dataclass(frozen=True, slots=True)
class LeaseGained:
    epoch: int


@dataclass(frozen=True, slots=True)
class LeaseLost:
    reason: str


Instruction = StoreLease | RemoveLease | ReadLease | LeaseGained | LeaseLost


class LeaseCandidate:
    """One attempt at a lease, from waiting to the end of the tenure. Events in, instructions out."""

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
        self._known = False  # whether anything has been observed yet
        self._writing = False  # equivalent: without a connection nothing is stored, and `connected` sets it
        self._attempt = 0  # equivalent: compared only with itself
        self._written_over: api.ConnectionId | None = None
        self._gained = False
        self._deadline = 0.0
        self._act_at = 0.0  # when to renew, or to look again

    def held_at(self, now: float) -> bool:
        """Whether the holder may act: also right where `tick` is late, because the process was paused."""
        return self.phase is LeasePhase.HELD and now < self._deadline

    @property
    def ended(self) -> bool:
        return self.phase in (LeasePhase.LOST, LeasePhase.RELEASED)

    @property
    def wake_at(self) -> float | None:
        """When `tick` is wanted at the latest; None: only after another event."""
        may_act = not self.ended and not self._writing and self._connection is not None
        if self.phase in (LeasePhase.HELD, LeasePhase.SUSPENDED):
            return min(self._deadline, self._act_at) if may_act else self._deadline
        return self._act_at if may_act else None

    # Events.

    def connected(self, connection: api.ConnectionId, now: float) -> Sequence[Instruction]:
        self._connection = connection
        self._writing = False  # what was under way over the old one may never be answered
        self._act_at = now
        if self.phase is LeasePhase.CLAIMING:
            self.phase = LeasePhase.WAITING
        return self.tick(now)

    def disconnected(self) -> None:
        self._connection = None
        if self.phase is LeasePhase.HELD:
            self.phase = LeasePhase.SUSPENDED

    def closed(self, connection: api.ConnectionId, now: float) -> Sequence[Instruction]:
        """The broker reports that this connection is no more."""
        self._closed[connection] = None
        if len(self._closed) > CLOSED_KEPT:
            del self._closed[next(iter(self._closed))]
        return self._claim_if_free(now) if self.phase is LeasePhase.WAITING else ()

    def observed(self, revision: int | None, record: LeaseRecord | None, now: float) -> Sequence[Instruction]:
        """What stands under the key: None for both where there is nothing (or a marker of its end)."""
        if revision is None:
            revision = self._revision
        if self.ended or revision < self._revision:
            return ()
        if self.phase in (LeasePhase.HELD, LeasePhase.SUSPENDED):
            if record is None or record.claim != self._claim:
                return self._lose("another has taken over" if record else "the record is gone", now)
            self._revision = revision
            return self.tick(now)
        self._revision, self._record, self._known = revision, record, True
        self._act_at = now + self._ttl_s
        if record is not None and record.claim == self._claim:
            # A claim whose acknowledgement was lost. How much of its time is left nobody knows: renew.
            self.epoch = record.epoch or revision
            self.phase = LeasePhase.SUSPENDED
            self._deadline, self._act_at = now + self._ttl_s, now
            return self.tick(now)
        return self._claim_if_free(now) if self.phase is LeasePhase.WAITING else ()

    def stored(self, attempt: int, revision: int, sent_at: float, now: float) -> Sequence[Instruction]:
        if self.ended:
            return (RemoveLease(revision),)  # too late for us: let others have it
        if attempt != self._attempt:
            return ()  # superseded: the later attempt finds out how things stand
        self._writing = False
        self._revision = max(revision, self._revision)
        self.epoch = self.epoch or revision
        self._deadline = sent_at + self._ttl_s * (1 - MARGIN)
        self._act_at = sent_at + self._ttl_s / RENEWALS
        if self._connection is None or self._connection != self._written_over:
            # The record names a connection that is no more: others may take it for dead. Write it anew.
            self.phase = LeasePhase.SUSPENDED
            self._act_at = now
            return self.tick(now)
        if now >= self._deadline:
            return self._lose("the acknowledgement came too late", now)
        self.phase = LeasePhase.HELD
        if self._gained:
            return ()
        self._gained = True
        return (LeaseGained(self.epoch),)

    def conflicted(self, attempt: int, now: float) -> Sequence[Instruction]:
        """Somebody else stored something, or we did and never heard of it: look."""
        return self._unsure(attempt, now, at_once=True)

    def failed(self, attempt: int, now: float) -> Sequence[Instruction]:
        """Whether it was stored nobody knows."""
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
            if now >= self._deadline:
                return self._lose("it could not be renewed in time", now)
            if now >= self._act_at and not self._writing and self._connection is not None:
                return self._store(self._revision)
        elif self.phase is LeasePhase.WAITING and now >= self._act_at and self._connection is not None:
            self._act_at = now + self._ttl_s
            return (ReadLease(),)
        return ()

    def release(self) -> Sequence[Instruction]:
        was, self.phase = self.phase, LeasePhase.RELEASED
        # What is being stored just now is removed when it is known under which revision it stands.
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
            self.phase = LeasePhase.CLAIMING
            return self._store(None)
        if api.ConnectionId(there.broker, there.connection) in self._closed:
            self.phase = LeasePhase.CLAIMING
            return self._store(self._revision)
        return ()

    def _store(self, revision: int | None) -> Sequence[Instruction]:
        assert self._connection is not None
        self._writing = True
        self._attempt += 1  # equivalent: any number that none before had
        self._written_over = self._connection
        record = LeaseRecord(
            holder=self._holder,
            claim=self._claim,
            broker=self._connection.broker,
            connection=self._connection.number,
            ttl_s=self._ttl_s,
            epoch=self.epoch,
        )
        return (StoreLease(record, revision, self._attempt),)

    def _lose(self, reason: str, now: float) -> Sequence[Instruction]:
        if not self._gained:  # nobody was told of it: it was only a claim
            self.phase, self.epoch, self._known = LeasePhase.WAITING, 0, False
            self._act_at = now + RETRY_S
            return ()
        self.phase = LeasePhase.LOST
        return (LeaseLost(reason),)
