"""The matcher: who gets an event, at a million receivers.

Receivers stand in a `table.Table` for each model, their distinct policies in one `index.PolicyIndex`.  An
event is matched in three steps: the policies that are true of it (none: done), the receivers that its address
means, and who is in both.  The last is worked out from the smaller side: each address hit asks whether
its policy is true, or each true policy lists its receivers and asks whether the address means them.

Single writer: between two calls every event sees one consistent state.  Pure: no clock, no bus.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from muster.core import errors
from muster.notify import index, names, plain
from muster.notify import model as models
from muster.notify import table as tables
from muster.predicates import ast, parser, types

Array = npt.NDArray[Any]

# Nanoseconds, measured: an address hit costs random reads of its policy; a true conjunction, those of its
# policy and of the policy's receivers.
HIT_NS: Final = 10
CONJUNCTION_NS: Final = 30


def fastest() -> Any:
    """The compiled kernels where numba is installed, numpy's otherwise."""
    try:
        from muster.notify import kernels
    except ImportError:
        return plain
    return kernels


def warmed() -> Any:
    """`fastest`, loaded and compiled: that takes a second, and several on a machine that never ran them."""
    kernels = fastest()
    trial = Engine(kernels=kernels)
    model = models.Model("Trial", {"a": types.STRING, "b": types.FLOAT, "c": types.set_of("x")})
    trial.join("p", model, {"a": "v", "b": 1.0, "c": frozenset({"x"})}, parser.parse("e AND n >= 1"))
    trial.update(["p"], {"b": [0.5]})
    trial.match({"e": True, "n": 1}, parser.parse("a = 'v' AND b < 1 AND c CONTAINS 'x'"))
    return kernels


@dataclass(frozen=True, slots=True)
class Found:
    """Receivers of one table, by row."""

    table: int
    rows: Array


