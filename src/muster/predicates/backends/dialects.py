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
    integer_type: str
    real_type: str
    infinity: str
    integer_operators: Mapping[str, str]
    contains: str
    matches: Callable[
        [str, like_patterns.PatternShape], str
    ]  # the SQL of a column, a pattern that has wildcards
    not_a_number: str | None  # None: the engine stores NaN as NULL
    compares_exactly: bool = False  # integers with floating-point numbers

    def identifier(self, name: str) -> str:
        if "\0" in name:
            raise errors.InvalidInput(f"{name!r} cannot name a column")
        return self.quote + name.replace(self.quote, self.quote * 2) + self.quote


def _doubled(word: str) -> str:
    return "'" + word.replace("'", "''") + "'"


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
    return f"({'||chr(0)||'.join(map(_doubled, word.split(chr(0))))})" if "\0" in word else _doubled(word)


def _postgresql_string(word: str) -> str:
    if "\0" in word:
        raise errors.InvalidInput("PostgreSQL's text cannot hold the character NUL")
    return _doubled(word)


def _sqlite_string(word: str) -> str:
    return _sqlite_text(word.encode()) if "\0" in word else _doubled(word)


def _like(string: Callable[[str], str]) -> Callable[[str, like_patterns.PatternShape], str]:
    def matches(column: str, form: like_patterns.PatternShape) -> str:
        pattern = like_patterns.write(
            form,
            any_one="_",
            any_run="%",
            quote=lambda character: ("!" if character in "%_!" else "") + character,
        )
        return f"{column} LIKE {string(pattern)} ESCAPE '!'"

    return matches


# SQLite's GLOB stops at NUL, and treats U+FFFE and U+FFFF like U+FFFD. For the comparison they become
# characters beyond Unicode, which no value contains.
_STAND_INS: Final = {
    "\0": b"\xf7\xbf\xbf\xbf",
    "\ufffe": b"\xf7\xbf\xbf\xbe",
    "\uffff": b"\xf7\xbf\xbf\xbd",
}


def _glob(column: str, form: like_patterns.PatternShape) -> str:
    # SQLite's LIKE ignores case; its GLOB does not.
    pattern = like_patterns.write(
        form,
        any_one="?",
        any_run="*",
        quote=lambda character: f"[{character}]" if character in "*?[" else character,
    )
    value = _without_nul(column)
    if any(character in pattern for character in "\ufffd\ufffe\uffff"):
        for character in "\ufffe\uffff":
            value = f"replace({value}, '{character}', {_sqlite_text(_STAND_INS[character])})"
    return f"{value} GLOB {_sqlite_pattern(pattern)}"


def _without_nul(column: str) -> str:
    """Its value with a substitute for each NUL. (`replace` treats a NUL like an empty text.)"""
    nul = _sqlite_text(_STAND_INS["\0"])
    cut = (
        f"WITH RECURSIVE cut(done, rest) AS (SELECT '', CAST({column} AS BLOB) UNION ALL"
        f" SELECT done || CAST(substr(rest, 1, instr(rest, X'00') - 1) AS TEXT) || {nul},"
        " substr(rest, instr(rest, X'00') + 1) FROM cut WHERE instr(rest, X'00') > 0)"
        " SELECT done || CAST(rest AS TEXT) FROM cut WHERE instr(rest, X'00') = 0"
    )
    return f"CASE WHEN instr(CAST({column} AS BLOB), X'00') > 0 THEN ({cut}) ELSE {column} END"


def _sqlite_pattern(pattern: str) -> str:
    if not any(character in pattern for character in _STAND_INS):
        return _doubled(pattern)
    return _sqlite_text(b"".join(_STAND_INS.get(character) or character.encode() for character in pattern))


def _sqlite_text(data: bytes) -> str:
    return f"CAST(X'{data.hex()}' AS TEXT)"


SPARK: Final = SqlDialect(
    name="spark",
    quote="`",
    string=_spark_string,
    integer="{x}L",
    real="{x}D",
    integer_type="BIGINT",
    real_type="DOUBLE",
    infinity="CAST('Infinity' AS DOUBLE)",
    integer_operators={
        "+": "try_add({a}, {b})",
        "-": "try_subtract({a}, {b})",
        "*": "try_multiply({a}, {b})",
        "/": "CASE WHEN {b} = -1L THEN try_subtract(0L, {a}) ELSE {a} div nullif({b}, 0L) END",
    },
    contains="array_contains({a}, {b})",
    matches=_spark_matches,
    not_a_number="CAST('NaN' AS DOUBLE)",
)

DUCKDB: Final = SqlDialect(
    name="duckdb",
    quote='"',
    string=_duckdb_string,
    integer="CAST({x} AS BIGINT)",
    real="CAST({x} AS DOUBLE)",
    integer_type="BIGINT",
    real_type="DOUBLE",
    infinity="CAST('Infinity' AS DOUBLE)",
    integer_operators={
        "+": "TRY_CAST(CAST({a} AS HUGEINT) + {b} AS BIGINT)",
        "-": "TRY_CAST(CAST({a} AS HUGEINT) - {b} AS BIGINT)",
        "*": "TRY_CAST(CAST({a} AS HUGEINT) * {b} AS BIGINT)",
        "/": "TRY_CAST(CAST({a} AS HUGEINT) // NULLIF({b}, 0) AS BIGINT)",
    },
    contains="list_contains({a}, {b})",
    matches=_like(_duckdb_string),
    not_a_number="CAST('NaN' AS DOUBLE)",
)

_IN_64_BITS: Final = (
    "(SELECT CASE WHEN v BETWEEN -9223372036854775808 AND 9223372036854775807 THEN CAST(v AS BIGINT) END"
    " FROM (SELECT {} AS v) AS r)"
)

POSTGRESQL: Final = SqlDialect(
    name="postgresql",
    quote='"',
    string=_postgresql_string,
    integer="CAST({x} AS BIGINT)",
    real="CAST({x} AS DOUBLE PRECISION)",
    integer_type="BIGINT",
    real_type="DOUBLE PRECISION",
    infinity="CAST('Infinity' AS DOUBLE PRECISION)",
    integer_operators={
        **{sign: _IN_64_BITS.format(f"CAST({{a}} AS NUMERIC) {sign} {{b}}") for sign in "+-*"},
        "/": _IN_64_BITS.format("div(CAST({a} AS NUMERIC), NULLIF({b}, 0))"),
    },
    contains="{b} = ANY({a})",
    matches=_like(_postgresql_string),
    not_a_number="CAST('NaN' AS DOUBLE PRECISION)",
)

# SQLite has no arrays: a set is a JSON array.
_STILL_WHOLE: Final = "(SELECT CASE typeof(v) WHEN 'integer' THEN v END FROM (SELECT {} AS v))"

SQLITE: Final = SqlDialect(
    name="sqlite",
    quote='"',
    string=_sqlite_string,
    integer="{x}",
    real="{x}",
    integer_type="INTEGER",
    real_type="REAL",
    infinity="9e999",
    integer_operators={sign: _STILL_WHOLE.format(f"{{a}} {sign} {{b}}") for sign in "+-*/"},
    contains="EXISTS (SELECT 1 FROM json_each({a}) WHERE value = {b})",
    matches=_glob,
    not_a_number=None,
    compares_exactly=True,
)
