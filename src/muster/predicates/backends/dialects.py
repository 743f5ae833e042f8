"""The differences of SQL engines that matter for predicates: one row of a small table for each.

The fields of a template are filled with SQL: ``{x}`` is an operand, ``{a}`` and ``{b}`` are two. The
templates for integers yield NULL where the result exceeds 64 bits or the divisor is 0; by default, engines
raise an error there, or wrap, or use floating point.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from muster.core import errors
from muster.predicates import like_patterns


@dataclass(frozen=True, slots=True)
class SqlDialect:
    name: str
    quote: str  # around an identifier
    string: Callable[[str], str]
    integer: str  # a literal {x}
    real: str
    integer_operators: Mapping[str, str]
    contains: str
    matches: Callable[[str, like_patterns.PatternShape], str]  # of a column, a pattern with wildcards

    def identifier(self, name: str) -> str:
        if "\0" in name:
            raise errors.InvalidInput(f"{name!r} cannot name a column")
        return self.quote + name.replace(self.quote, self.quote * 2) + self.quote


def _spark_string(word: str) -> str:
    # Settings of Spark change the meaning of a backslash and a doubled quote in a literal, and ${…} is
    # replaced even there: a word with any of them is written as bytes, which are the same under all settings.
    if word.isascii() and word.isprintable() and not set("'\\$") & set(word):
        return f"'{word}'"
    return f"CAST(X'{word.encode().hex()}' AS STRING)"


def _spark_matches(column: str, form: like_patterns.PatternShape) -> str:
    match [like_patterns.plain(segment) for segment in form.segments]:
        case [str(start), ""]:
            return f"startswith({column}, {_spark_string(start)})"
        case ["", str(end)]:
            return f"endswith({column}, {_spark_string(end)})"
        case ["", str(inside), ""]:
            return f"contains({column}, {_spark_string(inside)})"
    # Not Spark's LIKE: it becomes a regular expression that backtracks at every %.
    return f"{column} RLIKE {_spark_string(like_patterns.regular_expression(form))}"


def _duckdb_string(word: str) -> str:
    parts = ["'" + part.replace("'", "''") + "'" for part in word.split("\0")]
    return f"({'||chr(0)||'.join(parts)})" if len(parts) > 1 else parts[0]


def _duckdb_matches(column: str, form: like_patterns.PatternShape) -> str:
    pattern = like_patterns.write(
        form,
        any_one="_",
        any_run="%",
        quote=lambda character: ("!" if character in "%_!" else "") + character,
    )
    return f"{column} LIKE {_duckdb_string(pattern)} ESCAPE '!'"


SPARK: Final = SqlDialect(
    name="spark",
    quote="`",
    string=_spark_string,
    integer="{x}L",
    real="{x}D",
    integer_operators={
        "+": "try_add({a}, {b})",
        "-": "try_subtract({a}, {b})",
        "*": "try_multiply({a}, {b})",
        "/": "CASE WHEN {b} = -1L THEN try_subtract(0L, {a}) ELSE {a} div nullif({b}, 0L) END",
    },
    contains="array_contains({a}, {b})",
    matches=_spark_matches,
)

DUCKDB: Final = SqlDialect(
    name="duckdb",
    quote='"',
    string=_duckdb_string,
    integer="CAST({x} AS BIGINT)",
    real="CAST({x} AS DOUBLE)",
    integer_operators={
        "+": "TRY_CAST(CAST({a} AS HUGEINT) + {b} AS BIGINT)",
        "-": "TRY_CAST(CAST({a} AS HUGEINT) - {b} AS BIGINT)",
        "*": "TRY_CAST(CAST({a} AS HUGEINT) * {b} AS BIGINT)",
        "/": "TRY_CAST(CAST({a} AS HUGEINT) // NULLIF({b}, 0) AS BIGINT)",
    },
    contains="list_contains({a}, {b})",
    matches=_duckdb_matches,
)