class Engine:
    def __init__(self, *, kernels: Any = None) -> None:
        self._kernels = fastest() if kernels is None else kernels
        self.policies = index.PolicyIndex(self._kernels)
        self.tables: list[tables.Table] = []
        self._table_of: dict[str, int] = {}
        self._names: list[names.Names] = []  # by table
        self._ids = np.zeros(1024, np.int32)

    def use(self, kernels: Any) -> None:
        """Go on with other kernels: they share all that is held."""
        self._kernels = self.policies.kernels = kernels
        for table in self.tables:
            table.kernels = kernels

    def __len__(self) -> int:
        return sum(map(len, self._names))

    def __contains__(self, party: str) -> bool:
        return any(known.row(party) >= 0 for known in self._names)

    def parties(self) -> Iterable[str]:
        return itertools.chain.from_iterable(self._names)

    # -- changes

    def define(self, model: models.Model) -> None:
        number = self._table_of.get(model.name)
        if number is None:
            self._table_of[model.name] = len(self.tables)
            self.tables.append(tables.Table(model, self._kernels))
            self._names.append(names.Names())
        elif self.tables[number].model != model:
            self.tables[number].extend(model)

    def join(
        self,
        party: str,
        model: models.Model,
        state: models.State,
        policy: ast.Condition | None,
        *,
        durable: bool = False,
    ) -> None:
        if party in self:
            self.leave(party)
        self.define(model)
        number = self._table_of[model.name]
        table = self.tables[number]
        rows = table.take(1)
        row = int(rows[0])
        table.write(rows, {name: [value] for name, value in state.items()})
        if durable:
            table.set_durable(rows, True)
        if policy is not None:
            table.set_policy(row, self.policies.hold(policy))
        self._names[number].add(party, row)

    def join_many(
        self,
        parties: Sequence[str],
        model: models.Model,
        columns: Mapping[str, Sequence[Any]],
        policies: Sequence[ast.Condition],
        which: Array,
    ) -> None:
        """New parties, all of one model: ``which[i]`` says which of ``policies`` party i has.

        Receivers of one policy come to stand together, which makes matching faster.
        """
        self.define(model)
        number = self._table_of[model.name]
        table = self.tables[number]
        users = np.bincount(which, minlength=len(policies)).tolist()
        numbers = [
            self.policies.hold(policy, count) if count else -1
            for policy, count in zip(policies, users, strict=True)
        ]
        held = np.array(numbers, np.int32)[which]
        order = np.argsort(held, kind="stable")
        rows = np.empty(len(parties), np.int64)
        rows[order] = table.take(len(parties))
        table.write(rows, columns)
        table.set_policies(rows, held)
        for party, row in zip(parties, rows.tolist(), strict=True):
            self._names[number].add(party, row)

    def update(self, parties: Sequence[str], columns: Mapping[str, Sequence[Any]]) -> None:
        """New values in columns; a party that comes twice keeps its last."""
        places: list[dict[int, int]] = [{} for _ in self.tables]  # row -> place, the last one
        for place, party in enumerate(parties):
            for number, known in enumerate(self._names):
                if (row := known.row(party)) >= 0:
                    places[number][row] = place
                    break
            else:
                raise errors.NotFound(f"there is no party {party!r:.160}")
        for table, chosen in zip(self.tables, places, strict=True):
            if len(chosen) == len(parties):
                table.write(np.fromiter(chosen, np.int64, len(chosen)), columns)
            elif chosen:
                some = {name: [cells[place] for place in chosen.values()] for name, cells in columns.items()}
                table.write(np.fromiter(chosen, np.int64, len(chosen)), some)

    def update_slots(self, rows: Array, columns: Mapping[str, Sequence[Any]], *, table: int = 0) -> None:
        """The same for those who know the rows."""
        self.tables[table].write(rows, columns)

    def set_policy(self, party: str, policy: ast.Condition | None) -> None:
        table, row = self._at(party)
        held = int(table.policy_of[row])
        table.set_policy(row, -1 if policy is None else self.policies.hold(policy))
        if held >= 0:
            self.policies.release(held)

    def leave(self, party: str) -> None:
        table, row = self._at(party)
        held = int(table.policy_of[row])
        table.give_back(row)
        if held >= 0:
            self.policies.release(held)
        self._names[self._table_of[table.model.name]].remove(party)

    # -- questions

    def _at(self, party: str) -> tuple[tables.Table, int]:
        for table, known in zip(self.tables, self._names, strict=True):
            if (row := known.row(party)) >= 0:
                return table, row
        raise errors.NotFound(f"there is no party {party!r:.160}")

    def model_of(self, party: str) -> models.Model:
        return self._at(party)[0].model

    def state_of(self, party: str) -> dict[str, types.Value]:
        table, row = self._at(party)
        return table.read(row)

    def policy_of(self, party: str) -> ast.Condition | None:
        table, row = self._at(party)
        held = int(table.policy_of[row])
        return None if held < 0 else self.policies.condition(held)

    def is_durable(self, party: str) -> bool:
        table, row = self._at(party)
        return table.is_durable(row)

    def match(self, attributes: Mapping[str, types.Value], address: ast.Condition) -> list[str]:
        """The parties that get an event of these attributes, sent to this address."""
        return [
            self._names[found.table].of_row[row]
            for found in self.find(attributes, address)
            for row in found.rows.tolist()
        ]

    def find(self, attributes: Mapping[str, types.Value], address: ast.Condition) -> list[Found]:
        """The same as rows; good until the next call."""
        kernels, policies = self._kernels, self.policies
        true = policies.ask(attributes)
        if not true:
            return []
        found = []
        accepting: Array | None = None
        for number, table in enumerate(self.tables):
            if not table.used:
                continue
            means, hits = table.address(address)
            if not hits:
                continue
            if hits * HIT_NS <= true * CONJUNCTION_NS:
                ids = self._room(hits)
                count = kernels.by_address(
                    means, table.policy_of, policies.first, policies.count, policies.true, ids
                )
            else:
                accepting = policies.policies() if accepting is None else accepting
                ids = self._room(kernels.weight(accepting, table.counts))
                count = kernels.by_policy(accepting, table.starts, table.counts, table.members, means, ids)
            if count:
                found.append(Found(number, ids[:count]))
        return found

    def _room(self, size: int) -> Array:
        if len(self.tables) > 1:
            return np.zeros(size + 1, np.int32)
        if len(self._ids) <= size:
            self._ids = np.zeros(size + 1024, np.int32)
        return self._ids

    def find_bits(
        self, attributes: Mapping[str, types.Value], address: ast.Condition, *, table: int = 0
    ) -> tuple[Array, int]:
        """Of one table, as a bitmap: where very many match, ids would cost more than the match."""
        chosen = self.tables[table]
        out = np.zeros(-(-chosen.used // 64), np.uint64)
        if not self.policies.ask(attributes):
            return out, 0
        accepting = self.policies.policies()
        means, _ = chosen.address(address)
        count = self._kernels.bits_by_policy(
            accepting, chosen.starts, chosen.counts, chosen.members, means, out
        )
        return out, int(count)

    def means(self, address: ast.Condition) -> list[str]:
        """Who an address means, whatever they accept."""
        found: list[str] = []
        for number, table in enumerate(self.tables):
            if table.used:
                bits, count = table.address(address)
                rows = np.zeros(count + 1, np.int64)
                self._kernels.positions(bits, rows)
                found += [self._names[number].of_row[row] for row in rows[:count].tolist()]
        return found
