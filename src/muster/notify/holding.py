"""A shard in the hands of a notifier: what was said to it, checked, stored and applied, in this order.

One writer for each shard.  Whatever waits when a write begins goes into it together, so the rate of changes
does not depend on the time a sync takes.  Each write expects to be the next after the last one: a notifier
that was deposed without knowing it cannot store anything any more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from muster.bus import api, leases
from muster.core import errors, messages, subjects
from muster.notify import engine as engines
from muster.notify import known, pending, protocol
from muster.notify import model as models
from muster.predicates import types

QUEUE_MAX = 10_000
BYTES_MAX = 900_000


@dataclass(slots=True)
class Said:
    """Changes that wait for the writer."""

    process: str
    changes: Sequence[protocol.Change]
    done: Callable[[int, list[tuple[int, protocol.Fault]]], None]
    size: int


@dataclass(slots=True)
class Holding:
    shard: protocol.Shard
    lease: leases.Lease
    sequence: int = 0  # of the last message in its log of parties
    matched_sequence: int = 0  # of the last in its log of matches
    pending: pending.Pending = field(default_factory=pending.Pending)
    queue: asyncio.Queue[Said] = field(default_factory=lambda: asyncio.Queue(QUEUE_MAX))
    subscriptions: list[api.Subscription] = field(default_factory=list)
    since_snapshot: int = 0
    since_reset: int = 0
    sent_at: dict[int, float] = field(default_factory=dict)

    @property
    def subject(self) -> str:
        return subjects.logged(protocol.PART, "party", str(self.shard))

    @property
    def matched_subject(self) -> str:
        return subjects.logged(protocol.PART, "matched", str(self.shard))


class Checker:
    """Decides which changes hold, given those before them in the same write."""

    def __init__(self, engine: engines.Engine, knows: known.Known, count: Callable[[str], None]) -> None:
        self._engine = engine
        self._knows = knows
        self._count = count
        self._models: dict[str, models.Model | None] = {}  # of this write: None has left

    def check(
        self, said: Said, shard: protocol.Shard
    ) -> tuple[list[protocol.Change], list[tuple[int, protocol.Fault]]]:
        accepted: list[protocol.Change] = []
        refused: list[tuple[int, protocol.Fault]] = []
        for place, change in enumerate(said.changes):
            try:
                self._check(said.process, change, shard)
            except errors.MusterError as error:
                self._count(error.code)
                refused.append((place, protocol.fault_of(error)))
            else:
                accepted.append(change)
        return accepted, refused

    def _check(self, process: str, change: protocol.Change, shard: protocol.Shard) -> None:
        vocabulary = self._knows.vocabulary
        names = change.parties if isinstance(change, protocol.Update) else (change.party,)
        for name in names:
            if protocol.shard_of(protocol.party_id(process, name)) != shard:
                raise errors.InvalidInput(f"{name} does not belong to shard {shard}")
        party = protocol.party_id(process, names[0])
        match change:
            case protocol.Join():
                found = vocabulary.party_model(change.model)
                found.require(protocol.from_wire(change.state))
                if change.policy:
                    vocabulary.policy(change.policy)
                self._models[party] = found
            case protocol.SetPolicy():
                self._model(party)
                if change.policy:
                    vocabulary.policy(change.policy)
            case protocol.Leave():
                self._model(party)
                self._models[party] = None
            case protocol.Update():
                fitting = {self._model(protocol.party_id(process, name)) for name in names}
                for attribute, cells in change.values.items():
                    if len(cells) != len(names):
                        raise errors.InvalidInput(
                            f"{len(cells)} values of {attribute} for {len(names)} parties"
                        )
                    for one in fitting:
                        _check_cells(one, attribute, cells)

    def _model(self, party: str) -> models.Model:
        found = self._models.get(party)
        if found is None:
            if party in self._models or party not in self._engine:
                raise errors.NotFound(
                    f"there is no party {party[:160]}", hint="it has to advertise its state first"
                )
            return self._engine.model_of(party)
        return found


def _check_cells(model: models.Model, attribute: str, cells: Sequence[Any]) -> None:
    declared = model.attributes.get(attribute)
    if declared is None or models.restricted(attribute):
        model.require({attribute: None})  # says what is wrong
    assert declared is not None
    if declared.kind is types.Kind.FLOAT and set(map(type, cells)) <= {float, int}:
        return
    for cell in cells:
        model.require({attribute: frozenset(cell) if isinstance(cell, tuple) else cell})


def apply(engine: engines.Engine, knows: known.Known, process: str, change: protocol.Change) -> None:
    """A change that was checked, by this notifier or the one before it."""
    match change:
        case protocol.Join():
            model = knows.vocabulary.party_model(change.model)
            engine.join(
                protocol.party_id(process, change.party),
                model,
                model.require(protocol.from_wire(change.state)),
                models.parse_policy(change.policy) if change.policy else None,
                durable=change.delivery == "durable",
            )
        case protocol.Update():
            cells = {name: _cells(listed) for name, listed in change.values.items()}
            engine.update([protocol.party_id(process, name) for name in change.parties], cells)
        case protocol.SetPolicy():
            party = protocol.party_id(process, change.party)
            engine.set_policy(party, models.parse_policy(change.policy) if change.policy else None)
        case protocol.Leave():
            engine.leave(protocol.party_id(process, change.party))


def _cells(listed: list[protocol.Value]) -> list[Any]:
    return [frozenset(cell) if cell.__class__ is tuple else cell for cell in listed]


def kept(entries: Sequence[tuple[str, tuple[protocol.Change, ...]]], epoch: int) -> bytes:
    return messages.encode(
        protocol.Kept(
            entries=tuple(protocol.Entry(process=process, changes=changes) for process, changes in entries),
            at_ms=int(time.time() * 1000),
            epoch=epoch,
        ),
        "msgpack",
    )


def snapshot(engine: engines.Engine, shard: protocol.Shard, epoch: int) -> list[bytes]:
    """The parties of a shard as messages; the first says that nothing before it counts."""
    by_process: dict[str, list[protocol.Change]] = {}
    for party in engine.parties():
        if protocol.shard_of(party) == shard:
            process, _, name = party.partition("/")
            by_process.setdefault(process, []).append(_join(engine, party, name))
    made = [messages.encode(protocol.Kept(at_ms=int(time.time() * 1000), epoch=epoch, reset=True), "msgpack")]
    for process, joins in by_process.items():
        made += [
            kept([(process, tuple(joins[start : start + 500]))], epoch) for start in range(0, len(joins), 500)
        ]
    return made


def _join(engine: engines.Engine, party: str, name: str) -> protocol.Join:
    state: Mapping[str, types.Value] = engine.state_of(party)
    policy = engine.policy_of(party)
    return protocol.Join(
        party=name,
        model=engine.model_of(party).name,
        state=protocol.to_wire({key: value for key, value in state.items() if not models.restricted(key)}),
        policy=models.text_of(policy),
        delivery="durable" if engine.is_durable(party) else "transient",
    )
