"""Predicates: the paper's policy on one message, parsing, and a million rows at once.

Peers, in the same run: for one message, a tree of closures over the same condition, and a function written by
hand that knows no NULL; for parsing, Python's own compiler; for a million rows, numpy written by hand that
knows no NULL, and DuckDB on one thread with a prepared statement, its words in ENUM columns as ours are in
codes.  The best round counts, on every side.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import duckdb
import numpy as np

from benchmarks import harness, measure
from muster.core import errors
from muster.predicates import ast, types, values
from muster.predicates.analysis import normal_forms
from muster.predicates.backends import columnar, columns
from muster.predicates.backends import python as backends_python
from muster.predicates.syntax import parser

POLICY = """
{ (alert AND (threat_level >= 4)) AND (sender: (_command_region == "northwest" AND _trust_level >= 2)) } OR
{ (command AND (sender: (entity == "Intellimune" AND _command_region == "national"))) }
"""
# The same without scopes and without NULL, as one would write it in Python.
POLICY_IN_PYTHON = """
(get('alert') and get('threat_level') >= 4 and get('sender._command_region') == 'northwest'
 and get('sender._trust_level') >= 2
 or get('command') and get('sender.entity') == 'Intellimune' and get('sender._command_region') == 'national')
"""
ALERT: dict[str, object] = {
    "alert": True,
    "threat_level": 5,
    "sender._command_region": "northwest",
    "sender._trust_level": 3,
}
COMMAND: dict[str, object] = {
    "command": True,
    "sender.entity": "Intellimune",
    "sender._command_region": "national",
}
STRANGER: dict[str, object] = {"alert": True, "threat_level": 5, "sender.entity": "Macrocorp"}
MESSAGES = {
    "accepted alert": (ALERT, True),
    "accepted command": (COMMAND, True),
    "refused, sender's attributes NULL": (STRANGER, False),
}

FOUR = "(load < 0.25 AND region = 'r7') OR NOT (load < 0.9 OR application = 'a3')"
WORDS = {"application": 64, "region": 100}  # how many there are of each
MODEL = {"load": types.FLOAT, "application": types.STRING, "region": types.STRING}
ROWS = 1_000_000


def run(quick: bool) -> list[harness.Row]:
    return [*one_message(quick), *parsing(quick), *million_rows(quick)]


def one_message(quick: bool) -> list[harness.Row]:
    condition = parser.parse(POLICY, home="event")
    matches, tree = backends_python.compile(condition), tree_of_closures(condition)
    by_hand = eval(f"lambda get: {POLICY_IN_PYTHON.strip()}")  # noqa: S307  our own constant, above
    sides: dict[str, Callable[[], float]] = {"by hand": functools.partial(nanoseconds, by_hand, ALERT)}
    for label, (message, accepted) in MESSAGES.items():
        assert matches(message.get) is (tree(message.get) is True) is accepted
        sides[label] = functools.partial(nanoseconds, matches, message)
        sides[f"{label}, tree"] = functools.partial(nanoseconds, tree, message)
    best_s = {name: min(took) for name, took in measure.in_turns(sides, rounds=8 if quick else 25).items()}
    rows = [
        harness.Row(
            metric=f"the paper's policy on one message: {label}",
            ours=best_s[label],
            unit="ns",
            better="lower",
            peer=best_s[f"{label}, tree"],
            peer_name="tree of closures",
            goal=300,
        )
        for label in MESSAGES
    ]
    versus = harness.Row(
        metric="the same alert, against Python that knows no NULL and no types",
        ours=best_s["accepted alert"],
        unit="ns",
        better="lower",
        peer=best_s["by hand"],
        peer_name="written by hand",
    )
    return harness.under(
        "one dict of 3 to 4 attributes, one condition of 7 clauses, compiled before; best of "
        f"{8 if quick else 25} rounds of each side",
        [*rows, versus],
    )


def nanoseconds(matches: Callable[[Any], object], message: dict[str, object]) -> float:
    # Many short rounds: on a busy machine, some of them fall between the neighbours' turns.
    return measure.nanoseconds_a_call(functools.partial(matches, message.get), rounds=8, round_s=0.01)


def tree_of_closures(condition: ast.Condition) -> Callable[[Callable[[str], object]], bool | None]:
    """Three-valued truth without generated source, as far as these conditions need it."""
    match condition:
        case ast.And() | ast.Or():
            parts = [tree_of_closures(part) for part in condition.operands]
            decisive = isinstance(condition, ast.Or)

            def joined(get: Callable[[str], object]) -> bool | None:
                truth: bool | None = not decisive
                for part in parts:
                    value = part(get)
                    if value is decisive:
                        return decisive
                    if value is None:
                        truth = None
                return truth

            return joined
        case ast.Comparison(left=ast.Name() as name, right=ast.Literal() as literal):
            key, sign, constant, compare = name.key, condition.operator, literal.value, values.compare
            return lambda get: compare(sign, get(key), constant)
        case _:
            raise errors.InvalidInput(f"no closure for {condition}")


def parsing(quick: bool) -> list[harness.Row]:
    condition = parser.parse(POLICY)

    def compile_anew() -> None:
        normal_forms.cached_negation_normal.cache_clear()
        backends_python.compile(condition)

    sides = {
        "parse": lambda: parser.parse(POLICY),
        "compile": compile_anew,
        "python": lambda: compile(POLICY_IN_PYTHON.replace("\n", " ").strip(), "policy", "eval"),
    }
    outcomes = measure.in_turns(
        {
            name: functools.partial(
                measure.nanoseconds_a_call, side, rounds=10 if quick else 30, round_s=0.02
            )
            for name, side in sides.items()
        },
        rounds=3,
    )
    python = min(outcomes["python"]) / 1e3
    return harness.under(
        "a text of 7 clauses; nothing cached; best round of each side",
        [
            harness.Row(
                metric=f"{label} the paper's policy",
                ours=min(outcomes[name]) / 1e3,
                unit="µs",
                better="lower",
                peer=python,
                peer_name="Python's compile()",
            )
            for name, label in (("parse", "parse"), ("compile", "compile, once parsed,"))
        ],
    )


def million_rows(quick: bool) -> list[harness.Row]:
    """Five cells in a hundred are NULL, and the hand-written numpy counts them wrongly."""
    rng = np.random.default_rng(7)
    condition = parser.parse(FOUR)
    load = np.where(rng.random(ROWS) < 0.05, np.nan, rng.random(ROWS))
    coded = {
        key: np.where(rng.random(ROWS) < 0.05, 0, rng.integers(1, count + 1, ROWS)).astype(np.uint8)
        for key, count in WORDS.items()
    }
    table = columns.Table(
        {
            "load": columns.Column(types.ValueKind.FLOAT, load),
            **{
                key: columns.Column(
                    types.ValueKind.STRING, codes, tuple(f"{key[0]}{n}" for n in range(1, count + 1))
                )
                for (key, count), codes in zip(WORDS.items(), coded.values(), strict=True)
            },
        }
    )
    region, application = coded["region"], coded["application"]

    def two_valued() -> object:
        return ((load < 0.25) & (region == 7)) | ~((load < 0.9) | (application == 3))

    with duckdb.connect() as connection:
        connection.execute("SET threads = 1")
        arrays = {"load": load, **coded}  # read by name in the next line
        for key, count in WORDS.items():
            words = ", ".join(f"'{key[0]}{number}'" for number in range(1, count + 1))
            connection.execute(f"CREATE TYPE {key}_word AS ENUM ({words})")
        connection.execute(
            "CREATE TABLE t AS SELECT nullif(load, 'NaN'::DOUBLE) AS load,"
            " ('a' || nullif(application, 0))::application_word AS application,"
            " ('r' || nullif(region, 0))::region_word AS region FROM arrays"
        )
        del arrays
        connection.execute(f"PREPARE counted AS SELECT count(*) FROM t WHERE {FOUR}")

        def by_duckdb() -> Any:
            (answer,) = connection.execute("EXECUTE counted").fetchall()
            return answer[0]

        assert np.count_nonzero(columnar.evaluate(condition, table)) == by_duckdb() > 0
        outcomes = measure.in_turns(
            {
                "ours": lambda: measure.seconds(lambda: columnar.evaluate(condition, table)),
                "numpy": lambda: measure.seconds(two_valued),
                "duckdb": lambda: measure.seconds(by_duckdb),
            },
            rounds=10 if quick else 50,
            seconds_max=20,
        )
    return harness.under(
        f"one float and two words of {' and '.join(map(str, WORDS.values()))} values, in memory, one thread; "
        f"best of {len(outcomes['ours'])} rounds of each side",
        [
            harness.Row(
                metric=f"a million rows, four clauses, 5 % NULL: {label}",
                ours=min(outcomes["ours"]) * 1e6,
                unit="µs a million rows",
                better="lower",
                peer=min(outcomes[peer]) * 1e6,
                peer_name=name,
            )
            for label, peer, name in (
                ("against two-valued arrays", "numpy", "numpy by hand, two-valued"),
                ("against a SQL engine", "duckdb", "DuckDB, one thread, ENUM, prepared"),
            )
        ],
    )
