"""The rules one by one; then explaining, checking, types, normal forms, cost and tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from muster.core import errors
from muster.predicates import ast, types
from muster.predicates.analysis import cost, explanation, normal_forms, type_check
from muster.predicates.backends import columnar, columns, python
from muster.predicates.syntax import parser, printer
from tests.predicates.test_parser import POLICY

NAN = float("nan")


def truth(expression: str, **attributes: Any) -> bool | None:
    tree = parser.parse(expression)
    if python.compile(tree)(attributes.get):
        return True
    return False if python.compile(ast.Not(tree))(attributes.get) else None


@pytest.mark.parametrize(
    ("expression", "attributes", "expected"),
    [
        # unlike types are false, whatever the operator
        ("x = 'a'", {"x": 1}, False),
        ("x <> 'a'", {"x": 1}, False),
        ("NOT x = 'a'", {"x": 1}, True),
        ("NOT x <> 'a'", {"x": 1}, True),
        ("x = 1", {"x": True}, False),
        ("x = 0", {"x": False}, False),
        ("x >= 0", {"x": True}, False),
        ("x = TRUE", {"x": 1}, False),
        ("x <> TRUE", {"x": 0}, False),
        ("x = '1'", {"x": 1}, False),
        ("x < y", {"x": "a", "y": "b"}, False),
        ("x = y", {"x": {"a"}, "y": {"a"}}, False),
        ("x = 'a'", {"x": b"a"}, False),
        ("x BETWEEN 1 AND 5", {"x": "3"}, False),
        ("x NOT BETWEEN 1 AND 5", {"x": "3"}, False),
        ("NOT x BETWEEN 1 AND 5", {"x": "3"}, True),
        ("x IN ('a')", {"x": 1}, False),
        ("x NOT IN ('a')", {"x": 1}, True),
        ("x LIKE '1'", {"x": 1}, False),
        ("x NOT LIKE '%'", {"x": 1}, True),
        ("x CONTAINS 'a'", {"x": "a"}, False),
        # NULL and NaN are unknown
        ("x = 1", {}, None),
        ("x <> 1", {"x": NAN}, None),
        ("NOT x = 1", {"x": NAN}, None),
        ("x = x", {"x": NAN}, None),
        ("x IS NULL", {"x": NAN}, True),
        ("x IS NULL", {}, True),
        ("x IN ('a')", {}, None),
        ("x NOT IN ('a')", {}, None),
        ("x LIKE '%'", {}, None),
        ("x CONTAINS 'a'", {}, None),
        ("x + 1 = 2", {}, None),
        ("alert", {}, None),
        # Kleene's tables
        ("x = 1 AND y = 1", {"y": 2}, False),
        ("x = 1 AND y = 1", {"y": 1}, None),
        ("x = 1 OR y = 1", {"y": 1}, True),
        ("x = 1 OR y = 1", {"y": 2}, None),
        ("NOT (x = 1 OR y = 1)", {"y": 1}, False),
        # numbers
        ("x = 9007199254740993", {"x": 9007199254740992.0}, False),
        ("x < 9007199254740993", {"x": 9007199254740992.0}, True),
        ("x = 9007199254740992.0", {"x": 9007199254740993}, False),
        ("x > 9007199254740992.0", {"x": 9007199254740993}, True),
        ("x = 1.0", {"x": 1}, True),
        ("7 / 2 = 3", {}, True),
        ("-7 / 2 = -3", {}, True),
        ("7 / 2. = 3.5", {}, True),
        ("x / 0 = 1", {"x": 1}, None),
        ("x / 0.0 = 1", {"x": 1.0}, None),
        ("x + 1 > 0", {"x": 2**63 - 1}, None),
        ("x * 1. > 0", {"x": 2**63 - 1}, True),
        ("-x > 0", {"x": -(2**63)}, None),
        ("x / -1 > 0", {"x": -(2**63)}, None),
        ("x - x = 0", {"x": float("inf")}, None),
        ("x * 10 = x", {"x": 1e308}, False),
        ("x + 1 = 2", {"x": True}, None),
        ("x + 1 = 2", {"x": "1"}, None),
        ("x > 1", {"x": 10**400}, True),
        ("x + 1. > 1", {"x": 10**400}, None),
        # strings
        ("x = 'A'", {"x": "a"}, False),
        ("phone LIKE '12%3'", {"phone": "123"}, True),
        ("phone LIKE '12%3'", {"phone": "12993"}, True),
        ("phone LIKE '12%3'", {"phone": "1234"}, False),
        ("word LIKE 'l_se'", {"word": "lose"}, True),
        ("word LIKE 'l_se'", {"word": "loose"}, False),
        ("u LIKE '\\_%' ESCAPE '\\'", {"u": "_foo"}, True),
        ("u LIKE '\\_%' ESCAPE '\\'", {"u": "bar"}, False),
        ("x LIKE 'a\\%'", {"x": "a\\bc"}, True),
        # sets
        ("services CONTAINS 'cgi'", {"services": frozenset({"docs", "cgi"})}, True),
        ("services CONTAINS 'cgi'", {"services": {"docs"}}, False),
        ("services CONTAINS 'cgi'", {"services": set()}, False),
    ],
)
def test_rules(expression: str, attributes: dict[str, Any], expected: bool | None) -> None:
    assert truth(expression, **attributes) is expected
    assert explanation.explain(parser.parse(expression), attributes).truth is expected


def test_the_papers_policy() -> None:
    accepts = python.compile(parser.parse(POLICY, home="event"))
    northwest = {"sender._command_region": "northwest", "sender._trust_level": 4}
    national = {"sender.entity": "Intellimune", "sender._command_region": "national"}
    assert accepts({"alert": True, "threat_level": 4, **northwest}.get)
    assert not accepts({"alert": True, "threat_level": 3, **northwest}.get)
    assert not accepts({"alert": True, "threat_level": 5, **national}.get)
    assert not accepts({"alert": True, "threat_level": 5, **northwest, "sender._trust_level": 1}.get)
    assert not accepts({"threat_level": 5, **northwest}.get)
    assert accepts({"command": True, **national}.get)
    assert not accepts({"command": True, **national, "sender.entity": "Macrocorp"}.get)


# explain


def test_explain_shows_the_nearest_part_of_an_or() -> None:
    condition = parser.parse("(alert AND level >= 4 AND rank >= 2) OR (command AND rank >= 3)")
    assert [
        near_miss.clause for near_miss in explanation.near_misses(condition, {"command": True, "rank": 1})
    ] == ["rank >= 3"]
    assert explanation.near_misses(condition, {"command": True, "rank": 3}) == ()


def test_explain_names_the_clauses_that_stood_in_the_way() -> None:
    expression = "alert AND threat_level >= 4 AND sender.region = 'northwest'"
    explained = explanation.explain(parser.parse(expression), {"alert": True, "threat_level": 3})
    assert explained.truth is False
    assert [(each.truth, expression[slice(*each.span)], each.values) for each in explained.because] == [
        (False, "threat_level >= 4", (("threat_level", 3),)),
        (None, "sender.region = 'northwest'", (("sender.region", None),)),
    ]
    assert str(explained) == (
        "false\n"
        "  false: threat_level >= 4 (threat_level is 3)\n"
        "  unknown: sender.region = 'northwest' (sender.region is NULL)"
    )


def test_explain_shows_why_a_predicate_is_true() -> None:
    explained = explanation.explain(
        parser.parse("(a = 1 AND b = 2) OR NOT c = 'x' OR d = 4"), {"c": "y", "d": 5}
    )
    assert explained.truth is True
    assert [str(each) for each in explained.because] == ["true: NOT c = 'x' (c is 'y')"]


def test_explain_of_an_or_names_all_of_it() -> None:
    explained = explanation.explain(
        parser.parse("s CONTAINS 'q' OR x BETWEEN 5 AND 9"), {"s": {"b", "a"}, "x": 3}
    )
    assert [str(each) for each in explained.because] == [
        "false: s CONTAINS 'q' (s is {a, b})",
        "false: x >= 5 (x is 3)",
    ]


# check


@pytest.mark.parametrize(
    ("expression", "message", "where"),
    [
        ("threat_lvl >= 4", "there is no attribute threat_lvl", "threat_lvl"),
        ("TRUE AND sender.regoin = 'x'", "sender.regoin", "sender.regoin"),
        ("threat_level = '4'", "int and string are unlike", "threat_level = '4'"),
        ("region", "string and bool are unlike", "region"),
        ("region < region", "only with = and <>", "region < region"),
        ("services = services", "sets do not compare", "services = services"),
        ("1 = 1 AND region + 1 > 2", "arithmetic is for numbers, and region is a string", "region"),
        ("load LIKE 'a%'", "LIKE is for strings, and load is a float", "load LIKE 'a%'"),
        ("services IN ('a')", "IN is for strings, and services is a set", "services IN ('a')"),
        ("region CONTAINS 'cgi'", "CONTAINS is for sets", "region CONTAINS 'cgi'"),
        ("services CONTAINS 'cgj'", "never contains 'cgj'", "services CONTAINS 'cgj'"),
    ],
)
def test_check_complains_in_the_right_place(expression: str, message: str, where: str) -> None:
    (problem,) = type_check.check(parser.parse(expression), MODEL)
    assert message in problem.message
    assert expression[slice(*problem.span)] == where
    with pytest.raises(errors.ParseError) as caught:
        type_check.require(parser.parse(expression), MODEL, expression)
    assert caught.value.position == expression.index(where)


MODEL = {
    "alert": types.BOOL,
    "threat_level": types.INT,
    "region": types.STRING,
    "sender.region": types.STRING,
    "load": types.FLOAT,
    "services": types.set_of("docs", "cgi", "xml"),
}


def test_check_suggests_the_nearest_spelling() -> None:
    problems = type_check.check(
        parser.parse("threat_lvl > 1 AND services CONTAINS 'docz' AND region = 'x'"), MODEL
    )
    assert [problem.hint for problem in problems] == ["did you mean threat_level?", "did you mean docs?"]


def test_check_is_content_with_what_is_right() -> None:
    right = (
        "alert AND threat_level / 2 >= load AND region IN ('a') AND services CONTAINS 'cgi' AND 2.5 > load"
    )
    assert type_check.check(parser.parse(right), MODEL) == ()
    type_check.require(parser.parse(right), MODEL, right)


# types


def test_types_as_text() -> None:
    for declared in (*MODEL.values(), types.FLOAT):
        assert types.parse_type(str(declared)) == declared
    assert types.parse_type(" DomainedSet{docs, cgi, xml} ") == MODEL["services"]
    assert types.parse_type("String") == types.STRING
    for wrong in ("", "strin", "set{}", "set{a,a}", "set{a,,b}", "set{a", "set{{a}}"):
        with pytest.raises(errors.InvalidInput):
            types.parse_type(wrong)


@pytest.mark.parametrize(
    ("declared", "fits", "misfits"),
    [
        (types.STRING, ["", "x", None], [1, b"x", True, {"x"}]),
        (types.INT, [0, 2**63 - 1, None], [True, 1.0, 2**63, "1"]),
        (types.FLOAT, [0.5, 3, NAN, None], [True, "1"]),
        (types.BOOL, [True, False, None], [1, 0, "TRUE"]),
        (types.set_of("a", "b"), [set(), frozenset({"a"}), None], [{"c"}, ["a"], "a", {1}]),
    ],
)
def test_types_accept(declared: types.AttributeType, fits: list[Any], misfits: list[Any]) -> None:
    assert all(declared.accepts(value) for value in fits)
    assert not any(declared.accepts(value) for value in misfits)
    columns.Column.of(declared, fits)
    for value in misfits:
        with pytest.raises(errors.InvalidInput):
            columns.Column.of(declared, [value])


# normal forms and cost


def test_one_key_for_all_ways_to_say_the_same() -> None:
    output = [
        "a = 1 AND (b = 2 OR NOT c = 'x')",
        "(NOT (c = 'x') OR 2 = b OR b = 2) AND 1 = a",
        "NOT (NOT a = 1 OR NOT b = 2 AND c = 'x')",
        "a = 1 AND (b = 2 OR c NOT LIKE 'x') AND TRUE",
        "a = 1 AND (b = 2 OR NOT c = 'x') OR FALSE AND d = 1",
    ]
    keys = {normal_forms.canonical(parser.parse(expression)) for expression in output}
    assert len(keys) == 1
    assert hash(keys.pop()) == hash(normal_forms.canonical(parser.parse(output[0])))
    runs = ["x LIKE 'a%%b%'", "x LIKE 'a%b%%' ESCAPE '!'"]
    assert len({normal_forms.canonical(parser.parse(expression)) for expression in runs}) == 1
    # These three differ where a type is unlike or a value missing.
    others = ["c <> 'x'", "NOT c = 'x'", "c <> 'x' OR c IS NULL"]
    assert len({normal_forms.canonical(parser.parse(expression)) for expression in others}) == 3
    assert normal_forms.canonical(parser.parse("x = 1")) != normal_forms.canonical(parser.parse("x = 1.0"))


def test_or_of_ands() -> None:
    def conjunctions(expression: str) -> set[str]:
        actual = normal_forms.disjunctive_normal(parser.parse(expression))
        return {" & ".join(sorted(printer.write(part) for part in parts)) for parts in actual}

    assert conjunctions("a = 1 AND (b = 2 OR c = 3)") == {"a = 1 & b = 2", "a = 1 & c = 3"}
    assert conjunctions("(a = 1 OR b = 2) AND NOT a = 1") == {"NOT a = 1 & b = 2"}
    assert conjunctions("TRUE") == {""}
    assert conjunctions("a = 1 AND FALSE") == set()


def test_cost_classes() -> None:
    def dearest(expression: str) -> cost.CostClass:
        return cost.measure(parser.parse(expression)).dearest

    assert dearest("TRUE OR a = 1") is cost.CostClass.CONSTANT
    assert dearest("1 < a AND b IN ('x') AND s CONTAINS 'q' AND c IS NULL") is cost.CostClass.LOOKUP
    assert dearest("a LIKE 'x' OR NOT a LIKE 'x%'") is cost.CostClass.PATTERN
    assert dearest("a = 1 AND b = c") is cost.CostClass.COMPUTED
    assert dearest("a + 1 = 2") is cost.CostClass.COMPUTED
    assert cost.measure(parser.parse("a BETWEEN 1 AND 2 OR (b = 1 OR c = 2)")) == cost.Cost(
        4, 3, cost.CostClass.LOOKUP
    )


# tables


def test_a_table_without_the_column_has_nulls() -> None:
    table = columns.Table({}, rows=3)
    assert columnar.evaluate(parser.parse("x IS NULL"), table).tolist() == [True] * 3
    assert columnar.evaluate(parser.parse("x = 1 OR NOT x = 1"), table).tolist() == [False] * 3
    assert columnar.evaluate(parser.parse("x = 1"), columns.Table({}, rows=0)).tolist() == []


def test_columns_have_one_length() -> None:
    column = columns.Column.of(types.INT, [1, 2])
    with pytest.raises(errors.InvalidInput):
        columns.Table({"x": column}, rows=3)
    with pytest.raises(errors.InvalidInput):
        columns.Table({})


def test_evaluation_leaves_the_columns_as_they_were() -> None:
    rows: list[dict[str, Any]] = [{"b": True, "i": None, "s": "a"}, {"b": None, "i": 5, "s": None}]
    table = columns.Table.of({"b": types.BOOL, "i": types.INT, "s": types.STRING}, rows)
    before = {key: (column.values.copy(), column.null) for key, column in table.columns.items()}
    for expression in (
        "i IS NOT NULL AND b OR s IS NULL",
        "NOT i = 5 AND i + 1 = 6",
        "s <> 'a' OR NOT i IS NULL",
    ):
        columnar.evaluate(parser.parse(expression), table)
    for key, column in table.columns.items():
        assert np.array_equal(column.values, before[key][0])
        assert column.null is before[key][1]
    assert table.columns["i"].null is not None
    assert table.columns["i"].null.tolist() == [True, False]


def test_sets_of_many_words() -> None:
    words = [f"w{number}" for number in range(63)]
    rows: list[dict[str, Any]] = [{"s": {"w0", "w62"}}, {"s": set()}, {}]
    table = columns.Table.of({"s": types.set_of(*words)}, rows)
    assert columnar.evaluate(parser.parse("s CONTAINS 'w62'"), table).tolist() == [True, False, False]
    assert columnar.evaluate(parser.parse("NOT s CONTAINS 'w62'"), table).tolist() == [False, True, False]
    with pytest.raises(errors.LimitExceeded):
        columns.Column.of(types.set_of(*words, "more"), [])


def test_findings_stand_in_the_text_that_was_parsed_not_in_an_equal_one():
    for written in ("x = 1 AND y = 2", "     x=1   AND    y=2"):
        explained = explanation.explain(parser.parse(written), {})
        assert [written[slice(*each.span)].replace(" ", "") for each in explained.because] == ["x=1", "y=2"]
