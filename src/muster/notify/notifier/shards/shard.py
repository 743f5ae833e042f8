"""A shard that a notifier holds: its queue of changes, and their validation.

Each shard has one writer.  All changes that are waiting when a write begins go into it together, so the rate
of changes does not depend on the time a sync takes.  Each write expects to be the next after the last one: a
notifier that lost the shard without noticing cannot store anything any more.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from muster.bus import api, leases
from muster.bus.rpc import error_replies
from muster.core import errors, quotas, subjects
from muster.notify import authorities, models, protocol
from muster.notify.matcher import matcher
from muster.notify.notifier import fair_queue, pending_acks
from muster.notify.notifier.shards import snapshots
from muster.predicates import types

CHANGES_WAITING_MAX = 1000  # messages for each process
TEXT_MAX = 128 << 10  # characters of one value: a message with it fits into the log and a snapshot


@dataclass(slots=True)
class QueuedChanges:
    """Changes that wait for the writer."""

    process: str
    changes: Sequence[protocol.Change]
    answer: asyncio.Future[protocol.NotifyReply]
    size: int


def policies(changes: Sequence[protocol.Change]) -> Iterator[str]:
    for change in changes:
        match change:
            case protocol.JoinReceivers():
                yield from change.policies
            case protocol.JoinReceiver() | protocol.SetReceiverPolicy():
                yield change.policy


@dataclass(slots=True)
class Shard:
    shard: protocol.Shard
    lease: leases.Lease
    sequence: int = 0  # of the last message in its log of receivers
    log_bytes: int = 0  # since the snapshot
    log_messages: int = 0
    snapshot_bytes: int = 0
    matched_sequence: int = 0  # of the last message in its log of matches
    matched_bytes: int = 0  # since all records were replaced
    pending: pending_acks.PendingAcks = field(default_factory=pending_acks.PendingAcks)
    floor: int = 0  # as recorded: the next holder of the shard needs no earlier event
    recorded: int = 0  # position as recorded
    uncertain: asyncio.Event = field(default_factory=asyncio.Event)  # outcome of a write is unknown
    passing: dict[int, list[str]] = field(default_factory=dict)  # to transient receivers, once recorded
    unstored: list[protocol.MatchRecord] = field(default_factory=list)
    queue: fair_queue.FairQueue[QueuedChanges] = field(
        default_factory=lambda: fair_queue.FairQueue(CHANGES_WAITING_MAX)
    )
    subscriptions: list[api.Subscription] = field(default_factory=list)
    sent_at: dict[int, float] = field(default_factory=dict)

    @property
    def has_unrecorded(self) -> bool:
        return bool(self.unstored or self.passing or self.pending.is_dirty)

    def due(self, limit: float, count: int) -> list[int]:
        """Return events that were last delivered before ``limit``, at most ``count``.

        Those that have waited longest come first.  Otherwise the first events of a receiver that stays away
        would be repeated for ever, and those behind them would never reach a receiver that returns.
        """
        sent_at = self.sent_at
        overdue = (
            (at, seq)
            for seq in self.pending.owed
            if seq <= self.recorded and (at := sent_at.get(seq, 0.0)) <= limit
        )
        return [seq for _, seq in heapq.nsmallest(count, overdue)]

    def require_lease(self) -> None:
        """A holder that reads its logs again after another one took over must not append to them."""
        if not self.lease.held:
            raise errors.Unavailable(f"the lease of shard {self.shard} was lost while its logs were read")

    @property
    def subject(self) -> str:
        return subjects.log_subject(protocol.PART, "receiver", str(self.shard))

    @property
    def matched_subject(self) -> str:
        return subjects.log_subject(protocol.PART, "matched", str(self.shard))


class ChangeValidator:
    """Validates changes, given the earlier ones of the same write."""

    def __init__(
        self,
        engine: matcher.Matcher,
        knows: authorities.AuthorityView,
        count: Callable[[str], None],
        receivers_max: int = 0,
    ) -> None:
        """``receivers_max``: of one process; 0: no limit."""
        self._engine = engine
        self._knows = knows
        self._count = count
        self._quota = quotas.Quota("receivers", receivers_max, "notify.receivers_per_identity")
        self._models: dict[str, models.Model | None] = {}  # of this write; None: the receiver has left

    def check(
        self, process: str, changes: Sequence[protocol.Change], shard: protocol.Shard
    ) -> tuple[list[protocol.Change], list[tuple[int, error_replies.ErrorReply]]]:
        accepted: list[protocol.Change] = []
        refused: list[tuple[int, error_replies.ErrorReply]] = []
        for place, change in enumerate(changes):
            try:
                accepted.append(self._check(process, change, shard))
            except errors.MusterError as error:
                self._count(error.code)
                refused.append((place, error_replies.to_error_reply(error)))
        return accepted, refused

    def _check(self, process: str, change: protocol.Change, shard: protocol.Shard) -> protocol.Change:
        """Return the change as it is stored, with policies in canonical form."""
        vocabulary = self._knows.vocabulary
        receivers = snapshots.receivers_of(process, change)
        for receiver in receivers:
            if protocol.shard_of(receiver) != shard:
                raise errors.InvalidInput(f"{receiver} does not belong to shard {shard}")
        match change:
            case protocol.JoinReceiver():
                subjects.token(change.receiver)
                model = vocabulary.receiver_model(change.model)
                for attribute, value in change.state.items():
                    _require_short(attribute, (value,))
                model.require(protocol.from_wire(change.state))
                kept = msgspec.structs.replace(change, policy=vocabulary.policy_text(change.policy))
                self._check_quota(process, receivers)
                self._models[receivers[0]] = model
                return kept
            case protocol.JoinReceivers():
                self._check_joins(change, receivers)
                texts = tuple(map(vocabulary.policy_text, change.policies))
                self._check_quota(process, receivers)
                self._models.update(dict.fromkeys(receivers, vocabulary.receiver_model(change.model)))
                return msgspec.structs.replace(change, policies=texts, changed_s=[])
            case protocol.SetReceiverPolicy():
                self._model(receivers[0])
                return msgspec.structs.replace(change, policy=vocabulary.policy_text(change.policy))
            case protocol.LeaveReceiver():
                self._models[receivers[0]] = None  # an unknown receiver counts as one that has left
            case protocol.UpdateReceivers():
                fitting = self._models_of(receivers)
                for attribute, cells in change.values.items():
                    for model in fitting:
                        _check_cells(model, attribute, cells, len(receivers))
        return change

    def _check_quota(self, process: str, receivers: Sequence[str]) -> None:
        """`errors.LimitExceeded` if the process has too many receivers with these and those of this write."""
        stored, joining = self._engine.stored, self._models
        if stored.of(process)[0] + len(joining) + len(receivers) > self._quota.items:
            own = {name for name, model in joining.items() if model and name.startswith(f"{process}/")}
            stored.check(process, self._quota, sum(name not in self._engine for name in own.union(receivers)))

    def _check_joins(self, change: protocol.JoinReceivers, receivers: list[str]) -> None:
        for name in change.receivers:
            subjects.token(name)
        model = self._knows.vocabulary.receiver_model(change.model)
        for attribute, cells in change.values.items():
            _check_cells(model, attribute, cells, len(receivers))
        if change.which and len(change.which) != len(receivers):
            raise errors.InvalidInput(f"{len(change.which)} policies for {len(receivers)} receivers")
        if not all(0 <= number < len(change.policies) for number in change.which):
            raise errors.InvalidInput(
                f"there are {len(change.policies)} policies, but the change refers to others"
            )
        if not all(0 <= place < len(receivers) for place in change.durable):
            raise errors.InvalidInput("a position of a durable receiver is out of range")
        if len(set(receivers)) != len(receivers):
            raise errors.InvalidInput("a receiver joins twice in one change")

    def _models_of(self, receivers: Sequence[str]) -> set[models.Model]:
        if not self._models and (held_models := self._engine.models_of(receivers)) is not None:
            return held_models
        return set(map(self._model, receivers))

    def _model(self, receiver: str) -> models.Model:
        model = self._models.get(receiver)
        if model is None and receiver not in self._models:
            model = self._engine.known_model_of(receiver)
        if model is None:
            raise errors.NotFound(f"there is no receiver {receiver[:160]}", hint="it has to join first")
        return model


def _check_cells(model: models.Model, attribute: str, cells: Sequence[Any], count: int) -> None:
    if len(cells) != count:
        raise errors.InvalidInput(f"{len(cells)} values of {attribute} for {count} receivers")
    _require_short(attribute, cells)
    declared = model.attributes.get(attribute)
    if declared is None or models.restricted(attribute):
        model.require({attribute: None})  # raises the error
    assert declared is not None
    if declared.kind is types.ValueKind.FLOAT and set(map(type, cells)) == {float}:
        models.require_finite(attribute, cells)
        return
    for cell in cells:
        model.require({attribute: frozenset(cell) if isinstance(cell, tuple) else cell})


def _require_short(attribute: str, cells: Sequence[Any]) -> None:
    for cell in cells:
        if cell.__class__ is str and len(cell) > TEXT_MAX:
            raise errors.LimitExceeded(
                f"{attribute[:80]} has {len(cell):,} characters; at most {TEXT_MAX:,} are allowed"
            )
