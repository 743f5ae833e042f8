"""The matcher: finds the receivers of an event among a million.

Receivers are in a `receiver_table.ReceiverTable` for each model, their distinct policies in one
`policy_index.PolicyIndex`.  An event is matched in three steps: the policies that are true for it (none:
done), the receivers that match its address, and the intersection.  The intersection is computed from the
smaller side: for each receiver that matches the address, whether its policy is true; or for each receiver of
a true policy, whether it matches the address.

There is a single writer: between two calls every event sees one consistent state.  Pure: no clock, no bus.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from muster.core import errors, quotas
from muster.notify import models
from muster.notify.matcher import kernels_numpy, name_table, opcodes, policy_index, receiver_table
from muster.predicates import ast, types
from muster.predicates.syntax import parser

Array = npt.NDArray[Any]

# Measured in nanoseconds: a match of the address costs reads of its policy; a true conjunction costs reads of
# its policy, and then of a bit of the address for each receiver of the policy.
HIT_NS: Final = 4
CONJUNCTION_NS: Final = 6
MEMBER_NS: Final = 2


def select_kernels() -> Any:
    """Return the compiled kernels if numba is installed, otherwise those of numpy."""
    try:
        from muster.notify.matcher import kernels_numba
    except ImportError:
        return kernels_numpy
    return kernels_numba


def warm_up() -> Any:
    """Load and compile the kernels of `select_kernels`: takes a second, several at the first time."""
    kernels = select_kernels()
    trial = Matcher(kernels=kernels)
    attributes = {"a": types.STRING, "b": types.FLOAT, "c": types.set_of("x"), "d": types.INT}
    model = models.Model("Trial", attributes)
    state: models.State = {"a": "v", "b": 1.0, "c": frozenset({"x"}), "d": 1}
    trial.join("p", model, state, parser.parse("e AND n >= 1"))
    trial.update(["p"] * name_table.FEW, {"b": [0.5] * name_table.FEW})
    address = parser.parse("a = 'v' AND b < 1 AND c CONTAINS 'x' AND d < 2")
    trial.match({"e": True, "n": 1}, address)
    trial.match({"e": True, "n": 1}, address)
    trial.names([MatchResult(0, np.zeros(name_table.FEW, np.int64))])
    return kernels


@dataclass(frozen=True, slots=True)
class MatchResult:
    """Receivers of one table, by row."""

    table: int
    rows: Array


def without(results: Iterable[MatchResult], others: Iterable[MatchResult]) -> list[MatchResult]:
    """Return the receivers of the first that are not among the others."""
    rows = {other.table: other.rows for other in others}
    return [
        MatchResult(result.table, np.setdiff1d(result.rows, rows[result.table], assume_unique=True))
        if result.table in rows
        else result
        for result in results
    ]


class Matcher:
    def __init__(self, *, kernels: Any = None) -> None:
        self._kernels = select_kernels() if kernels is None else kernels
        self.policies = policy_index.PolicyIndex(self._kernels)
        self.tables: list[receiver_table.ReceiverTable] = []
        self._table_of: dict[str, int] = {}
        self._names: list[name_table.NameTable] = []  # by table
        self.stored = quotas.StoredAmounts()  # receivers by process
        self._ids = np.zeros(1024, np.int32)

    def use(self, kernels: Any) -> None:
        """Switch to other kernels; they use the same data."""
        self._kernels = kernels
        self.policies.use(kernels)
        for table, known in zip(self.tables, self._names, strict=True):
            table.kernels = known.kernels = kernels

    def __len__(self) -> int:
        return sum(map(len, self._names))

    def __contains__(self, receiver: str) -> bool:
        return any(known.row(receiver) >= 0 for known in self._names)

    def receivers(self) -> Iterable[str]:
        return itertools.chain.from_iterable(self._names)

    # -- changes

    def define(self, model: models.Model) -> None:
        number = self._table_of.get(model.name)
        if number is None:
            self._table_of[model.name] = len(self.tables)
            self.tables.append(receiver_table.ReceiverTable(model, self._kernels))
            self._names.append(name_table.NameTable(self._kernels))
        elif self.tables[number].model != model:
            self.tables[number].extend(model)

    def join(
        self,
        receiver: str,
        model: models.Model,
        state: models.State,
        policy: ast.Condition | str | None,
        *,
        durable: bool = False,
        shard: int = 0,
        at_s: int = 0,
    ) -> None:
        held = self.policies.hold(policy) if policy else -1  # first, because it may be rejected
        if receiver in self:
            self.leave(receiver)
        self.define(model)
        number = self._table_of[model.name]
        table = self.tables[number]
        rows = table.allocate_rows(1, shard)
        row = int(rows[0])
        table.write(rows, {name: [value] for name, value in state.items()})
        table.changed_s[row] = at_s
        if durable:
            table.set_durable(rows, True)
        table.set_policy(row, held)
        self._names[number].add([receiver], rows)
        self._count([receiver], 1)

    def join_many(
        self,
        receivers: Sequence[str],
        model: models.Model,
        columns: Mapping[str, Sequence[Any]],
        policies: Sequence[ast.Condition | str | None],
        which: Array,
        *,
        durable: Array | None = None,
        shard: int = 0,
        at_s: Array | int = 0,
    ) -> None:
        """Add different receivers of one model: receiver i has the policy ``policies[which[i]]``.

        Receivers of the same policy become adjacent, which makes matching faster.
        """
        self.define(model)
        number = self._table_of[model.name]
        table = self.tables[number]
        for known in self._names:
            for place in np.flatnonzero(known.rows(receivers) >= 0).tolist():
                self.leave(receivers[place])
        users = np.bincount(which, minlength=len(policies)).tolist()
        held = np.array(self.policies.hold_many(policies, users), np.int32)[which]
        order = np.argsort(held, kind="stable")
        rows = np.empty(len(receivers), np.int64)
        rows[order] = table.allocate_rows(len(receivers), shard)
        table.write(rows, columns)
        if durable is not None and durable.any():
            table.set_durable(rows[durable], True)
        table.set_policies(rows, held)
        table.changed_s[rows] = at_s
        self._names[number].add(receivers, rows)
        self._count(receivers, 1)

    def update(self, receivers: Sequence[str], columns: Mapping[str, Sequence[Any]], at_s: int = 0) -> None:
        """Set new values, given in columns. If a receiver occurs twice, the last value counts."""
        for number, places, rows in self.places(receivers):
            if len(places) == len(receivers):
                part = columns
            else:
                part = {name: [cells[place] for place in places] for name, cells in columns.items()}
            self.tables[number].write(rows, part)
            if at_s:
                self.tables[number].changed_s[rows] = at_s

    def places(self, receivers: Sequence[str]) -> list[tuple[int, Sequence[int], Array]]:
        """Return, by table, the positions of the known receivers, without duplicates, and their rows."""
        places: list[tuple[int, Sequence[int], Array]] = []
        missing = np.ones(len(receivers), np.bool_)
        for number, known in enumerate(self._names):
            rows = known.rows(receivers)
            ordered = np.sort(rows)
            if len(rows) and ordered[0] >= 0 and (np.diff(ordered) > 0).all():
                return [(number, range(len(rows)), rows)]
            last = {row: place for place, row in enumerate(rows.tolist()) if row >= 0}
            if last:
                places.append((number, list(last.values()), np.fromiter(last, np.int64, len(last))))
                missing &= rows < 0
        if missing.any():
            raise errors.NotFound(f"there is no receiver {receivers[int(missing.argmax())]!r:.160}")
        return places

    def write_granted(
        self, number: int, rows: Array, columns: Mapping[str, Sequence[Any]], ends_s: Sequence[float]
    ) -> None:
        """Set the granted attributes of receivers of one table, and when they end."""
        self.tables[number].write(rows, columns)
        self.tables[number].set_ends(rows, np.array(ends_s))

    def next_end_s(self) -> float:
        """Return when the next grant ends."""
        return min((float(table.ends_s.min(initial=np.inf)) for table in self.tables), default=np.inf)

    def ended(self, now_s: float) -> list[str]:
        """Return the receivers with a grant that has ended."""
        return self.names(
            MatchResult(number, np.flatnonzero(table.ends_s <= now_s))
            for number, table in enumerate(self.tables)
        )

    def changed_s(self, receiver: str) -> int:
        table, row = self._at(receiver)
        return int(table.changed_s[row])

    def set_policy(self, receiver: str, policy: ast.Condition | str | None, at_s: int = 0) -> None:
        table, row = self._at(receiver)
        table.changed_s[row] = at_s
        held = int(table.policy_of[row])
        table.set_policy(row, self.policies.hold(policy) if policy else -1)
        if held >= 0:
            self.policies.release(held)

    def leave(self, receiver: str) -> None:
        table, row = self._at(receiver)
        held = int(table.policy_of[row])
        table.release_rows(np.array([row], np.int64))
        if held >= 0:
            self.policies.release(held)
        self._names[self._table_of[table.model.name]].remove(np.array([row], np.int64))
        self._count([receiver], -1)

    def _count(self, receivers: Iterable[str], by: int) -> None:
        counts = collections.Counter(receiver.partition("/")[0] for receiver in receivers)
        for process, number in counts.items():
            self.stored.change(process, by * number)

    def leave_shard(self, shard: int) -> None:
        """Remove all receivers of a shard."""
        for table, known in zip(self.tables, self._names, strict=True):
            rows = table.rows_of(shard)
            if not len(rows):
                continue
            self._count(known.of(rows), -1)
            held, users = np.unique(table.policy_of[rows], return_counts=True)
            table.release_rows(rows)
            for policy, count in zip(held.tolist(), users.tolist(), strict=True):
                if policy >= 0:
                    self.policies.release(policy, count)
            known.remove(rows)

    def tidy(self) -> None:
        """Compact the data after many changes: matching is faster then and takes less memory."""
        for table in self.tables:
            table.tidy()

    # -- queries

    def _at(self, receiver: str) -> tuple[receiver_table.ReceiverTable, int]:
        for table, known in zip(self.tables, self._names, strict=True):
            if (row := known.row(receiver)) >= 0:
                return table, row
        raise errors.NotFound(f"there is no receiver {receiver!r:.160}")

    def known_model_of(self, receiver: str) -> models.Model | None:
        """Return the model of a receiver; None if there is no such receiver."""
        for table, known in zip(self.tables, self._names, strict=True):
            if known.row(receiver) >= 0:
                return table.model
        return None

    def models_of(self, receivers: Sequence[str]) -> set[models.Model] | None:
        """Return the models of many receivers; None if one of them does not exist."""
        missing = np.ones(len(receivers), np.bool_)
        held_models: set[models.Model] = set()
        for table, known in zip(self.tables, self._names, strict=True):
            here = known.rows(receivers) >= 0
            if here.any():
                held_models.add(table.model)
                missing &= ~here
            if not missing.any():
                return held_models
        return None

    def model_of(self, receiver: str) -> models.Model:
        return self._at(receiver)[0].model

    def state_of(self, receiver: str) -> dict[str, types.Value]:
        table, row = self._at(receiver)
        return table.read(row)

    def policy_of(self, receiver: str) -> str:
        """Return the text of its policy; empty if it has none."""
        table, row = self._at(receiver)
        held = int(table.policy_of[row])
        return "" if held < 0 else self.policies.text(held)

    def is_durable(self, receiver: str) -> bool:
        table, row = self._at(receiver)
        return table.is_durable(row)

    def match(self, attributes: Mapping[str, types.Value], address: ast.Condition) -> list[str]:
        """Return the receivers of an event with these attributes and this address."""
        return self.names(self.find(attributes, address))

    def names(self, results: Iterable[MatchResult]) -> list[str]:
        listed: list[str] = []
        for result in results:
            listed += self._names[result.table].of(result.rows)
        return listed

    def name_blocks(self, results: Iterable[MatchResult] | None = None) -> Iterator[list[str]]:
        """Like `names`, or the names of all receivers, in blocks (`name_table.NameTable.blocks`)."""
        if results is None:
            return itertools.chain.from_iterable([known.blocks() for known in self._names])
        return itertools.chain.from_iterable(
            [self._names[result.table].blocks(result.rows) for result in results]
        )

    def of_shards(self, results: Iterable[MatchResult], shards: Array) -> list[MatchResult]:
        """Return only the receivers in shards for which ``shards[number]`` is true."""
        return [
            MatchResult(result.table, result.rows[shards[self.tables[result.table].shard_of[result.rows]]])
            for result in results
        ]

    def find(self, attributes: Mapping[str, types.Value], address: ast.Condition) -> list[MatchResult]:
        """Like `match`, but returns rows, which are valid until the next call."""
        kernels, policies = self._kernels, self.policies
        true = policies.evaluate(attributes)
        if not true:
            return []
        results = []
        for number, table in enumerate(self.tables):
            if not table.used:
                continue
            means, hits = table.address(address)
            if not hits:
                continue
            ids = self._room(hits)
            members = table.used / policies.conjunctions
            if hits * HIT_NS <= true * (CONJUNCTION_NS + MEMBER_NS * members):
                count = kernels.by_address(means, hits, table.policy_of, policies.parts, policies.true, ids)
            else:
                count = kernels.by_policy(
                    policies.true, policies.owner, policies.room, table.spans, table.members, means, ids
                )
            if count:
                results.append(MatchResult(number, ids[:count]))
        return results

    def _room(self, size: int) -> Array:
        if len(self.tables) > 1:
            return np.zeros(size + opcodes.SPARE, np.int32)
        if len(self._ids) < size + opcodes.SPARE:
            self._ids = np.zeros(size + 1024, np.int32)
        return self._ids

    def find_addressed(self, address: ast.Condition) -> list[MatchResult]:
        """Return the receivers that match an address, whatever they accept."""
        results = []
        for number, table in enumerate(self.tables):
            if table.used:
                bits, count = table.address(address)
                rows = np.zeros(count + 1, np.int64)
                self._kernels.positions(bits, rows)
                results.append(MatchResult(number, rows[:count]))
        return results

    def accepts(self, attributes: Mapping[str, types.Value], table: int, rows: Array) -> Array:
        """Return for which of these receivers the policy is true for an event."""
        true = np.zeros(self.policies.numbers + 1, np.bool_)  # the last is for receivers without a policy
        if self.policies.evaluate(attributes):
            true[self.policies.policies()] = True
        accepted: Array = true[self.tables[table].policy_of[rows]]
        return accepted
