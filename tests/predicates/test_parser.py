"""The grammar, clause by clause: what parses, into which tree, and where errors point."""

from __future__ import annotations

import sys
import time

import pytest

from muster.core import errors
from muster.predicates import ast, limits
from muster.predicates.syntax import parser, printer

POLICY = """
{
  (alert AND (threat_level >= 4)) AND
  (sender: (_command_region == "northwest" AND _trust_level >= 2))
} OR
{
  (command AND (sender: (entity == "Intellimune" AND _command_region == "national")))
}
"""


def canonical(expression: str, **options: object) -> str:
    tree = parser.parse(expression, **options)  # type: ignore[arg-type]
    written = printer.write(tree)
    assert parser.parse(written) == tree
    return written


def test_the_papers_policy_whole() -> None:
    assert canonical(POLICY) == (
        "(alert = TRUE AND threat_level >= 4)"
        " AND (sender._command_region = 'northwest' AND sender._trust_level >= 2)"
        " OR command = TRUE AND (sender.entity = 'Intellimune' AND sender._command_region = 'national')"
    )


@pytest.mark.parametrize(
    ("expression", "written"),
    [
        ("a = 1 OR b = 2 AND c = 3", "a = 1 OR b = 2 AND c = 3"),
        ("(a = 1 OR b = 2) AND c = 3", "(a = 1 OR b = 2) AND c = 3"),
        ("not a = 1 and b = 2", "NOT a = 1 AND b = 2"),
        ("NOT (a = 1 AND b = 2)", "NOT (a = 1 AND b = 2)"),
        ("NOT NOT a = 1", "NOT NOT a = 1"),
        ("a + b * c - d / -e > 0", "a + b * c - d / -e > 0"),
        ("(a + b) * (c - d) > 0", "(a + b) * (c - d) > 0"),
        ("a - (b - c) > 0", "a - (b - c) > 0"),
        ("a - b - c > 0", "a - b - c > 0"),
        ("-(5) = x", "-(5) = x"),
        ("- - x = - -5", "--x = -(-5)"),
        ("+x = +5", "+x = 5"),
        ("age BETWEEN 15 AND 19 AND a = 1", "(age >= 15 AND age <= 19) AND a = 1"),
        ("age NOT BETWEEN 15 AND 19", "age < 15 OR age > 19"),
        ("a + 1 BETWEEN b AND c * 2", "a + 1 >= b AND a + 1 <= c * 2"),
        ("c IN ('UK', 'US')", "c IN ('UK', 'US')"),
        ("c not in ('UK')", "c NOT IN ('UK')"),
        ("NOT c IN ('UK')", "c NOT IN ('UK')"),
        ("w LIKE 'l_se%'", "w LIKE 'l_se%'"),
        ("u Not Like '\\_%' Escape '\\'", "u NOT LIKE '\\_%' ESCAPE '\\'"),
        ("p IS NULL OR p Is Not Null", "p IS NULL OR p IS NOT NULL"),
        ("s = 'it''s'", "s = 'it''s'"),
        ("TRUE = b AND FALSE <> b", "TRUE = b AND FALSE <> b"),
        ("TRUE", "TRUE"),
        ("paid", "paid = TRUE"),
        ("NOT paid AND (urgent OR amount > 3)", "NOT paid = TRUE AND (urgent = TRUE OR amount > 3)"),
        ("(((a))) = ((1))", "a = 1"),
        ("x\t=\n1\r\fAND(y=2)", "x = 1 AND y = 2"),
    ],
)
def test_selectors(expression: str, written: str) -> None:
    assert canonical(expression, strict=True) == written
    assert canonical(expression) == written


@pytest.mark.parametrize(
    ("literal", "value"),
    [
        ("57", 57),
        ("0", 0),
        ("0x1F", 31),
        ("0XfL", 15),
        ("017", 15),
        ("5L", 5),
        ("5l", 5),
        ("-5", -5),
        ("9223372036854775807", 2**63 - 1),
        ("-9223372036854775808", -(2**63)),
        ("7.", 7.0),
        (".5", 0.5),
        ("7E3", 7000.0),
        ("-57.9e-2", -0.579),
        ("+6.2", 6.2),
        ("7d", 7.0),
        ("1.5F", 1.5),
        ("0.1f", 0.10000000149011612),
        ("09.5", 9.5),
    ],
)
def test_numbers_are_javas(literal: str, value: float) -> None:
    tree = parser.parse(f"x = {literal}", strict=True)
    assert tree == ast.Comparison("=", ast.Name("x"), ast.Literal(value))


