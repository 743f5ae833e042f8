"""What docs/reference/predicates.md shows is run, and what it lists is what the code has."""

from __future__ import annotations

import doctest
import pathlib
import re

from muster.predicates import limits
from muster.predicates.syntax import lexer, parser

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "reference" / "predicates.md"


def test_examples() -> None:
    results = doctest.testfile(str(PAGE), module_relative=False, optionflags=doctest.IGNORE_EXCEPTION_DETAIL)
    assert results.attempted > 20
    assert results.failed == 0


def test_the_tables_of_conditions_parse() -> None:
    page = PAGE.read_text()
    plain, extended = page[page.index("## Conditions") :].split("### Extensions", 1)
    extended = extended[: extended.index("None of them reserves")]
    for expression in examples(plain):
        parser.parse(expression, strict=True)
    for expression in examples(extended):
        parser.parse(expression)
    assert len(examples(plain)) > 10
    assert len(examples(extended)) >= 10


def examples(table: str) -> list[str]:
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    matches = re.compile(r".*\w (=|<>|==|!=|BETWEEN|NOT|IN|LIKE|IS|CONTAINS) |.*: \(")
    return [code for row in rows for code in re.findall(r"`([^`]+)`", row) if matches.match(code)]


def test_the_reserved_words() -> None:
    (line,) = [
        line for line in PAGE.read_text().splitlines() if line.startswith("Reserved, and so not names")
    ]
    assert set(re.findall(r"`(\w+)`", line)) == lexer.RESERVED


def test_the_limits() -> None:
    page = PAGE.read_text()
    section = page[page.index("## Limits") : page.index("## Back ends")]
    shown = [int(number.replace(",", "")) for number in re.findall(r"\| ([\d,]+) \|", section)]
    bounds = limits.DEFAULT
    assert shown == [
        bounds.text_length,
        bounds.clauses,
        bounds.depth,
        bounds.pattern_length,
        bounds.pattern_wildcards,
        bounds.gaps_length,
    ]
