"""An index that finds the policies that are true for an event without evaluating each of them.

A policy is an OR of conjunctions; a conjunction is an AND of clauses, each about one attribute of the event
or its sender.  For each attribute, the constants of all clauses divide the possible values into *classes*:
NULL, each word that occurs, each interval between neighbouring bounds.  All values of one class make the same
clauses true, so each class has one *row*: the bitmap of the conjunctions that it does not exclude.  An event
is decided by the AND of one row for each attribute, some kilobytes each, however many policies there are.

(The bit-vector scheme of packet classification: Lakshman and Stiliadis, SIGCOMM 1998.)

Rows are created when a class first occurs, and kept.  A new conjunction sets or clears its bit in each
existing row.  Attributes that are only compared with TRUE or FALSE, like the types of events, share one row
for each combination that occurs: there may be many of them, and an event has few.  Clauses that compare two
attributes or calculate are evaluated by a closure, only for the remaining conjunctions; so is a whole policy
that has too many conjunctions.  Equal policies are stored once.

There may be a hundred thousand policies, so each is stored as its text: a tree takes twenty times the memory
and is needed only for explanations.
"""

from __future__ import annotations

import array
import bisect
import collections
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from muster.core import errors
from muster.notify import models
from muster.notify.matcher import name_table
from muster.predicates import ast, types, values
from muster.predicates.analysis import cost, explanation, normal_forms
from muster.predicates.backends import python

Array = npt.NDArray[Any]
Class = tuple[Any, ...]

ROWS_BYTES_MAX: Final = 256 << 20  # of rows, and of the values that they are for
CLASS_BYTES: Final = 256  # of a class besides its value
TOGETHER_MAX: Final = 1024
BULK: Final = 100
NULL: Final[Class] = ("null",)
NOTHING: Final = "-"  # instead of a name


@dataclass(slots=True)
class _Attribute:
    """All clauses of policies about one attribute."""

    key: str
    bounds: list[Any] = field(default_factory=list)  # numbers, sorted
    words: dict[str, int] = field(default_factory=dict)
    patterns: int = 0  # number of LIKE clauses; with any, every string is its own class
    clauses: dict[normal_forms.Literal, array.array[int]] = field(default_factory=dict)  # -> conjunctions
    is_flag: bool = True  # only compared with TRUE and FALSE
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

    def truth(self, literal: normal_forms.Literal, of: Class) -> bool:
        """Whether the clause is true for the values of a class."""
        if literal.__class__ is ast.Comparison and of[0] == "at":
            return values.compare(literal.operator, of[1], literal.right.value) is True  # type: ignore[union-attr]
        match of:
            case ("null",):
                value: Any = None
            case ("bool", value) | ("word", value) | ("set", value) | ("at", value):
                pass
            case ("other",):
                # Different from any word of a clause: a lone surrogate, which no text from the wire contains.
                value = "\ud800"
            case _:
                return self._between(literal, of)
        return explanation.truth_of(literal, {self.key: value}.get) is True

    def _between(self, literal: normal_forms.Literal, of: Class) -> bool:
        """Whether the clause is true for a number strictly between two bounds, or beyond all."""
        when, clause = (False, literal.operand) if isinstance(literal, ast.Not) else (True, literal)
        if not isinstance(clause, ast.Comparison):
            return not when  # IS NULL, or about strings or sets: FALSE for a number
        assert isinstance(clause.right, ast.Literal)
        if not clause.right.kind.is_number:
            return not when
        above = of[0] == "above" and of[1] >= clause.right.value
        return (clause.operator in ((">", ">=", "<>") if above else ("<", "<=", "<>"))) is when