@pytest.mark.parametrize(
    ("expression", "written"),
    [
        ('x == "it""s" AND y != 2', "x = 'it\"s' AND y <> 2"),
        ("services CONTAINS 'cgi'", "services CONTAINS 'cgi'"),
        ("services not contains 'cgi'", "services NOT CONTAINS 'cgi'"),
        ("contains CONTAINS 'contains'", "contains CONTAINS 'contains'"),
        ("sender = receiver.x", "sender = receiver.x"),
        ("sender.not = 1", "sender.not = 1"),
        ("sender : { a == 1 AND event.b == 2 }", "sender.a = 1 AND event.b = 2"),
        ("sender: (a = 1 AND receiver: (b = 2) AND c = 3) AND d = 4",
         "(sender.a = 1 AND receiver.b = 2 AND sender.c = 3) AND d = 4"),
        ("{ a } OR { b AND (c + 1 > 2) }", "a = TRUE OR b = TRUE AND c + 1 > 2"),
    ],
)  # fmt: skip
def test_extensions(expression: str, written: str) -> None:
    assert canonical(expression) == written
    with pytest.raises(errors.ParseError):
        parser.parse(expression, strict=True)


def test_strict_reserves_no_extra_words() -> None:
    assert canonical("contains = 1 AND sender = 2 AND receiver = 3 AND event = 4", strict=True)


def test_home_scope_is_the_bare_one() -> None:
    assert parser.parse("event.x = sender.x", home="event") == parser.parse("x = sender.x")
    assert parser.parse("event: (x = 1)", home="event") == parser.parse("x = 1")
    assert parser.parse("sender: (event: (x = 1))", home="event") == parser.parse("x = 1")


def test_other_scopes() -> None:
    tree = parser.parse("label: (zone = 'a')", scopes=("label",))
    assert tree == ast.Comparison("=", ast.Name("zone", "label"), ast.Literal("a"))


@pytest.mark.parametrize("name", ["größe", "_x", "$x", "日本", "Ⅷ", "a1", "ab\u200d", "€", "NULLx"])
def test_names_are_javas(name: str) -> None:
    assert parser.parse(f"{name} = 1", strict=True) == ast.Comparison("=", ast.Name(name), ast.Literal(1))


def test_names_are_case_sensitive_and_words_are_not() -> None:
    assert parser.parse("X = 1") != parser.parse("x = 1")
    assert parser.parse("x is not null Or y lIkE 'a'", strict=True) == parser.parse(
        "x IS NOT NULL OR y LIKE 'a'", strict=True
    )


def test_blank_selector_is_no_selector() -> None:
    assert parser.parse(" \t\n", strict=True) == ast.Constant(True)
    with pytest.raises(errors.ParseError):
        parser.parse("  ")


def test_header_fields_of_selectors() -> None:
    for name in ("JMSPriority", "JMSType", "JMSXGroupID", "JMS_Vendor"):
        parser.parse(f"{name} = 4", strict=True)
    with pytest.raises(errors.ParseError, match="JMSReplyTo"):
        parser.parse("JMSReplyTo = 'x'", strict=True)


