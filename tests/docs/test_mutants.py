"""`tools.mutants` makes the documented changes, and its modules and tests exist."""

from __future__ import annotations

import ast
import re

from tools import mutants

EQUIVALENT = {
    "return max(width, 2)": "(2 -> 3, 3 -> 4): nothing is wider",
    "return width == 1": "because it is",
}
SOURCE = '''
@dataclass(frozen=True)
class Box(Struct, kw_only=True):
    size: Literal[3] = 4

def fits(box: Box, width: int) -> bool:
    """At most 5."""
    if box.size <= width and not box.full:
        note(box)
        return max(width, 2)  # nothing is wider
    return width == 1
'''


def test_each_mutant_is_one_change_of_what_is_decided():
    lines = ast.unparse(mutants.changed(SOURCE, None)).splitlines()
    actual = []
    for mutant in mutants.mutants(SOURCE, EQUIVALENT):
        other = ast.unparse(mutants.changed(SOURCE, mutant)).splitlines()
        (different,) = [line.strip() for line, before in zip(other, lines, strict=True) if line != before]
        actual.append(different)
    assert sorted(actual) == sorted(
        [
            "size: Literal[3] = 5",
            "if not (box.size <= width and (not box.full)):",
            "if box.size <= width or not box.full:",
            "if box.size < width and (not box.full):",
            "if box.size <= width and (not not box.full):",
            "None",
            "return None",
            "return min(width, 2)",
        ]
    )


def test_the_cores_and_their_tests_are_there():
    for package, modules in mutants.CORES.items():
        for module, tests in modules.items():
            assert module.startswith(f"{package}/")
            for path in (f"src/muster/{module}", *tests):
                assert (mutants.ROOT / path).is_file(), path


def test_equivalent_lines_are_those_of_cores():
    cores = {module for modules in mutants.CORES.values() for module in modules}
    assert mutants.equivalents().keys() <= cores


def test_what_fails_or_hangs_in_a_fork_gives_nothing():
    assert mutants.forked(30, lambda: 7) == 7
    assert mutants.forked(0.05, lambda: __import__("signal").pause()) is None
    assert mutants.forked(30, lambda: __import__("os")._exit(3)) is None


def test_each_core_has_a_row_and_few_survivors():
    text = (mutants.ROOT / "docs" / "testing.md").read_text()
    rows = re.findall(r"^\| [\d-]+ \| `([\w/]+\.py)` \| (\d+) \| (\d+) \|$", text, re.MULTILINE)
    assert sorted(module for module, *_ in rows) == sorted(
        module for modules in mutants.CORES.values() for module in modules
    )
    for module, tried, survived in rows:
        assert int(survived) < mutants.SURVIVORS_MAX * int(tried), module
