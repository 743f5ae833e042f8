"""Which policies are true of an event, without asking each of them.

A policy is an OR of conjunctions; a conjunction is an AND of clauses, each about one attribute of the event
or its sender.  For each attribute, the constants of all clauses cut what a value can be into *classes*:
NULL, each word that is asked for, each interval between neighbouring bounds.  All values of one class make
the same clauses true, so each class has one *row*: the bitmap of the conjunctions that it leaves standing.
An event is decided by AND-ing one row for each attribute, some kilobytes each, however many policies there
are.

(The bit-vector scheme of packet classification: Lakshman and Stiliadis, SIGCOMM 1998.)

Rows are made when a class first occurs, and kept.  A new conjunction sets or clears its bit in each row
there is.  Attributes that are only asked whether they are TRUE or FALSE, as the types of events are, share
one row for each way in which they occur together: there may be many of them, and an event has few.  Clauses
that compare two attributes or calculate are left to a closure, asked of the survivors only; so is all of
a policy that has too many conjunctions.  Equal policies are one.
"""

from __future__ import annotations

import array
import bisect
import collections
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from muster.core import errors
from muster.notify import model
from muster.predicates import ast, closure, cost, explain, normal, types, values

Array = npt.NDArray[Any]
Class = tuple[Any, ...]

ROWS_BYTES_MAX: Final = 256 << 20
TOGETHER_MAX: Final = 1024
BULK: Final = 100
NULL: Final[Class] = ("null",)


@dataclass(slots=True)
class _Attribute:
    """Everything that policies ask of one attribute."""

    key: str
    bounds: list[Any] = field(default_factory=list)  # numbers, sorted
    words: dict[str, int] = field(default_factory=dict)
    patterns: int = 0  # LIKE: then every string is a class of its own
    clauses: dict[normal.Literal, array.array[int]] = field(default_factory=dict)  # -> conjunctions
    is_flag: bool = True  # only ever compared with TRUE and FALSE
    rows: dict[Class, int] = field(default_factory=dict)

    def class_of(self, value: types.Value) -> Class:
        if value is None:
            return NULL
        kind = value.__class__
        if kind is bool:
            return ("bool", value)
        if kind is int or kind is float:
            if value != value:
                return NULL
            at = bisect.bisect_right(self.bounds, value)
            if not at:
                return ("below",)
            bound = self.bounds[at - 1]
            return ("at", bound) if bound == value else ("above", bound)
        if kind is str:
            return ("word", value) if self.patterns or value in self.words else ("other",)
        return ("set", frozenset(value))  # type: ignore[arg-type]

    def truth(self, literal: normal.Literal, of: Class) -> bool:
        """Whether the clause is true of the values of a class."""
        if literal.__class__ is ast.Comparison and of[0] == "at":
            return values.compare(literal.operator, of[1], literal.right.value) is True  # type: ignore[union-attr]
        match of:
            case ("null",):
                value: Any = None
            case ("bool", value) | ("word", value) | ("set", value) | ("at", value):
                pass
            case ("other",):
                # Unlike any word that is asked for: no text holds this character twice by accident.
                value = "\ufdd0\ufdd1"
            case _:
                return self._between(literal, of)
        return explain.truth_of(literal, {self.key: value}.get) is True

    def _between(self, literal: normal.Literal, of: Class) -> bool:
        """Of a number that lies strictly between two bounds, or beyond them all."""
        when, clause = (False, literal.operand) if isinstance(literal, ast.Not) else (True, literal)
        if not isinstance(clause, ast.Comparison):
            return not when  # IS NULL, or about strings or sets: FALSE of a number
        assert isinstance(clause.right, ast.Literal)
        if not clause.right.kind.is_number:
            return not when
        above = of[0] == "above" and of[1] >= clause.right.value
        return (clause.operator in ((">", ">=", "<>") if above else ("<", "<=", "<>"))) is when


@dataclass(slots=True)
class _Policy:
    condition: ast.Condition
    conjunctions: list[int]
    users: int = 0