@pytest.mark.parametrize(
    ("expression", "position", "message"),
    [
        ("x = NULL", 4, "IS NULL"),
        ("x = ", 4, "the end"),
        ("a < b < c", 6, "join two comparisons with AND"),
        ("a = 1 b = 2", 6, "AND or OR"),
        ("(a = 1", 0, "never closed"),
        ("a = 1)", 5, "closes nothing"),
        ("{a = 1)", 6, "write }"),
        ("a = 'x", 4, "never closed"),
        ("a IN (1)", 6, "strings"),
        ("a IN ()", 6, "strings"),
        ("a IN ('x' 'y')", 10, "comma"),
        ("a IN 'x'", 5, "list"),
        ("a LIKE 5", 7, "string"),
        ("a LIKE 'x' ESCAPE 'ab'", 18, "single character"),
        ("a LIKE 'x!' ESCAPE '!'", 9, "ends with"),
        ("5 LIKE 'x'", 0, "name"),
        ("a + 1 IS NULL", 0, "name"),
        ("a IS 5", 5, "NULL"),
        ("a NOT = 5", 6, "BETWEEN, IN, LIKE"),
        ("a BETWEEN 1", 2, "upper bound"),
        ("a BETWEEN 'x' AND 'y'", 10, "number"),
        ("a < 'x'", 4, "only with = and <>"),
        ("TRUE >= a", 0, "only with = and <>"),
        ("'a' + 1 = 2", 0, "number"),
        ("a + 1", 0, "this is a value"),
        ("'a'", 0, "this is a value"),
        ("(a = 1) + 1 = 2", 0, "a condition"),
        ("{a} = 2", 0, "a condition"),
        ("sender: (a) = 2", 0, "a condition"),
        ("a = NOT b", 4, "in front of"),
        ("a = 1 AND", 9, "the end"),
        ("AND a = 1", 0, "'AND'"),
        ("a = 5x", 5, "neither a number nor a name"),
        ("a = 1.2.3", 7, "neither a number"),
        ("a = 08", 4, "octal"),
        ("a = 9223372036854775808", 4, "9223372036854775807"),
        ("a = 0x8000000000000001", 4, "9223372036854775807"),
        ("a = 1E999", 4, "largest"),
        ("a = 1E39f", 4, "largest"),
        ("a && b", 2, "AND"),
        ("a = “x”", 4, "straight quotes"),
        ("a\u00a0= 1", 1, "unexpected"),
        ("a = 'x\ud800'", 6, "surrogate"),
        ("sendr.x = 1", 0, "did you mean sender"),
        ("sender. x = 1", 7, "sender.name"),
        ("sender: a = 1", 8, "sender: ( … )"),
        ("", 0, "empty"),
    ],
)
def test_errors_point_and_say_what_would_be_right(expression: str, position: int, message: str) -> None:
    with pytest.raises(errors.ParseError) as caught:
        parser.parse(expression)
    assert caught.value.position == position
    assert caught.value.text == expression
    assert message in f"{caught.value.message}; {caught.value.hint}"


def test_spans_are_places_in_the_text() -> None:
    expression = " (a + 1) > 2 AND NOT x IN ('b') "
    tree = parser.parse(expression)
    assert isinstance(tree, ast.And)
    assert [expression[slice(*part.span)] for part in tree.operands] == ["(a + 1) > 2", "NOT x IN ('b')"]


DEEP = limits.DEFAULT.depth


@pytest.mark.parametrize(
    "expression",
    [
        "x = '" + "a" * 10_000_000 + "'",
        " OR ".join(["a=1"] * 10_000),
        "(" * 20_000 + "a = 1" + ")" * 20_000,
        "(" * 20_000,
        "{" * 20_000,
        "sender:(" * 8_000,
        "NOT " * 16_000 + "a = 1",
        "- " * 30_000 + "a = 1",
        "a = " + "1+" * 30_000 + "1",
        "a = " + "(1+" * 15_000 + "1" + ")" * 15_000,
        "x LIKE '" + "%a" * 10_000 + "'",
        "x LIKE '" + "_" * 10_000 + "'",
    ],
    ids=lambda expression: f"{expression[:12]}…{len(expression)}",
)
def test_hostile_sizes_are_refused_quickly(expression: str) -> None:
    began = time.thread_time()
    with pytest.raises(errors.LimitExceeded):
        parser.parse(expression)
    assert time.thread_time() - began < 2  # what grows with the square takes minutes


def test_the_limits_themselves_are_allowed_even_on_a_short_stack() -> None:
    inside = DEEP - 1
    deepest = [
        "(" * DEEP + "a = 1" + ")" * DEEP,
        "NOT " * (inside - 1) + "a = 1",
        "-" * (inside - 1) + "a = 1",
    ]
    wide = " OR ".join(f"a = {number}" for number in range(limits.DEFAULT.clauses))

    def shallow(frames: int) -> None:
        if frames:
            shallow(frames - 1)
        else:
            for expression in [*deepest, wide]:
                parser.parse(expression)

    shallow(sys.getrecursionlimit() - 200)