class PolicyIndex:
    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels
        self._attributes: dict[str, _Attribute] = {}
        self._others: list[_Attribute] = []  # attributes that are not flags
        self._together: dict[tuple[Any, ...], int] = {}  # combination of flags -> their common row
        self._texts = name_table.NameTable(kernels)  # canonical; by number
        self._users = array.array("q")
        self._needs: list[str] = []  # by policy, the flags that its conjunctions need: see `_needs_of`
        self._needed: collections.Counter[str] = collections.Counter()  # number of conjunctions
        self._free: list[int] = []
        self._conjunctions = 0
        self._dead = 0
        self._residual: dict[int, python.Matches] = {}  # conjunction -> condition that the rows do not cover
        self._words = 16
        self._rows = np.zeros((64, self._words), np.uint64)
        self._rows_used = 1  # row 0: existing conjunctions
        self._rows_free: list[int] = []
        self._classes_bytes = 0  # values come from events, and may be long
        self.owner = np.zeros(self._words * 64, np.int32)
        self.parts = np.zeros((64, 2), np.int32)  # by policy: its first conjunction, and their number
        self.true = np.zeros(self._words, np.uint64)
        self.room = np.zeros(64, np.int32)

    def __len__(self) -> int:
        return len(self._texts)

    def use(self, kernels: Any) -> None:
        self._kernels = self._texts.kernels = kernels

    def text(self, policy: int) -> str:
        return self._texts.of(np.array([policy]))[0]

    def accepts(self) -> frozenset[str] | None:
        """Return the flags of which an event needs one for any policy to be true; None: no restriction."""
        return None if NOTHING in self._needed else frozenset(self._needed)

    # -- policies

    def hold(self, policy: ast.Condition | str, users: int = 1) -> int:
        """Add users to a policy, and return its number."""
        if not isinstance(policy, str):
            return self._hold(models.canonical_text(policy), policy, users)
        number = self._texts.row(policy)
        if number >= 0:
            self._users[number] += users
            return number
        checked = models.pop_checked_policy(policy)
        if checked is not None:
            return self._hold(policy, checked, users)
        condition = models.parse_policy(policy)
        return self._hold(models.canonical_text(condition), condition, users)

    def _hold(self, canonical: str, condition: ast.Condition, users: int) -> int:
        number = self._texts.row(canonical)
        if number < 0:
            number = self._add(canonical, condition)
        self._users[number] += users
        return number

    def hold_many(self, policies: Sequence[ast.Condition | str | None], users: Sequence[int]) -> list[int]:
        """Like `hold` for many policies; -1 for an empty or unused one."""
        if len(policies) > BULK:
            self._forget_rows()  # cheaper to build again than to update for each
        return [
            self.hold(policy, count) if policy and count else -1
            for policy, count in zip(policies, users, strict=True)
        ]

    def release(self, policy: int, users: int = 1) -> None:
        self._users[policy] -= users
        if self._users[policy]:
            return
        self._forget_together()
        first, count = self.parts[policy].tolist()
        for conjunction in range(first, first + count):
            self._rows[0, conjunction >> 6] &= ~(np.uint64(1) << np.uint64(conjunction & 63))
            self._residual.pop(conjunction, None)
        self._dead += count
        self._count(self._needs[policy], -1)
        self._texts.remove(np.array([policy]))
        self._needs[policy] = ""
        self._free.append(policy)
        if self._dead > 1024 and self._dead > self._conjunctions // 2:
            self._renumber()

    def _add(self, text: str, condition: ast.Condition) -> int:
        """Add a new policy; its conjunctions get consecutive numbers."""
        self._forget_together()
        parts = _conjunctions(condition)
        needs = _needs_of(parts)
        if self._free:
            policy = self._free.pop()
            self._needs[policy] = needs
        else:
            policy = len(self._needs)
            self._needs.append(needs)
            self._users.append(0)
        self._texts.add([text], np.array([policy]))
        if policy >= len(self.parts):
            self.parts = np.concatenate((self.parts, np.zeros_like(self.parts)))
        self._count(needs, 1)
        first = self._conjunctions
        if parts is None:
            self._residual[self._new(policy)] = python.compile(condition)
        else:
            for part in parts:
                self._add_conjunction(self._new(policy), part)
        count = self._conjunctions - first
        self.parts[policy] = (first, count) if count else (0, 0)
        return policy

    def _add_conjunction(self, number: int, part: tuple[normal_forms.Literal, ...]) -> None:
        about: dict[str, list[normal_forms.Literal]] = {}
        rest: list[normal_forms.Literal] = []
        for literal in part:
            key = _key(literal)
            if key is None:
                rest.append(literal)
            else:
                about.setdefault(key, []).append(literal)
        if rest:
            left = ast.And(tuple(rest)) if len(rest) > 1 else rest[0]
            self._residual[number] = python.compile(left)
        for key, literals in about.items():
            self._ask(key, literals, number)

    def _count(self, needs: str, change: int) -> None:
        for key in needs.split():
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
            # An attribute excludes no conjunction without a clause about it.
            rows[1:, self._words :] = ~np.uint64(0)
            self._rows, self._words = rows, words
            self.owner = np.concatenate((self.owner, np.zeros(words * 64 - len(self.owner), np.int32)))
            self.true = np.zeros(words, np.uint64)
        self.owner[number] = policy
        self._rows[0, number >> 6] |= np.uint64(1) << np.uint64(number & 63)
        if self._conjunctions > len(self.room):
            self.room = np.zeros(2 * self._conjunctions, np.int32)
        return number

    def _ask(self, key: str, literals: list[normal_forms.Literal], number: int) -> None:
        for literal in literals:
            self._know(key, literal).append(number)
        attribute = self._attributes[key]
        word, bit = number >> 6, np.uint64(1) << np.uint64(number & 63)
        for of, row in attribute.rows.items():
            if not all(attribute.truth(literal, of) for literal in literals):
                self._rows[row, word] &= ~bit

    def _know(self, key: str, literal: normal_forms.Literal) -> array.array[int]:
        """Return the conjunctions that contain this clause about an attribute."""
        attribute = self._attributes.get(key)
        if attribute is None:
            attribute = self._attributes[key] = _Attribute(key)
        if attribute.is_flag and not _asks_flag(literal):
            attribute.is_flag = False
            self._others.append(attribute)
        if literal not in attribute.clauses:
            attribute.clauses[literal] = array.array("I")
            self._learn(attribute, literal)
        return attribute.clauses[literal]

    def _learn(self, attribute: _Attribute, literal: normal_forms.Literal) -> None:
        """Add the constants of a new clause: they divide classes, and rows of divided classes are dropped."""
        clause = literal.operand if isinstance(literal, ast.Not) else literal
        match clause:
            case ast.Comparison(right=ast.Literal() as constant):
                if constant.kind.is_number:
                    at = bisect.bisect_left(attribute.bounds, constant.value)
                    if at == len(attribute.bounds) or attribute.bounds[at] != constant.value:
                        attribute.bounds.insert(at, constant.value)
                        # The class below keeps its name and its lower part; only the lowest has no name.
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
        self._classes_bytes += CLASS_BYTES + len(repr(of))
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
        self._classes_bytes = 0

    def _forget_together(self) -> None:
        self._rows_free += self._together.values()
        self._together.clear()

    def _renumber(self) -> None:
        """Renumber the remaining conjunctions without gaps, in the same order."""
        size = self._words * 64
        alive = np.unpackbits(self._rows[0].view(np.uint8), bitorder="little").astype(np.bool_)
        now = np.cumsum(alive) - 1
        self._conjunctions, self._dead = int(alive.sum()), 0
        self.owner = np.concatenate((self.owner[alive], np.zeros(size - self._conjunctions, np.int32)))
        used = np.flatnonzero(np.frombuffer(self._users, np.int64))
        self.parts[used, 0] = np.maximum(now[self.parts[used, 0]], 0)
        self._residual = {int(now[number]): matches for number, matches in self._residual.items()}
        self._forget_rows()
        self._rows = np.zeros((64, self._words), np.uint64)
        self._rows[0] = np.packbits(np.arange(size) < self._conjunctions, bitorder="little").view(np.uint64)
        attributes, self._attributes, self._others = self._attributes, {}, []
        for key, attribute in attributes.items():
            for literal, numbers in attribute.clauses.items():
                held = np.frombuffer(numbers, np.uint32)
                left = now[held[alive[held]]].astype(np.uint32)
                if len(left):
                    self._know(key, literal).frombytes(left.tobytes())

    # -- events

    def evaluate(self, attributes: Mapping[str, types.Value]) -> int:
        """Return how many conjunctions are true for an event; `true` has their bits until the next call."""
        if self._rows_used * self._words * 8 + self._classes_bytes > ROWS_BYTES_MAX:
            self._forget_rows()
        get = attributes.get
        chosen = [self._flags(attributes)]
        for attribute in self._others:
            of = attribute.class_of(get(attribute.key))
            row = attribute.rows.get(of)
            chosen.append(self._row(attribute, of) if row is None else row)
        count = int(self._kernels.intersect(self._rows, np.array(chosen), self.true))
        if count and self._residual:
            self._evaluate_residual(get)
            count = int(np.bitwise_count(self.true).sum())
        return count

    def _flags(self, attributes: Mapping[str, types.Value]) -> int:
        """Return the common row of all flags for those that the event has."""
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
            rows = [self._row(flag, classes.get(key, NULL)) for key, flag in known.items() if flag.is_flag]
            if len(self._together) >= TOGETHER_MAX:
                self._forget_together()
            row = self._together[there] = self._new_row()
            self._kernels.intersect(self._rows, np.array([0, *rows]), self._rows[row])
        return row

    def policies(self) -> Array:
        """Return the policies that `evaluate` found true."""
        count = self._kernels.policies_of(self.true, self.owner, self.room)
        return self.room[:count]

    @property
    def conjunctions(self) -> int:
        return self._conjunctions

    @property
    def numbers(self) -> int:
        """The upper bound of policy numbers."""
        return len(self._needs)

    def _evaluate_residual(self, get: python.Get) -> None:
        for number, matches in self._residual.items():
            word, bit = number >> 6, np.uint64(1) << np.uint64(number & 63)
            if self.true[word] & bit and not matches(get):
                self.true[word] &= ~bit


