"""The receivers of one model: rows of columns, and which rows have which policy.

A row is used again after its receiver has left.  The rows of a policy are adjacent in ``members``, in a range
with space to grow, so that the receivers of a true policy are read sequentially.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from muster.notify import models
from muster.notify.matcher import kernels_numpy, number_column, opcodes, receiver_columns
from muster.predicates import ast, types
from muster.predicates.analysis import normal_forms
from muster.predicates.backends import columnar
from muster.predicates.backends import columns as exact

Array = npt.NDArray[Any]

LIVE: Final = 0
DURABLE: Final = 1
SCRATCH: Final = 2  # bitmaps for exact evaluation, one event at a time
SCRATCHES: Final = 14
PROGRAMS_MAX: Final = 4096
# Measured in uses: edges that free space for constants cost as much as so many uses of addresses without.
MISSES_MAX: Final = 10_000
# Numbers that one constant compares at most when the edges are quantiles; others are excess.
COMPARED_SHARE: Final = 1 / number_column.QUANTILES
EXCESS_MIN: Final = 16_384  # not worth new quantiles, however few rows there are
MANY: Final = 16  # if more than one in so many is added at once, all members are rebuilt

MAKERS: Final[
    dict[
        types.ValueKind,
        Callable[[receiver_columns.ColumnStorage, types.AttributeType], receiver_columns.ReceiverColumn],
    ]
] = {
    types.ValueKind.STRING: lambda room, _: receiver_columns.WordColumn(room, types.ValueKind.STRING),
    types.ValueKind.BOOL: lambda room, _: receiver_columns.WordColumn(room, types.ValueKind.BOOL),
    types.ValueKind.SET: lambda room, declared: receiver_columns.SetColumn(room, declared.domain),
    types.ValueKind.INT: lambda room, _: number_column.NumberColumn(room, types.ValueKind.INT),
    types.ValueKind.FLOAT: lambda room, _: number_column.NumberColumn(room, types.ValueKind.FLOAT),
}


class AddressProgram:
    """A compiled address. It is valid until a column that it uses changes its codes."""

    __slots__ = ("columns", "condition", "exactly", "steps", "undecided", "versions")

    def __init__(self) -> None:
        self.condition: ast.Condition | None = None
        self.steps: Any = []
        self.columns: list[receiver_columns.ReceiverColumn] = []
        self.versions: list[int] = []
        self.exactly: list[ast.Condition] = []
        self.undecided: list[number_column.NumberColumn] = []  # of each constant that is not an edge

    def holds(self) -> bool:
        return all(
            column.version == version for column, version in zip(self.columns, self.versions, strict=True)
        )


class ReceiverTable:
    def __init__(self, model: models.Model, kernels: Any, *, capacity: int = 1024) -> None:
        self.kernels = kernels
        self.capacity = capacity
        self.used = 0  # rows allocated so far
        self.bits = np.zeros((SCRATCH + SCRATCHES, capacity // 64), np.uint64)
        self._bitmaps = SCRATCH + SCRATCHES
        self._spare: list[int] = []
        self._codes = np.zeros(0, np.uint8)
        self._code_columns = 0
        self._numbers = np.zeros(0, np.int64)
        self._number_columns = 0
        self.shard_of = np.zeros(capacity, np.uint8)
        self.changed_s = np.zeros(capacity, np.uint32)  # last change of the receiver, in wall time
        self.ends_s = np.zeros(0)  # end of the receiver's first grant; empty while there are no grants
        self.policy_of = np.full(capacity, -1, np.int32)
        self._place = np.zeros(capacity, np.int32)  # position of the row in members
        # For each policy: the start of its range, the number of rows, and the first row if the rows are
        # consecutive, otherwise -1.
        self.spans = np.zeros((0, 3), np.int32)
        self._room_for = np.zeros(0, np.int32)
        self.members = np.zeros(capacity, np.int32)
        self._members_end = 0
        self._free: list[int] = []
        self._out = np.zeros(capacity // 64, np.uint64)
        self._programs: dict[int, AddressProgram] = {}
        self._misses = 0
        self._excess = 0.0
        self.compared = 0  # numbers compared because codes did not decide
        self.columns: dict[str, receiver_columns.ReceiverColumn] = {}
        self.extend(model)

    def extend(self, model: models.Model) -> None:
        """Set the model, or its extension."""
        self.model = model
        for name, declared in model.attributes.items():
            if name not in self.columns:
                self.columns[name] = MAKERS[declared.kind](self, declared)
        self._programs.clear()

    def __len__(self) -> int:
        return self.used - len(self._free)

    # -- storage

    def free_bitmaps(self, numbers: list[int]) -> None:
        self.bits[numbers] = 0
        self._spare += numbers

    def new_bitmaps(self, count: int) -> int:
        """Allocate consecutive bitmaps, and return the number of the first."""
        if count == 1 and self._spare:
            return self._spare.pop()
        first = self._bitmaps
        self._bitmaps += count
        if self._bitmaps > len(self.bits):
            size = max(self._bitmaps, len(self.bits) + len(self.bits) // 8)
            more = np.zeros((size - len(self.bits), self.bits.shape[1]), np.uint64)
            self.bits = np.concatenate((self.bits, more))
        return first

    def new_codes(self) -> int:
        self._code_columns += 1
        self._codes = np.concatenate((self._codes, np.zeros(self.capacity, np.uint8)))
        return self._code_columns - 1

    def codes_of(self, column: int) -> Array:
        return self._codes[column * self.capacity : (column + 1) * self.capacity]

    def new_numbers(self) -> int:
        self._number_columns += 1
        self._numbers = np.concatenate((self._numbers, np.zeros(self.capacity, np.int64)))
        return self._number_columns - 1

    def numbers_of(self, column: int) -> Array:
        return self._numbers[column * self.capacity : (column + 1) * self.capacity]

    def _grow(self, capacity: int) -> None:
        before, self.capacity = self.capacity, capacity
        bits = np.zeros((len(self.bits), capacity // 64), np.uint64)
        bits[:, : before // 64] = self.bits
        self.bits = bits
        self._codes = _widened(self._codes, before, capacity)
        self._numbers = _widened(self._numbers, before, capacity)
        self.policy_of = np.concatenate((self.policy_of, np.full(capacity - before, -1, np.int32)))
        for name in ("_place", "shard_of", "changed_s"):
            held = getattr(self, name)
            setattr(self, name, np.concatenate((held, np.zeros(capacity - before, held.dtype))))
        if len(self.ends_s):
            self.ends_s = np.concatenate((self.ends_s, np.full(capacity - before, np.inf)))
        self._out = np.zeros(capacity // 64, np.uint64)
        for column in self.columns.values():
            column.grow()

    # -- receivers

    def allocate_rows(self, count: int, shard: int = 0) -> Array:
        """Allocate rows for new receivers of a shard."""
        again = [self._free.pop() for _ in range(min(count, len(self._free)))]
        new = count - len(again)
        if self.used + new > self.capacity:
            capacity = self.capacity
            while self.used + new > capacity:
                capacity *= 2
            self._grow(capacity)
        rows = np.concatenate(
            (np.array(again, np.int64), np.arange(self.used, self.used + new, dtype=np.int64))
        )
        self.used += new
        self._mark(LIVE, rows, True)
        self.shard_of[rows] = shard
        return rows

    def rows_of(self, shard: int) -> Array:
        live = kernels_numpy.unpack(self.bits[LIVE])[: self.used].view(np.bool_)
        return np.flatnonzero(live & (self.shard_of[: self.used] == shard))

    def _mark(self, bitmap: int, rows: Array, value: bool) -> None:
        masks = np.full(len(rows), int(value), np.uint64)
        self.kernels.write_sets(rows, masks, bitmap, 1, self.bits)

    def set_durable(self, rows: Array, value: bool) -> None:
        self._mark(DURABLE, rows, value)

    def is_durable(self, row: int) -> bool:
        return bool((int(self.bits[DURABLE, row >> 6]) >> (row & 63)) & 1)

    def durable(self, rows: Array) -> Array:
        """Return which of the rows have durable delivery."""
        is_set: Array = (self.bits[DURABLE, rows >> 6] >> (rows & 63).astype(np.uint64)) & np.uint64(1) != 0
        return is_set

    def release_rows(self, rows: Array) -> None:
        if len(rows) == 1:
            self.set_policy(int(rows[0]), -1)
        else:
            self.policy_of[rows] = -1
            self._compact()
        nothing = [None] * len(rows)
        for column in self.columns.values():
            column.write(rows, nothing)
        self._mark(LIVE, rows, False)
        self._mark(DURABLE, rows, False)
        self.changed_s[rows] = 0
        self.set_ends(rows, np.inf)
        self._free += rows.tolist()

    def set_ends(self, rows: Array, at_s: Array | float) -> None:
        if not len(self.ends_s):
            if np.isinf(at_s).all():
                return
            self.ends_s = np.full(self.capacity, np.inf)
        self.ends_s[rows] = at_s

    def write(self, rows: Array, cells: Mapping[str, Sequence[Any]]) -> None:
        for name, listed in cells.items():
            self.columns[name].write(rows, listed)

    def read(self, row: int) -> dict[str, types.Value]:
        values = {name: column.read(row) for name, column in self.columns.items()}
        return {name: value for name, value in values.items() if value is not None}

    def cells(self, rows: Array) -> dict[str, list[types.Value]]:
        """Return the states of many rows, in columns."""
        return {name: column.cells(rows) for name, column in self.columns.items()}

    # -- policies

    def _know(self, policy: int) -> None:
        if policy >= len(self.spans):
            more = max(64, policy + 1 - len(self.spans), len(self.spans) // 2)
            self.spans = np.concatenate((self.spans, np.zeros((more, 3), np.int32)))
            self._room_for = np.concatenate((self._room_for, np.zeros(more, np.int32)))

    def set_policy(self, row: int, policy: int) -> None:
        """Set the policy of a row; -1: none, so the receiver accepts nothing."""
        held = int(self.policy_of[row])
        if held == policy:
            return
        if held >= 0:
            start, count, _ = self.spans[held].tolist()
            place, moved = int(self._place[row]), int(self.members[start + count - 1])
            self.members[place], self._place[moved] = moved, place
            self.spans[held, 1:] = count - 1, -1
        self.policy_of[row] = -1
        if policy >= 0:
            self._know(policy)
            self._extend(policy, np.array([row], np.int64))

    def _extend(self, policy: int, rows: Array) -> None:
        """Give this policy to rows without one."""
        start, count, _ = self.spans[policy].tolist()
        end = count + len(rows)
        if end > self._room_for[policy]:
            self._move(policy, 2 * end)
            start = int(self.spans[policy, 0])
        self.members[start + count : start + end] = rows
        self._place[rows] = np.arange(start + count, start + end, dtype=np.int32)
        self.spans[policy, 1:] = end, -1
        self.policy_of[rows] = policy  # not before: all members may have been rebuilt

    def _move(self, policy: int, room: int) -> None:
        """Move a range of members to the end, where there is more space."""
        if self._members_end + room > len(self.members):
            if self._members_end > 4 * max(1024, len(self)):
                self._compact()
            size = max(self._members_end + room, len(self.members) + len(self.members) // 4)
            self.members = np.concatenate((self.members, np.zeros(size - len(self.members), np.int32)))
        start, count, _ = self.spans[policy].tolist()
        end = self._members_end
        rows = self.members[start : start + count]
        self.members[end : end + count] = rows
        self._place[rows] = np.arange(end, end + count, dtype=np.int32)
        self.spans[policy, 0], self._room_for[policy] = end, room
        self._members_end = end + room

    def tidy(self) -> None:
        """Remove gaps that moved members left, and make members of a policy adjacent."""
        if self._members_end > len(self):
            self._compact()

    def _compact(self) -> None:
        self._lay_out(np.flatnonzero(self.policy_of[: self.used] >= 0))

    def set_policies(self, rows: Array, policies: Array) -> None:
        """Set the policies of many rows without one; -1: none."""
        if (highest := int(policies.max(initial=-1))) < 0:
            return
        self._know(highest)
        if len(rows) * MANY >= self.used:
            self.policy_of[rows] = policies
            self._compact()
            return
        order = np.argsort(policies, kind="stable")
        for places in np.split(order, np.flatnonzero(np.diff(policies[order])) + 1):
            if (policy := int(policies[places[0]])) >= 0:
                self._extend(policy, rows[places])

    def _lay_out(self, rows: Array) -> None:
        policies = self.policy_of[rows]
        rows = rows[np.argsort(policies, kind="stable")]
        counts = np.bincount(policies, minlength=len(self.spans)).astype(np.int32)
        starts = np.cumsum(counts, dtype=np.int32) - counts
        self.members = rows.astype(np.int32)
        used = np.flatnonzero(counts)
        first, last = self.members[starts[used]], self.members[starts[used] + counts[used] - 1]
        firsts = np.full(len(counts), -1, np.int32)
        # Here the rows of a policy are in ascending order.
        firsts[used] = np.where(last - first == counts[used] - 1, first, -1)
        self.spans, self._room_for = np.stack((starts, counts, firsts), axis=1), counts
        self._place[rows] = np.arange(len(rows), dtype=np.int32)
        self._members_end = len(rows)

    # -- addresses

    def address(self, condition: ast.Condition) -> tuple[Array, int]:
        """Return a bitmap of rows where the condition is true, valid until the next call; their number."""
        # By identity: hashing a tree takes as long as reading a bitmap. The program refers to the condition.
        compiled = self._programs.get(id(condition))
        if compiled is not None and compiled.undecided:
            self._count_miss()
        if compiled is None or not compiled.holds():
            compiled = self._compile(condition)
        words = -(-self.used // 64)
        out = self._out[:words]
        if compiled.exactly:
            self._work_out(compiled.exactly)
        count, compared = self.kernels.run(
            compiled.steps, self.bits, self._codes, self._numbers, self.capacity, out
        )
        if compared:
            self._account(compiled, int(compared))
        return out, int(count)

    def _account(self, program: AddressProgram, compared: int) -> None:
        """Balance the columns of a program when too many numbers have been compared."""
        self.compared += compared
        self._excess += max(0.0, compared - len(program.undecided) * self.used * COMPARED_SHARE)
        if self._excess > self.used + EXCESS_MIN:
            self._excess = 0.0
            for column in set(program.undecided):
                column.balance()

    def _compile(self, condition: ast.Condition) -> AddressProgram:
        normal = normal_forms.uncached_negation_normal(condition)
        program = AddressProgram()
        program.steps = self._condition(normal, program)
        while not program.holds():  # a later clause changed codes that an earlier one uses
            program = AddressProgram()
            program.steps = self._condition(normal, program)
        if len(program.exactly) > SCRATCHES:
            program = AddressProgram()
            program.exactly.append(condition)
            program.steps = [(opcodes.BITMAP, SCRATCH, 0, 0)]
        if not _needs_a_value(normal):
            program.steps.append((opcodes.NEXT, LIVE, 0, 0))
        program.steps = np.array(program.steps, np.int64)
        # An undecided constant becomes an edge at the second use, if there is space: that compiles it again.
        if not any(column.has_room for column in program.undecided):
            if len(self._programs) >= PROGRAMS_MAX:
                self._programs.clear()
            program.condition = condition
            self._programs[id(condition)] = program
        return program

    def _count_miss(self) -> None:
        """Count a repeated address with a constant that finds no space; finally make space."""
        self._misses += 1
        if self._misses >= MISSES_MAX:
            self._misses = 0
            for column in self.columns.values():
                if isinstance(column, number_column.NumberColumn) and not column.has_room:
                    column.drop_constants()

    def _condition(self, condition: ast.Condition, program: AddressProgram) -> list[receiver_columns.Step]:
        if isinstance(condition, ast.And):
            return _all([self._condition(part, program) for part in condition.operands])
        if isinstance(condition, ast.Or):
            first, *others = (self._condition(part, program) for part in condition.operands)
            return first + [step for steps in others for step in (*steps, (opcodes.OR, 0, 0, 0))]
        when, clause = (False, condition.operand) if isinstance(condition, ast.Not) else (True, condition)
        assert not isinstance(clause, _JOINING)
        steps = self._clause(clause, program, when=when)
        if steps is None:
            steps = [(opcodes.BITMAP, SCRATCH + len(program.exactly), 0, 0)]
            program.exactly.append(condition)
        return steps

    def _clause(
        self, clause: ast.Clause, program: AddressProgram, *, when: bool
    ) -> list[receiver_columns.Step] | None:
        if isinstance(clause, ast.Constant):
            return receiver_columns.everything() if clause.value is when else receiver_columns.nothing()
        if isinstance(clause, ast.Comparison):
            if not isinstance(clause.left, ast.Name) or not isinstance(clause.right, ast.Literal):
                return None
            name = clause.left
        else:
            name = clause.name
        column = self.columns.get(name.key)
        if column is None:
            is_null = isinstance(clause, ast.IsNull) and when
            return receiver_columns.everything() if is_null else receiver_columns.nothing()
        program.columns.append(column)
        program.versions.append(column.version)
        if isinstance(clause, ast.IsNull):
            present = column.present()
            if not present:
                return None
            return [*receiver_columns.everything(), *present, (opcodes.NOT, 0, 0, 0)] if when else present
        if not isinstance(column, number_column.NumberColumn):
            return column.steps(clause, when=when)
        steps = column.steps(clause, when=when)
        program.undecided += [column for step in steps if step[0] in opcodes.COMPARING]
        return steps

    def _work_out(self, conditions: list[ast.Condition]) -> None:
        words = -(-self.used // 64)
        rows = words * 64
        names = {name.key for condition in conditions for name in ast.names(condition)}
        needed = {name: column.exact(rows) for name, column in self.columns.items() if name in names}
        table = exact.Table(needed, rows=rows)
        for place, condition in enumerate(conditions):
            self.bits[SCRATCH + place, :words] = kernels_numpy.pack(columnar.evaluate(condition, table))


_JOINING: Final = (ast.Not, ast.And, ast.Or)

# Bitmaps are the cheapest to read; codes are read last, and only where bits remain.
_IN_PLACE: Final = {opcodes.BITMAP: opcodes.NEXT, opcodes.RANGE: opcodes.WITHIN}


def _all(parts: list[list[receiver_columns.Step]]) -> list[receiver_columns.Step]:
    """Return the steps for the intersection."""
    ordered = sorted(parts, key=_dearness)
    program = list(ordered[0])
    for steps in ordered[1:]:
        (operation, a, b, c), *others = steps
        if operation in _IN_PLACE and all(step[0] in opcodes.COMPARING for step in others):
            program += [(_IN_PLACE[operation], a, b, c), *others]
        else:
            program += [*steps, (opcodes.AND, 0, 0, 0)]
    return program


def _dearness(steps: list[receiver_columns.Step]) -> int:
    if steps[-1][0] in opcodes.COMPARING:
        return 3
    return 1 if len(steps) > 1 else 2 * (steps[0][0] == opcodes.RANGE)


def _needs_a_value(condition: ast.Condition) -> bool:
    """Whether it is false for a row without any value, such as an unused row."""
    if isinstance(condition, ast.And):
        return any(map(_needs_a_value, condition.operands))
    if isinstance(condition, ast.Or):
        return all(map(_needs_a_value, condition.operands))
    if isinstance(condition, (ast.IsNull, ast.Constant)):
        return False
    clause = condition.operand if isinstance(condition, ast.Not) else condition
    if not isinstance(clause, ast.Comparison) or isinstance(clause.left, ast.Name):
        return True
    return bool(ast.names(clause))


def _widened(columns: Array, before: int, capacity: int) -> Array:
    """Return columns of more rows."""
    held = columns.reshape(-1, before)
    widened = np.zeros((len(held), capacity), columns.dtype)
    widened[:, :before] = held
    return widened.reshape(-1)
