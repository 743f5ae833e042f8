from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from muster.notify.matcher import name_table


def _check(held: name_table.NameTable, expected: dict[str, int], strangers: list[str]) -> None:
    assert len(held) == len(expected)
    assert sorted(held) == sorted(expected)
    names_in_order = [*expected, *strangers]
    random.Random(1).shuffle(names_in_order)
    actual = [expected.get(name, -1) for name in names_in_order]
    assert held.rows(names_in_order).tolist() == actual
    assert [held.row(name) for name in names_in_order] == actual
    assert held.of(np.array(list(expected.values()), np.int64)) == list(expected)


@pytest.mark.parametrize("letter", ["w", "ü", "東"])
def test_names_come_and_go_and_are_found_again(kernels, letter):
    dice = random.Random(letter)
    held, expected, free, fresh = name_table.NameTable(kernels), dict[str, int](), list[int](), 0
    for step in range(60):
        count = dice.choice([1, 5, 40, 3000])
        new = [f"farm/{letter * dice.randrange(1, 4)}-{step}-{number}" for number in range(count)]
        rows = [free.pop() if free else fresh + number for number in range(count)]
        fresh = max(fresh, *(row + 1 for row in rows))
        held.add(new, np.array(rows, np.int64))
        expected.update(zip(new, rows, strict=True))
        gone = dice.sample(sorted(expected), dice.choice([0, 1, len(expected) // 2, len(expected)]))
        free += [expected.pop(name) for name in gone[::-1]]
        held.remove(np.array(free[len(free) - len(gone) :], np.int64))
        if step % 10 == 9:
            # Those that have gone, parts of names, and two names in one.
            ends = [name[:-1] for name in list(expected)[:50] if name[:-1] not in expected]
            _check(held, expected, [*gone[:50], *ends, "".join(gone[:2])])
    assert fresh > 1000


@pytest.mark.parametrize("letter", ["w", "ü"])
def test_names_in_blocks_are_those_of_one_moment(kernels, letter):
    held, names = name_table.NameTable(kernels), [f"{letter}{number}" for number in range(1_300)]
    held.add(names, np.arange(1_300))
    chosen, everything = held.blocks(np.arange(0, 1_300, 2)), held.blocks()
    first = next(everything)
    held.remove(np.arange(600))
    held.add([f"other{number}" for number in range(600)], np.arange(600))
    assert [*first, *itertools.chain.from_iterable(everything)] == names
    assert list(itertools.chain.from_iterable(chosen)) == names[::2]
    assert len(list(held.blocks(np.zeros(0, np.int64)))) == 0
    assert [len(block) for block in held.blocks()] == [512, 512, 276]


def test_names_that_have_gone_take_no_room(kernels):
    held = name_table.NameTable(kernels)
    for step in range(200):
        rows = np.arange(1000)
        held.add([f"farm/web-{step}-{number}" for number in range(1000)], rows)
        held.remove(rows)
    assert not len(held)
    assert len(held._text) < 2 * name_table.GARBAGE + 20_000
    assert len(held._places) <= 4096