def _conjunctions(condition: ast.Condition) -> tuple[tuple[normal_forms.Literal, ...], ...] | None:
    try:
        return normal_forms.disjunctive_normal(condition, cap=models.CONJUNCTIONS_MAX)
    except errors.LimitExceeded:
        return None


def _needs_of(parts: tuple[tuple[normal_forms.Literal, ...], ...] | None) -> str:
    """Return, for each conjunction, a flag that must be TRUE, or that there is none."""
    needs: list[str] = []
    for part in [()] if parts is None else parts:
        needs += [clause.left.key for clause in part if _needs_true(clause)] or [NOTHING]  # type: ignore[union-attr]
    return sys.intern(" ".join(needs))  # most policies have the same


def _asks_flag(literal: normal_forms.Literal) -> bool:
    clause = literal.operand if isinstance(literal, ast.Not) else literal
    match clause:
        case ast.Comparison(right=ast.Literal() as constant):
            return constant.kind is types.ValueKind.BOOL
    return isinstance(clause, ast.IsNull)


def _needs_true(literal: normal_forms.Literal) -> bool:
    match literal:
        case ast.Comparison(operator="=", left=ast.Name(), right=ast.Literal(value=True)):
            return literal.right.kind is types.ValueKind.BOOL  # type: ignore[union-attr]
    return False


def _key(literal: normal_forms.Literal) -> str | None:
    """Return the attribute of a clause that compares one attribute with constants."""
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
