"""Constants of addresses: codes decide all rows but those in the interval of a new constant."""

from __future__ import annotations

import math
import operator
import random
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies

from muster.notify import models
from muster.notify.matcher import (
    kernels_numpy,
    matcher,
    number_column,
    opcodes,
    receiver_table,
)
from muster.predicates import ast, types
from muster.predicates.backends import columnar
from muster.predicates.syntax import parser
from tests.notify import reference, worlds

MODEL = models.Model("M", {"f": types.FLOAT, "g": types.FLOAT, "n": types.INT, "s": types.STRING})
ALWAYS = parser.parse("TRUE")
SIGNS: tuple[ast.ComparisonOperator, ...] = ("<", "<=", ">", ">=", "=", "<>")
FLOATS = (None, math.nan, 0.0, -0.0, 5e-324, 0.1, 0.5, 2.0**53, -1e300, math.inf, -math.inf)
INTEGERS = (
    None,
    0,
    1,
    2,
    2**53,
    2**53 + 1,
    types.INT_MIN,
    types.INT_MIN + 1,
    types.INT_MAX - 1,
    types.INT_MAX,
)
CONSTANTS = (
    0, 0.0, -0.0, 1, 0.5, 1.5, 5e-324, -5e-324, 2**53 + 1, 2.0**53, 1e300, -1.7976931348623157e308,
    1.7976931348623157e308, types.INT_MIN, types.INT_MAX, 2.0**63, -(2.0**63),
)  # fmt: skip


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few edges, which are full soon and are chosen anew often."""
    monkeypatch.setattr(number_column, "EDGES_MAX", 12)
    monkeypatch.setattr(number_column, "QUANTILES", 6)
    monkeypatch.setattr(number_column, "SEEN_MAX", 5)
    monkeypatch.setattr(number_column, "STALE_SHARE", 0)
    monkeypatch.setattr(receiver_table, "MISSES_MAX", 5)
    monkeypatch.setattr(receiver_table, "EXCESS_MIN", 0)


class Both:
    """Receivers in the matcher and in the reference, which accept every event."""

    def __init__(self, kernels: Any) -> None:
        self.ours, self._plainly = matcher.Matcher(kernels=kernels), reference.ReferenceMatcher()

    def join(self, states: dict[str, dict[str, Any]]) -> None:
        cells = {key: [state.get(key) for state in states.values()] for key in MODEL.attributes}
        self.ours.join_many(list(states), MODEL, cells, [ALWAYS], np.zeros(len(states), np.int64))
        for name, state in states.items():
            self._plainly.join(name, state, ALWAYS)

    def update(self, name: str, values: dict[str, Any]) -> None:
        self.ours.update([name], {key: [value] for key, value in values.items()})
        self._plainly.update(name, values)

    def leave(self, name: str) -> None:
        self.ours.leave(name)
        self._plainly.leave(name)

    def check(self, address: ast.Condition) -> int:
        expected = sorted(self._plainly.match({}, address))
        assert sorted(self.ours.match({}, address)) == expected, address
        return len(expected)

    @property
    def table(self) -> receiver_table.ReceiverTable:
        return self.ours.tables[0]


def _state(dice: random.Random) -> dict[str, Any]:
    return {
        "f": dice.choice([*FLOATS, dice.random(), dice.random()]),
        "g": dice.choice([None, dice.random(), round(dice.random(), 1)]),
        "n": dice.choice([*INTEGERS, dice.randrange(-50, 50), dice.randrange(-50, 50)]),
        "s": dice.choice([None, "a", "b"]),
    }


def _condition(dice: random.Random, depth: int = 2) -> ast.Condition:
    if depth and dice.random() < 0.7:
        parts = tuple(_condition(dice, depth - 1) for _ in range(dice.randrange(2, 4)))
        return ast.And(parts) if dice.random() < 0.5 else ast.Or(parts)
    if dice.random() < 0.1:
        return ast.IsNull(ast.Name("f"))
    if dice.random() < 0.1:
        return ast.Comparison("=", ast.Name("s"), ast.Literal("a"))
    fresh = dice.choice([dice.uniform(-0.2, 1.2), dice.randrange(-60, 60), dice.uniform(-60, 60)])
    constant = ast.Literal(fresh if dice.random() < 0.7 else dice.choice(CONSTANTS))
    clause = ast.Comparison(dice.choice(SIGNS), ast.Name(dice.choice("fgn")), constant)
    return ast.Not(clause) if dice.random() < 0.3 else clause


def _play(dice: random.Random, kernels: Any, *, receivers: int, steps: int) -> int:
    both = Both(kernels)
    there = [f"p{number}" for number in range(receivers)]
    both.join({name: _state(dice) for name in there})
    addresses: list[ast.Condition] = []
    matches = 0
    for step in range(steps):
        addresses.append(_condition(dice))
        # The same tree again: compiled before, perhaps with other edges.
        matches += both.check(addresses[-1]) + both.check(dice.choice(addresses))
        name = dice.choice(there)
        if step % 3:
            both.update(name, _state(dice))
        elif step % 2:
            there.remove(name)
            both.leave(name)
        else:
            there.append(f"q{step}")
            both.join({there[-1]: _state(dice)})
    return matches


def test_constants_that_are_no_edges_are_decided_as_the_reference_decides_them(kernels, hasty):
    for seed in range(4):
        assert _play(random.Random(seed), kernels, receivers=200, steps=60) > 1000


def test_the_same_with_the_usual_number_of_edges_and_a_table_that_grows(kernels):
    dice = random.Random(5)
    both = Both(kernels)
    for part in range(3):  # the table doubles, with edges, and programs compiled for the smaller one
        both.join({f"p{part}-{number}": _state(dice) for number in range(900)})
        addresses = [_condition(dice) for _ in range(25)]
        for address in (*addresses, *addresses):
            both.check(address)
    assert both.table.capacity > 1024


@hypothesis.given(strategies.integers(min_value=0))
@hypothesis.settings(
    max_examples=20, deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
def test_any_constants(hasty, seed):
    _play(random.Random(seed), kernels_numpy, receivers=40, steps=25)


def test_random_worlds_with_few_edges(kernels, hasty):
    for seed in range(3):
        worlds.play(random.Random(seed), kernels)


@pytest.mark.parametrize("constant", CONSTANTS)
def test_every_sign_at_the_ends_of_the_numbers(kernels, constant):
    """At both uses: first the numbers are compared, then the constant is an edge."""
    both = Both(kernels)
    both.join(
        {f"f{place}": {"f": value} for place, value in enumerate(FLOATS)}
        | {f"n{place}": {"n": value} for place, value in enumerate(INTEGERS)}
    )
    for name in "fn":
        for sign in SIGNS:
            clause = ast.Comparison(sign, ast.Name(name), ast.Literal(constant))
            for condition in (clause, ast.Not(clause)):
                both.check(condition)
                both.check(condition)


# -- how much is compared


def _many(kernels: Any, loads: list[Any]) -> Both:
    both = Both(kernels)
    cells = {"f": loads, "n": [None if load is None else round(load * 1e6) for load in loads]}
    names = [f"p{number}" for number in range(len(loads))]
    both.ours.join_many(names, MODEL, cells, [ALWAYS], np.zeros(len(loads), np.int64))
    return both


def _address(both: Both, text: str) -> tuple[int, int]:
    """Return how many rows match, and how many numbers were compared."""
    before = both.table.compared
    count = both.table.address(parser.parse(text))[1]
    return count, both.table.compared - before


def _warm(both: Both, dice: random.Random) -> None:
    for _ in range(30):
        _address(both, f"f < {dice.random():.9f} OR n < {dice.randrange(10**6)}")


ROWS = 20_000


def test_a_new_constant_compares_only_the_numbers_of_its_interval(kernels, monkeypatch):
    dice = random.Random(1)
    loads = [None if number % 50 == 0 else dice.random() for number in range(ROWS)]
    both = _many(kernels, loads)
    _warm(both, dice)
    monkeypatch.setattr(columnar, "evaluate", lambda *_: pytest.fail("evaluates all rows"))
    present = [load for load in loads if load is not None]
    compare = {"<": operator.lt, ">=": operator.ge, "=": operator.eq, "<>": operator.ne}
    for sign, is_true in 20 * list(compare.items()):
        bound = f"{dice.random():.9f}"
        count, compared = _address(both, f"f {sign} {bound}")
        assert count == sum(is_true(load, float(bound)) for load in present)
        assert 0 < compared <= 2 * 3 * ROWS / number_column.QUANTILES
    count, compared = _address(both, "s = 'a' AND f < 0.123456789")
    assert (count, compared) == (0, 0)  # no row remains when the number's turn comes
    count, compared = _address(both, "f < 0.234567891 AND (g < 1 OR g > 2)")
    assert (count, compared) == (0, 0)  # comparing comes last


def test_a_repeated_constant_compares_nothing(kernels):
    dice = random.Random(2)
    both = _many(kernels, [dice.random() for _ in range(ROWS)])
    _warm(both, dice)
    address = parser.parse("f < 0.123456789 AND n >= 12345 AND n <> 77777")
    counts = set()
    for use in range(4):
        before = both.table.compared
        counts.add(both.table.address(address)[1])
        assert (both.table.compared > before) is (use == 0)
    assert len(counts) == 1
    assert _address(both, "g < 1 OR f >= 0.123456789")[1] == 0  # in another address


def test_a_frequent_number_has_an_interval_of_its_own(kernels):
    dice = random.Random(3)
    both = _many(kernels, [0.25 if dice.random() < 0.9 else dice.random() for _ in range(ROWS)])
    _warm(both, dice)
    for text in ("f < 0.250000001", "f > 0.249999999", "n < 250001", "n >= 249999", "f = 0.25"):
        assert _address(both, text)[1] < 3 * ROWS / number_column.QUANTILES, text


def test_the_quantiles_follow_the_numbers(kernels):
    dice = random.Random(4)
    both = _many(kernels, [dice.random() for _ in range(ROWS)])
    _warm(both, dice)
    names = [f"p{number}" for number in range(ROWS)]
    both.ours.update(names, {"f": [1000 + dice.random() for _ in names]})
    assert _address(both, "f < 1000.123456789")[1] > ROWS / 2
    for _ in range(20):
        _address(both, f"f < {1000 + dice.random():.9f}")
    assert _address(both, "f < 1000.987654321")[1] < 3 * ROWS / number_column.QUANTILES


def test_quantiles_are_computed_again_only_when_numbers_have_changed(kernels, monkeypatch):
    monkeypatch.setattr(receiver_table, "COMPARED_SHARE", 0)  # every comparison is too many
    monkeypatch.setattr(receiver_table, "EXCESS_MIN", -ROWS)
    dice = random.Random(8)
    both = _many(kernels, [dice.random() for _ in range(ROWS)])
    column = both.table.columns["f"]

    def versions() -> int:
        before = column.version
        for _ in range(20):
            _address(both, f"f < {dice.random():.9f}")
        return column.version - before

    assert versions() == 1
    names = [f"p{number}" for number in range(ROWS // 10)]
    both.ours.update(names, {"f": [dice.random() for _ in names]})
    assert versions() == 0
    both.ours.update(names, {"f": [dice.random() for _ in names]})
    assert versions() == 1


def test_repeated_constants_stay_edges_when_quantiles_are_computed_again(kernels):
    dice = random.Random(9)
    both = _many(kernels, [dice.random() for _ in range(ROWS)])
    _warm(both, dice)
    address = parser.parse("f < 0.123456789")
    for _ in range(2):
        both.table.address(address)
    column = both.table.columns["f"]
    assert isinstance(column, number_column.NumberColumn)
    loads = [dice.random() for _ in range(ROWS)]
    both.ours.update([f"p{number}" for number in range(ROWS)], {"f": loads})
    column.balance()
    before = both.table.compared, column.version
    assert both.table.address(address)[1] == sum(load < 0.123456789 for load in loads)
    assert (both.table.compared, column.version) == before


def test_more_constants_than_a_byte_has_codes(kernels):
    both = Both(kernels)
    both.join({f"p{number}": {"f": number / 300} for number in range(300)})
    addresses = [parser.parse(f"f < {number / 500}") for number in range(2 * number_column.EDGES_MAX)]
    for _ in range(2):
        for address in addresses:
            both.check(address)


def test_constants_find_space_again_when_others_are_used_no_more(kernels, monkeypatch):
    monkeypatch.setattr(receiver_table, "MISSES_MAX", 50)
    dice = random.Random(6)
    both = _many(kernels, [dice.random() for _ in range(ROWS)])
    for _ in range(2 * number_column.EDGES_MAX):
        address = parser.parse(f"f < {dice.random():.9f}")
        for _ in range(2):
            both.table.address(address)
    late = [parser.parse(f"f >= 0.1 AND f < {0.3 + number / 1000:.9f}") for number in range(20)]
    for _ in range(10):
        for address in late:
            both.table.address(address)
    before = both.table.compared
    for address in late:
        both.table.address(address)
    assert both.table.compared == before


# -- kernels


def test_a_split_interval_is_encoded_as_from_the_start(kernels):
    numbers = np.random.default_rng(7)
    for kind in (np.int64, np.float64):
        values = numbers.integers(-20, 20, 256).astype(kind)
        rows = np.arange(256)
        null = rows[::9]
        edges: list[Any] = []
        codes = np.zeros(256, np.uint8)
        kernels.encode_rows(values, rows, np.array(edges, kind), codes)
        codes[null] = 0
        for edge in numbers.permutation(np.arange(-25, 25)):
            at = int(np.searchsorted(edges, edge))
            edges.insert(at, edge)
            kernels.split_interval(values, codes, at + 1, kind(edge))
            expected = np.zeros(256, np.uint8)
            kernels.encode_rows(values, rows, np.array(edges, kind), expected)
            expected[null] = 0
            assert codes.tolist() == expected.tolist()


def test_programs_with_comparisons_give_the_same_with_both_kernels():
    pytest.importorskip("numba")
    from muster.notify.matcher import kernels_numba

    dice = np.random.default_rng(8)
    rows = 64 * 300
    bits = dice.integers(0, 2**63, (2, 300), dtype=np.uint64)
    bits[1, dice.random(300) < 0.95] = 0  # few words remain
    codes = dice.integers(0, 6, 2 * rows).astype(np.uint8)
    whole = dice.integers(-100, 100, rows)
    numbers = np.concatenate((whole, dice.normal(0, 10, rows).view(np.int64)))
    for bitmap in (0, 1):
        for operation in sorted(opcodes.COMPARING):
            real = operation in (opcodes.FLOAT_BELOW, opcodes.FLOAT_FROM)
            bound = int(np.float64(1.5).view(np.int64)) if real else 7
            steps = np.array(
                [
                    (opcodes.BITMAP, bitmap, 0, 0),
                    (opcodes.WITHIN, 1, 2, 3),
                    (operation, 1, 256 * real + 3, bound),
                ],
                np.int64,
            )
            first, other = np.zeros(300, np.uint64), np.zeros(300, np.uint64)
            results = [
                kernels_numpy.run(steps, bits, codes, numbers, rows, first),
                kernels_numba.run(steps, bits, codes, numbers, rows, other),
            ]
            assert results[0] == results[1]
            assert results[0][1] > 0
            assert first.tolist() == other.tolist()