class PolicyIndex:
    def __init__(self, kernels: Any) -> None:
        self.kernels = kernels
        self._attributes: dict[str, _Attribute] = {}
        self._others: list[_Attribute] = []  # those that are no flags
        self._together: dict[tuple[Any, ...], int] = {}  # flags as they occur -> their common row
        self._ids: dict[ast.Condition, int] = {}
        self._policies: dict[int, _Policy] = {}
        self._needed: collections.Counter[str] = collections.Counter()  # by conjunctions
        self._needing_nothing = 0
        self._free: list[int] = []
        self._next = 0
        self._conjunctions = 0
        self._dead = 0
        self._residual: dict[int, closure.Matches] = {}  # conjunction -> what the rows cannot tell
        self._words = 16
        self._rows = np.zeros((64, self._words), np.uint64)
        self._rows_used = 1  # row 0: conjunctions that there are
        self._rows_free: list[int] = []
        self.owner = np.zeros(self._words * 64, np.int32)
        self.parts = np.zeros((64, 2), np.int32)  # of each policy, its first conjunction and how many it has
        self.true = np.zeros(self._words, np.uint64)
        self.room = np.zeros(64, np.int32)

    def __len__(self) -> int:
        return len(self._policies)

    def condition(self, policy: int) -> ast.Condition:
        return self._policies[policy].condition

    def accepts(self) -> frozenset[str] | None:
        """Names of which an event must have one, TRUE, for any policy to hold; None: one holds without."""
        return None if self._needing_nothing else frozenset(self._needed)

    # -- policies

    def hold(self, condition: ast.Condition, users: int = 1) -> int:
        """The number of this policy, which has so many users more."""
        key = _canonical(condition)
        policy = self._ids.get(key)
        if policy is None:
            policy = self._free.pop() if self._free else self._next
            self._next = max(self._next, policy + 1)
            if policy >= len(self.parts):
                self.parts = np.concatenate((self.parts, np.zeros_like(self.parts)))
            self._ids[key] = policy
            self._policies[policy] = _Policy(key, self._add(policy, key))
            self._count(key, 1)
        self._policies[policy].users += users
        return policy

    def hold_many(self, conditions: Sequence[ast.Condition | None], users: Sequence[int]) -> list[int]:
        """The numbers of many policies at once; -1 where there is none, or nobody has it."""
        if len(conditions) > BULK:
            self._forget_rows()  # cheaper to make anew than to bring up to date for each
        return [
            self.hold(one, count) if one is not None and count else -1
            for one, count in zip(conditions, users, strict=True)
        ]

    def release(self, policy: int, users: int = 1) -> None:
        held = self._policies[policy]
        held.users -= users
        if held.users:
            return
        self._forget_together()
        for conjunction in held.conjunctions:
            self._rows[0, conjunction >> 6] &= ~(np.uint64(1) << np.uint64(conjunction & 63))
            self._residual.pop(conjunction, None)
        self._dead += len(held.conjunctions)
        del self._policies[policy], self._ids[held.condition]
        self._count(held.condition, -1)
        self._free.append(policy)
        if self._dead > 1024 and self._dead > self._conjunctions // 2:
            self._rebuild()

    def _add(self, policy: int, condition: ast.Condition) -> list[int]:
        """Its conjunctions, at consecutive numbers."""
        self._forget_together()
        first = self._conjunctions
        numbers = self._add_conjunctions(policy, condition)
        self.parts[policy] = first, len(numbers)
        return numbers

    def _add_conjunctions(self, policy: int, condition: ast.Condition) -> list[int]:
        parts = _conjunctions(condition)
        if parts is None:
            number = self._new(policy)
            self._residual[number] = closure.compile(condition)
            return [number]
        numbers = []
        for part in parts:
            number = self._new(policy)
            numbers.append(number)
            about: dict[str, list[normal.Literal]] = {}
            rest: list[normal.Literal] = []
            for literal in part:
                key = _key(literal)
                if key is None:
                    rest.append(literal)
                else:
                    about.setdefault(key, []).append(literal)
            if rest:
                left = ast.And(tuple(rest)) if len(rest) > 1 else rest[0]
                self._residual[number] = closure.compile(left)
            for key, literals in about.items():
                self._ask(key, literals, number)
        return numbers

    def _count(self, condition: ast.Condition, change: int) -> None:
        """What its conjunctions need to be TRUE."""
        for part in [()] if (parts := _conjunctions(condition)) is None else parts:
            needed = [clause.left.key for clause in part if _needs_true(clause)]  # type: ignore[union-attr]
            if not needed:
                self._needing_nothing += change
            for key in needed:
                self._needed[key] += change
                if not self._needed[key]:
                    del self._needed[key]

    def _new(self, policy: int) -> int:
        number = self._conjunctions
        self._conjunctions += 1
        if number >= self._words * 64:
            words = self._words + max(16, self._words // 2)
            rows = np.zeros((len(self._rows), words), np.uint64)
            rows[:, : self._words] = self._rows
            # No attribute has anything against a conjunction that does not ask about it.
            rows[1:, self._words :] = ~np.uint64(0)
            self._rows, self._words = rows, words
            self.owner = np.concatenate((self.owner, np.zeros(words * 64 - len(self.owner), np.int32)))
            self.true = np.zeros(words, np.uint64)
        self.owner[number] = policy
        self._rows[0, number >> 6] |= np.uint64(1) << np.uint64(number & 63)
        if self._conjunctions > len(self.room):
            self.room = np.zeros(2 * self._conjunctions, np.int32)
        return number

    def _ask(self, key: str, literals: list[normal.Literal], number: int) -> None:
        attribute = self._attributes.get(key)
        if attribute is None:
            attribute = self._attributes[key] = _Attribute(key)
        if attribute.is_flag and not all(map(_asks_flag, literals)):
            attribute.is_flag = False
            self._others.append(attribute)
        for literal in literals:
            if literal not in attribute.clauses:
                attribute.clauses[literal] = array.array("I")
                self._learn(attribute, literal)
            attribute.clauses[literal].append(number)
        word, bit = number >> 6, np.uint64(1) << np.uint64(number & 63)
        for of, row in attribute.rows.items():
            if not all(attribute.truth(literal, of) for literal in literals):
                self._rows[row, word] &= ~bit

    def _learn(self, attribute: _Attribute, literal: normal.Literal) -> None:
        """Constants of a new clause cut classes in two; what stood for both parts stands for neither."""
        clause = literal.operand if isinstance(literal, ast.Not) else literal
        match clause:
            case ast.Comparison(right=ast.Literal() as constant):
                if constant.kind.is_number:
                    at = bisect.bisect_left(attribute.bounds, constant.value)
                    if at == len(attribute.bounds) or attribute.bounds[at] != constant.value:
                        attribute.bounds.insert(at, constant.value)
                        # The class below it keeps its name and its lower part; only "below" all has none.
                elif isinstance(constant.value, str):
                    attribute.words[constant.value] = 1
            case ast.In():
                attribute.words.update(dict.fromkeys(clause.words, 1))
            case ast.Like():
                if not attribute.patterns:
                    attribute.rows.pop(("other",), None)
                attribute.patterns += 1
            case _:
                pass

    def _row(self, attribute: _Attribute, of: Class) -> int:
        row = attribute.rows.get(of)
        if row is not None:
            return row
        row = attribute.rows[of] = self._new_row()
        standing = np.ones(self._words * 64, np.bool_)
        for literal, numbers in attribute.clauses.items():
            if not attribute.truth(literal, of):
                standing[np.frombuffer(numbers, np.uint32)] = False
        self._rows[row] = np.packbits(standing, bitorder="little").view(np.uint64)
        return row

    def _new_row(self) -> int:
        if self._rows_free:
            return self._rows_free.pop()
        row = self._rows_used
        self._rows_used += 1
        if row >= len(self._rows):
            more = np.zeros((len(self._rows) // 4 + 16, self._words), np.uint64)
            self._rows = np.concatenate((self._rows, more))
        return row

    def _forget_rows(self) -> None:
        for each in self._attributes.values():
            each.rows.clear()
        self._together.clear()
        self._rows_free.clear()
        self._rows_used = 1

    def _forget_together(self) -> None:
        self._rows_free += self._together.values()
        self._together.clear()

    def _rebuild(self) -> None:
        policies = self._policies
        self._attributes.clear()
        self._others.clear()
        self._forget_rows()
        self._residual.clear()
        self._conjunctions = self._dead = 0
        self._rows = np.zeros((64, self._words), np.uint64)
        for number, policy in policies.items():
            policy.conjunctions = self._add(number, policy.condition)

    # -- events

    def ask(self, attributes: Mapping[str, types.Value]) -> int:
        """How many conjunctions are true of an event; `true` has a bit for each, until the next call."""
        if self._rows_used * self._words * 8 > ROWS_BYTES_MAX:
            self._forget_rows()
        get = attributes.get
        chosen = [self._flags(attributes)]
        for attribute in self._others:
            of = attribute.class_of(get(attribute.key))
            row = attribute.rows.get(of)
            chosen.append(self._row(attribute, of) if row is None else row)
        count = int(self.kernels.intersect(self._rows, np.array(chosen), self.true))
        if count and self._residual:
            self._ask_residual(get)
            count = int(np.bitwise_count(self.true).sum())
        return count

    def _flags(self, attributes: Mapping[str, types.Value]) -> int:
        """The common row of all flags: what is there, and that the others are not."""
        known = self._attributes
        there = tuple(
            [
                (key, attribute.class_of(value))
                for key, value in attributes.items()
                if (attribute := known.get(key)) is not None and attribute.is_flag
            ]
        )
        row = self._together.get(there)
        if row is None:
            classes = dict(there)
            rows = [self._row(one, classes.get(key, NULL)) for key, one in known.items() if one.is_flag]
            if len(self._together) >= TOGETHER_MAX:
                self._forget_together()
            row = self._together[there] = self._new_row()
            self.kernels.intersect(self._rows, np.array([0, *rows]), self._rows[row])
        return row

    def policies(self) -> Array:
        """The policies that `ask` found true."""
        count = self.kernels.policies_of(self.true, self.owner, self.room)
        return self.room[:count]

    @property
    def conjunctions(self) -> int:
        return self._conjunctions

    @property
    def numbers(self) -> int:
        """All numbers of policies are below this."""
        return self._next

    def _ask_residual(self, get: closure.Get) -> None:
        for number, matches in self._residual.items():
            word, bit = number >> 6, np.uint64(1) << np.uint64(number & 63)
            if self.true[word] & bit and not matches(get):
                self.true[word] &= ~bit

    @property
    def nbytes(self) -> int:
        return self._rows.nbytes + self.owner.nbytes


_canonical = functools.lru_cache(model.POLICIES_PARSED)(normal.canonical)


def _conjunctions(condition: ast.Condition) -> tuple[tuple[normal.Literal, ...], ...] | None:
    try:
        return normal.disjunctive_normal(condition, cap=model.CONJUNCTIONS_MAX)
    except errors.LimitExceeded:
        return None


def _asks_flag(literal: normal.Literal) -> bool:
    clause = literal.operand if isinstance(literal, ast.Not) else literal
    match clause:
        case ast.Comparison(right=ast.Literal() as constant):
            return constant.kind is types.Kind.BOOL
    return isinstance(clause, ast.IsNull)


def _needs_true(literal: normal.Literal) -> bool:
    match literal:
        case ast.Comparison(operator="=", left=ast.Name(), right=ast.Literal(value=True)):
            return literal.right.kind is types.Kind.BOOL  # type: ignore[union-attr]
    return False


def _key(literal: normal.Literal) -> str | None:
    """The one attribute that the clause is about, if constants are all it is compared with."""
    clause = literal.operand if isinstance(literal, ast.Not) else literal
    if isinstance(clause, ast.Comparison):
        if isinstance(clause.left, ast.Name) and isinstance(clause.right, ast.Literal):
            return clause.left.key
        return None
    if cost.class_of(literal) is cost.CostClass.COMPUTED or isinstance(
        clause, ast.Constant | ast.Not | ast.And | ast.Or
    ):
        return None
    return clause.name.key
